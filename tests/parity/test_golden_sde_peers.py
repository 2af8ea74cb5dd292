"""Steps of Flow-GRPO, DiffusionNFT, MixGRPO, DanceGRPO and Flow-Factory, from the components."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity.golden import Case, Coverage, assert_close
from verl_omni_core import registry
from verl_omni_core.samplers import _denoise
from verl_omni_core.samplers._contract import Transition
from verl_omni_core.samplers._transition import predict_clean

PEERS = Coverage("sde_step_other_peers")
OTHERS = Coverage("sde_step_ddim_dpm")
SCORED_WITH_NORMALIZER = {
    "DiffusionNFT:flow_grpo_step": ("flow_sde", True),
    "DiffusionNFT:dance_grpo_step": ("dance_sde", False),
    "MixGRPO:dance_grpo_step": ("dance_sde", False),
    "DanceGRPO:flux_step": ("dance_sde", True),
}
DYNAMICS = {"Flow-SDE": "flow_sde", "CPS": "cps", "Dance-SDE": "dance_sde", "ODE": "ode"}


def move(name: str, case: Case, sample: Tensor, velocity: Tensor, **given: Any) -> Transition:
    index, sigmas = case.params["step_index"], case.inputs["sigmas"]
    rows = len(sample)
    given.setdefault("noise_level", case.params.get("eta", case.params.get("noise_level", 1.0)))
    return registry.component("sampler", name).step(
        sample,
        velocity,
        sigma=sigmas[index].expand(rows),
        sigma_next=sigmas[index + 1].expand(rows),
        sigma_second=float(sigmas[1]),
        **given,
    )


@PEERS.where(lambda case: case.fn == "flow_grpo:sde_step_with_logprob")
def test_flow_sde_equals_flow_grpo(case: Case) -> None:
    sample, velocity, out = case.inputs["sample"], case.inputs["model_output"], case.outputs
    drawn = move("flow_sde", case, sample, velocity, noise=case.inputs["noise"])
    assert_close(drawn.prev_sample, out["prev_sample"])
    assert_close(drawn.mean, out["prev_sample_mean"])
    assert_close(drawn.std_dev_t, out["std_dev_t"])
    assert_close(drawn.log_prob, out["log_prob"])


@PEERS.where(lambda case: case.fn == "MixGRPO:flow_grpo_step")
def test_flow_sde_equals_mixgrpo(case: Case) -> None:
    """Its deterministic branch moves as ode does, but scores that move under the SDE."""
    sample, velocity, out = case.inputs["latents"], case.inputs["model_output"], case.outputs
    drawn = move("flow_sde", case, sample, velocity, noise=case.inputs["noise"])
    assert_close(drawn.mean, out["prev_sample_mean"])
    assert_close(drawn.std, out["std_times_sqrt_dt"].expand(2))
    assert_close(
        predict_clean(sample, velocity, case.inputs["sigmas"][case.params["step_index"]].expand(2)), out["pred_x0"]
    )
    if case.params["deterministic"]:
        still = move("ode", case, sample, velocity)
        assert_close(still.prev_sample, out["prev_sample"])
        assert still.log_prob is None
        drawn = move("flow_sde", case, sample, velocity, prev_sample=out["prev_sample"])
    assert_close(drawn.prev_sample, out["prev_sample"])
    assert_close(drawn.log_prob, out["log_prob"])


@PEERS.where(lambda case: case.fn in SCORED_WITH_NORMALIZER and case.params.get("grpo") is not False)
def test_scoring_equals_the_peer_with_or_without_the_normalizer(case: Case) -> None:
    """DiffusionNFT and MixGRPO copied DanceGRPO's step and lost its normalizer."""
    name, normalizer = SCORED_WITH_NORMALIZER[case.fn or ""]
    sample, velocity = case.inputs["latents"], case.inputs["model_output"]
    scored = move(
        name,
        case,
        sample,
        velocity,
        prev_sample=case.inputs["prev_sample"],
        include_logprob_normalizer=normalizer,
    )
    assert_close(scored.log_prob, case.outputs["log_prob"])
    assert_close(
        predict_clean(sample, velocity, case.inputs["sigmas"][case.params["step_index"]].expand(2)),
        case.outputs["pred_x0"],
    )


@PEERS.where(lambda case: case.fn == "DanceGRPO:flux_step" and case.params.get("grpo") is False)
def test_ode_equals_the_deterministic_step_of_dancegrpo(case: Case) -> None:
    assert case.params["sde_solver"] is False
    sample, velocity = case.inputs["latents"], case.inputs["model_output"]
    still = move("ode", case, sample, velocity)
    assert_close(still.mean, case.outputs["prev_sample_mean"])
    assert torch.equal(still.prev_sample, still.mean)


@PEERS.where(lambda case: case.fn == "Flow-Factory:step")
def test_each_dynamics_equals_flow_factory(case: Case) -> None:
    """It rounds drawn latents to the input's dtype before scoring; ours keeps fp32 and scores what it is given."""
    name, out = DYNAMICS[case.params["dynamics"]], case.outputs
    dtype = getattr(torch, case.params["input_dtype"].removeprefix("torch."))
    if dtype != torch.float32:
        with pytest.raises(TypeError, match="float32"):
            move(name, case, case.inputs["latents"], case.inputs["noise_pred"], noise=case.inputs["noise"])
    sample, velocity = case.inputs["latents"].float(), case.inputs["noise_pred"].float()
    drawn = move(name, case, sample, velocity, noise=case.inputs["noise"])
    assert_close(drawn.mean, out["next_latents_mean"])
    assert_close(drawn.sqrt_dt.square(), -out["dt"])
    if name == "ode":
        assert_close(drawn.prev_sample, out["next_latents_mean"])
        assert drawn.log_prob is None
        return
    assert_close(drawn.prev_sample.to(dtype), out["next_latents"])
    # its std_dev_t of the constant diffusion lacks the root of the step, as that of flow_sde does
    std_dev_t = drawn.std / drawn.sqrt_dt if name == "dance_sde" else drawn.std_dev_t
    assert_close(std_dev_t, out["std_dev_t"])
    if name == "cps" and case.params["step_index"] == 9:
        assert drawn.log_prob is None
        return
    scored = move(name, case, sample, velocity, prev_sample=out["next_latents"])
    assert_close(scored.log_prob, out["log_prob"])


def chain(case: Case, first: int, **options: Any) -> list[Tensor]:
    """The trajectory of the dpm component in the denoising loop over the levels from ``first`` on."""
    a, b, c = (case.params[name] for name in "abc")
    sigmas = case.inputs["sigmas"][first : first + len(case.outputs["trajectory"])]
    visited: list[Tensor] = []

    def velocity(latents: Tensor, timestep: Tensor, i: int) -> Tensor:
        visited.append(latents)
        v = a * latents + b * torch.tanh(latents) * sigmas[i] + c
        # MixGRPO's noise-predicting variant is fed the clean prediction; this velocity makes the two coincide
        return -sigmas[i] * v / (1 - sigmas[i]) if options.get("algorithm_type") == "dpmsolver" else v

    schedule = SimpleNamespace(sigmas=sigmas, timesteps=sigmas[:-1] * 1000)
    dpm = registry.component("sampler", "dpm")
    found = _denoise.denoise(
        velocity, case.inputs["x_init"], schedule, dpm, options, noise_level=0.0, window=None, generators=[]
    )
    return [*visited, found.latents_clean]


@PEERS.where(lambda case: case.fn == "DiffusionNFT:dpm_step chain")
def test_dpm_equals_the_rollout_of_diffusionnft(case: Case) -> None:
    assert_close(torch.stack(chain(case, 0, solver_order=case.params["order"])), case.outputs["trajectory"])


@PEERS.where(lambda case: "MixGRPO:dpm_step chain" in (case.fn or ""))
def test_dpm_equals_the_solvers_of_mixgrpo(case: Case) -> None:
    found = chain(
        case,
        1,
        solver_order=case.params["order"],
        algorithm_type=case.params["algorithm"],
        solver_type=case.params["solver_type"],
    )
    assert_close(torch.stack(found), case.outputs["trajectory"])


@OTHERS.where(lambda case: case.fn == "DanceGRPO:ddim_step_with_logprob")
def test_ddim_equals_dancegrpo(case: Case) -> None:
    sigma, sigma_next = (
        (1 / case.inputs[name].double() - 1).sqrt().float() for name in ("alphas_cumprod_t", "alphas_cumprod_prev")
    )
    given = {
        "sigma": sigma,
        "sigma_next": sigma_next,
        "sigma_second": 0.0,
        "noise_level": case.params["eta"],
        "prediction_type": case.params["prediction_type"],
    }
    ddim = registry.component("sampler", "ddim")
    drawn = ddim.step(case.inputs["sample"], case.inputs["model_output"], noise=case.inputs["noise"], **given)
    assert_close(drawn.prev_sample, case.outputs["prev_sample"])
    assert_close(drawn.log_prob, case.outputs["log_prob"])
    scored = ddim.step(
        case.inputs["sample"], case.inputs["replay_model_output"], prev_sample=case.outputs["prev_sample"], **given
    )
    assert_close(scored.log_prob, case.outputs["replay_log_prob"])


@OTHERS.where(lambda case: case.fn == "DiffusionNFT:ddim_update")
def test_flow_ddim_equals_diffusionnft(case: Case) -> None:
    """It reports the spread divided by a factor of its own; the product is the spread."""
    sample = case.inputs["sample"]
    velocity = (sample - case.inputs["x0_pred"]) / case.inputs["sigmas"][case.params["step_index"]]
    drawn = move("flow_ddim", case, sample, velocity, noise=case.inputs["noise"])
    assert_close(drawn.prev_sample, case.outputs["prev_sample"])
    assert_close(drawn.mean, case.outputs["prev_mean"])
    assert_close(drawn.std, (case.outputs["std_dev_t"] * case.outputs["dt_sqrt"]).expand(2))
    assert (drawn.log_prob is None) == (case.params["eta"] == 0)


@OTHERS.where(lambda case: case.fn == "MixGRPO:dpm_step SDE first order")
def test_dpm_sde_equals_mixgrpo(case: Case) -> None:
    """Its noise-predicting variant gets the clean prediction; the velocity that makes both equal reproduces it."""
    sample, velocity = case.inputs["sample"], case.inputs["model_output"]
    sigma = case.inputs["sigmas"][case.params["step_index"]]
    assert_close(predict_clean(sample, velocity, sigma.expand(2)), case.outputs["x0_pred"])
    if case.params["algorithm"] == "dpmsolver":
        velocity = -sigma * velocity / (1 - sigma)
    drawn = move("dpm_sde", case, sample, velocity, noise=case.inputs["noise"], algorithm_type=case.params["algorithm"])
    assert_close(drawn.prev_sample, case.outputs["prev_sample"])
    assert_close(drawn.log_prob, case.outputs["log_prob"])


def test_every_case_is_covered() -> None:
    PEERS.check(tested=116, left_out=0)
    OTHERS.check(tested=66, left_out=0)
