"""Draw the samples of a stage: packs to the rollout workers, finished shards of earlier tries taken over."""

from collections.abc import Mapping, Sequence

import pyarrow as pa

from verl_omni_core.errors import StageLost, VerlOmniError
from verl_omni_core.stages.session import Session
from verl_omni_core.store.attempt import Attempt
from verl_omni_core.store.manifest import FileRecord
from verl_omni_core.workers.rollout_worker import PackTask, packs_of


def draw(
    session: Session, attempt: Attempt, prompts: pa.Table, requests: pa.Table, *, version: int, validate: bool
) -> tuple[list[FileRecord], list[Mapping[str, float]]]:
    """Draw every request and return the files of all shards and the timings of the samples drawn now.

    A pack whose samples did not all succeed is drawn again, up to ``rollout.max_attempts`` times, if that may help; one
    that an earlier attempt of the same key finished is taken over.

    Args:
        attempt: where shards are written.
        prompts, requests: tables of the samples.
        version: the policy version that must draw them.
        validate: whether these are held-out samples, whose trajectories are not kept.

    Raises:
        StageLost: replicas died; once they are rebuilt only the missing packs are drawn. Else what the samples of a
            pack failed with in the last try, a failure that no retry helps before others. Other packs stay finished.
    """
    packs = packs_of(
        prompts,
        requests,
        attempt,
        pack_size=session.config.rollout.pack_size,
        weights_version=version,
        score=session.config.reward.streaming,
        validate=validate,
    )
    finished = session.store.finished_shards(attempt.step, attempt.stage, attempt.key)
    files = [file for pack in packs if pack.shard in finished for file in attempt.adopt(finished[pack.shard]).files]
    timings: list[Mapping[str, float]] = []
    left = [pack for pack in packs if pack.shard not in finished]
    tries = 0
    while left:
        left, errors = _draw_packs(session, left, files, timings)
        tries += 1
        if left:
            _raise_final(errors, tries, session.config.rollout.max_attempts, f"{len(packs)} packs of {attempt.stage}")
    return files, timings


def _draw_packs(
    session: Session, packs: Sequence[PackTask], files: list[FileRecord], timings: list[Mapping[str, float]]
) -> tuple[list[PackTask], list[VerlOmniError]]:
    failed, errors = [], []
    for pack, result in zip(packs, session.actors.run_packs(packs), strict=True):
        if result.error is not None:
            failed.append(pack)
            errors.append(result.error)
            continue
        files.extend(result.files)
        timings.extend(result.metrics)
    return failed, errors


def _raise_final(errors: Sequence[VerlOmniError], tries: int, most: int, what: str) -> None:
    """Raise the error that decides, unless another try with the same actors may help."""
    final = [error for error in errors if not error.retryable]
    lost = [error for error in errors if isinstance(error, StageLost)]
    if tries < most and not (final or lost):
        return
    error = (final or lost or list(errors))[0]
    times = "once" if tries == 1 else f"{tries} times"
    raise type(error)(
        f"{len(errors)} of {what} failed {times}; the first error: {type(error).__name__}: {error}"
    ) from error
