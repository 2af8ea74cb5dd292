"""Group-relative advantages of five projects and group statistics of rewards, from the registered estimator."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity.golden import Case, Coverage, assert_close, flow_grpo_loss, group_index
from verl_omni_core import registry
from verl_omni_core.algorithms._advantages import gdpo_advantages
from verl_omni_core.metrics.rl import reward_metrics

ADVANTAGES = Coverage("advantages")
INLINE = Coverage("inline_losses_other_peers")
PEER = "verl-omni:compute_flow_grpo_outcome_advantage"
TRACKERS = ("flow_grpo:PerPromptStatTracker.update", "DiffusionNFT:PerPromptStatTracker.update")
FLOW_FACTORY_FLOOR = 1e-12
"""Flow-Factory divides by the larger of the spread and 1e-6; added to the spread this is too small to see."""


def advantages(rewards: Tensor, groups: Tensor, **options: Any) -> Tensor:
    flow_grpo = registry.component("algorithm", "flow_grpo")
    chosen = registry.options("algorithm", "flow_grpo", options)
    return flow_grpo.advantages(rewards, groups, rewards.isfinite(), chosen)


def of_peer(case: Case) -> tuple[Tensor, Tensor, dict[str, Any]]:
    options = {"normalize_std": case.params["norm_adv_by_std_in_grpo"], "global_std": case.params["global_std"]}
    return case.inputs["sample_level_rewards"][:, 0], group_index(case.inputs["uid"]), options


def is_finite(case: Case) -> bool:
    return bool(case.inputs["sample_level_rewards"].isfinite().all())


def has_equal_std(case: Case) -> bool:
    """Whether the peer's spread over repeated columns is the spread over the rewards."""
    return case.params["T"] == 1 or not case.params["norm_adv_by_std_in_grpo"]


@ADVANTAGES.where(lambda case: case.fn == PEER and is_finite(case) and has_equal_std(case))
def test_flow_grpo_advantages_equal_the_peer(case: Case) -> None:
    rewards, groups, options = of_peer(case)
    found = advantages(rewards, groups, **options)
    assert_close(found[:, None].expand_as(case.outputs["advantages"]), case.outputs["advantages"])


@ADVANTAGES.where(lambda case: case.fn == PEER and is_finite(case) and not has_equal_std(case))
def test_the_spread_is_taken_over_rewards_not_over_their_copies(case: Case) -> None:
    """Ours on purpose: the peer counts each reward T times, which changes Bessel's correction and nothing else."""
    rewards, groups, options = of_peer(case)
    found, copies = advantages(rewards, groups, **options).double(), case.params["T"]
    members = [
        torch.arange(len(rewards)) if options["global_std"] else (groups == g).nonzero().flatten() for g in groups
    ]
    for row, same in enumerate(members):
        own = rewards[same].double()
        centred = rewards[row].double() - rewards[groups == groups[row]].double().mean()
        # the sum of squares is that of the group's or the batch's own mean
        squares, count = (own - own.mean()).square().sum(), len(own)
        ours = (squares / (count - 1)).sqrt() if count > 1 else torch.tensor(1.0)
        peers = (squares * copies / (count * copies - 1)).sqrt() if count > 1 else torch.tensor(1.0)
        assert_close(found[row], centred / (ours + 1e-4))
        assert_close(centred / (peers + 1e-4), case.outputs["advantages"][row, 0])


@ADVANTAGES.where(lambda case: case.fn == PEER and not is_finite(case))
def test_a_missing_reward_changes_no_other_advantage(case: Case) -> None:
    """Ours on purpose: the peer's nan spreads to the group or to the whole batch."""
    rewards, groups, options = of_peer(case)
    found = advantages(rewards, groups, **options)
    kept = rewards.isfinite()
    assert (found[~kept] == 0).all()
    assert torch.equal(found[kept], advantages(rewards[kept], groups[kept], **options))
    assert found.isfinite().all()


@ADVANTAGES.where(lambda case: case.fn in TRACKERS and "type" not in case.params)
def test_population_spread_equals_the_prompt_trackers(case: Case) -> None:
    rewards = torch.tensor(case.inputs["rewards"], dtype=torch.float64)
    found = advantages(rewards, group_index(case.inputs["prompts"]), global_std=case.params["global_std"], std_ddof=0)
    assert_close(found, torch.tensor(case.outputs["advantages"]))


@ADVANTAGES.where(lambda case: case.fn == "Flow-Factory:compute_weighted_sum")
def test_a_weighted_sum_equals_flow_factory(case: Case) -> None:
    rewards = sum(
        weight * torch.tensor(case.inputs[name], dtype=torch.float64) for name, weight in case.params["weights"].items()
    )
    found = advantages(
        rewards,
        group_index(case.inputs["uid"]),
        global_std=case.params["global_std"],
        std_ddof=0,
        std_epsilon=FLOW_FACTORY_FLOOR,
    )
    assert_close(found, case.outputs["advantages"])


@ADVANTAGES.where(lambda case: case.fn == "Flow-Factory:compute_gdpo")
def test_gdpo_equals_flow_factory(case: Case) -> None:
    rewards = torch.tensor([case.inputs[name] for name in case.params["weights"]], dtype=torch.float64)
    weights = torch.tensor(list(case.params["weights"].values()))
    groups = group_index(case.inputs["uid"])
    found = gdpo_advantages(rewards, weights, groups, torch.ones_like(groups, dtype=torch.bool))
    assert_close(found, case.outputs["advantages"])


@ADVANTAGES.where(lambda case: case.fn == "verl:compute_grpo_outcome_advantage")
def test_token_advantages_equal_verl_except_for_groups_of_one(case: Case) -> None:
    """Ours on purpose: a group of one has no baseline and scores 0, VeRL keeps its raw reward."""
    rewards = case.inputs["token_level_rewards"].sum(dim=1)
    mask, groups = case.inputs["response_mask"], group_index(case.inputs["uid"])
    found = advantages(
        rewards,
        groups,
        normalize_std=case.params["norm_adv_by_std_in_grpo"],
        global_std=False,
        std_epsilon=case.params["epsilon"],
    )
    sizes = torch.bincount(groups)[groups]
    expected = case.outputs["advantages"]
    assert_close((found[:, None] * mask)[sizes > 1], expected[sizes > 1])
    assert (found[sizes == 1] == 0).all()
    lone = rewards / (1 + case.params["epsilon"]) if case.params["norm_adv_by_std_in_grpo"] else rewards
    assert_close((lone[:, None] * mask)[sizes == 1], expected[sizes == 1])


@ADVANTAGES.where(lambda case: case.fn == "verl:compute_gdpo_outcome_advantage")
def test_scores_of_several_rewards_equal_verl_before_whitening(case: Case) -> None:
    """Ours on purpose: VeRL whitens over tokens with an unbiased spread, gdpo here over samples with the population's.

    So the weighted sum of registered estimates is compared, whitened here as there. A group of one keeps its reward
    there and scores 0 here.
    """
    groups = group_index(case.inputs["uid"])
    lone = torch.bincount(groups)[groups] == 1
    weights = case.params["weights"] or [1.0, 1.0]
    total = torch.zeros(len(groups), dtype=torch.float64)
    for name, weight in zip(("r1", "r2"), weights, strict=True):
        rewards = torch.tensor(case.inputs[name])
        scored = advantages(rewards, groups, global_std=False, std_epsilon=1e-6).double()
        total += weight * torch.where(lone, rewards / (1 + 1e-6), scored)
    copies = total[:, None].expand(-1, case.params["T"])
    assert_close((copies - copies.mean()) / (copies.var() + 1e-8).sqrt(), case.outputs["advantages"])


@ADVANTAGES.where(lambda case: case.fn == "flow_grpo:calculate_zero_std_ratio")
def test_group_spreads_equal_the_peer(case: Case) -> None:
    rewards = torch.tensor(case.inputs["rewards"], dtype=torch.float64)
    found = reward_metrics(rewards, group_index(case.inputs["prompts"]), torch.ones(len(rewards), dtype=torch.bool))
    assert_close(found["critic/rewards/zero_std_ratio"], case.outputs["zero_std_ratio"])
    assert_close(found["critic/rewards/std_mean"], case.outputs["mean_group_std"])


ADVANTAGES.leave_out(
    lambda case: case.params.get("type") in ("sft", "dpo"),
    "labels of best and worst samples for supervised and preference losses, which are no advantages",
)
ADVANTAGES.leave_out(
    lambda case: case.fn == "DiffusionNFT:get_mean_of_top_rewards",
    "a statistic of rewards that is not among the metrics",
)
ADVANTAGES.leave_out(
    lambda case: case.fn == "flow_grpo:PerPromptStatTracker.update twice without clear",
    "a history of rewards; ours has no state between steps",
)


@INLINE.where(lambda case: case.fn == "DanceGRPO group advantages")
def test_group_spread_equals_dancegrpo(case: Case) -> None:
    rewards = case.inputs["rewards"]
    groups = torch.arange(len(rewards)) // case.params["num_generations"]
    assert_close(advantages(rewards, groups, global_std=False, std_epsilon=1e-8), case.outputs["advantages"])


def of_mixgrpo(case: Case, kind: str) -> bool:
    params = case.params
    return case.fn == "MixGRPO group advantages" and params["multi_reward_mix"] == kind and params["trimmed_ratio"] == 0


@INLINE.where(lambda case: of_mixgrpo(case, "reward_aggr") or of_mixgrpo(case, "advantage_aggr"))
def test_sums_of_rewards_and_of_advantages_equal_mixgrpo(case: Case) -> None:
    """Rewards that it sums up come to its estimator as one column, the first."""
    weighted = [(case.inputs[f"rewards_{name}"], weight) for name, weight in case.params["weights"].items()]
    groups = torch.arange(len(weighted[0][0])) // case.params["num_generations"]
    options = {"global_std": False, "std_epsilon": 1e-8}
    if case.params["multi_reward_mix"] == "reward_aggr":
        found = advantages(weighted[0][0], groups, **options)
    else:
        found = sum(weight * advantages(rewards, groups, **options) for rewards, weight in weighted)
    assert_close(found, case.outputs["advantages"])


@INLINE.where(lambda case: case.fn == "flow_grpo loop")
def test_loss_and_divergence_equal_the_training_loop_of_flow_grpo(case: Case) -> None:
    log_probs = case.inputs["log_prob"].clone().requires_grad_()
    rows = flow_grpo_loss(
        log_probs,
        case.inputs["prev_sample_mean"],
        case.inputs["std_dev_t"],
        {
            "old_log_probs": case.inputs["old_log_prob"],
            "advantages": case.inputs["advantages"],
            "ref_prev_sample_mean": case.inputs["ref_prev_sample_mean"],
        },
        clip_range=case.params["clip_range"],
        adv_clip=case.params["adv_clip_max"],
        kl_coef=case.params["beta"],
    )
    assert_close(rows.loss.mean(), case.outputs["loss"])
    assert_close(rows.metrics["actor/pg_clipfrac"].mean(), case.outputs["clipfrac"])
    assert_close(rows.metrics["actor/pg_clipfrac_higher"].mean(), case.outputs["clipfrac_gt_one"])
    assert_close(rows.metrics["actor/pg_clipfrac_lower"].mean(), case.outputs["clipfrac_lt_one"])
    if case.params["beta"]:
        assert_close(rows.metrics["actor/kl_loss"].mean(), case.outputs["kl_loss"])
    (gradient,) = torch.autograd.grad(rows.loss.mean(), log_probs)
    assert_close(gradient, case.outputs["grad_log_prob"])


INLINE.leave_out(
    lambda case: case.fn == "MixGRPO group advantages" and case.params["trimmed_ratio"] != 0,
    "drops the lowest rewards from the statistics, an option that no recipe uses",
)
INLINE.leave_out(
    lambda case: any(name in (case.fn or "") for name in ("NFT", "DPO", "GRPO-Guard")),
    "losses of other algorithms: DiffusionNFT, Diffusion-DPO, GRPO-Guard",
)


def test_every_case_is_covered_or_left_out_with_a_reason() -> None:
    ADVANTAGES.check(tested=104, left_out=15)
    INLINE.check(tested=8, left_out=16)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(LookupError, match="global_std"):
        advantages(torch.tensor([1.0, 2.0]), torch.tensor([0, 0]), global_sdt=True)
