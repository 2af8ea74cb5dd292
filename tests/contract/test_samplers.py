"""Every discovered transition rule keeps the promises of its kind."""

import dataclasses
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from verl_omni_core import registry
from verl_omni_core.errors import ConfigError
from verl_omni_core.samplers._contract import Transition
from verl_omni_core.samplers._denoise import denoise

NAMES = registry.names("sampler")
STOCHASTIC = [name for name in NAMES if registry.component("sampler", name).IS_STOCHASTIC]
DETERMINISTIC = [name for name in NAMES if name not in STOCHASTIC]
ROWS, SHAPE = 3, (2, 4, 5)
LEVELS = {
    "sigma": torch.tensor([0.9, 0.75, 0.4]),
    "sigma_next": torch.tensor([0.75, 0.6, 0.2]),
    "sigma_second": 0.9,
    "noise_level": 0.7,
}


def tensors(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sample, velocity, noise = (torch.randn(ROWS, *SHAPE, generator=generator) for _ in range(3))
    return sample, velocity, noise


def options(name: str) -> dict[str, Any]:
    return dataclasses.asdict(registry.options("sampler", name, {}))


def step(name: str, *inputs: Tensor, **given: Any) -> Transition:
    return registry.component("sampler", name).step(*inputs, **LEVELS | given, **options(name))


@pytest.mark.parametrize("name", NAMES)
def test_a_rule_declares_its_surface(name: str) -> None:
    rule = registry.component("sampler", name)
    assert isinstance(rule.IS_STOCHASTIC, bool)
    assert dataclasses.is_dataclass(rule.Options)
    assert rule.Options.__dataclass_params__.frozen
    accepted = inspect.signature(rule.step).parameters
    assert {field.name for field in dataclasses.fields(rule.Options)} <= set(accepted)
    assert rule.__doc__


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_option_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="noise_levle"):
        registry.options("sampler", name, {"noise_levle": 1.0})


@pytest.mark.parametrize("name", NAMES)
def test_every_option_is_described(name: str) -> None:
    for field in dataclasses.fields(registry.component("sampler", name).Options):
        assert field.metadata["description"].endswith(".")


@pytest.mark.parametrize("name", NAMES)
def test_a_rule_takes_noise_up_to_its_own_bound_and_refuses_more(name: str) -> None:
    sample, velocity, noise = tensors()
    most = getattr(registry.component("sampler", name), "MAX_NOISE_LEVEL", None)
    step(name, sample, velocity, noise=noise, noise_level=1.5 if most is None else most)
    for above in () if most is None else (most + 0.01, torch.tensor([0.5, 0.5, most + 0.01])):
        with pytest.raises(ValueError, match="sampler.noise_level"):
            step(name, sample, velocity, noise=noise, noise_level=above)


@pytest.mark.parametrize("name", NAMES)
def test_a_move_is_fp32_and_of_the_promised_shapes(name: str) -> None:
    sample, velocity, noise = tensors()
    move = step(name, sample, velocity, noise=noise)
    for latents in (move.prev_sample, move.mean):
        assert latents.dtype == torch.float32
        assert latents.shape == sample.shape
    for row_values in (move.std, move.std_dev_t, move.sqrt_dt):
        assert row_values.dtype == torch.float32
        assert row_values.shape == (ROWS,)
    torch.testing.assert_close(move.sqrt_dt.square(), LEVELS["sigma"] - LEVELS["sigma_next"])


@pytest.mark.parametrize("name", STOCHASTIC)
def test_a_draw_is_the_mean_plus_the_spread_times_the_noise(name: str) -> None:
    sample, velocity, noise = tensors()
    move = step(name, sample, velocity, noise=noise)
    assert (move.std > 0).all()
    torch.testing.assert_close(move.prev_sample, move.mean + move.std.view(-1, 1, 1, 1) * noise)


@pytest.mark.parametrize("name", STOCHASTIC)
def test_scoring_a_draw_gives_its_log_prob_bit_for_bit(name: str) -> None:
    sample, velocity, noise = tensors()
    drawn = step(name, sample, velocity, noise=noise)
    scored = step(name, sample, velocity, prev_sample=drawn.prev_sample)
    assert drawn.log_prob is not None
    assert scored.log_prob is not None
    assert torch.equal(drawn.log_prob, scored.log_prob)
    assert torch.equal(scored.prev_sample, drawn.prev_sample)


@pytest.mark.parametrize("name", STOCHASTIC)
def test_a_row_does_not_depend_on_the_batch_it_is_in(name: str) -> None:
    sample, velocity, noise = tensors()
    together = step(name, sample, velocity, noise=noise)
    for row in range(ROWS):
        only = slice(row, row + 1)
        levels = {key: LEVELS[key][only] for key in ("sigma", "sigma_next")}
        alone = step(name, sample[only], velocity[only], noise=noise[only], **levels)
        assert torch.equal(alone.prev_sample, together.prev_sample[only])
        assert torch.equal(alone.log_prob, together.log_prob[only])


@pytest.mark.parametrize("name", STOCHASTIC)
def test_gradients_of_a_score_reach_the_velocity_and_not_the_result(name: str) -> None:
    sample, velocity, noise = tensors()
    prev_sample = step(name, sample, velocity, noise=noise).prev_sample.requires_grad_()
    velocity = velocity.requires_grad_()
    scored = step(name, sample, velocity, prev_sample=prev_sample)
    scored.log_prob.sum().backward()
    assert velocity.grad is not None
    assert velocity.grad.abs().sum() > 0
    assert prev_sample.grad is None


@pytest.mark.parametrize("name", STOCHASTIC)
def test_a_stochastic_move_needs_noise_or_a_result(name: str) -> None:
    sample, velocity, noise = tensors()
    with pytest.raises(ValueError, match="neither"):
        step(name, sample, velocity)
    with pytest.raises(ValueError, match="both"):
        step(name, sample, velocity, noise=noise, prev_sample=sample)


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_a_deterministic_rule_has_no_log_prob_and_no_spread(name: str) -> None:
    sample, velocity, noise = tensors()
    move = step(name, sample, velocity, noise=noise)
    assert move.log_prob is None
    assert (move.std == 0).all()
    assert torch.equal(move.prev_sample, step(name, sample, velocity).prev_sample)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("which", ["sample", "velocity", "noise", "sigma"])
def test_anything_but_fp32_is_refused(name: str, which: str) -> None:
    given = dict(zip(("sample", "velocity", "noise"), tensors(), strict=True))
    levels = {"sigma": LEVELS["sigma"]}
    target = levels if which == "sigma" else given
    target[which] = target[which].bfloat16()
    with pytest.raises(TypeError, match=which):
        step(name, given["sample"], given["velocity"], noise=given["noise"], **levels)


@pytest.mark.parametrize("name", NAMES)
def test_a_rule_denoises_in_the_loop(name: str) -> None:
    schedule = SimpleNamespace(
        sigmas=torch.tensor([1.0, 0.8, 0.5, 0.2, 0.0]), timesteps=torch.tensor([1000.0, 800.0, 500.0, 200.0])
    )
    rule = registry.component("sampler", name)
    generators = [torch.Generator().manual_seed(row) for row in range(ROWS)]
    found = denoise(
        lambda latents, *_: 0.3 * latents,
        tensors()[0],
        schedule,
        rule,
        options(name),
        noise_level=0.5,
        window=(1, 3) if rule.IS_STOCHASTIC else None,
        generators=generators,
    )
    recorded = 2 if rule.IS_STOCHASTIC else 0
    assert found.latents_clean.isfinite().all()
    assert found.log_probs.shape == (ROWS, recorded)
    assert found.all_latents.shape == (ROWS, recorded + 1 if recorded else 0, *SHAPE)
    assert found.log_probs.isfinite().all()
