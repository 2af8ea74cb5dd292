"""The control run: rewards permuted over the samples of a step."""

import torch

from verl_omni_core.stages.advantage import _shuffled


def test_shuffled_rewards_are_the_same_numbers_on_other_samples() -> None:
    scores, valid = torch.arange(96.0), torch.arange(96) % 7 > 0
    moved, still_valid = _shuffled(scores, valid, seed=43)
    assert moved.sort().values.equal(scores) and not moved.equal(scores)
    assert still_valid.equal(valid[moved.long()])


def test_each_step_has_an_order_of_its_own_that_repeats() -> None:
    scores, valid = torch.arange(96.0), torch.ones(96, dtype=torch.bool)
    first, again, other = (_shuffled(scores, valid, seed)[0] for seed in (43, 43, 44))
    assert first.equal(again) and not first.equal(other)
