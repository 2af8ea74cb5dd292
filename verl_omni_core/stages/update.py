"""Train on a step's committed tables, exactly once a mini-batch."""

from typing import NoReturn

from verl_omni_core.errors import ContractError, OffPolicyError
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.stages.keys import stage_key
from verl_omni_core.stages.metric_table import metric_table
from verl_omni_core.stages.observe import stage
from verl_omni_core.stages.session import RunRef, Session, session_of
from verl_omni_core.stages.trained import STAGES
from verl_omni_core.store.ledger import FORK, standing
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
        ContractError: the ledger has this step's updates with other samples; or, with ``run.deterministic``, a restored
            trainer that repeated a committed step holds other weights than were synced then. Without it, that goes into
            the ledger as a fork.
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
    known = _known_updates(session, command)
    try:
        result = session.actors.trainer.update_actor(command)
    except OffPolicyError as error:
        if done is None:
            _set_aside(session, rollout, error)
        raise
    if done is not None:  # a restored trainer catches up from stored batches
        _compare_with_synced(session, step)
        return done
    for record in result.records:
        if record["update_id"] not in known:
            session.ledger.append(record)
    attempt = session.store.attempt(step, STAGE, key)
    table = metric_table(step, result.metrics)
    files = [attempt.write_table("metrics", 0, table)]
    return attempt.commit(
        files, rows=len(table), parents=parents, producer=session.producer(weights_version=result.version)
    )


def _known_updates(session: Session, command: UpdateCommand) -> set[str]:
    """Return the update ids that stand in the ledger.

    A machine that died between the ledger and the commit left some there; what the run went back before may come again.
    """
    digests = {
        record["update_id"]: record["batch_digest"] for record in standing(session.ledger.records_since(command.step))
    }
    for number in range(len(command.mini_batches)):
        update_id = command.update_id(number)
        if digests.get(update_id, command.batch_digest(number)) != command.batch_digest(number):
            raise ContractError(
                f"the ledger has update {update_id} with the batch {digests[update_id][:12]}, now it is to be made "
                f"with {command.batch_digest(number)[:12]}: the samples of step {command.step} changed after they were "
                "trained on. Restore the run's folder from a copy, or start a new run from its last weights"
            )
    return set(digests)


def _compare_with_synced(session: Session, step: int) -> None:
    """Compare a repeated step's weights with those that were written for the replicas when it was first made."""
    synced = session.store.find(step, STAGES["policy"])
    if synced is None:
        return
    written = session.store.manifest(synced).producer["checksum"]
    now = session.actors.trainer.weights_checksum()
    if now == written:
        return
    if session.config.run.deterministic:
        raise ContractError(
            f"the restored trainer repeated step {step} and holds weights with checksum {now[:12]}, {written[:12]} was "
            "synced then; run.deterministic promises equal ones. Resume with the device and the library versions that "
            "the run was started with, or start a new run from these weights"
        )
    fork = {
        "update_id": f"{step:06d}/fork-{session.ref.epoch}",
        "step": step,
        "kind": FORK,
        "version_before": step,
        "version_after": step,
        "batch_digest": "",
        "weights_digest": now,
        "skipped": False,
        "metrics_json": "{}",
    }
    if all(record["update_id"] != fork["update_id"] for record in session.ledger.records()):
        session.ledger.append(fork)


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
