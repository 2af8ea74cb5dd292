"""Replay on a device whose values cannot be read back at all: whoever waits for one raises here."""

import pytest
import torch

from verl_omni_core import registry
from verl_omni_core.errors import ContractError
from verl_omni_core.models._contract import Schedule
from verl_omni_core.samplers._denoise import integrate
from verl_omni_core.training.losses import diffusion_loss, weighted
from verl_omni_core.training.ppo_engine import _Passes
from verl_omni_core.training.replay import Denoising, score_step

UNREADABLE = torch.device("meta")
SIGMAS = torch.tensor([0.95, 0.9, 0.7, 0.4, 0.0])
SCHEDULE = Schedule(SIGMAS, SIGMAS[:-1] * 1000)
STOCHASTIC = [name for name in registry.names("sampler") if registry.component("sampler", name).IS_STOCHASTIC]


def _latents(device):
    return torch.zeros(4, 3, 2, 2, device=device)


@pytest.mark.parametrize("sampler", STOCHASTIC)
def test_no_pass_reads_a_value_of_its_device(sampler):
    how = Denoising(registry.component("sampler", sampler), {}, SCHEDULE, 0.7, 1.0)
    weight = torch.ones((), device=UNREADABLE, requires_grad=True)
    current = score_step(
        lambda latents, timestep: latents * weight + timestep.view(-1, 1, 1, 1),
        _latents(UNREADABLE),
        _latents(UNREADABLE),
        torch.tensor([0, 1, 2, 1]),
        how,
    )
    stored = {name: torch.zeros(4, device=UNREADABLE) for name in ("old_log_probs", "rollout_log_probs", "advantages")}
    stored["ref_prev_sample_mean"] = _latents(UNREADABLE)
    options = registry.options("algorithm", "flow_grpo", {"kl_coef": 0.1})
    output = diffusion_loss(registry.component("algorithm", "flow_grpo"), options)(current, stored)
    counted = torch.ones(4, device=UNREADABLE)
    weighted(output.loss, counted, 4.0, 1).backward()
    said = _Passes()
    said.add(current, stored, output, counted)
    assert weight.grad.device == current.std.device == UNREADABLE
    with pytest.raises(NotImplementedError):  # the mini-batch's end does
        said.deviation()


@pytest.mark.parametrize("sampler", STOCHASTIC)
def test_no_step_of_a_rollout_reads_a_value_of_its_device(sampler):
    drawn = integrate(
        lambda latents, timestep, _: latents + timestep.view(-1, 1, 1, 1),
        _latents(UNREADABLE),
        SCHEDULE,
        registry.component("sampler", sampler),
        {},
        noise_level=0.7,
        window=(1, 3),
        noise_of=lambda _: _latents(UNREADABLE),
    )
    assert drawn.log_probs.device == drawn.all_timesteps.device == UNREADABLE


def test_steps_without_noise_are_refused():
    how = Denoising(registry.component("sampler", "flow_sde"), {}, SCHEDULE, 0.0, 1.0)
    with pytest.raises(ContractError, match="raise sampler.noise_level"):
        score_step(lambda latents, _: latents, _latents("cpu"), _latents("cpu"), torch.tensor([0, 1, 2, 1]), how)
