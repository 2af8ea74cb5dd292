"""The Flow-GRPO loss by hand: clipping, weights, the divergence and where gradients stop."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from verl_omni_core.algorithms import flow_grpo
from verl_omni_core.algorithms._contract import Current
from verl_omni_core.algorithms._ratios import clipped_surrogate
from verl_omni_core.errors import ContractError


def current(log_probs: list[float], mean: Tensor | None = None, **changes: Any) -> Current:
    rows = len(log_probs)
    whole = Current(
        log_probs=torch.tensor(log_probs).requires_grad_(),
        prev_sample_mean=torch.zeros(rows, 2) if mean is None else mean,
        std=torch.full((rows,), 0.25),
        std_dev_t=torch.full((rows,), 0.5),
        sqrt_dt=torch.full((rows,), 0.5),
        velocity=torch.zeros(rows, 2),
    )
    return replace(whole, **changes)


def batch(old: list[float], advantages: list[float], **more: Tensor) -> dict[str, Tensor]:
    return {"old_log_probs": torch.tensor(old), "advantages": torch.tensor(advantages), **more}


def loss(now: Current, rows: Any, **options: Any) -> Any:
    return flow_grpo.loss(now, rows, flow_grpo.Options(**options))


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.5, 2.0, -2.0 * 1.1),  # gains nothing above the range
        (0.5, 2.0, -2.0 * 0.5),  # pays in full below it
        (1.5, -2.0, 2.0 * 1.5),
        (0.5, -2.0, 2.0 * 0.9),
        (1.05, 2.0, -2.0 * 1.05),
        (1.0, 0.0, 0.0),
    ],
)
def test_a_ratio_is_clipped_only_where_it_would_gain(ratio: float, advantage: float, expected: float) -> None:
    found = clipped_surrogate(torch.tensor([ratio]), torch.tensor([advantage]), clip_range=0.1)
    assert found.item() == pytest.approx(expected)


def test_before_any_update_the_ratio_is_1_and_the_gradient_is_minus_the_advantage() -> None:
    now = current([-1.0, -2.0, -3.0])
    output = loss(now, batch([-1.0, -2.0, -3.0], [0.5, -1.5, 0.0]))
    assert output.loss.tolist() == [-0.5, 1.5, 0.0]
    assert output.metrics["actor/ratio_mean"].tolist() == [1.0, 1.0, 1.0]
    (gradient,) = torch.autograd.grad(output.loss.mean(), now.log_probs)
    torch.testing.assert_close(gradient, torch.tensor([-0.5, 1.5, 0.0]) / 3)


def test_advantages_are_clamped_in_the_loss() -> None:
    assert loss(current([0.0, 0.0]), batch([0.0, 0.0], [9.0, -9.0])).loss.tolist() == [-5.0, 5.0]
    assert loss(current([0.0]), batch([0.0], [9.0]), adv_clip=2.0).loss.tolist() == [-2.0]


def test_weights_multiply_rows_without_gradient_and_zero_rejects() -> None:
    weights = torch.tensor([0.0, 2.0], requires_grad=True)
    now = current([0.0, 0.0])
    output = loss(now, batch([0.0, 0.0], [1.0, 1.0], rollout_is_weights=weights))
    assert output.loss.tolist() == [0.0, -2.0]
    output.loss.sum().backward()
    assert now.log_probs.grad.tolist() == [0.0, -2.0]
    assert weights.grad is None


def test_clipped_fractions_do_not_look_at_the_advantage() -> None:
    metrics = loss(current([0.2, -0.2, 0.0]), batch([0.0] * 3, [0.0] * 3), clip_range=0.1).metrics
    assert metrics["actor/pg_clipfrac"].tolist() == [1.0, 1.0, 0.0]
    assert metrics["actor/pg_clipfrac_higher"].tolist() == [1.0, 0.0, 0.0]
    assert metrics["actor/pg_clipfrac_lower"].tolist() == [0.0, 1.0, 0.0]
    torch.testing.assert_close(metrics["actor/ppo_kl"], torch.tensor([-0.2, 0.2, 0.0]))


@pytest.mark.parametrize(("kl_scale", "spread"), [("std_dev_t", 0.5), ("tau", 0.25)])
def test_the_divergence_by_hand_under_both_scales(kl_scale: str, spread: float) -> None:
    mean = torch.tensor([[1.0, 3.0]], requires_grad=True)
    rows = batch([0.0], [0.0], ref_prev_sample_mean=torch.zeros(1, 2))
    output = loss(current([0.0], mean), rows, kl_coef=0.04, kl_scale=kl_scale)
    divergence = 5.0 / (2 * spread**2)
    assert output.loss.item() == pytest.approx(0.04 * divergence)
    assert output.metrics["actor/kl_loss"].item() == pytest.approx(divergence)
    assert output.metrics["actor/kl_coef"].item() == pytest.approx(0.04)


def test_the_divergence_has_a_gradient_for_the_policy_and_none_for_the_reference() -> None:
    mean = torch.tensor([[1.0, 3.0]], requires_grad=True)
    reference = torch.zeros(1, 2, requires_grad=True)
    loss(current([0.0], mean), batch([0.0], [0.0], ref_prev_sample_mean=reference), kl_coef=0.04).loss.sum().backward()
    torch.testing.assert_close(mean.grad, torch.tensor([[0.04 * 1.0 / 0.25 / 2, 0.04 * 3.0 / 0.25 / 2]]))
    assert reference.grad is None


def test_deterministic_steps_have_no_divergence() -> None:
    rows = batch([0.0], [0.0], ref_prev_sample_mean=torch.zeros(1, 2))
    with pytest.raises(ValueError, match="stochastic"):
        loss(current([0.0], std_dev_t=torch.zeros(1)), rows, kl_coef=0.04)


def test_the_reference_is_required_only_with_a_coefficient() -> None:
    assert flow_grpo.requires(flow_grpo.Options()) == ("old_log_probs", "advantages")
    assert "ref_prev_sample_mean" in flow_grpo.requires(flow_grpo.Options(kl_coef=0.1))
    with pytest.raises(ContractError, match="ref_prev_sample_mean"):
        loss(current([0.0]), batch([0.0], [0.0]), kl_coef=0.1)


def test_a_tensordict_serves_as_the_batch() -> None:
    rows = TensorDict(batch([0.0, 0.0], [1.0, -1.0]), batch_size=[2])
    assert loss(current([0.0, 0.0]), rows).loss.tolist() == [-1.0, 1.0]


def test_log_probs_in_half_precision_are_refused() -> None:
    now = replace(current([0.0]), log_probs=torch.zeros(1, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="float32"):
        loss(now, batch([0.0], [0.0]))


def test_columns_that_would_broadcast_are_refused() -> None:
    rows = batch([0.0, 0.0], [0.0, 0.0])
    rows["old_log_probs"] = rows["old_log_probs"][:, None]
    with pytest.raises(ContractError, match="old_log_probs"):
        loss(current([0.0, 0.0]), rows)


@pytest.mark.parametrize("cuts", [(1, 1, 1, 1, 1, 1, 1), (4, 3), (2, 5), (6, 1)])
def test_any_cut_into_micro_batches_has_one_gradient(cuts: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    base, direction = torch.randn(2, 7, 3, generator=generator).unbind()
    old, advantages = torch.randn(2, 7, generator=generator).unbind()

    def gradient(cut: tuple[int, ...]) -> Tensor:
        weight = torch.tensor(0.01, requires_grad=True)
        for rows in torch.arange(7).split(list(cut)):
            mean = base[rows] + weight * direction[rows]
            now = Current(
                log_probs=old[rows] + 1e-4 * mean.sum(dim=1),
                prev_sample_mean=mean,
                std=torch.ones(len(rows)),
                std_dev_t=torch.ones(len(rows)),
                sqrt_dt=torch.ones(len(rows)),
                velocity=mean,
            )
            stored = {
                "old_log_probs": old[rows],
                "advantages": advantages[rows],
                "ref_prev_sample_mean": base[rows],
            }
            (loss(now, stored, kl_coef=0.5).loss.sum() / 7).backward()
        return weight.grad

    torch.testing.assert_close(gradient(cuts), gradient((7,)), rtol=1e-5, atol=0)


def test_every_default_is_that_of_the_literature() -> None:
    defaults = {field.name: field.default for field in fields(flow_grpo.Options)}
    assert defaults == {
        "clip_range": 1e-4,
        "adv_clip": 5.0,
        "kl_coef": 0.0,
        "kl_scale": "std_dev_t",
        "normalize_std": True,
        "global_std": True,
        "std_epsilon": 1e-4,
        "std_ddof": 1,
    }
