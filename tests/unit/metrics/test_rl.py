"""Reward, advantage and log-prob metrics by hand."""

import math

import numpy as np
import pytest
import torch

from verl_omni_core.metrics.reduce import Accumulator
from verl_omni_core.metrics.rl import (
    advantage_metrics,
    off_policy_metrics,
    old_policy_metrics,
    reward_metrics,
    rollout_correction_metrics,
    rollout_correction_rows,
    scorer_metrics,
)

TRUE = torch.ones(4, dtype=torch.bool)
GROUPS = torch.tensor([5, 5, 9, 9])


def test_reward_metrics_by_hand() -> None:
    found = reward_metrics(torch.tensor([1.0, 3.0, 2.0, 2.0]), GROUPS, TRUE)
    assert found == {
        "critic/rewards/mean": 2.0,
        "critic/rewards/max": 3.0,
        "critic/rewards/min": 1.0,
        "critic/rewards/zero_std_ratio": 0.5,
        "critic/rewards/std_mean": 0.5,
        "critic/rewards/group_size": 2.0,
        "critic/rewards/invalid_fraction": 0.0,
    }


def test_equal_rewards_have_exactly_no_spread() -> None:
    found = reward_metrics(torch.tensor([0.1, 0.1, 0.1]), torch.zeros(3, dtype=torch.int64), TRUE[:3])
    assert found["critic/rewards/zero_std_ratio"] == 1
    assert found["critic/rewards/std_mean"] == 0


def test_a_missing_reward_is_counted_and_enters_no_statistic() -> None:
    rewards = torch.tensor([1.0, float("nan"), 2.0, 4.0])
    found = reward_metrics(rewards, GROUPS, rewards.isfinite())
    assert found["critic/rewards/invalid_fraction"] == 0.25
    assert found["critic/rewards/mean"] == pytest.approx(7 / 3)
    assert found["critic/rewards/group_size"] == 2.0


def test_without_any_reward_there_is_no_number() -> None:
    found = reward_metrics(torch.full((4,), float("nan")), GROUPS, ~TRUE)
    assert found == {"critic/rewards/invalid_fraction": 1.0}
    assert advantage_metrics(torch.zeros(4), ~TRUE) == {}


def test_advantages_and_returns_are_reported_before_clamping() -> None:
    found = advantage_metrics(torch.tensor([9.0, -9.0, 3.0, 0.0]), torch.tensor([True, True, True, False]))
    assert found["critic/advantages/max"] == 9
    assert found["critic/returns/min"] == -9
    assert found["critic/advantages/mean"] == 1


def test_scorers_without_numbers_are_left_out_and_missing_scores_skipped() -> None:
    found = scorer_metrics({"ocr": [0.5, None, 1.0], "text": ["a", "b", "c"], "jpeg_size": [None, None, None]})
    assert found == {"critic/reward/ocr/mean": 0.75}


def test_refresh_kinds_are_flags() -> None:
    assert old_policy_metrics(True, 0.5, "ema")["old_policy/ema_update"] == 1
    assert old_policy_metrics(True, 0.5, "ema")["old_policy/copy_update"] == 0


def test_equal_log_probs_have_no_mismatch() -> None:
    log_probs = torch.tensor([[-1.0, -2.0], [-1.5, -0.5]])
    found = rollout_correction_metrics(log_probs, log_probs)
    for name in ("kl", "k3_kl", "chi2_token", "chi2_seq", "log_ppl_diff", "logprob_abs_diff_max"):
        assert found[f"rollout_corr/{name}"] == 0
    assert found["rollout_corr/ppl_ratio"] == 1


def test_mismatch_by_hand() -> None:
    old, rollout = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.1, -1.8]])
    found = rollout_correction_metrics(old, rollout, timesteps=torch.tensor([[900.0, 800.0]]))
    assert found["rollout_corr/kl"] == pytest.approx(0.05)
    assert found["rollout_corr/log_ppl_diff"] == pytest.approx(0.05)
    assert found["rollout_corr/k3_kl"] == pytest.approx((math.exp(0.1) - 1.1 + math.exp(-0.2) - 0.8) / 2)
    assert found["rollout_corr/chi2_seq"] == pytest.approx(math.exp(-0.2) - 1)
    assert found["rollout_corr/logprob_abs_diff/ts_900"] == pytest.approx(0.1)
    assert found["rollout_corr/logprob_abs_diff/ts_800"] == pytest.approx(0.2)


def test_masked_values_and_empty_rows_do_not_count() -> None:
    old = torch.tensor([[-1.0, -2.0], [-7.0, -7.0]])
    rollout = torch.tensor([[-1.1, 5.0], [9.0, 9.0]])
    found = rollout_correction_metrics(old, rollout, mask=torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    assert found["rollout_corr/logprob_abs_diff_max"] == pytest.approx(0.1)
    assert found["rollout_corr/training_log_ppl"] == 1


def test_nothing_to_compare_is_an_error() -> None:
    with pytest.raises(ValueError, match="no log-prob counts"):
        rollout_correction_metrics(torch.zeros(1, 2), torch.zeros(1, 2), mask=torch.zeros(1, 2))
    with pytest.raises(ValueError, match="expected equal"):
        rollout_correction_metrics(torch.zeros(1, 2), torch.zeros(1, 3))


def test_rows_of_single_steps_reduce_to_the_diagnostics_of_one_column_in_any_cut() -> None:
    current = torch.tensor([-1.0, -2.0, -0.5, 1.5])
    rollout = torch.tensor([-1.1, -1.8, -0.5, 1.0])
    collected = Accumulator()
    for cut in (slice(0, 3), slice(3, 4)):
        collected.add(rollout_correction_rows(current[cut], rollout[cut]))
    expected = rollout_correction_metrics(current[:, None], rollout[:, None])
    assert collected.result() == pytest.approx({f"actor/{name}": value for name, value in expected.items()})
    assert collected.result()["actor/rollout_corr/kl"] == pytest.approx(-(0.1 - 0.2 + 0.0 + 0.5) / 4)
    assert collected.result()["actor/rollout_corr/log_ppl_diff_max"] == pytest.approx(0.2)


def test_ages_of_samples_by_hand() -> None:
    """Step 6 is drawn by version 4; one sample was begun by version 3."""
    found = off_policy_metrics(6, np.array([4, 4, 3, 4]), np.array([4, 4, 4, 4]))
    assert {name.removeprefix("training/off_policy/trajectory_"): value for name, value in found.items()} == {
        "staleness/mean": 1.0,
        "staleness/max": 1.0,
        "staleness/min": 1.0,
        "staleness_worst/mean": 1.25,
        "staleness_worst/max": 2.0,
        "staleness_worst/min": 1.0,
        "spans/mean": 1.25,
        "spans/max": 2.0,
        "spans/min": 1.0,
    }
