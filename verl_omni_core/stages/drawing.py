"""Draw the samples of a stage: packs to the rollout workers, finished shards of earlier tries taken over."""

from collections.abc import Mapping, Sequence

import pyarrow as pa

from verl_omni_core.errors import EngineError
from verl_omni_core.stages.session import Session
from verl_omni_core.store.attempt import Attempt
from verl_omni_core.store.manifest import FileRecord
from verl_omni_core.workers.rollout_worker import PackTask, packs_of


def draw(
    session: Session, attempt: Attempt, prompts: pa.Table, requests: pa.Table, *, version: int, validate: bool
) -> tuple[list[FileRecord], list[Mapping[str, float]]]:
    """Draw every request and return the files of all shards and the timings of the samples drawn now.

    A pack whose samples did not all succeed is drawn again, up to ``rollout.max_attempts`` times; one that an earlier
    attempt of the same key finished is taken over.

    Args:
        attempt: where shards are written.
        prompts, requests: tables of the samples.
        version: the policy version that must draw them.
        validate: whether these are held-out samples, whose trajectories are not kept.

    Raises:
        EngineError: a pack failed in every attempt; names its first error.
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
    errors: list[str] = []
    for _ in range(session.config.rollout.max_attempts):
        left, errors = _draw_packs(session, attempt, left, files, timings)
        if not left:
            return files, timings
    raise EngineError(
        f"{len(left)} of {len(packs)} packs of {attempt.stage} failed {session.config.rollout.max_attempts} times; "
        f"the first error: {errors[0]}"
    )


def _draw_packs(
    session: Session,
    attempt: Attempt,
    packs: Sequence[PackTask],
    files: list[FileRecord],
    timings: list[Mapping[str, float]],
) -> tuple[list[PackTask], list[str]]:
    failed, errors = [], []
    for pack, result in zip(packs, session.actors.run_packs(packs), strict=True):
        if result.failed:
            failed.append(pack)
            errors.append(str(result.first_error))
            continue
        attempt.finish_shard(pack.shard, result.files)
        files.extend(result.files)
        timings.extend(result.metrics)
    return failed, errors
