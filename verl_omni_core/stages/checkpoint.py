"""Commit the trainer's whole state: copied at once, written beside the next step, committed before the next update."""

import logging

from verl_omni_core.errors import ContractError
from verl_omni_core.stages.keys import stage_key
from verl_omni_core.stages.observe import stage
from verl_omni_core.stages.schedule import snapshot_due
from verl_omni_core.stages.session import RunRef, Session, session_of
from verl_omni_core.stages.update import STAGE as UPDATE
from verl_omni_core.store.manifest import ArtifactRef

STAGE = "checkpoint"

logger = logging.getLogger(__name__)


@stage(STAGE)
def checkpoint(run: RunRef, step: int) -> ArtifactRef | None:
    """Commit the policy, its average, optimizer, schedule and random states after ``step``, where that is due.

    What was begun after the update is waited for; what nobody began is begun here. A trainer that has learned from
    a later step, as one that outlived its flow may have, cannot go back: then there is none of this step.

    Raises:
        StoreError: the state could not be written, or reads back differently.
    """
    session = session_of(run)
    return commit_state(session, step) if snapshot_due(session.config, step) else None


def begin_state(session: Session, step: int) -> None:
    """Let the trainer copy its state after ``step`` and begin to write it; does nothing if that was done."""
    if session.snapshot is not None and session.snapshot.step == step:
        return
    if _is_taken_over(session, step):
        return
    update, key = _origin(session, step)
    if session.store.committed(step, STAGE, key) is not None:
        return
    held = session.actors.trainer.version()
    if held != step:
        logger.warning("step %d has no checkpoint: the trainer holds version %d already", step, held)
        return
    attempt = session.store.attempt(step, STAGE, key, parents=[update], weights_version=step)
    session.actors.trainer.begin_snapshot(attempt)
    session.snapshot = attempt


def commit_state(session: Session, step: int) -> ArtifactRef | None:
    """Commit the trainer's whole state after ``step``, whether it is due or not; see :func:`checkpoint`."""
    begin_state(session, step)
    attempt = session.snapshot
    if attempt is None or attempt.step != step:
        return session.store.find(step, STAGE)
    written = session.actors.trainer.finish_snapshot(attempt)
    session.snapshot = None
    return attempt.commit(
        written.files,
        rows=len(written.files),
        parents=[_origin(session, step)[0]],
        producer=session.producer(weights_version=step, seconds=written.seconds),
    )


def _is_taken_over(session: Session, step: int) -> bool:
    """Say whether the run begins with this checkpoint: another run made it, and there is no update of the step here."""
    return session.store.find(step, UPDATE) is None and session.store.find(step, STAGE) is not None


def _origin(session: Session, step: int) -> tuple[ArtifactRef, str]:
    """Return the update that made the state of ``step``, and the key of its checkpoint."""
    update = session.store.find(step, UPDATE)
    if update is None:
        raise ContractError(f"step {step} has no committed update; a checkpoint follows one")
    training = session.config.training.model_dump(mode="json", exclude={"step_timeout_s"})
    return update, stage_key(STAGE, step, [update], training=training)
