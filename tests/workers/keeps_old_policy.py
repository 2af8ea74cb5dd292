"""An algorithm outside the package: FlowGRPO without a divergence term, with an adapter for an earlier policy."""

from dataclasses import dataclass

from verl_omni_core.algorithms import flow_grpo
from verl_omni_core.algorithms.flow_grpo import EVALUATION, REQUIRES

__all__ = ["ADAPTERS", "EVALUATION", "REQUIRES", "Options", "advantages", "loss"]

ADAPTERS = ("old",)


@dataclass(frozen=True, kw_only=True)
class Options:
    """It has none of its own."""

    clip_range: float = 1e-4


def advantages(rewards, group_ids, valid, options):
    return flow_grpo.advantages(rewards, group_ids, valid, flow_grpo.Options(clip_range=options.clip_range))


def loss(current, batch, options):
    return flow_grpo.loss(current, batch, flow_grpo.Options(clip_range=options.clip_range))
