"""The demo at a scale of seconds, and ways to interfere with it between two stages."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import ray

from verl_omni_core.settings.loader import load
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.stages.observe import Silent, observe_with, observer

DEMO = "glyph-flow_grpo-ocr-cpu"
PROMPTS, GROUP, STEPS = 6, 4, 4
SAMPLES = PROMPTS * GROUP
HELD_OUT, HELD_OUT_SAMPLES = 4, 2

_SMALL: dict[str, object] = {
    "run.steps": STEPS,
    "run.validate_every": 0,
    "run.checkpoint_every": 2,
    "run.images_every": 2,
    "model.lora.rank": 4,
    "data.prompts_per_step": PROMPTS,
    "data.max_validation_prompts": HELD_OUT,
    "sampler.num_inference_steps": 6,
    "sampler.sde_window_size": 2,
    "sampler.sde_window_range": "[0, 2]",
    "sampler.validation.num_inference_steps": 6,
    "sampler.validation.samples_per_prompt": HELD_OUT_SAMPLES,
    "rollout.group_size": GROUP,
    "rollout.max_batch": 8,
    "rollout.pack_size": 8,
    "rollout.threads": 1,
    "training.threads": 1,
    "training.micro_batch": 8,
    "tracking.grid_prompts": 2,
    "durability.min_free_gb": 0.1,
    # claims are checked at their own scale, not at the loose limit that guards a user's run
    "algorithm.max_ratio_deviation": 1e-5,
    "cluster.keep_actors": "true",
}


def overrides(run_id: str, store: str | Path, **changes: object) -> list[str]:
    """Return ``--set`` arguments of a small run; ``__`` in a name stands for its dot."""
    values = _SMALL | {"run.id": run_id, "run.store": store}
    values |= {name.replace("__", "."): value for name, value in changes.items()}
    return [f"{name}={value}" for name, value in values.items()]


def settings(run_id: str, store: str | Path, **changes: object) -> RunConfig:
    """Return the settings of a small run."""
    return load(DEMO, overrides=overrides(run_id, store, **changes)).config


class Stopped(Exception):
    """The fault that a test planted."""


class _Before(Silent):
    def __init__(self, step: int, stage: str, action: Callable[[], None]) -> None:
        self.at, self.action, self.others = (step, stage), action, observer()

    def stage(self, step: int, name: str) -> None:
        self.others.stage(step, name)
        if (step, name) == self.at:
            self.action()


@contextlib.contextmanager
def before(step: int, stage: str, action: Callable[[], None]) -> Iterator[None]:
    """Do ``action`` just before a stage begins; what it raises ends the run there."""
    remove = observe_with(_Before(step, stage, action))
    try:
        yield
    finally:
        remove()


def stop() -> None:
    raise Stopped


def process_ids(actors: Mapping[str, Any]) -> dict[str, int]:
    """Return the process of each actor, by its name."""
    pids = ray.get([actor.__ray_call__.remote(lambda _: os.getpid()) for actor in actors.values()], timeout=60)
    return dict(zip(actors, pids, strict=True))


def kill(actors: Mapping[str, Any], *names: str) -> None:
    """End the processes of some actors, as a crash would."""
    pids = process_ids(actors)
    processes = [psutil.Process(pids[name]) for name in names]
    for process in processes:
        process.send_signal(signal.SIGKILL)
    assert not psutil.wait_procs(processes, timeout=30)[1]


def gap(one: Mapping[str, object], other: Mapping[str, object]) -> float:
    """Return the largest difference between two sets of weights."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)  # type: ignore[operator]


def distance(one: Mapping[str, object], other: Mapping[str, object]) -> float:
    """Return the Euclidean distance of two sets of weights."""
    assert one.keys() == other.keys()
    return sum(float((one[name] - other[name]).double().square().sum()) for name in one) ** 0.5  # type: ignore[operator]
