"""Whole trajectories and noise grids of VeRL-Omni, from the loop that every engine runs."""

from types import SimpleNamespace

import torch
from torch import Tensor

from tests.parity.golden import Case, Coverage, assert_close
from verl_omni_core import registry
from verl_omni_core.samplers import _denoise, _schedule
from verl_omni_core.samplers._contract import TransitionRule

TRAJECTORIES = Coverage("sde_trajectory_verl_omni")
GRIDS = Coverage("sigma_grids")
RULES = {"sde": "flow_sde", "cps": "cps", "dance_sde": "dance_sde"}
FAMILIES = {
    "sd35": _schedule.sd3_sigmas,
    "noshift": lambda steps: _schedule.sd3_sigmas(steps, shift=1.0),
    "qwen512": lambda steps: _schedule.qwen_image_sigmas(steps, tokens=(512 // 16) ** 2),
    "qwen1024": lambda steps: _schedule.qwen_image_sigmas(steps, tokens=(1024 // 16) ** 2),
    "wan5": lambda steps: _schedule.shifted_linear_sigmas(steps, shift=5.0),
    "bagel": _schedule.bagel_sigmas,
}


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


@GRIDS.where(lambda case: "kind" in case.params)
def test_a_family_grid_is_bit_equal_to_its_pipeline(case: Case) -> None:
    sigmas = FAMILIES[case.params["kind"]](case.params["num_inference_steps"])
    unit = 1 if case.params["kind"] == "bagel" else 1000
    assert torch.equal(sigmas, case.outputs["sigmas"])
    assert torch.equal(sigmas[:-1] * unit, case.outputs["timesteps"])
    assert sigmas[0] == 1


@GRIDS.where(lambda case: case.fn == "calculate_shift")
def test_mu_grows_linearly_with_the_tokens(case: Case) -> None:
    tokens, base_length, max_length, base_shift, max_shift = case.params["args"]
    mu = _schedule.linear_mu(
        tokens, base_length=base_length, max_length=max_length, base_shift=base_shift, max_shift=max_shift
    )
    assert_close(mu, case.outputs["mu"], rel=0, off=1e-12)


@GRIDS.where(lambda case: case.fn == "sd3_time_shift")
def test_the_static_shift_equals_the_peer(case: Case) -> None:
    assert_close(_schedule.static_shift(case.inputs["t"], case.params["shift"]), case.outputs["y"], rel=0)


def test_every_case_is_covered() -> None:
    TRAJECTORIES.check(tested=6, left_out=0)
    GRIDS.check(tested=16, left_out=0)
