"""The report of a run: one HTML file that needs nothing else."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_omni_core.report.chart import Point, line_chart
from verl_omni_core.report.images import PicturePair, data_uri, png
from verl_omni_core.report.summary import HeldOut, duration

_TEMPLATE = "report.html.j2"


@dataclass(frozen=True)
class Report:
    """Everything that a report shows."""

    run_id: str
    steps: int
    seconds: float
    """That the run took; time without an owner does not count."""
    rewards: Sequence[Point]
    """(step, mean reward of the step's samples)."""
    validations: Sequence[Point]
    """(step, mean held-out reward)."""
    held_out: HeldOut | None
    pairs: Sequence[PicturePair]
    metrics: Mapping[str, float]
    """Final value of each metric, by name."""
    settings_digest: str
    engine: Mapping[str, Any]
    """Who generated: engine, version, pipeline class, count of requests."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Resolved settings by dotted name."""
    statistics: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """Held-out statistics by name, such as ``best@4/mean``, of each step that was judged."""


def render(report: Report) -> str:
    """Return the page. Whatever comes from data is escaped; there are no links and no scripts."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("verl_omni_core.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    curves = {"samples of the step": report.rewards, "held-out prompts": report.validations}
    pairs = [
        {
            "prompt": pair.prompt,
            "seed": pair.seed,
            "before": data_uri(png(pair.before)),
            "after": data_uri(png(pair.after)),
            "reward_before": pair.reward_before,
            "reward_after": pair.reward_after,
            "trend": _trend(pair),
        }
        for pair in report.pairs
    ]
    return environment.get_template(_TEMPLATE).render(
        report=report,
        duration=duration(report.seconds),
        # the chart escapes what it takes
        chart=Markup(line_chart(curves, x_label="step", y_label="mean reward")),  # noqa: S704
        pairs=pairs,
        statistics=_table(report.statistics),
        metrics=sorted(report.metrics.items()),
        settings=sorted(report.settings.items()),
    )


def _trend(pair: PicturePair) -> str:
    if pair.reward_before is None or pair.reward_after is None or pair.reward_before == pair.reward_after:
        return "same"
    return "up" if pair.reward_after > pair.reward_before else "down"


def _table(statistics: Mapping[int, Mapping[str, float]]) -> list[tuple[int, list[tuple[str, float]]]]:
    """Return rows of (step, named values): means only, under the names people say."""
    return [
        (step, [(name.removesuffix("/mean"), value) for name, value in statistics[step].items() if "/std" not in name])
        for step in sorted(statistics)
    ]


def write_report(path: str | Path, report: Report) -> Path:
    """Write the page, replacing an older one in one move; return its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(render(report), encoding="utf-8")
    temporary.replace(path)
    return path
