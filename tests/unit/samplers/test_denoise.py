"""The one denoising loop: draws, records and seeds."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from verl_omni_core.samplers import cps, dpm, flow_sde, ode
from verl_omni_core.samplers._denoise import Trajectory, denoise, draw_noise

STEPS, SHAPE = 6, (2, 3)
SIGMAS = torch.tensor([1.0, 0.9375, 0.8571, 0.75, 0.6, 0.375, 0.0])
SCHEDULE = SimpleNamespace(sigmas=SIGMAS, timesteps=SIGMAS[:-1] * 1000)


def velocity(latents: Tensor, timestep: Tensor, i: int) -> Tensor:
    return 0.3 * latents + 0.1 * timestep.view(-1, 1, 1) / 1000


def generators(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def initial(*seeds: int) -> Tensor:
    return draw_noise(SHAPE, generators(*seeds), torch.device("cpu"))


def run(
    *seeds: int, rule: Any = flow_sde, window: tuple[int, int] | None = (1, 3), noise_level: float = 0.7, **given: Any
) -> Trajectory:
    schedule = given.pop("schedule", SCHEDULE)
    latents = given.pop("latents", initial(*seeds))
    drawn = given.pop("generators", generators(*(seed + 1000 for seed in seeds)))
    return denoise(
        given.pop("velocity", velocity),
        latents,
        schedule,
        rule,
        given,
        noise_level=noise_level,
        window=window,
        generators=drawn,
    )


def test_the_window_is_recorded_with_one_latent_more_than_steps() -> None:
    found = run(1, 2)
    assert found.all_latents.shape == (2, 3, *SHAPE)
    assert found.log_probs.shape == (2, 2)
    assert found.step_indices.tolist() == [1, 2]
    assert found.step_indices.dtype == torch.int64
    assert torch.equal(found.all_timesteps, SCHEDULE.timesteps[1:3].expand(2, -1))
    assert found.all_timesteps.dtype == torch.float32


def test_recorded_steps_score_to_their_own_log_probs_bit_for_bit() -> None:
    found = run(1, 2, window=(0, 5))
    for w, i in enumerate(found.step_indices.tolist()):
        before = found.all_latents[:, w]
        scored = flow_sde.step(
            before,
            velocity(before, found.all_timesteps[:, w], i),
            sigma=SIGMAS[i].expand(2),
            sigma_next=SIGMAS[i + 1].expand(2),
            sigma_second=float(SIGMAS[1]),
            noise_level=0.7,
            prev_sample=found.all_latents[:, w + 1],
        )
        assert torch.equal(scored.log_prob, found.log_probs[:, w])


def test_a_sample_depends_on_its_seed_alone() -> None:
    together = run(1, 2, 3)
    for row, seed in enumerate((1, 2, 3)):
        alone = run(seed)
        assert torch.equal(alone.latents_clean[0], together.latents_clean[row])
        assert torch.equal(alone.log_probs[0], together.log_probs[row])


def test_one_noise_tensor_is_drawn_at_every_step_in_the_window_or_not() -> None:
    (used,) = generators(5)
    run(1, generators=[used], window=(2, 3))
    (fresh,) = generators(5)
    for _ in range(STEPS):
        torch.randn(SHAPE, generator=fresh)
    assert torch.equal(torch.randn(3, generator=used), torch.randn(3, generator=fresh))


def test_moving_the_window_keeps_the_noise_of_a_step() -> None:
    """The first stochastic step at index 2 uses the third draw, wherever the window begins."""
    late = run(1, window=(2, 3))
    (generator,) = generators(1001)
    noise = [torch.randn(SHAPE, generator=generator) for _ in range(3)][2]
    before = late.all_latents[:, 0]
    drawn = flow_sde.step(
        before,
        velocity(before, late.all_timesteps[:, 0], 2),
        sigma=SIGMAS[2:3],
        sigma_next=SIGMAS[3:4],
        sigma_second=float(SIGMAS[1]),
        noise_level=0.7,
        noise=noise[None],
    )
    assert torch.equal(drawn.prev_sample, late.all_latents[:, 1])


def test_without_a_window_nothing_is_drawn_or_recorded_and_steps_are_eulers() -> None:
    (untouched,) = generators(5)
    found = run(1, generators=[untouched], window=None)
    assert torch.equal(torch.randn(3, generator=untouched), torch.randn(3, generator=generators(5)[0]))
    latents = initial(1)
    for i in range(STEPS):
        step = velocity(latents, SCHEDULE.timesteps[i].expand(1), i)
        latents = latents + (SIGMAS[i + 1] - SIGMAS[i]) * step
    assert torch.equal(found.latents_clean, latents)
    assert found.log_probs.shape == (1, 0)
    assert found.all_latents.shape == (1, 0, *SHAPE)
    assert found.all_timesteps.shape == (1, 0)
    assert found.step_indices.shape == (0,)


def test_the_window_may_begin_with_the_first_step_and_records_the_initial_noise() -> None:
    assert torch.equal(run(1, window=(0, 1)).all_latents[:, 0], initial(1))


def test_ode_without_a_window_equals_a_stochastic_rule_without_one() -> None:
    assert torch.equal(run(1, rule=ode, window=None).latents_clean, run(1, rule=cps, window=None).latents_clean)


def test_a_multistep_rule_gets_its_last_evaluation() -> None:
    """With a clean prediction that does not change, second order changes nothing; with one that does, it does."""

    def towards_half(latents: Tensor, timestep: Tensor, i: int) -> Tensor:
        return (latents - 0.5) / (timestep.view(-1, 1, 1) / 1000)

    steady = {order: run(1, rule=dpm, window=None, velocity=towards_half, solver_order=order) for order in (1, 2)}
    torch.testing.assert_close(steady[1].latents_clean, steady[2].latents_clean)
    changing = {order: run(1, rule=dpm, window=None, solver_order=order) for order in (1, 2)}
    assert not torch.allclose(changing[1].latents_clean, changing[2].latents_clean)


def test_the_loop_keeps_no_graph() -> None:
    weight = torch.tensor(0.3, requires_grad=True)
    found = run(1, velocity=lambda latents, *_: weight * latents)
    assert not found.latents_clean.requires_grad
    assert not found.log_probs.requires_grad


def test_a_network_in_lower_precision_still_moves_fp32_latents() -> None:
    found = run(1, velocity=lambda latents, *_: (0.3 * latents).bfloat16())
    assert found.latents_clean.dtype == torch.float32
    assert found.all_latents.dtype == torch.float32


@pytest.mark.parametrize("window", [(0, STEPS), (3, 3), (-1, 2), (4, 2)])
def test_a_window_with_the_last_step_or_without_any_is_refused(window: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="window"):
        run(1, window=window)


def test_a_window_needs_a_stochastic_rule_and_noise() -> None:
    with pytest.raises(ValueError, match="deterministic rule"):
        run(1, rule=ode)
    with pytest.raises(ValueError, match="adds no noise"):
        run(1, noise_level=0.0)


def test_each_row_needs_a_generator() -> None:
    with pytest.raises(ValueError, match="2 generators for 1 rows"):
        run(1, generators=generators(1, 2))


def test_half_precision_latents_and_ragged_schedules_are_refused() -> None:
    with pytest.raises(TypeError, match="float32"):
        run(1, latents=initial(1).half())
    with pytest.raises(ValueError, match="sigmas"):
        run(1, schedule=SimpleNamespace(sigmas=SIGMAS[:-1], timesteps=SCHEDULE.timesteps))
