"""The trainer's view of stored samples before the update: the sampling policy's log-probs, the reference's means."""

from collections.abc import Callable

from verl_omni_core.algorithms._contract import needs_reference
from verl_omni_core.settings.resolve import algorithm_options
from verl_omni_core.stages.keys import stage_key
from verl_omni_core.stages.observe import stage
from verl_omni_core.stages.session import RunRef, Session, session_of
from verl_omni_core.store.manifest import ArtifactRef, FileRecord
from verl_omni_core.workers.commands import InferCommand


@stage("old_log_probs")
def old_log_probs(run: RunRef, step: int, samples: ArtifactRef) -> ArtifactRef | None:
    """Commit the ``logprobs`` table, or return none where the engine's own log-probs serve."""
    session = session_of(run)
    if not session.config.algorithm.recompute_old_log_probs:
        return None
    return _infer(session, step, "old_log_probs", samples, session.actors.trainer.infer_actor_batch)


@stage("reference")
def reference(run: RunRef, step: int, samples: ArtifactRef) -> ArtifactRef | None:
    """Commit the ``reference`` table, or return none where the loss needs no reference."""
    session = session_of(run)
    if not needs_reference(session.algorithm, algorithm_options(session.config)):
        return None
    return _infer(session, step, "reference", samples, session.actors.trainer.infer_ref_batch)


def _infer(
    session: Session,
    step: int,
    name: str,
    samples: ArtifactRef,
    infer: Callable[[InferCommand], list[FileRecord]],
) -> ArtifactRef:
    key = stage_key(name, step, [samples], model=session.config.model.model_dump(mode="json"))
    done = session.store.committed(step, name, key)
    if done is not None:
        return done
    attempt = session.store.attempt(step, name, key, parents=[samples], weights_version=step - 1)
    files = infer(InferCommand(attempt=attempt, rollout=samples, expected_version=step - 1))
    return attempt.commit(
        files, rows=samples.rows, parents=[samples], producer=session.producer(weights_version=step - 1)
    )
