"""Train on a step's committed tables, exactly once a mini-batch."""

from typing import NoReturn

from verl_omni_core.errors import OffPolicyError
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.stages.keys import stage_key
from verl_omni_core.stages.metric_table import metric_table
from verl_omni_core.stages.observe import stage
from verl_omni_core.stages.session import RunRef, Session, session_of
from verl_omni_core.store.manifest import ArtifactRef
from verl_omni_core.store.rejection import reject
from verl_omni_core.workers.commands import UpdateCommand

STAGE = "update"


@stage(STAGE)
def update(
    run: RunRef,
    step: int,
    rollout: ArtifactRef,
    advantages: ArtifactRef,
    old_log_probs: ArtifactRef | None,
    reference: ArtifactRef | None,
) -> ArtifactRef:
    """Apply the step's optimizer steps and commit their metrics; the artifact's manifest names the new version.

    Args:
        rollout, advantages: the step's tables.
        old_log_probs: recomputed log-probs of the sampling policy; none takes the engine's.
        reference: the reference policy's means, where the loss has a divergence term.

    Raises:
        OffPolicyError: ratios of the first mini-batch are not 1 (``algorithm.max_ratio_deviation``). The samples are
            set aside, with all that was computed from them, and drawn again when the step is.
        NumericError: gradients stayed non-finite.
    """
    session = session_of(run)
    parents = [ref for ref in (rollout, advantages, old_log_probs, reference) if ref is not None]
    key = stage_key(
        STAGE,
        step,
        parents,
        algorithm=session.config.algorithm.model_dump(mode="json", exclude={"max_ratio_deviation"}),
        training=session.config.training.model_dump(mode="json", exclude={"step_timeout_s"}),
    )
    done = session.store.committed(step, STAGE, key)
    if done is not None and session.actors.trainer.version() >= step:
        return done
    command = UpdateCommand(
        root=run.root,
        step=step,
        expected_version=step - 1,
        epoch=run.epoch,
        rollout=rollout,
        advantages=advantages,
        old_log_probs=old_log_probs,
        reference=reference,
        mini_batches=mini_batches(session.config),
    )
    try:
        result = session.actors.trainer.update_actor(command)
    except OffPolicyError as error:
        if done is None:
            _set_aside(session, rollout, error)
        raise
    if done is not None:
        return done  # a restored trainer caught up from stored batches
    known = {record["update_id"] for record in session.ledger.records()} if result.replayed else set()
    for record in result.records:
        if record["update_id"] not in known:
            session.ledger.append(record)
    attempt = session.store.attempt(step, STAGE, key)
    table = metric_table(step, result.metrics)
    files = [attempt.write_table("metrics", 0, table)]
    return attempt.commit(
        files, rows=len(table), parents=parents, producer=session.producer(weights_version=result.version)
    )


def _set_aside(session: Session, rollout: ArtifactRef, error: OffPolicyError) -> NoReturn:
    reject(session.store, rollout, str(error))
    raise OffPolicyError(
        f"{error}. The samples of step {rollout.step} are set aside in {rollout.stage}/attempts/{rollout.attempt}; "
        "started again, the run draws them anew"
    ) from error


def mini_batches(config: RunConfig) -> list[list[int]]:
    """Return the sample indices of every mini-batch of a step, groups whole, one list an optimizer step."""
    prompts = config.data.prompts_per_step
    per_update = config.training.prompts_per_update or prompts
    group = config.rollout.group_size
    one_epoch = [list(range(first * group, (first + per_update) * group)) for first in range(0, prompts, per_update)]
    return one_epoch * config.training.epochs_per_step
