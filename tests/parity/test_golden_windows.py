"""Stochastic windows, from the function that plans a step."""

import pytest

from tests.parity.golden import Case, Coverage
from verl_omni_core.errors import ConfigError
from verl_omni_core.samplers._window import window_of_step

WINDOWS = Coverage("mixgrpo_windows")
PEER = "verl-omni:_maybe_make_progressive_window"


def window(case: Case, step: int, seed: int) -> tuple[int, int]:
    chosen = case.params["sde_window_range"]
    return window_of_step(
        seed,
        step,
        num_inference_steps=50,
        size=case.params["sde_window_size"],
        range=tuple(chosen) if chosen else None,
        strategy="random",
    )


@WINDOWS.where(
    lambda case: (
        case.fn == PEER
        and case.params["sample_strategy"] == "random"
        and case.params.get("sde_window_seed") is not None
    )
)
def test_random_windows_equal_the_peer_at_every_step(case: Case) -> None:
    found = [list(window(case, step, case.params["sde_window_seed"])) for step in range(30)]
    assert found == case.outputs["range_for_global_step_0_to_29"]


@WINDOWS.where(lambda case: case.fn == PEER and case.raises is not None)
def test_a_window_that_does_not_fit_is_a_configuration_error(case: Case) -> None:
    """Whatever the strategy; the peer finds out in its first rollout."""
    with pytest.raises(ConfigError, match="sde_window_size is 6"):
        window(case, 1, 0)


WINDOWS.leave_out(
    lambda case: case.fn == PEER and case.params["sample_strategy"] == "progressive" and case.raises is None,
    "the progressive strategy",
)
WINDOWS.leave_out(
    lambda case: (
        case.fn == PEER
        and case.params["sample_strategy"] == "random"
        and case.raises is None
        and case.params.get("sde_window_seed") is None
    ),
    "no seed: the peer then leaves the choice to each request; ours follows from the run's seed",
)
WINDOWS.leave_out(
    lambda case: (case.fn or "").startswith("MixGRPO"),
    "schedules of MixGRPO: progressive, decaying, and its own stream",
)
WINDOWS.leave_out(
    lambda case: case.fn in ("verl-omni:sample_per_sample_sde_windows", "Flow-Factory:current_sde_steps"),
    "windows or subsets of each request; ours share one window a step",
)
WINDOWS.leave_out(
    lambda case: case.fn == "verl-omni LTX:_select_sde_steps",
    "subsets of steps for an audio-video model, another stream",
)


def test_every_case_is_covered_or_left_out_with_a_reason() -> None:
    WINDOWS.check(tested=4, left_out=30)
