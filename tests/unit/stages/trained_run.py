"""A run of a tiny model that one real rank in this process trains on tables committed by hand: no flow, no engine."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.workers import committed_step
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.stages.checkpoint import checkpoint
from verl_omni_core.stages.opening import restore
from verl_omni_core.stages.schedule import snapshot_due
from verl_omni_core.stages.session import RunRef, Session, let_go, register
from verl_omni_core.stages.snapshot import begin_checkpoint
from verl_omni_core.stages.sync import AVERAGE, POLICY, weights_artifact
from verl_omni_core.stages.update import update
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.attempt import Attempt
from verl_omni_core.store.manifest import ArtifactRef
from verl_omni_core.store.runs import create_run
from verl_omni_core.workers.actor_rollout_ref import ActorRolloutRefWorker

STEPS = 4


class Trainer(ActorRolloutRefWorker):
    """One rank in this process, with what a group adds."""

    def version(self) -> int:
        return self.ping().version

    def owned_since(self) -> int:
        return self.ping().epoch

    def obey(self, epoch: int) -> None:
        self.ping(epoch)

    def finish_snapshot(self, attempt: Attempt) -> Any:
        return super().finish_snapshot(attempt, 60)


def settings(store: Path, pipeline: Path, **groups: dict[str, Any]) -> RunConfig:
    values = committed_step.config(pipeline, deterministic=True, ema_decay=0.9).model_dump(mode="json")
    values["run"] |= {"store": str(store), "id": "trained", "steps": STEPS, "checkpoint_every": 0}
    values["data"] |= {"prompts_per_step": 2}
    values["rollout"] |= {"group_size": 5}
    values["training"] |= {"prompts_per_update": 1, "schedule": "cosine"}
    values["tracking"] |= {"tensorboard": False}
    values["algorithm"] |= {"max_ratio_deviation": None}  # every step's samples here are the base's
    for group, changes in groups.items():
        values[group] |= changes
    return RunConfig.model_validate(values)


class TrainedRun:
    """The run; what a flow does with its trainer is done by :meth:`train`."""

    def __init__(self, store: Path, pipeline: Path, **groups: dict[str, Any]) -> None:
        self.pipeline, self.config = pipeline, settings(store, pipeline, **groups)
        self.folder = create_run(store, self.config.model_dump(mode="json"), code_version="1", run_id="trained")
        self.root = self.folder.root

    def restart(self, trainer: Trainer | None = None) -> Session:
        """Lose the driver, and the trainer unless it is given; return the new session."""
        let_go(str(self.root))
        if trainer is None:
            trainer = Trainer(self.config)
            trainer.init_model()
        store = RunStore(self.root, epoch=0)
        return register(Session(RunRef(str(self.root), 0), self.config, store, SimpleNamespace(trainer=trainer)))

    def batches(self, session: Session, step: int) -> tuple[ArtifactRef, ArtifactRef]:
        """Return the step's committed tables; equal samples every time."""
        rollout, advantages = (session.store.find(step, name) for name in ("rollout", "advantage"))
        if rollout is None or advantages is None:
            return committed_step.commit_step(self.root, self.pipeline, step)
        return rollout, advantages

    def update(self, session: Session, step: int) -> None:
        update(session.ref, step, *self.batches(session, step), None, None)

    def learn(self, session: Session, step: int) -> None:
        """Do what a flow does with the trainer between two steps' samples, up to the copy of its state."""
        if snapshot_due(self.config, step - 1):
            checkpoint(session.ref, step - 1)
        self.update(session, step)
        begin_checkpoint(session.ref, step)

    def train(self, session: Session, last: int = STEPS) -> dict[int, tuple[str, str]]:
        """Train from where the trainer stands; return the checksums of policy and average after each step."""
        found = {}
        for step in range(session.actors.trainer.version() + 1, last + 1):
            self.learn(session, step)
            found[step] = self.weights(session, step)
        if snapshot_due(self.config, last):
            checkpoint(session.ref, last)
        return found

    def resume(self) -> Session:
        """Start again after driver and trainer were lost."""
        session = self.restart()
        restore(session)
        return session

    def weights(self, session: Session, step: int) -> tuple[str, str]:
        refs = [weights_artifact(session, step, network) for network in (POLICY, AVERAGE)]
        policy, average = (str(session.store.manifest(ref).producer["checksum"]) for ref in refs)
        return policy, average

    def checkpoints(self) -> list[int]:
        store = RunStore(self.root)
        return [step for step in store.steps() if store.find(step, "checkpoint") is not None]
