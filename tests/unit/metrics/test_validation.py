"""Validation statistics by hand and against exact expectations, and the paired interval."""

import itertools

import numpy as np
import pytest

from verl_omni_core.metrics.validation import paired_bootstrap, prompt_statistics, subset_sizes, validation_metrics

NAN = float("nan")


@pytest.mark.parametrize(("samples", "sizes"), [(1, []), (2, [2]), (4, [2, 4]), (6, [2, 4, 6]), (8, [2, 4, 8])])
def test_k_doubles_up_to_the_number_of_samples(samples: int, sizes: list[int]) -> None:
    assert subset_sizes(samples) == sizes


def test_mean_and_population_spread_are_averaged_over_prompts() -> None:
    found = prompt_statistics([[0.0, 1.0], [1.0, 1.0]])
    assert found["mean@2"] == 0.75
    assert found["std@2"] == 0.25


def test_best_and_worst_converge_to_the_expectation_over_draws_with_replacement() -> None:
    scores = [0.1, 0.4, 0.5, 0.9]
    found = prompt_statistics([scores], draws=20_000)
    for k in (2, 4):
        drawn = [list(combination) for combination in itertools.product(scores, repeat=k)]
        best, worst = np.max(drawn, axis=1), np.min(drawn, axis=1)
        assert found[f"best@{k}/mean"] == pytest.approx(best.mean(), abs=0.01)
        assert found[f"best@{k}/std"] == pytest.approx(best.std(), abs=0.01)
        assert found[f"worst@{k}/mean"] == pytest.approx(worst.mean(), abs=0.01)
        assert found[f"worst@{k}/std"] == pytest.approx(worst.std(), abs=0.01)


def test_equal_calls_give_equal_numbers() -> None:
    scores = np.random.default_rng(0).random((16, 4))
    assert prompt_statistics(scores) == prompt_statistics(scores)
    assert prompt_statistics(scores) != prompt_statistics(scores, seed=43)


def test_one_sample_has_only_a_mean() -> None:
    assert prompt_statistics([[0.5], [1.0]]) == {"mean@1": 0.75}


def test_missing_scores_enter_nothing() -> None:
    found = prompt_statistics([[0.0, NAN], [1.0, 1.0], [NAN, NAN]])
    assert found["mean@2"] == 0.5
    assert found["best@2/mean"] == 0.5
    assert prompt_statistics([[NAN, NAN]]) == {}


def test_the_main_variable_at_full_size_is_core_and_the_rest_is_auxiliary() -> None:
    scores = [[0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0], [0.5, 0.5, 0.5, 0.5]]
    found = validation_metrics({"reward": scores, "jpeg_size": scores}, ["glyph", "glyph", "other"])
    assert found["val-core/glyph/reward/mean@4"] == 0.75
    assert "val-core/glyph/reward/best@4/mean" in found
    assert "val-aux/glyph/reward/best@2/mean" in found
    assert "val-aux/glyph/reward/worst@4/mean" in found
    assert "val-aux/glyph/jpeg_size/mean@4" in found
    assert found["val-core/other/reward/mean@4"] == 0.5
    assert not any(name.startswith("val-core/glyph/jpeg_size") for name in found)


def test_accuracy_is_the_main_variable_where_there_is_one() -> None:
    found = validation_metrics({"reward": [[1.0]], "acc": [[0.0]]}, ["glyph"])
    assert found["val-core/glyph/acc/mean@1"] == 0
    assert found["val-aux/glyph/reward/mean@1"] == 1


def test_missing_scores_are_counted() -> None:
    found = validation_metrics({"reward": [[1.0, NAN], [0.0, 0.0]]}, ["glyph", "glyph"])
    assert found["val-aux/glyph/reward/invalid_fraction"] == 0.25


def test_a_variable_needs_a_row_a_prompt() -> None:
    with pytest.raises(ValueError, match="3 prompts"):
        validation_metrics({"reward": [[1.0]]}, ["a", "b", "c"])


def test_a_constant_gain_has_an_interval_of_no_width() -> None:
    before = np.random.default_rng(0).random((128, 4))
    found = paired_bootstrap(before, before + 0.25)
    assert found.mean == pytest.approx(0.25)
    assert found.low == pytest.approx(0.25)
    assert found.high == pytest.approx(0.25)


def test_the_interval_is_that_of_the_mean_over_prompts() -> None:
    generator = np.random.default_rng(1)
    gains = generator.normal(0.1, 0.2, size=128)
    before = generator.random((128, 4))
    found = paired_bootstrap(before, before + gains[:, None])
    error = gains.std() / np.sqrt(128)
    assert found.low == pytest.approx(gains.mean() - 1.96 * error, abs=0.1 * error + 0.002)
    assert found.high == pytest.approx(gains.mean() + 1.96 * error, abs=0.1 * error + 0.002)


def test_pairing_takes_the_spread_between_prompts_out() -> None:
    generator = np.random.default_rng(2)
    before = generator.random((64, 1)).repeat(4, axis=1)
    found = paired_bootstrap(before, before + generator.normal(0.05, 0.01, size=(64, 4)))
    assert 0.04 < found.low < found.high < 0.06


def test_samples_of_a_prompt_are_not_independent_evidence() -> None:
    """Four equal samples of each prompt give the interval of one."""
    generator = np.random.default_rng(3)
    before, after = generator.random((2, 32, 1))
    assert paired_bootstrap(before, after) == paired_bootstrap(before.repeat(4, axis=1), after.repeat(4, axis=1))


def test_a_pair_needs_both_sides() -> None:
    found = paired_bootstrap([[0.0, NAN], [0.0, 0.0], [NAN, 1.0]], [[1.0, 9.0], [1.0, NAN], [5.0, NAN]])
    assert found.mean == 1.0
    with pytest.raises(ValueError, match="no sample"):
        paired_bootstrap([[NAN]], [[1.0]])
    with pytest.raises(ValueError, match="expected equal"):
        paired_bootstrap([[1.0]], [[1.0, 2.0]])
