"""What a run came to, in a few lines."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class HeldOut:
    """The base and the trained policy on the same held-out prompts and seeds, in reward units."""

    base: float
    trained: float
    low: float
    """Lower bound of the paired bootstrap 95 % interval of the gain."""
    high: float
    prompts: int
    samples_per_prompt: int

    @property
    def gain(self) -> float:
        """Trained minus base."""
        return self.trained - self.base


def summary(
    *,
    run_id: str,
    steps: int,
    seconds: float,
    held_out: HeldOut | None,
    report: str | Path,
    picture: str | Path | None = None,
    extra: Mapping[str, str] | None = None,
) -> str:
    """Return the text that a command prints at the end of a run.

    Args:
        run_id: name of the run.
        steps: training steps done.
        seconds: that the run took; time without an owner does not count.
        held_out: none if the run did not validate before and after.
        report: path of the HTML report.
        picture: path of the picture of the same seeds before and after.
        extra: further lines, by label.
    """
    lines = {"Run": f"{run_id}, {steps} steps in {duration(seconds)}"}
    if held_out is None:
        lines["Held-out reward"] = "not compared: the run did not validate before and after training"
    else:
        lines["Held-out reward"] = (
            f"{held_out.base:.3f} before, {held_out.trained:.3f} after training "
            f"({held_out.prompts} prompts, {held_out.samples_per_prompt} fixed seeds each)"
        )
        lines["Gain"] = (
            f"{held_out.gain:+.3f}, paired bootstrap 95 % interval {held_out.low:+.3f} to {held_out.high:+.3f}"
        )
    lines |= dict(extra or {})
    if picture is not None:
        lines["Before and after"] = str(picture)
    lines["Report"] = str(report)
    width = max(map(len, lines)) + 2
    return "\n".join(f"{label + ':':<{width}}{text}" for label, text in lines.items())


def duration(seconds: float) -> str:
    """Return a span of time for people: ``45 s``, ``3 min 20 s``, ``2 h 05 min``."""
    whole = round(max(seconds, 0.0))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
