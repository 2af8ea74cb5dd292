"""One reverse step of VeRL-Omni's three samplers, from the components that rollout and replay call."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity.golden import Case, Coverage, assert_close
from verl_omni_core import registry
from verl_omni_core.samplers._contract import TransitionRule

STEPS = Coverage("sde_step_verl_omni")
RULES = {"sde": "flow_sde", "cps": "cps", "dance_sde": "dance_sde"}


def rule_of(case: Case) -> TransitionRule:
    return registry.component("sampler", RULES[case.params["sde_type"]])


def levels(case: Case, rows: slice = slice(None)) -> dict[str, Any]:
    """The step's levels and options; ``noise_level`` as the case has it."""
    index = torch.tensor(case.params["step_index"])[rows]
    sigmas = case.inputs["sigmas"]
    level = case.params["noise_level"]
    found: dict[str, Any] = {
        "sigma": sigmas[index],
        "sigma_next": sigmas[index + 1],
        "sigma_second": float(sigmas[1]),
        "noise_level": case.inputs["noise_level"][rows].flatten() if level == "tensor" else level,
    }
    if case.params["sde_type"] != "cps":
        found["include_logprob_normalizer"] = case.params.get("include_logprob_normalizer", True)
    return found


def is_last_step_of_cps(case: Case) -> bool:
    return case.params["sde_type"] == "cps" and 9 in case.params["step_index"]


def is_stochastic(case: Case) -> bool:
    return case.params["noise_level"] not in ("tensor", 0.0) and not is_last_step_of_cps(case)


def replayed(case: Case) -> tuple[Any, Tensor]:
    velocity = case.inputs["replay_model_output"].clone().requires_grad_()
    move = rule_of(case).step(case.inputs["sample"], velocity, prev_sample=case.outputs["prev_sample"], **levels(case))
    (gradient,) = torch.autograd.grad(move.log_prob.sum(), velocity)
    return move, gradient


def check_drawn_rows(case: Case, rows: slice = slice(None)) -> None:
    out = {name: tensor[rows] for name, tensor in case.outputs.items()}
    move = rule_of(case).step(
        case.inputs["sample"][rows],
        case.inputs["model_output"][rows],
        noise=case.inputs["noise"][rows],
        **levels(case, rows),
    )
    assert_close(move.prev_sample, out["prev_sample"])
    assert_close(move.mean, out["prev_sample_mean"])
    assert_close(move.log_prob, out["log_prob"])
    assert_close(move.std_dev_t, out["std_dev_t"])
    assert_close(move.sqrt_dt, out["sqrt_dt"])


@STEPS.where(is_stochastic)
def test_sampling_replay_and_gradient_equal_the_peer(case: Case) -> None:
    check_drawn_rows(case)
    out = case.outputs
    scored, gradient = replayed(case)
    assert_close(scored.log_prob, out["replay_log_prob"])
    assert_close(scored.mean, out["replay_prev_sample_mean"])
    assert_close(gradient, out["replay_grad_model_output"])


@STEPS.where(lambda case: case.params["noise_level"] == 0.0)
def test_without_noise_the_step_is_eulers_and_has_no_log_prob(case: Case) -> None:
    """Ours on purpose: the peer returns nan or 0 for the log-prob of a step that has no density."""
    sample, velocity = case.inputs["sample"], case.inputs["model_output"]
    move = rule_of(case).step(sample, velocity, **levels(case))
    assert move.log_prob is None
    assert_close(move.prev_sample, case.outputs["prev_sample"])
    assert_close(move.mean, case.outputs["prev_sample_mean"])
    found = levels(case)
    found.pop("include_logprob_normalizer", None)
    euler = registry.component("sampler", "ode").step(sample, velocity, **found)
    assert_close(euler.prev_sample, case.outputs["prev_sample"])


@STEPS.where(is_last_step_of_cps)
def test_the_last_step_of_cps_is_deterministic_and_has_no_log_prob(case: Case) -> None:
    """Ours on purpose: the peer scores it with 0 or with the square of a rounding error."""
    assert case.params["step_index"] == [9, 9]
    inputs = case.inputs
    move = rule_of(case).step(inputs["sample"], inputs["model_output"], noise=inputs["noise"], **levels(case))
    assert move.log_prob is None
    assert_close(move.prev_sample, case.outputs["prev_sample"])
    assert_close(move.std_dev_t, case.outputs["std_dev_t"])
    assert_close(move.sqrt_dt, case.outputs["sqrt_dt"])


@STEPS.where(lambda case: case.params["noise_level"] == "tensor")
def test_rows_outside_their_window_are_stepped_apart(case: Case) -> None:
    """Ours on purpose: row 0 has no noise and no log-prob, row 1 equals the peer, the two do not share a call."""
    with pytest.raises(ValueError, match=r"rows \[0\]"):
        check_drawn_rows(case)
    check_drawn_rows(case, slice(1, 2))
    outside = slice(0, 1)
    sample, velocity = case.inputs["sample"][outside], case.inputs["model_output"][outside]
    move = rule_of(case).step(sample, velocity, **levels(case, outside))
    assert move.log_prob is None
    assert_close(move.prev_sample, case.outputs["prev_sample"][outside])


def test_every_case_is_covered() -> None:
    STEPS.check(tested=150, left_out=0)
