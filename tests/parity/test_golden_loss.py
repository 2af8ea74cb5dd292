"""The Flow-GRPO loss, its divergence term and its metrics, and the KL estimators, as the trainer calls them."""

import torch

from tests.parity.golden import Case, Coverage, assert_close, assert_metrics, flow_grpo_loss
from verl_omni_core.algorithms import _kl
from verl_omni_core.algorithms._contract import LossOutput
from verl_omni_core.metrics.reduce import Accumulator

LOSS = Coverage("loss_flow_grpo")
DIVERGENCE = Coverage("loss_kl_distill")
ESTIMATORS = Coverage("kl_penalties")
COMPOSITE = Coverage("loss_composite")


def reduced(output: LossOutput) -> dict[str, float]:
    collected = Accumulator()
    collected.add(output.metrics)
    return collected.result()


@LOSS.where(lambda _: True)
def test_loss_gradient_and_metrics_equal_the_peer(case: Case) -> None:
    log_probs = case.inputs["log_prob"].clone().requires_grad_()
    batch = {"old_log_probs": case.inputs["old_log_prob"], "advantages": case.inputs["advantages"]}
    if case.params.get("rollout_is_weights"):
        batch["rollout_is_weights"] = case.inputs["rollout_is_weights"]
    mean = torch.zeros(len(log_probs), 1)
    output = flow_grpo_loss(
        log_probs,
        mean,
        torch.ones(len(log_probs)),
        batch,
        clip_range=case.params["clip_ratio"],
        adv_clip=case.params["adv_clip_max"],
    )
    assert output.loss.shape == log_probs.shape
    assert_close(output.loss.mean(), case.outputs["loss"])
    (gradient,) = torch.autograd.grad(output.loss.mean(), log_probs)
    assert_close(gradient, case.outputs["grad_log_prob"])
    expected = dict(case.outputs["metrics"])
    if len(log_probs) == 1:
        # ours on purpose: one row has no spread, the peer's unbiased spread of it is nan
        assert expected.pop("actor/ratio_std") == "nan"
        assert reduced(output)["actor/ratio_std"] == 0
    assert_metrics(reduced(output), expected)


@DIVERGENCE.where(lambda case: case.fn == "kl")
def test_the_divergence_in_the_loss_equals_the_peer(case: Case) -> None:
    mean = case.inputs["prev_sample_mean"].clone().requires_grad_()
    still = torch.zeros(len(mean))
    batch = {
        "old_log_probs": still,
        "advantages": still,
        "ref_prev_sample_mean": case.inputs["ref_prev_sample_mean"],
    }
    output = flow_grpo_loss(still, mean, case.inputs["std_dev_t"], batch, kl_coef=1.0)
    assert_close(output.loss.mean(), case.outputs["loss"])
    (gradient,) = torch.autograd.grad(output.loss.mean(), mean)
    assert_close(gradient, case.outputs["grad_prev_sample_mean"])
    assert_close(reduced(output)["actor/kl_loss"], case.outputs["metrics"]["actor/kl_loss"])


@DIVERGENCE.where(lambda case: case.fn == "distill_kl")
def test_the_divergence_from_a_teacher_equals_the_peer(case: Case) -> None:
    mean = case.inputs["prev_sample_mean"].clone().requires_grad_()
    rows = _kl.mean_space_kl(mean, case.inputs["teacher_prev_sample_mean"], case.inputs["std_dev_t"].flatten())
    assert_close(rows.mean(), case.outputs["loss"])
    (gradient,) = torch.autograd.grad(rows.mean(), mean)
    assert_close(gradient, case.outputs["grad_prev_sample_mean"])


@DIVERGENCE.where(lambda case: case.fn == "distill_fm_mse")
def test_the_velocity_distance_equals_the_peer(case: Case) -> None:
    velocity = case.inputs["noise_pred"].clone().requires_grad_()
    rows = _kl.velocity_kl(velocity, case.inputs["teacher_noise_pred"])
    assert_close(rows.mean(), case.outputs["loss"])
    (gradient,) = torch.autograd.grad(rows.mean(), velocity)
    assert_close(gradient, case.outputs["grad_noise_pred"])


@ESTIMATORS.where(lambda _: True)
def test_a_kl_estimate_and_its_gradient_equal_the_peer(case: Case) -> None:
    log_probs = case.inputs["logprob"].clone().requires_grad_()
    estimate = _kl.estimate_kl(log_probs, case.inputs["ref_logprob"], case.params["kl_penalty"])
    assert_close(estimate, case.outputs["kl"])
    (gradient,) = torch.autograd.grad(estimate.sum(), log_probs)
    assert_close(gradient, case.outputs["grad_logprob"])


def is_flow_grpo(case: Case) -> bool:
    return case.params["loss_mode"] == "flow_grpo" and case.params["bypass_rollout_correction"] is None


@COMPOSITE.where(is_flow_grpo)
def test_the_sum_of_terms_equals_the_peer(case: Case) -> None:
    """Micro-batches and sequence ranks scale the peer's sum; here the trainer does, so the test does."""
    params, inputs = case.params, case.inputs
    log_probs = inputs["log_probs"].clone().requires_grad_()
    mean = inputs["prev_sample_mean"].clone().requires_grad_()
    output = flow_grpo_loss(
        log_probs,
        mean,
        inputs["std_dev_t"],
        {name: inputs[name] for name in ("old_log_probs", "advantages", "ref_prev_sample_mean")},
        clip_range=params["clip_ratio"],
        adv_clip=params["adv_clip_max"],
        kl_coef=params["kl_loss_coef"] if params["use_kl_loss"] else 0.0,
    )
    total = output.loss
    if params["use_distill_loss"]:
        teacher = _kl.mean_space_kl(mean, inputs["teacher_prev_sample_mean"], inputs["std_dev_t"].flatten())
        total = total + params["distill_loss_coef"] * teacher
    scaled = total.mean() * params["sp_size"] / params["gradient_accumulation_steps"]
    assert_close(scaled, case.outputs["loss"])
    of_log_probs, of_mean = torch.autograd.grad(scaled, (log_probs, mean), allow_unused=True)
    assert_close(of_log_probs, case.outputs["grad_log_probs"])
    assert_close(torch.zeros_like(mean) if of_mean is None else of_mean, case.outputs["grad_prev_sample_mean"])
    ours = {"kl_coef": "actor/kl_coef"}
    expected = {ours.get(name, name): value for name, value in case.outputs["metrics"].items() if "distill" not in name}
    assert_metrics(reduced(output), expected)


COMPOSITE.leave_out(
    lambda case: case.params["loss_mode"] == "distill_kl", "distillation as the main loss is another algorithm"
)
COMPOSITE.leave_out(
    lambda case: case.params["bypass_rollout_correction"] is not None,
    "rejection by rollout correction inside the loss; two of the three also under GRPO-Guard and Flow-DPPO",
)


def test_every_case_is_covered_or_left_out_with_a_reason() -> None:
    LOSS.check(tested=12, left_out=0)
    DIVERGENCE.check(tested=9, left_out=0)
    ESTIMATORS.check(tested=22, left_out=0)
    COMPOSITE.check(tested=3, left_out=4)
