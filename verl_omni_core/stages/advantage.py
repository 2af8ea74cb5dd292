"""Turn rewards into advantages, and rewards and advantages into the step's critic metrics."""

import pyarrow as pa
import torch

from verl_omni_core.batches import columns
from verl_omni_core.settings.resolve import algorithm_options
from verl_omni_core.stages.observe import stage
from verl_omni_core.stages.keys import stage_key
from verl_omni_core.stages.session import RunRef, session_of
from verl_omni_core.store.manifest import ArtifactRef

STAGE = "advantage"


@stage(STAGE)
def advantage(run: RunRef, step: int, rewards: ArtifactRef) -> ArtifactRef:
    """Commit the ``advantages`` table of a step: one row a sample, in canonical order.

    Args:
        rewards: the reward stage's artifact.
    """
    session = session_of(run)
    options = algorithm_options(session.config)
    key = stage_key(
        STAGE,
        step,
        [rewards],
        algorithm=session.config.algorithm.name,
        options=repr(options),
        shuffle=session.config.reward.shuffle,
    )
    done = session.store.committed(step, STAGE, key)
    if done is not None:
        return done
    summary = session.store.table(rewards, "reward_summary")
    scores = torch.tensor(summary.column(columns.RM_SCORE).fill_null(float("nan")).to_numpy(), dtype=torch.float32)
    valid = torch.tensor(summary.column(columns.VALID).to_numpy(zero_copy_only=False))
    uids = summary.column(columns.UID).to_pylist()
    number = {uid: i for i, uid in enumerate(dict.fromkeys(uids))}
    groups = torch.tensor([number[uid] for uid in uids])
    if session.config.reward.shuffle:
        scores, valid = _shuffled(scores, valid, session.config.run.seed + step)
    values = session.algorithm.advantages(scores, groups, valid, options)
    table = pa.table(
        {
            **{name: summary.column(name) for name in columns.IDENTITY},
            columns.SCORE: pa.array(scores.numpy(), pa.float32()),
            columns.VALID: pa.array(valid.numpy(), pa.bool_()),
            columns.ADVANTAGE: pa.array(values.numpy(), pa.float32()),
            columns.ESTIMATOR: [session.config.algorithm.name] * len(uids),
        }
    )
    attempt = session.store.attempt(step, STAGE, key)
    files = [attempt.write_table("advantages", 0, table)]
    return attempt.commit(files, rows=len(table), parents=[rewards], producer=session.producer())


def _shuffled(scores: torch.Tensor, valid: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    order = torch.randperm(len(scores), generator=torch.Generator().manual_seed(seed))
    return scores[order], valid[order]
