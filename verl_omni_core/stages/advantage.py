"""Turn rewards into advantages, and rewards and advantages into the step's critic metrics."""

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from verl_omni_core.batches import columns
from verl_omni_core.batches.tables import build_table
from verl_omni_core.metrics.rl import advantage_metrics, reward_metrics
from verl_omni_core.settings.resolve import algorithm_options
from verl_omni_core.stages.incomplete_groups import dropped
from verl_omni_core.stages.keys import stage_key
from verl_omni_core.stages.metric_table import metric_table
from verl_omni_core.stages.observe import stage
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
    scores, groups, valid = rewards_of(summary)
    if session.config.reward.shuffle:
        counted = ~torch.tensor(dropped(summary))  # a group that is left out stays so
        scores[counted], valid[counted] = _shuffled(scores[counted], valid[counted], session.config.run.seed + step)
    values = session.algorithm.advantages(scores, groups, valid, options)
    mean, std = _group_statistics(scores, groups, valid)
    table = build_table(
        "advantages",
        {
            **{name: summary.column(name) for name in columns.IDENTITY},
            columns.SCORE: scores.nan_to_num().numpy(),
            columns.GROUP_MEAN: mean,
            columns.GROUP_STD: std,
            columns.VALID: valid.numpy(),
            columns.ADVANTAGE: values.numpy(),
            columns.ESTIMATOR: [session.config.algorithm.name] * len(summary),
        },
    )
    attempt = session.store.attempt(step, STAGE, key, parents=[rewards])
    metrics = reward_metrics(scores, groups, valid) | advantage_metrics(values, valid)
    files = [
        attempt.write_table("advantages", 0, table),
        attempt.write_table("metrics", 0, metric_table(step, metrics)),
    ]
    return attempt.commit(files, rows=len(table), parents=[rewards], producer=session.producer())


def rewards_of(summary: pa.Table) -> tuple[Tensor, Tensor, Tensor]:
    """Return rewards [N] fp32 (nan where missing), group ids [N] int64 and validity [N] bool of a reward summary."""
    scores = torch.tensor(summary.column(columns.RM_SCORE).fill_null(float("nan")).to_numpy(), dtype=torch.float32)
    valid = torch.tensor(summary.column(columns.VALID).to_numpy())
    uids = summary.column(columns.UID).to_pylist()
    number = {uid: i for i, uid in enumerate(dict.fromkeys(uids))}
    return scores, torch.tensor([number[uid] for uid in uids]), valid


def _group_statistics(scores: Tensor, groups: Tensor, valid: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return each row's group mean and unbiased spread over valid rows; 0 where a group has too few."""
    mean: np.ndarray = np.zeros(len(scores), np.float32)
    std = np.zeros_like(mean)
    for group in groups.unique():
        rows = groups == group
        kept = scores[rows & valid].double()
        if len(kept):
            mean[rows.numpy()] = float(kept.mean())
        if len(kept) > 1:
            std[rows.numpy()] = float(kept.std())
    return mean, std


def _shuffled(scores: Tensor, valid: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    order = torch.randperm(len(scores), generator=torch.Generator().manual_seed(seed))
    return scores[order], valid[order]
