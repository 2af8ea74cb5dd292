"""What holds for any latents, levels and noise."""

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from verl_omni_core.samplers import cps, dance_sde, flow_ddim, flow_sde, ode

RULES = [flow_sde, cps, dance_sde]
levels = st.tuples(st.floats(0.05, 0.999), st.floats(0.01, 0.95)).map(lambda pair: (pair[0], pair[0] * pair[1]))
seeds = st.integers(0, 2**31)
noise_levels = st.floats(0.05, 1.0)


def draw(seed: int, rows: int = 2, elements: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sample, velocity, noise = torch.randn(3, rows, elements, generator=generator).unbind()
    return sample, velocity, noise


def of_rows(level: tuple[float, float], rows: int = 2) -> dict[str, Any]:
    return {"sigma": torch.full((rows,), level[0]), "sigma_next": torch.full((rows,), level[1]), "sigma_second": 0.95}


@settings(deadline=None, max_examples=60)
@given(levels, noise_levels, seeds)
def test_flow_sde_is_dance_sde_with_its_diffusion_as_noise_level(
    level: tuple[float, float], eta: float, seed: int
) -> None:
    sample, velocity, noise = draw(seed)
    first = flow_sde.step(sample, velocity, noise=noise, noise_level=eta, **of_rows(level))
    second = dance_sde.step(sample, velocity, noise=noise, noise_level=first.std_dev_t, **of_rows(level))
    # the score divides by sigma squared, so its rounding grows where sigma is small
    close = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(first.mean, second.mean, **close)
    torch.testing.assert_close(first.std, second.std)
    torch.testing.assert_close(first.prev_sample, second.prev_sample, **close)


@pytest.mark.parametrize("rule", [*RULES, flow_ddim], ids=lambda rule: rule.__name__.rsplit(".", 1)[-1])
@settings(deadline=None, max_examples=30)
@given(levels, seeds)
def test_without_noise_every_rule_is_eulers_step(rule: Any, level: tuple[float, float], seed: int) -> None:
    sample, velocity, noise = draw(seed)
    still = rule.step(sample, velocity, noise=noise, noise_level=0.0, **of_rows(level))
    euler = ode.step(sample, velocity, noise_level=0.0, **of_rows(level))
    assert still.log_prob is None
    torch.testing.assert_close(still.prev_sample, euler.prev_sample, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__.rsplit(".", 1)[-1])
@settings(deadline=None, max_examples=30)
@given(levels, noise_levels, seeds)
def test_scoring_own_draws_gives_a_ratio_of_exactly_1(
    rule: Any, level: tuple[float, float], eta: float, seed: int
) -> None:
    sample, velocity, noise = draw(seed)
    drawn = rule.step(sample, velocity, noise=noise, noise_level=eta, **of_rows(level))
    scored = rule.step(sample, velocity, prev_sample=drawn.prev_sample, noise_level=eta, **of_rows(level))
    assert torch.equal((scored.log_prob - drawn.log_prob).exp(), torch.ones(2))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__.rsplit(".", 1)[-1])
def test_draws_have_the_mean_and_the_spread_that_the_move_says(rule: Any) -> None:
    sample, velocity, noise = draw(7, rows=200, elements=500)
    move = rule.step(sample, velocity, noise=noise, noise_level=0.8, **of_rows((0.7, 0.5), rows=200))
    z = (move.prev_sample - move.mean) / move.std[:, None]
    assert abs(z.mean().item()) < 5 / math.sqrt(z.numel())
    assert abs(z.var().item() - 1) < 5 * math.sqrt(2 / z.numel())


@pytest.mark.parametrize("eta", [0.2, 0.8, 1.0])
def test_cps_keeps_the_noise_level_of_a_latent_on_the_path(eta: float) -> None:
    generator = torch.Generator().manual_seed(3)
    clean, before, noise = (torch.randn(4, 50_000, generator=generator) for _ in range(3))
    sample = 0.3 * clean + 0.7 * before
    move = cps.step(sample, before - clean, noise=noise, noise_level=eta, **of_rows((0.7, 0.5), rows=4))
    assert (move.prev_sample - 0.5 * clean).std().item() == pytest.approx(0.5, rel=0.01)


@settings(deadline=None, max_examples=30)
@given(levels, noise_levels, seeds)
@example((0.999, 0.04995), 0.999, 268435455)
def test_guard_identity_holds_for_the_gaussian_density(level: tuple[float, float], eta: float, seed: int) -> None:
    """tau (l - l_old + b) is the mean of z (mean - mean_old), with b the divergence of the two means."""
    sample, velocity, noise = draw(seed)
    old = flow_sde.step(sample, velocity, noise=noise, noise_level=eta, **of_rows(level))
    new = flow_sde.step(sample, velocity * 1.1, prev_sample=old.prev_sample, noise_level=eta, **of_rows(level))
    shift, tau = (new.mean - old.mean).double(), old.std.double()
    bias = shift.square().mean(dim=1) / (2 * tau.square())
    # the noise that the stored fp32 sample really holds
    drawn = (old.prev_sample.double() - old.mean.double()) / tau[:, None]
    left = tau * (new.log_prob.double() - old.log_prob.double() + bias)
    # log-probs are fp32 numbers of order 1 to 10, and tau multiplies their rounding
    scale = max(1.0, float(tau.max()), float((shift.square().mean(dim=1) / tau).max()))
    torch.testing.assert_close(left, (drawn * shift).mean(dim=1), rtol=1e-4, atol=1e-5 * scale)
