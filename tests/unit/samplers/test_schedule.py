"""Grids start at exactly 1, decrease, end at 0, and equal those of diffusers."""

import diffusers
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_omni_core.samplers import _schedule as grids

FAMILIES = {
    "uniform": grids.uniform_sigmas,
    "sd3": grids.sd3_sigmas,
    "qwen_image": lambda steps: grids.qwen_image_sigmas(steps, tokens=1024),
    "ltx": lambda steps: grids.ltx_sigmas(steps, video_tokens=1056),
    "wan": lambda steps: grids.shifted_linear_sigmas(steps, shift=5.0),
    "bagel": grids.bagel_sigmas,
}


@pytest.mark.parametrize("family", FAMILIES)
@given(steps=st.integers(3, 80))
def test_every_grid_starts_at_exactly_1_strictly_decreases_and_ends_at_0(family: str, steps: int) -> None:
    sigmas = FAMILIES[family](steps)
    assert sigmas.dtype == torch.float32
    assert sigmas[0] == 1
    assert sigmas[-1] == 0
    assert (sigmas.diff() < 0).all()
    assert len(sigmas) == (steps if family == "bagel" else steps + 1)


@pytest.mark.parametrize("steps", [2, 8, 10, 28, 50])
def test_grids_are_bit_equal_to_those_of_the_stock_scheduler(steps: int) -> None:
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(steps)
    assert torch.equal(scheduler.sigmas, grids.sd3_sigmas(steps))
    assert torch.equal(scheduler.timesteps, grids.sd3_sigmas(steps)[:-1] * 1000)
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / steps, steps))
    assert torch.equal(scheduler.sigmas, grids.uniform_sigmas(steps, shift=3.0))
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    mu = grids.linear_mu(1024)
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / steps, steps), mu=mu)
    assert torch.equal(scheduler.sigmas, grids.close_grid(grids.exponential_shift(grids.inverse_levels(steps), mu)))


def test_shifts_by_hand() -> None:
    half = torch.tensor([0.5])
    assert grids.static_shift(half, 3.0).item() == pytest.approx(0.75)
    assert grids.exponential_shift(half, np.log(3.0)).item() == pytest.approx(0.75)
    assert grids.linear_mu(256) == pytest.approx(0.5)
    assert grids.linear_mu(4096) == pytest.approx(1.15)


def test_the_stretch_moves_the_last_level_and_keeps_the_first() -> None:
    stretched = grids.stretch_to_terminal(torch.tensor([1.0, 0.5, 0.2]), 0.04)
    torch.testing.assert_close(stretched, torch.tensor([1.0, 0.4, 0.04]))


def test_the_last_level_of_the_sd3_grid_does_not_depend_on_the_number_of_steps() -> None:
    last = {grids.sd3_sigmas(steps)[-2].item() for steps in (4, 10, 28)}
    assert len(last) == 1
    assert last.pop() == pytest.approx(0.0089286, abs=1e-6)


@pytest.mark.parametrize("levels", [[0.9, 0.5], [1.0, 1.0], [1.0, 0.0]])
def test_a_grid_that_no_sampler_could_start_is_refused(levels: list[float]) -> None:
    with pytest.raises(ValueError, match="start at 1"):
        grids.close_grid(torch.tensor(levels))
