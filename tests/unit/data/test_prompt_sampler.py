"""The prompts of a step follow from seed and step alone."""

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from verl_omni_core.data.prompt_sampler import epoch_order, rows_of_step

cases = {
    "seed": st.integers(0, 2**63 - 1),
    "rows": st.integers(1, 40),
    "per_step": st.integers(1, 60),
    "steps": st.integers(1, 12),
    "shuffle": st.booleans(),
}


def draw(seed: int, step: int, rows: int, per_step: int, shuffle: bool) -> list:
    return rows_of_step(seed, step, dataset_rows=rows, prompts_per_step=per_step, shuffle=shuffle)


@settings(max_examples=1000, deadline=None)
@given(**cases)
def test_each_row_comes_once_an_epoch_however_steps_straddle_epochs(seed, rows, per_step, steps, shuffle):
    drawn = [prompt for step in range(1, steps + 1) for prompt in draw(seed, step, rows, per_step, shuffle)]
    assert len(drawn) == steps * per_step
    assert [prompt.epoch for prompt in drawn] == [position // rows for position in range(len(drawn))]
    for epoch in range(len(drawn) // rows):
        assert sorted(p.dataset_row for p in drawn[epoch * rows : (epoch + 1) * rows]) == list(range(rows))


@settings(max_examples=1000, deadline=None)
@given(**cases)
def test_a_resumed_run_draws_what_an_undisturbed_one_would_have(seed, rows, per_step, steps, shuffle):
    undisturbed = [draw(seed, step, rows, per_step, shuffle) for step in range(1, steps + 1)]
    epoch_order.cache_clear()  # a new process
    assert draw(seed, steps, rows, per_step, shuffle) == undisturbed[-1]
    assert draw(seed, 1, rows, per_step, shuffle) == undisturbed[0]


@settings(max_examples=1000, deadline=None)
@given(**cases)
def test_row_and_occurrence_name_a_group_of_a_step_uniquely(seed, rows, per_step, steps, shuffle):
    prompts = draw(seed, steps, rows, per_step, shuffle)
    assert len({(prompt.dataset_row, prompt.occurrence) for prompt in prompts}) == per_step
    counts = Counter(prompt.dataset_row for prompt in prompts)
    for row, count in counts.items():
        assert [p.occurrence for p in prompts if p.dataset_row == row] == list(range(count))


def test_the_number_of_prompts_a_step_does_not_change_their_order():
    by_three = [p.dataset_row for step in (1, 2, 3, 4) for p in draw(5, step, 7, 3, True)]
    by_four = [p.dataset_row for step in (1, 2, 3) for p in draw(5, step, 7, 4, True)]
    assert by_three == by_four


def test_without_shuffling_rows_come_in_the_order_of_the_file():
    assert [p.dataset_row for p in draw(5, 2, 5, 4, False)] == [4, 0, 1, 2]


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {tuple(epoch_order(seed, epoch, 30).tolist()) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_every_place_is_equally_likely():
    first = Counter(int(epoch_order(seed, 0, 4)[0]) for seed in range(2000))
    assert all(abs(count - 500) < 100 for count in first.values())  # five standard deviations


def test_the_order_is_the_same_in_every_version():
    assert epoch_order(42, 0, 8).tolist() == GOLDEN
    with pytest.raises(ValueError, match=r"read-only"):
        epoch_order(42, 0, 8)[0] = 1


GOLDEN = [5, 4, 1, 0, 7, 6, 2, 3]


@pytest.mark.parametrize("bad", [{"step": 0}, {"dataset_rows": 0}, {"prompts_per_step": 0}, {"seed": -1}])
def test_an_impossible_request_is_refused(bad):
    good = {"seed": 1, "step": 1, "dataset_rows": 2, "prompts_per_step": 2}
    with pytest.raises(ValueError, match=r"at least"):
        rows_of_step(**{**good, **bad})
