"""Overhead of a training step: the product against a straight loop over the same engine and trainer, one JSON line.

    python -m benchmarks.step_overhead

The product's step is its Prefect tasks in a flow against a standing server, its Ray actors and its Arrow commits. The
loop makes the same step in memory in one process. Both run in turn in one process run, with equal prompts, seeds, batch
shapes and threads. Services and runs live in a folder of their own, which is removed.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from verl_omni_core.workers import threads

if TYPE_CHECKING:
    from benchmarks.product_step import Measured, ProductStep
    from verl_omni_core.settings.run import RunConfig

PROFILE = "glyph-flow_grpo-ocr-cpu"
PACKAGES = ("torch", "vllm-omni", "ray", "prefect", "pyarrow")
_SMALL = (
    "data.prompts_per_step=2",
    "sampler.num_inference_steps=4",
    "sampler.sde_window_size=2",
    "sampler.sde_window_range=[0, 2]",
    "rollout.group_size=2",
    "rollout.max_batch=4",
    "rollout.pack_size=4",
    "training.micro_batch=4",
    "model.lora.rank=4",
)
_SPARE_STEPS = 10


def settings(arguments: argparse.Namespace, store: Path) -> "RunConfig":
    """Return the settings of the measured run: the profile without what happens only every few steps."""
    from verl_omni_core.settings.loader import load

    own = {
        "run.id": "step-overhead",
        "run.store": store,
        "run.steps": arguments.pairs + _SPARE_STEPS,
        "run.validate_every": 0,
        "run.checkpoint_every": 0,
        "run.images_every": 0,
        "data.max_validation_prompts": 8,
        "durability.min_free_gb": 0.5,
    }
    overrides = [*(_SMALL if arguments.small else ()), *(f"{name}={value}" for name, value in own.items())]
    return load(arguments.profile, overrides=[*overrides, *arguments.set]).config


@contextmanager
def surroundings(config: "RunConfig", home: Path) -> Iterator[None]:
    """Run a Ray head and a Prefect server of our own in ``home`` meanwhile."""
    from verl_omni_core.cluster import prefect_server, ray_head, services
    from verl_omni_core.cluster.start import start

    os.environ["VERL_OMNI_HOME"] = str(home)
    os.environ["PREFECT_LOGGING_LEVEL"] = "WARNING"
    for name in ("RAY_ADDRESS", "PREFECT_API_URL"):
        os.environ.pop(name, None)
    try:
        start(config.cluster, with_prefect=True, say=lambda line: print(line, file=sys.stderr))
        yield
    finally:
        for name in (ray_head.NAME, prefect_server.NAME):
            services.stop(name)


def report(measured: "Measured", config: "RunConfig", load_before: tuple[float, ...]) -> dict[str, Any]:
    """Return the line's fields; seconds are medians over pairs, the first steps of each kind left out."""
    ours = [step.seconds for step in measured.product]
    plain = [step.seconds for step in measured.in_memory]
    return {
        "benchmark": "step_overhead",
        "pairs": len(ours),
        "samples": config.data.prompts_per_step * config.rollout.group_size,
        "product_step_s": _rounded(median(ours)),
        "in_memory_step_s": _rounded(median(plain)),
        "ratio_of_medians": _rounded(median(ours) / median(plain)),
        "median_of_ratios": _rounded(median(a / b for a, b in zip(ours, plain, strict=True))),
        "overhead_s": _rounded(median(a - b for a, b in zip(ours, plain, strict=True))),
        "noop_step_s": _rounded(median(step.seconds for step in measured.noop)),
        "equal_results": measured.are_equal,
        "product_stages_s": _medians(step.stages for step in measured.product),
        "product_outside_stages_s": _rounded(median(_outside(step) for step in measured.product)),
        "in_memory_parts_s": _medians(step.parts for step in measured.in_memory),
        "noop_stages_s": _medians(step.stages for step in measured.noop),
        "noop_outside_stages_s": _rounded(median(_outside(step) for step in measured.noop)),
        "prefect_server_cpu_s": _rounded(measured.server_cpu_s),
        "product_step_s_all": [_rounded(value) for value in ours],
        "in_memory_step_s_all": [_rounded(value) for value in plain],
        "load_average": [[round(value, 2) for value in load] for load in (load_before, os.getloadavg())],
        "cpu_count": os.cpu_count(),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in PACKAGES},
        },
    }


def _outside(step: "ProductStep") -> float:
    return step.seconds - sum(step.stages.values())


def _medians(steps: Iterable[Mapping[str, float]]) -> dict[str, float]:
    rows = list(steps)
    return {name: _rounded(median(row[name] for row in rows)) for name in rows[0]}


def _rounded(seconds: float) -> float:
    return round(seconds, 4)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10, help="Pairs of steps that count.")
    parser.add_argument("--noop-repeats", type=int, default=5, help="Times that a committed step runs again.")
    parser.add_argument("--small", action="store_true", help="Steps of four samples: a check of the script.")
    parser.add_argument("--profile", default=PROFILE)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="Change a setting.")
    parser.add_argument("--folder", type=Path, help="Where to write; the system's temporary folder by default.")
    arguments = parser.parse_args()
    line = os.dup(1)
    os.dup2(2, 1)  # engines print; the line stands alone
    load_before = os.getloadavg()
    if "torch" in sys.modules:
        raise SystemExit("torch is loaded, too late to choose its threads; start this as a program of its own")
    with tempfile.TemporaryDirectory(prefix="overhead-", dir=arguments.folder, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        config = settings(arguments, folder / "runs")
        # both sides compute in threads of one kind; the product gives these variables to its actors
        os.environ.update(threads.environment(max(config.training.threads, config.rollout.threads)))
        with surroundings(config, folder / "home"):
            from benchmarks.product_step import measure

            measured = measure(config, arguments.pairs, arguments.noop_repeats)
            fields = report(measured, config, load_before)
    os.write(line, (json.dumps(fields) + "\n").encode())


if __name__ == "__main__":
    main()
