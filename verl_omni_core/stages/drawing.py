"""Draw the samples of a stage: packs to the rollout workers, finished shards of earlier tries taken over."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa

from verl_omni_core.batches import columns
from verl_omni_core.errors import StageLost, VerlOmniError
from verl_omni_core.identity import refill_seed
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.stages.session import Session
from verl_omni_core.store.attempt import Attempt
from verl_omni_core.store.manifest import FileRecord
from verl_omni_core.workers.rollout_worker import NOT_THE_SAMPLES, PackResult, PackTask, packs_of

FAIL, DROP, ZERO_WEIGHT, REFILL = "fail", "drop", "zero_weight", "refill"


@dataclass
class Drawn:
    """What was drawn."""

    files: list[FileRecord] = field(default_factory=list)
    """Of all shards."""
    timings: list[Mapping[str, float]] = field(default_factory=list)
    """Of the samples drawn now."""
    failed: int = 0
    """Samples that could not be drawn; ``trajectories_failed`` says why."""
    refilled: set[str] = field(default_factory=set)
    """Groups that have a sample drawn in place of one that failed."""
    refill_rounds: int = 0
    """Rounds of other seeds, summed over packs."""

    def add(
        self,
        files: Sequence[FileRecord],
        refills: int,
        refilled: Sequence[str],
        timings: Sequence[Mapping[str, float]] = (),
    ) -> None:
        """Add a pack's files, what became of its seeds, and the timings of its samples if they were drawn now."""
        self.files.extend(files)
        self.timings.extend(timings)
        self.refill_rounds += refills
        self.refilled.update(refilled)


def draw(
    session: Session, attempt: Attempt, prompts: pa.Table, requests: pa.Table, *, version: int, validate: bool
) -> Drawn:
    """Draw every request.

    A pack whose samples did not all succeed is drawn again, up to ``rollout.max_attempts`` times, if that may help; one
    that an earlier attempt of the same key finished is taken over. Then ``rollout.failure`` decides: the stage fails,
    the pack stays without its failed samples, or they get other seeds, up to ``rollout.refill_rounds`` times. Held-out
    samples get none, and fail.

    Args:
        attempt: where shards are written.
        prompts, requests: tables of the samples.
        version: the policy version that must draw them.
        validate: whether these are held-out samples, whose trajectories are not kept.

    Raises:
        StageLost: replicas died; once they are rebuilt only the missing packs are drawn. Else what the samples of a
            pack failed with in the last try, a failure that no retry helps before others. Other packs stay finished.
    """
    settings = session.config.rollout
    policy = FAIL if validate else settings.failure
    packs = packs_of(
        prompts,
        requests,
        attempt,
        pack_size=settings.pack_size,
        weights_version=version,
        score=session.config.reward.streaming,
        validate=validate,
    )
    if policy == ZERO_WEIGHT:  # a pack may lose every sample of a prompt whose embeddings it was to write
        packs = [_with_own_embeddings(pack) for pack in packs]
    finished = session.store.finished_shards(attempt.step, attempt.stage, attempt.key)
    drawn = Drawn()
    for pack in packs:
        if pack.shard in finished:
            record = attempt.adopt(finished[pack.shard])
            drawn.add(record.files, record.payload.get("refills", 0), record.payload.get("refilled", ()))
    left = [pack for pack in packs if pack.shard not in finished]
    what, tries = f"{len(packs)} packs of {attempt.stage}", 0
    lost: list[VerlOmniError] = []
    while left:
        failed = _draw_packs(session, left, drawn)
        tries += 1
        left = []
        for pack, result, error in failed:
            is_last = tries >= settings.max_attempts or not error.retryable or pack.refills > 0
            if isinstance(error, (*NOT_THE_SAMPLES, StageLost)):
                raise _final(failed, tries, what)
            if not is_last:
                left.append(pack)
            elif policy == REFILL and pack.refills < settings.refill_rounds:
                left.append(_refilled(pack, result, session.config.run.seed))
            elif policy in (DROP, ZERO_WEIGHT):
                drawn.add(result.files, 0, (), result.metrics)
                drawn.failed += result.failed
                lost.append(error)
            else:
                raise _final(failed, tries, what)
    _refuse_too_many(drawn.failed, len(requests), lost, session.config)
    return drawn


def _with_own_embeddings(pack: PackTask) -> PackTask:
    return replace(pack, embedding_keys=frozenset(pack.requests[columns.PROMPT_KEY].to_pylist()))


def _draw_packs(
    session: Session, packs: Sequence[PackTask], drawn: Drawn
) -> list[tuple[PackTask, PackResult, VerlOmniError]]:
    """Draw packs; return those that lack samples, with what decides."""
    failed = []
    for pack, result in zip(packs, session.actors.run_packs(packs), strict=True):
        if result.error is not None:
            failed.append((pack, result, result.error))
            continue
        refilled = [] if pack.replaced is None else pack.replaced[columns.UID].to_pylist()
        drawn.add(result.files, pack.refills, refilled, result.metrics)
    return failed


def _refilled(pack: PackTask, result: PackResult, run_seed: int) -> PackTask:
    """Return the pack with other seeds for the samples that failed, which only their place and the round decide."""
    assert result.failures is not None
    lost, refills = set(result.failures[columns.SAMPLE_INDEX].to_pylist()), pack.refills + 1
    indices, seeds = pack.requests[columns.SAMPLE_INDEX].to_pylist(), pack.requests[columns.SEED].to_pylist()
    fresh = [
        refill_seed(run_seed, pack.attempt.step, index, refills) if index in lost else seed
        for index, seed in zip(indices, seeds, strict=True)
    ]
    place = pack.requests.schema.get_field_index(columns.SEED)
    requests = pack.requests.set_column(place, pack.requests.schema.field(place), pa.array(fresh, pa.int64()))
    told = [table for table in (pack.replaced, result.failures) if table is not None]
    return replace(pack, requests=requests, refills=refills, replaced=pa.concat_tables(told).unify_dictionaries())


def _final(failed: Sequence[tuple[PackTask, PackResult, VerlOmniError]], tries: int, what: str) -> VerlOmniError:
    """Return the error that decides for the stage: one that other samples would meet as well before others."""
    errors = [error for *_, error in failed]
    others = [error for error in errors if isinstance(error, NOT_THE_SAMPLES)]
    lost = [error for error in errors if isinstance(error, StageLost)]
    final = [error for error in errors if not error.retryable]
    error = (others or lost or final or errors)[0]
    times = "once" if tries == 1 else f"{tries} times"
    raised = type(error)(f"{len(errors)} of {what} failed {times}; the first error: {type(error).__name__}: {error}")
    raised.__cause__ = error
    return raised


def _refuse_too_many(failed: int, count: int, errors: Sequence[VerlOmniError], config: RunConfig) -> None:
    limit = config.rollout.max_failed_fraction
    if not failed or (failed <= limit * count and failed < count):
        return
    first = errors[0]
    raise type(first)(
        f"{failed} of {count} samples could not be drawn, rollout.max_failed_fraction allows {limit:.0%} with "
        f"rollout.failure = {config.rollout.failure!r}, and at least one must be left; the first error: "
        f"{type(first).__name__}: {first}"
    ) from first
