"""All metric names, with unit, reduction and definition: the one list.

A name is what a run logs; a part in braces stands for any text. The reduction says how values of rows, micro-batches
and ranks become one number; ``metrics.reduce`` applies it.

Symbols: ``l`` log-prob of the current policy, ``l_old`` of the policy before the update, ``ratio = exp(l - l_old)``.
Group spreads in metrics are population standard deviations, those in advantages are not.
"""

import functools
import re
from dataclasses import dataclass
from typing import Literal

Reduction = Literal["mean", "std", "max", "min", "sum", "last"]


@dataclass(frozen=True)
class Metric:
    """One name and what it means."""

    name: str
    unit: str
    """Empty for a pure number."""
    reduction: Reduction
    """``mean`` is weighted by rows; ``std`` is unbiased over rows, 0 for one row."""
    definition: str


def _family(prefix: str, unit: str, definitions: dict[str, str], reduction: Reduction = "mean") -> list[Metric]:
    return [Metric(f"{prefix}/{name}", unit, reduction, text) for name, text in definitions.items()]


def _extremes(prefix: str, unit: str, what: str) -> list[Metric]:
    return [
        Metric(f"{prefix}/mean", unit, "mean", f"mean of {what}"),
        Metric(f"{prefix}/max", unit, "max", f"largest of {what}"),
        Metric(f"{prefix}/min", unit, "min", f"smallest of {what}"),
    ]


ACTOR = [
    Metric("actor/loss", "", "mean", "mean loss of a mini-batch over its rows and stochastic steps"),
    Metric("actor/ppo_kl", "nat/element", "mean", "mean of l_old - l"),
    Metric("actor/ratio_mean", "", "mean", "mean ratio"),
    Metric("actor/ratio_std", "", "std", "unbiased spread of the ratio over a mini-batch"),
    Metric("actor/ratio_deviation", "", "max", "largest |ratio - 1|"),
    Metric(
        "actor/pg_clipfrac", "", "mean", "share of rows with |ratio - 1| > clip_range, whatever the advantage's sign"
    ),
    Metric("actor/pg_clipfrac_higher", "", "mean", "share of rows with ratio - 1 > clip_range"),
    Metric("actor/pg_clipfrac_lower", "", "mean", "share of rows with 1 - ratio > clip_range"),
    Metric("actor/kl_loss", "", "mean", "divergence from the reference policy, before its coefficient"),
    Metric("actor/kl_coef", "", "last", "coefficient of the divergence"),
    Metric("actor/grad_norm", "", "mean", "norm of the gradient before clipping"),
    Metric("actor/lr", "", "last", "learning rate after the step"),
    Metric("actor/skipped_steps", "", "sum", "optimizer steps skipped for a gradient that is not finite"),
    Metric("actor/optimizer_steps", "", "sum", "optimizer steps made"),
    Metric("actor/first_ratio_deviation", "", "max", "largest |ratio - 1| of the first mini-batch with rows"),
]

CRITIC = [
    *_extremes("critic/rewards", "reward", "the valid rewards of a step"),
    Metric("critic/rewards/zero_std_ratio", "", "mean", "share of groups whose rewards are all equal"),
    Metric("critic/rewards/std_mean", "reward", "mean", "mean of the groups' population spreads"),
    Metric("critic/rewards/group_size", "", "mean", "samples by distinct groups"),
    Metric(
        "critic/rewards/invalid_fraction",
        "",
        "mean",
        "share of drawn samples that count nowhere: without a reward, or left out with their group",
    ),
    *_extremes("critic/advantages", "", "the advantages of valid samples, before clamping"),
    *_extremes("critic/returns", "", "the returns of valid samples, equal to the advantages"),
    Metric("critic/reward/{name}/mean", "reward", "mean", "mean of one scorer, or of the weighted sum as 'combined'"),
]

ROLLOUT_CORRECTION = [
    *_family(
        "rollout_corr",
        "",
        {
            "training_ppl": "mean over rows of exp(-mean of l_old over steps)",
            "training_log_ppl": "mean over rows of -mean of l_old",
            "rollout_ppl": "as training_ppl with the engine's log-probs",
            "rollout_log_ppl": "as training_log_ppl with the engine's log-probs",
            "kl": "mean of l_rollout - l_old",
            "k3_kl": "mean of exp(R) - R - 1 with R = l_old - l_rollout",
            "log_ppl_diff": "mean over rows of mean l_rollout - mean l_old",
            "log_ppl_abs_diff": "mean over rows of its absolute value",
            "ppl_ratio": "mean over rows of exp(log_ppl_diff)",
            "chi2_token": "mean of exp(2 R) - 1",
            "chi2_seq": "mean over rows of exp(2 sum of R) - 1",
            "logprob_abs_diff_mean": "mean |l_old - l_rollout|",
            "logprob_abs_diff/ts_{timestep}": "the same at one timestep",
        },
    ),
    Metric("rollout_corr/log_ppl_diff_max", "", "max", "largest log_ppl_diff of a row"),
    Metric("rollout_corr/log_ppl_diff_min", "", "min", "smallest log_ppl_diff of a row"),
    Metric("rollout_corr/logprob_abs_diff_max", "", "max", "largest |l_old - l_rollout|"),
]

PROGRESS = [
    Metric("training/global_step", "step", "last", "training steps made"),
    Metric("training/epoch", "epoch", "last", "passes over the data set"),
    *_extremes("training/off_policy/trajectory_staleness", "step", "step - 1 - newest policy version of a sample"),
    *_extremes(
        "training/off_policy/trajectory_staleness_worst", "step", "step - 1 - oldest policy version of a sample"
    ),
    *_extremes("training/off_policy/trajectory_spans", "", "policy versions that a sample spans"),
    *_family(
        "training/rollout_failure",
        "",
        {
            "evicted_groups": "groups of a step of which no sample is trained on, because some failed",
            "evicted_trajectories": "samples of a step that could not be drawn, or were left out with their group",
            "refilled_prompts": "prompts of a step that have a sample drawn in place of one that failed",
            "refill_rounds": "rounds in which other seeds were tried, summed over packs",
        },
        "sum",
    ),
    Metric("timing_s/{stage}", "s", "sum", "wall time of a stage of the step; 'step' is perf/time_per_step"),
    Metric("timing_per_image_ms/{stage}", "ms", "mean", "a stage's wall time by samples"),
    Metric("perf/total_num_images", "sample", "sum", "samples of a step"),
    Metric(
        "perf/time_per_step",
        "s",
        "last",
        "wall time from a step's plan to its log, without validation, pictures and checkpoint; left out of a step that "
        "was resumed midway, as is what follows from it",
    ),
    Metric(
        "perf/throughput",
        "sample/s/device",
        "last",
        "samples by perf/time_per_step and by the GPUs that train or generate; by 1 where there are none",
    ),
    Metric("agent_loop/{part}/{statistic}", "s", "mean", "generation, tool and scoring times of samples"),
    Metric("flow/overhead_s", "s", "last", "the part of perf/time_per_step outside its stages, with waits for retries"),
]

VALIDATION = [
    Metric(
        "val-core/{source}/{variable}/{statistic}",
        "",
        "last",
        "mean@N and best@N of a data source's main variable: acc if a scorer says it, else reward",
    ),
    Metric("val-aux/{source}/{variable}/{statistic}", "", "last", "the other statistics and variables of validation"),
]

METRICS: tuple[Metric, ...] = (*ACTOR, *CRITIC, *ROLLOUT_CORRECTION, *PROGRESS, *VALIDATION)


@functools.cache
def metric_of(name: str) -> Metric | None:
    """Return what ``name`` means; none if it is not in the list, as for a metric of an outside algorithm.

    ``actor/rollout_corr/x`` means ``rollout_corr/x``, with the current policy in place of the old one.
    """
    name = name.removeprefix("actor/") if name.startswith("actor/rollout_corr/") else name
    for metric in METRICS:
        if metric.name == name:
            return metric
    for metric in METRICS:
        pattern = re.sub(r"\\\{\w+\\\}", "(.+)", re.escape(metric.name))
        if "{" in metric.name and re.fullmatch(pattern, name):
            return metric
    return None
