"""Advantages by hand, and what holds for any rewards."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from verl_omni_core.algorithms._advantages import gdpo_advantages, group_advantages

REWARDS = torch.tensor([1.0, 2.0, 3.0, 4.0, 6.0, 2.0])
GROUPS = torch.tensor([0, 0, 0, 1, 1, 1])
MODES = [
    {"normalize_std": True, "global_std": True},
    {"normalize_std": True, "global_std": False},
    {"normalize_std": False, "global_std": True},
]


def valid(rewards: Tensor) -> Tensor:
    return torch.ones(len(rewards), dtype=torch.bool)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    groups = torch.tensor([group for group, size in enumerate(sizes) for _ in range(size)]) * 3 + 1
    values = draw(st.lists(st.floats(-10, 10, width=32), min_size=len(groups), max_size=len(groups)))
    return torch.tensor(values), groups


def test_the_spread_of_the_batch_by_hand() -> None:
    # means 2 and 4, unbiased spread of the six rewards sqrt(16/5)
    found = group_advantages(REWARDS, GROUPS, valid(REWARDS))
    expected = torch.tensor([-1.0, 0.0, 1.0, 0.0, 2.0, -2.0]) / (3.2**0.5 + 1e-4)
    torch.testing.assert_close(found, expected)


def test_the_spread_of_the_group_by_hand() -> None:
    # unbiased spreads 1 and 2
    found = group_advantages(REWARDS, GROUPS, valid(REWARDS), global_std=False)
    expected = torch.tensor([-1.0, 0.0, 1.0, 0.0, 2.0, -2.0]) / torch.tensor([1.0001] * 3 + [2.0001] * 3)
    torch.testing.assert_close(found, expected)


def test_without_a_spread_the_group_mean_is_subtracted() -> None:
    found = group_advantages(REWARDS, GROUPS, valid(REWARDS), normalize_std=False)
    assert found.tolist() == [-1.0, 0.0, 1.0, 0.0, 2.0, -2.0]


def test_the_population_spread_by_hand() -> None:
    found = group_advantages(REWARDS[:3], GROUPS[:3], valid(REWARDS[:3]), global_std=False, std_ddof=0)
    torch.testing.assert_close(found[2].item(), 1 / ((2 / 3) ** 0.5 + 1e-4), rtol=1e-6, atol=0)


@pytest.mark.parametrize("mode", MODES)
def test_singleton_group_has_zero_advantage(mode: dict[str, bool]) -> None:
    found = group_advantages(
        torch.tensor([5.0, 1.0, 2.0]), torch.tensor([9, 4, 4]), torch.ones(3, dtype=torch.bool), **mode
    )
    assert found[0] == 0
    assert found[1] < 0 < found[2]


@pytest.mark.parametrize("mode", MODES)
def test_a_group_of_equal_rewards_has_exactly_zero_advantages(mode: dict[str, bool]) -> None:
    """Also where the mean of equal numbers is not that number: 0.1 three times."""
    rewards = torch.tensor([0.1, 0.1, 0.1, 0.7, 0.2])
    found = group_advantages(rewards, torch.tensor([0, 0, 0, 1, 1]), valid(rewards), std_epsilon=1e-12, **mode)
    assert found[:3].tolist() == [0.0, 0.0, 0.0]
    assert (found[3:] != 0).all()


@pytest.mark.parametrize("mode", MODES)
def test_a_group_with_one_valid_row_contributes_nothing(mode: dict[str, bool]) -> None:
    rewards = torch.tensor([5.0, float("nan"), 1.0, 2.0])
    found = group_advantages(rewards, torch.tensor([0, 0, 1, 1]), rewards.isfinite(), **mode)
    assert found[:2].tolist() == [0.0, 0.0]
    assert found.isfinite().all()


def test_a_batch_without_any_valid_row_is_all_zero() -> None:
    rewards = torch.full((3,), float("nan"))
    assert group_advantages(rewards, torch.tensor([0, 0, 1]), rewards.isfinite()).tolist() == [0.0, 0.0, 0.0]


def test_a_valid_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rows \[1\] are not finite"):
        group_advantages(torch.tensor([1.0, float("inf")]), torch.tensor([0, 0]), torch.ones(2, dtype=torch.bool))


def test_reward_columns_are_refused() -> None:
    with pytest.raises(ValueError, match="combine reward columns"):
        group_advantages(torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64), torch.ones(3, dtype=torch.bool))


def test_near_equal_rewards_keep_their_differences() -> None:
    rewards = torch.tensor([1000.0, 1000.0 + 2**-13, 1000.0, 1000.0 + 2**-13])
    found = group_advantages(rewards, torch.zeros(4, dtype=torch.int64), valid(rewards), normalize_std=False)
    assert found.abs().tolist() == [2**-14] * 4


@pytest.mark.parametrize("mode", MODES)
@settings(deadline=None, max_examples=60)
@given(batches())
def test_advantages_of_a_group_add_up_to_zero(mode: dict[str, bool], batch: tuple[Tensor, Tensor]) -> None:
    rewards, groups = batch
    found = group_advantages(rewards, groups, valid(rewards), **mode).double()
    for group in groups.unique():
        assert abs(found[groups == group].sum()) <= 1e-5 * max(1.0, found.abs().max())


@pytest.mark.parametrize("mode", MODES)
@settings(deadline=None, max_examples=60)
@given(batches(), st.randoms(use_true_random=False))
def test_shuffled_rows_have_the_same_advantages(mode: dict[str, bool], batch: tuple[Tensor, Tensor], random) -> None:
    rewards, groups = batch
    order = list(range(len(rewards)))
    random.shuffle(order)
    shuffled = group_advantages(rewards[order], groups[order], valid(rewards), **mode)
    torch.testing.assert_close(shuffled, group_advantages(rewards, groups, valid(rewards), **mode)[order])


@pytest.mark.parametrize("global_std", [False])
@settings(deadline=None, max_examples=60)
@given(batches(), st.integers(-64, 64))
def test_a_constant_added_to_a_group_changes_nothing(
    global_std: bool, batch: tuple[Tensor, Tensor], shift: int
) -> None:
    """Under the spread of the batch this holds for the mean, not for the divisor."""
    rewards, groups = batch
    rewards = (rewards * 16).round() / 16  # so that the sum is exact
    moved = torch.where(groups == groups[0], rewards + shift, rewards)
    for options in ({"global_std": global_std}, {"normalize_std": False}):
        torch.testing.assert_close(
            group_advantages(moved, groups, valid(rewards), **options),
            group_advantages(rewards, groups, valid(rewards), **options),
        )


@pytest.mark.parametrize("mode", MODES)
@settings(deadline=None, max_examples=60)
@given(batches(), st.data())
def test_invalid_rows_change_no_other_advantage(mode: dict[str, bool], batch: tuple[Tensor, Tensor], data) -> None:
    rewards, groups = batch
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(rewards), max_size=len(rewards))))
    spoiled = torch.where(mask, rewards, float("nan"))
    found = group_advantages(spoiled, groups, mask, **mode)
    assert (found[~mask] == 0).all()
    torch.testing.assert_close(found[mask], group_advantages(rewards[mask], groups[mask], valid(rewards[mask]), **mode))


def test_gdpo_of_one_reward_is_its_group_score_over_the_spread_of_all_scores() -> None:
    groups = torch.tensor([0, 0, 1, 1])
    found = gdpo_advantages(
        torch.tensor([[0.0, 1.0, 0.0, 5.0]]), torch.tensor([3.0]), groups, torch.ones(4, dtype=torch.bool)
    )
    torch.testing.assert_close(found, torch.tensor([-1.0, 1.0, -1.0, 1.0]))


def test_gdpo_needs_a_weight_a_reward() -> None:
    with pytest.raises(ValueError, match="weights"):
        gdpo_advantages(torch.zeros(2, 3), torch.ones(3), torch.zeros(3, dtype=torch.int64), torch.ones(3).bool())
