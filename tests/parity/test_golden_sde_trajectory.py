"""Whole trajectories and noise grids of VeRL-Omni, from the loop that every engine runs."""

from types import SimpleNamespace

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from tests.parity.golden import Case, Coverage, assert_close
from verl_omni_core import registry
from verl_omni_core.models._contract import Geometry
from verl_omni_core.samplers import _denoise
from verl_omni_core.samplers._contract import TransitionRule

TRAJECTORIES = Coverage("sde_trajectory_verl_omni")
GRIDS = Coverage("sigma_grids")
RULES = {"sde": "flow_sde", "cps": "cps", "dance_sde": "dance_sde"}
SHIFTS = {"sd35": 3.0, "noshift": 1.0}
GEOMETRY = Geometry(512, 512, (16, 64, 64))


def velocity_of(case: Case, latents: Tensor, step_index: int) -> Tensor:
    a, b, c = (case.params[name] for name in "abc")
    return a * latents + b * torch.tanh(latents) * case.inputs["sigmas"][step_index] + c


@TRAJECTORIES.where(lambda _: True)
def test_the_denoising_loop_equals_the_peer_in_and_outside_the_window(case: Case) -> None:
    rule: TransitionRule = registry.component("sampler", RULES[case.params["sde_type"]])
    start, end = case.params["window"]
    schedule = SimpleNamespace(sigmas=case.inputs["sigmas"], timesteps=case.inputs["timesteps"])
    found = _denoise.integrate(
        lambda latents, _, i: velocity_of(case, latents, i),
        case.inputs["x_init"],
        schedule,
        rule,
        {},
        noise_level=case.params["noise_level"],
        window=(start, end),
        noise_of=lambda i: case.inputs["noise"][i],
    )
    close = {"rel": 1e-4, "off": 1e-5}
    assert_close(found.latents_clean, case.outputs["latents"][:, -1], **close)
    assert_close(found.all_latents, case.outputs["latents"][:, start : end + 1], **close)
    assert_close(found.log_probs, case.outputs["window_log_probs"], **close)
    assert found.step_indices.tolist() == list(range(start, end))
    assert torch.equal(found.all_timesteps, case.inputs["timesteps"][start:end].expand(2, -1))
    for w, i in enumerate(range(start, end)):
        before = found.all_latents[:, w]
        scored = rule.step(
            before,
            velocity_of(case, before, i),
            sigma=schedule.sigmas[i].expand(2),
            sigma_next=schedule.sigmas[i + 1].expand(2),
            sigma_second=float(schedule.sigmas[1]),
            noise_level=case.params["noise_level"],
            prev_sample=found.all_latents[:, w + 1],
        )
        assert_close(scored.log_prob, case.outputs["replayed_window_log_probs"][:, w], **close)


@GRIDS.where(lambda case: case.params.get("kind") in SHIFTS)
def test_the_adapters_grid_is_bit_equal_to_the_peers(case: Case) -> None:
    steps = case.params["num_inference_steps"]
    config = dict(FlowMatchEulerDiscreteScheduler(shift=SHIFTS[case.params["kind"]]).config)
    schedule = registry.component("model", "sd3").build(None).schedule(GEOMETRY, steps, config, "scheduler")
    assert torch.equal(schedule.sigmas, case.outputs["sigmas"])
    assert torch.equal(schedule.timesteps, case.outputs["timesteps"])
    assert schedule.sigmas[0] == 1


GRIDS.leave_out(lambda case: case.params.get("kind") not in SHIFTS, "of model families that have no adapter here")


def test_every_case_is_covered() -> None:
    TRAJECTORIES.check(tested=6, left_out=0)
    GRIDS.check(tested=3, left_out=13)
