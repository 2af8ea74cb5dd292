"""Metrics of a step, seeds, and the diagnostics of rollout correction."""

import torch

from tests.parity.golden import Case, Coverage, assert_metrics, group_index
from verl_omni_core import identity
from verl_omni_core.metrics import rl, timing

MISC = Coverage("metrics_and_misc")
CORRECTION = Coverage("rollout_correction")
NOT_DIAGNOSTICS = ("rollout_corr/rollout_is_", "rollout_corr/rollout_rs_")


@MISC.where(lambda case: case.fn == "compute_data_metrics_diffusion")
def test_reward_and_advantage_metrics_equal_the_peer(case: Case) -> None:
    valid = torch.ones(len(case.inputs["uid"]), dtype=torch.bool)
    rewards = case.inputs["sample_level_rewards"].mean(dim=1)
    found = rl.reward_metrics(rewards, group_index(case.inputs["uid"]), valid)
    found |= rl.advantage_metrics(case.inputs["advantages"], valid)
    assert torch.equal(case.inputs["advantages"], case.inputs["returns"])
    assert_metrics(found, case.outputs["metrics"], rel=1e-6)


@MISC.where(lambda case: case.fn == "compute_throughput_metrics_diffusion")
def test_throughput_equals_the_peer(case: Case) -> None:
    found = timing.throughput_metrics(case.outputs["batch_size"], case.params["step_time"], case.params["n_gpus"])
    assert_metrics(found, case.outputs["metrics"], rel=1e-6)


@MISC.where(lambda case: case.fn == "compute_timing_metrics_diffusion")
def test_stage_times_equal_the_peer(case: Case) -> None:
    found = timing.timing_metrics(case.inputs["timing_raw"], case.params["num_images"])
    assert found.keys() == case.outputs["metrics"].keys()
    assert_metrics(found, case.outputs["metrics"], rel=1e-6)


@MISC.where(lambda case: case.fn == "compute_reward_extra_metrics_diffusion")
def test_scorer_means_equal_the_peer(case: Case) -> None:
    found = rl.scorer_metrics(case.inputs["extra"])
    assert found.keys() == case.outputs["metrics"].keys()
    assert_metrics(found, case.outputs["metrics"], rel=1e-6)


@MISC.where(lambda case: case.fn == "compute_old_policy_metrics")
def test_refresh_flags_equal_the_peer(case: Case) -> None:
    applied, decay, kind = case.params["update_result"]
    assert rl.old_policy_metrics(applied, decay, kind) == case.outputs["metrics"]


@MISC.where(lambda case: case.fn == "maybe_per_rollout_seeds")
def test_sample_seeds_equal_the_peer(case: Case) -> None:
    indices = case.inputs.get("global_indices", range(case.inputs["batch_size"]))
    # the peer's base is the run's seed plus the step less 1
    seeds = [identity.sample_seed(case.inputs["rollout_seed"], 1, index) for index in indices]
    assert [str(seed) for seed in seeds] == case.outputs["seeds"]


MISC.leave_out(
    lambda case: case.fn == "seed_from_prompt_ids",
    "seeds from prompt tokens, for samples of a group that share their initial noise; ours all differ",
)
MISC.leave_out(
    lambda case: (case.fn or "").startswith(("sample_noise_and_timesteps", "TimeSampler", "Flow-Factory AWM")),
    "forward noising, for preference and forward-process losses",
)
MISC.leave_out(lambda case: case.fn == "h3_dit_timestep", "the timestep of a model that is not among the adapters")


@CORRECTION.where(lambda _: True)
def test_rollout_diagnostics_equal_the_peer(case: Case) -> None:
    """Weights and rejection masks of rollout correction are not made; every other number of a case is compared."""
    expected = {name: value for name, value in case.outputs["metrics"].items() if not name.startswith(NOT_DIAGNOSTICS)}
    old = next(case.inputs[name] for name in ("old_log_prob", "old_log_probs", "log_prob") if name in case.inputs)
    rollout = next(case.inputs[name] for name in ("rollout_log_prob", "rollout_log_probs") if name in case.inputs)
    found = rl.rollout_correction_metrics(
        old, rollout, mask=case.inputs.get("response_mask"), timesteps=case.inputs.get("timesteps")
    )
    assert len(expected) >= 13
    assert_metrics(found, expected)


def test_every_case_is_covered_or_left_out_with_a_reason() -> None:
    MISC.check(tested=12, left_out=28)
    CORRECTION.check(tested=50, left_out=0)
