"""Divergences by hand."""

import math

import pytest
import torch

from verl_omni_core.algorithms._kl import estimate_kl, mean_space_kl, velocity_kl


def test_with_the_full_spread_it_is_the_divergence_of_two_gaussians() -> None:
    mean, other = torch.tensor([[0.3, -0.2]]), torch.tensor([[0.0, 0.1]])
    one, two = (torch.distributions.Normal(m, 0.4) for m in (mean, other))
    expected = torch.distributions.kl_divergence(one, two).mean()
    assert mean_space_kl(mean, other, torch.tensor([0.4])).item() == pytest.approx(expected.item())


def test_velocity_distance_is_a_mean_over_elements() -> None:
    assert velocity_kl(torch.tensor([[1.0, 3.0]]), torch.zeros(1, 2)).tolist() == [5.0]


@pytest.mark.parametrize("function", [lambda a, b: mean_space_kl(a, b, torch.ones(2)), velocity_kl])
def test_shapes_that_would_broadcast_are_refused(function) -> None:
    with pytest.raises(ValueError, match="expected equal"):
        function(torch.zeros(2, 3), torch.zeros(1, 3))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
def test_a_scale_that_is_not_positive_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match=r"rows \[1\]"):
        mean_space_kl(torch.zeros(2, 3), torch.zeros(2, 3), torch.tensor([1.0, scale]))


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k1", 0.5), ("kl", 0.5), ("abs", 0.5), ("k2", 0.125), ("mse", 0.125), ("k3", math.exp(-0.5) - 0.5)],
)
def test_estimates_by_hand(estimator: str, expected: float) -> None:
    assert estimate_kl(torch.tensor(-1.0), torch.tensor(-1.5), estimator).item() == pytest.approx(expected)


def test_k3_is_bounded_and_never_negative() -> None:
    far = estimate_kl(torch.tensor([-100.0, 100.0]), torch.tensor([0.0, 0.0]), "low_var_kl")
    assert far.tolist() == [10.0, 10.0]


def test_a_plus_keeps_the_value_and_takes_the_gradient_of_k2() -> None:
    log_probs = torch.tensor(-1.0, requires_grad=True)
    estimate = estimate_kl(log_probs, torch.tensor(-1.5), "k3+")
    assert estimate.item() == pytest.approx(math.exp(-0.5) - 0.5)
    estimate.backward()
    assert log_probs.grad.item() == pytest.approx(0.5)


@pytest.mark.parametrize("estimator", ["full", "k4", "+", "k1++x"])
def test_an_unknown_estimator_is_refused(estimator: str) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        estimate_kl(torch.zeros(1), torch.zeros(1), estimator)
