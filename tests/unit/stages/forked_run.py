"""A run that a real rank trained on samples committed by hand, to be forked: no flow, no actor, no engine."""

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.stages.trained_run import Trainer
from tests.workers import committed_step
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.stages import opening
from verl_omni_core.stages.checkpoint import checkpoint
from verl_omni_core.stages.session import RunRef, Session, let_go, session_of
from verl_omni_core.stages.sync import AVERAGE, POLICY, weights_artifact
from verl_omni_core.stages.update import update
from verl_omni_core.store.manifest import ArtifactRef

STEPS, CHECKPOINTS = 3, (1, 2)


def settings(pipeline: Path, store: Path, **run: Any) -> RunConfig:
    """Two prompts a step, five samples of each, an optimizer step for each prompt."""
    values = committed_step.config(pipeline, deterministic=True, ema_decay=0.9).model_dump(mode="json")
    values["run"] |= {"store": str(store), "id": "parent", "steps": STEPS, "checkpoint_every": 1, **run}
    values["data"] |= {"prompts_per_step": 2}
    values["rollout"] |= {"group_size": 5}
    values["training"] |= {"prompts_per_update": 1}
    values["algorithm"] |= {"max_ratio_deviation": None}  # every step's samples here are the base's
    values["durability"] |= {"min_free_gb": 0}
    values["tracking"] |= {"tensorboard": False}
    return RunConfig.model_validate(values)


def start(config: RunConfig, patch: pytest.MonkeyPatch) -> Session:
    """Open a run with a fresh trainer."""
    trainer = Trainer(config)
    trainer.init_model()
    actors = SimpleNamespace(trainer=trainer, describe_engines=list, stop=lambda: None)
    patch.setattr(opening, "check", lambda config: None)
    patch.setattr(opening, "plan", lambda run, step: None)
    patch.setattr(opening.Actors, "start_or_find", lambda *_, **__: actors)
    return session_of(opening.open_run(config))


def train(session: Session, pipeline: Path, last: int) -> None:
    """Train to step ``last`` as the flow does, on samples that are the same in every run."""
    run, store = session.ref, session.store
    weights_artifact(session, run.done, POLICY)
    for step in range(run.done + 1, last + 1):
        samples = committed_step.commit_step(session.root, pipeline, step, epoch=run.epoch)
        commit(session, update(run, step, *samples, None, None), step)
        if step in CHECKPOINTS:
            checkpoint(run, step)
        for network in (POLICY, AVERAGE):
            weights_artifact(session, step, network)
    assert store.steps()[-1] == last
    let_go(run.root)


def commit(session: Session, parent: ArtifactRef, step: int) -> None:
    """Commit a step's log."""
    attempt = session.store.attempt(step, "log", "key")
    attempt.commit([], rows=0, parents=[parent], producer={})


def weights(root: Path, epoch: int, step: int, network: str = POLICY) -> str:
    """Return the checksum of a step's weights."""
    session = session_of(RunRef(str(root), epoch))
    ref = session.store.find(step, "sync" if network == POLICY else "sync-average")
    assert ref is not None
    return str(session.store.manifest(ref).producer["checksum"])


def tree(root: Path) -> dict[str, tuple[int, int, str]]:
    """Return size, time of change and digest of everything under ``root``, by path."""
    found = {}
    for path in sorted(root.rglob("*")):
        state = path.lstat()
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[str(path.relative_to(root))] = (state.st_size if path.is_file() else 0, state.st_mtime_ns, digest)
    return found
