"""Hand-computed steps and the traps of each transition rule."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from verl_omni_core import registry
from verl_omni_core.samplers import cps, dance_sde, ddim, dpm, dpm_sde, flow_ddim, flow_sde, ode
from verl_omni_core.samplers._contract import Transition

ONE, ZERO = torch.ones(1, 1), torch.zeros(1, 1)


def step(
    rule: Any, sample: float, velocity: float, sigma: float, sigma_next: float, eta: float, **given: Any
) -> Transition:
    """One row, one latent element."""
    given = {"sigma_second": 0.9, "noise": ONE, **given}
    if "prev_sample" in given:
        given["noise"] = None
    return rule.step(
        torch.full((1, 1), sample),
        torch.full((1, 1), velocity),
        sigma=torch.tensor([sigma]),
        sigma_next=torch.tensor([sigma_next]),
        noise_level=eta,
        **given,
    )


def value(tensor: Tensor) -> float:
    return tensor.item()


def test_flow_sde_by_hand() -> None:
    # s = 0.8, s' = 0.6, eta = 0.5: g = 0.5 sqrt(4) = 1, eps = 1 + 0.2 * 2 = 1.4, drift = 2 + 1.4 / 1.6
    move = step(flow_sde, 1.0, 2.0, 0.8, 0.6, 0.5)
    assert value(move.std_dev_t) == pytest.approx(1.0)
    assert value(move.std) == pytest.approx(math.sqrt(0.2))
    assert value(move.mean) == pytest.approx(1 - 0.2 * (2 + 1.4 / 1.6))
    assert value(move.prev_sample) == pytest.approx(value(move.mean) + math.sqrt(0.2))
    assert value(move.log_prob) == pytest.approx(-0.5 - 0.5 * math.log(0.2) - 0.5 * math.log(2 * math.pi))


def test_flow_sde_takes_the_second_level_in_place_of_1() -> None:
    move = step(flow_sde, 1.0, 2.0, 1.0, 0.9, 0.7, sigma_second=0.9)
    assert value(move.std_dev_t) == pytest.approx(0.7 * math.sqrt(1 / 0.1), rel=1e-6)
    assert value(step(flow_sde, 1.0, 2.0, 0.99, 0.9, 0.7).std_dev_t) == pytest.approx(0.7 * math.sqrt(99), rel=1e-5)


def test_dance_sde_by_hand() -> None:
    # g = 0.5: drift = 2 + 0.25 * 1.4 / 1.6
    move = step(dance_sde, 1.0, 2.0, 0.8, 0.6, 0.5)
    assert value(move.mean) == pytest.approx(1 - 0.2 * (2 + 0.25 * 1.4 / 1.6))
    assert value(move.std) == pytest.approx(0.5 * math.sqrt(0.2))
    assert torch.equal(move.std_dev_t, move.std)


def test_cps_by_hand() -> None:
    # clean = 1 - 1.6 = -0.6, noise = 1.4; eta = 1/3: the spread is half of s', the noise keeps cos(30 degrees) of it
    move = step(cps, 1.0, 2.0, 0.8, 0.6, 1 / 3)
    assert value(move.std) == pytest.approx(0.3)
    assert value(move.mean) == pytest.approx(0.4 * -0.6 + 0.6 * math.sqrt(3) / 2 * 1.4)
    assert value(move.log_prob) == pytest.approx(-0.09)


def test_cps_refuses_a_noise_level_above_1() -> None:
    for level in (1.2, torch.tensor([1.2])):
        with pytest.raises(ValueError, match="0 to 1"):
            step(cps, 1.0, 2.0, 0.8, 0.6, level)
    assert step(cps, 1.0, 2.0, 0.8, 0.6, 1.0).mean.item() == pytest.approx(0.4 * -0.6, abs=1e-7)


def test_cps_has_no_normalizer_to_switch_off() -> None:
    with pytest.raises(LookupError):
        registry.options("sampler", "cps", {"include_logprob_normalizer": False})


def test_ode_by_hand() -> None:
    move = step(ode, 1.0, 2.0, 0.8, 0.6, 0.7)
    assert value(move.prev_sample) == pytest.approx(0.6)
    assert move.log_prob is None


@pytest.mark.parametrize("rule", [flow_sde, dance_sde])
def test_the_last_step_of_an_sde_would_add_noise_to_the_image(rule: Any) -> None:
    assert value(step(rule, 1.0, 2.0, 0.2, 0.0, 0.7).std) > 0


def test_the_last_step_of_cps_is_deterministic() -> None:
    assert step(cps, 1.0, 2.0, 0.2, 0.0, 0.7).log_prob is None


@pytest.mark.parametrize("rule", [flow_sde, dance_sde, flow_ddim])
def test_without_the_normalizer_only_the_distance_is_left(rule: Any) -> None:
    with_it, without = (
        step(rule, 1.0, 2.0, 0.8, 0.6, 0.5, include_logprob_normalizer=choice) for choice in (True, False)
    )
    assert value(without.log_prob) == pytest.approx(-0.5)
    constants = math.log(value(with_it.std)) + 0.5 * math.log(2 * math.pi)
    assert value(with_it.log_prob) == pytest.approx(-0.5 - constants, abs=1e-6)


def test_the_log_prob_is_the_mean_over_elements_not_the_sum() -> None:
    sample, velocity, noise = torch.ones(1, 4), torch.full((1, 4), 2.0), torch.tensor([[1.0, -1.0, 3.0, 1.0]])
    levels = {"sigma": torch.tensor([0.8]), "sigma_next": torch.tensor([0.6]), "sigma_second": 0.9, "noise_level": 0.5}
    move = flow_sde.step(sample, velocity, noise=noise, include_logprob_normalizer=False, **levels)
    assert value(move.log_prob) == pytest.approx(-(1 + 1 + 9 + 1) / 2 / 4)


def test_a_noise_level_a_row_equals_a_row_at_a_time() -> None:
    sample, velocity, noise = torch.randn(3, 2, 5).unbind()
    levels = {"sigma": torch.tensor([0.8, 0.5]), "sigma_next": torch.tensor([0.6, 0.1]), "sigma_second": 0.9}
    together = flow_sde.step(sample, velocity, noise=noise, noise_level=torch.tensor([0.3, 1.1]), **levels)
    for row, eta in enumerate((0.3, 1.1)):
        only = slice(row, row + 1)
        alone = flow_sde.step(
            sample[only],
            velocity[only],
            noise=noise[only],
            noise_level=eta,
            **{**levels, "sigma": levels["sigma"][only], "sigma_next": levels["sigma_next"][only]},
        )
        torch.testing.assert_close(alone.prev_sample, together.prev_sample[only])
        torch.testing.assert_close(alone.log_prob, together.log_prob[only])


def test_rows_with_and_without_noise_are_not_mixed() -> None:
    sample = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"rows \[1\]"):
        flow_sde.step(
            sample,
            sample,
            sigma=torch.tensor([0.8, 0.8]),
            sigma_next=torch.tensor([0.6, 0.6]),
            sigma_second=0.9,
            noise_level=torch.tensor([0.5, 0.0]),
            noise=sample,
        )


def test_levels_must_decrease() -> None:
    for sigma, sigma_next in ((0.6, 0.8), (0.6, 0.6), (float("nan"), 0.2)):
        with pytest.raises(ValueError, match="not above"):
            step(cps, 1.0, 2.0, sigma, sigma_next, 0.5)


@pytest.mark.parametrize("level", [-0.1, torch.tensor([0.1, 0.2, 0.3])])
def test_a_noise_level_is_not_negative_and_fits_the_rows(level: float | Tensor) -> None:
    with pytest.raises(ValueError, match="noise_level"):
        step(flow_sde, 1.0, 2.0, 0.8, 0.6, level)


def test_shapes_that_would_broadcast_are_refused() -> None:
    sample = torch.zeros(2, 3)
    levels = {"sigma": torch.full((2,), 0.8), "sigma_next": torch.full((2,), 0.6)}
    with pytest.raises(ValueError, match="velocity"):
        ode.step(sample, torch.zeros(1, 3), **levels, sigma_second=0.9, noise_level=0.0)
    with pytest.raises(ValueError, match="sigma has"):
        ode.step(sample, sample, **levels | {"sigma": torch.tensor([0.8])}, sigma_second=0.9, noise_level=0.0)


def test_bf16_latents_are_refused_because_a_stored_bf16_result_biases_the_ratio() -> None:
    generator = torch.Generator().manual_seed(0)
    sample, velocity, noise = (torch.randn(64, 500, generator=generator) for _ in range(3))
    levels = {"sigma": torch.full((64,), 0.8), "sigma_next": torch.full((64,), 0.7), "sigma_second": 0.9}
    drawn = flow_sde.step(sample, velocity, noise=noise, noise_level=0.05, **levels)
    stored = drawn.prev_sample.bfloat16()
    with pytest.raises(TypeError, match=r"prev_sample is torch\.bfloat16"):
        flow_sde.step(sample, velocity, prev_sample=stored, noise_level=0.05, **levels)
    rounded = flow_sde.step(sample, velocity, prev_sample=stored.float(), noise_level=0.05, **levels)
    exact = flow_sde.step(sample, velocity, prev_sample=drawn.prev_sample, noise_level=0.05, **levels)
    ratios = (rounded.log_prob - drawn.log_prob).exp()
    assert ratios.mean() < 1 - 1e-4
    assert torch.equal(exact.log_prob, drawn.log_prob)


@pytest.mark.parametrize("prediction_type", ["epsilon", "sample", "v_prediction"])
def test_ddim_without_noise_keeps_both_predictions(prediction_type: str) -> None:
    # clean 0.5 and noise -1 at alpha_bar 0.36; next alpha_bar 0.64: 0.8 * 0.5 - 0.6
    sample = 0.6 * 0.5 + 0.8 * -1.0
    prediction = {"epsilon": -1.0, "sample": 0.5, "v_prediction": 0.6 * -1.0 - 0.8 * 0.5}[prediction_type]
    move = step(ddim, sample, prediction, 0.8 / 0.6, 0.6 / 0.8, 0.0, prediction_type=prediction_type)
    assert value(move.prev_sample) == pytest.approx(-0.2, abs=1e-6)
    assert move.log_prob is None


def test_ddim_spread_is_that_of_the_ddpm_posterior() -> None:
    variance = 0.36 / 0.64 * (1 - 0.36 / 0.64)
    assert value(step(ddim, 1.0, 0.0, 0.8 / 0.6, 0.6 / 0.8, 1.0).std) == pytest.approx(math.sqrt(variance), rel=1e-6)


def test_flow_ddim_from_pure_noise_replaces_all_of_it() -> None:
    move = step(flow_ddim, 1.0, 2.0, 1.0, 0.6, 1.0)
    assert value(move.std) == pytest.approx(0.6)
    assert value(move.mean) == pytest.approx(0.4 * (1 - 2.0))


@pytest.mark.parametrize("algorithm_type", ["dpmsolver++", "dpmsolver"])
def test_first_order_dpm_of_a_flow_model_is_eulers_step(algorithm_type: str) -> None:
    move = step(dpm, 1.0, 2.0, 0.8, 0.6, 0.0, algorithm_type=algorithm_type, solver_order=1)
    assert value(move.prev_sample) == pytest.approx(0.6)


def test_second_order_dpm_is_exact_for_a_constant_clean_prediction() -> None:
    # velocity towards noise from clean 0.5: (x - 0.5) / s
    before = (torch.full((1, 1), 1.5), torch.full((1, 1), 1.0), torch.tensor([1.0]))
    move = step(dpm, 1.3, 1.0, 0.8, 0.6, 0.0, history=[before])
    assert value(move.prev_sample) == pytest.approx(0.5 + 0.6 * 1.0)


@pytest.mark.parametrize("solver_type", ["midpoint", "heun"])
def test_dpm_ends_at_the_clean_prediction(solver_type: str) -> None:
    before = (torch.full((1, 1), 1.5), torch.full((1, 1), 1.0), torch.tensor([0.4]))
    move = step(dpm, 1.0, 2.0, 0.2, 0.0, 0.0, history=[before], solver_type=solver_type)
    assert value(move.prev_sample) == pytest.approx(1.0 - 0.2 * 2.0)


def test_dpm_sde_from_pure_noise_forgets_it_and_ends_without_noise() -> None:
    first = step(dpm_sde, 1.0, 2.0, 1.0, 0.6, 0.0)
    assert value(first.std) == pytest.approx(0.6)
    assert value(first.mean) == pytest.approx(0.4 * (1 - 2.0))
    last = step(dpm_sde, 1.0, 2.0, 0.2, 0.0, 0.0)
    assert last.log_prob is None
    assert value(last.prev_sample) == pytest.approx(1.0 - 0.4)
