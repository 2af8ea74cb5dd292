"""Reductions do not depend on how rows were batched."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_omni_core.metrics.reduce import Accumulator, reduce_rows


def collected(*pieces: list[float], name: str = "actor/ratio_mean") -> float:
    total = Accumulator()
    for piece in pieces:
        total.add({name: torch.tensor(piece)})
    return total.result()[name]


def test_an_uneven_last_micro_batch_weighs_by_its_rows() -> None:
    assert collected([1.0, 2.0, 3.0], [10.0]) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("actor/ratio_mean", 4.0),
        ("actor/ratio_std", math.sqrt(50 / 3)),
        ("critic/rewards/max", 10.0),
        ("critic/rewards/min", 1.0),
        ("actor/skipped_steps", 16.0),
        ("actor/lr", 10.0),
        ("somebody/elses", 4.0),
    ],
)
def test_each_metric_reduces_as_declared(name: str, expected: float) -> None:
    assert collected([1.0, 2.0], [3.0, 10.0], name=name) == pytest.approx(expected)


def test_the_spread_of_one_row_is_zero() -> None:
    assert collected([1.5], name="actor/ratio_std") == 0


def test_a_spread_of_1e_minus_5_around_1_survives() -> None:
    rows = torch.tensor([1.0 + 1e-5, 1.0 - 1e-5] * 500, dtype=torch.float64)
    total = Accumulator()
    for piece in rows.split(7):
        total.add({"actor/ratio_std": piece})
    assert total.result()["actor/ratio_std"] == pytest.approx(rows.std().item(), rel=1e-9)


def test_rows_of_weight_0_count_nowhere() -> None:
    total = Accumulator()
    total.add({"critic/rewards/max": torch.tensor([1.0, float("nan"), 2.0])}, weights=torch.tensor([1.0, 0.0, 1.0]))
    assert total.result() == {"critic/rewards/max": 2.0}
    total.add({"actor/ppo_kl": torch.tensor([1.0])}, weights=torch.tensor([0.0]))
    assert "actor/ppo_kl" not in total.result()


def test_numbers_count_as_one_row_beside_weighted_rows() -> None:
    total = Accumulator()
    total.add({"actor/grad_norm": 2.0, "actor/ppo_kl": torch.tensor([1.0, 5.0])}, weights=torch.tensor([1.0, 0.0]))
    total.add({"actor/grad_norm": 4.0})
    assert total.result() == {"actor/grad_norm": 3.0, "actor/ppo_kl": 1.0}


def test_states_of_ranks_cross_as_json_and_merge() -> None:
    ranks = []
    for piece in ([1.0, 2.0, 3.0], [10.0]):
        rank = Accumulator()
        rank.add({"actor/ratio_mean": torch.tensor(piece), "actor/ratio_std": torch.tensor(piece)})
        ranks.append(json.loads(json.dumps(rank.state())))
    total = Accumulator()
    for state in ranks:
        total.merge(state)
    assert total.result()["actor/ratio_mean"] == pytest.approx(4.0)
    assert total.result()["actor/ratio_std"] == pytest.approx(math.sqrt(50 / 3))


def test_a_nan_is_not_hidden() -> None:
    assert math.isnan(collected([1.0, float("nan")]))


def test_weights_must_match_rows() -> None:
    with pytest.raises(ValueError, match="2 rows and 3 weights"):
        Accumulator().add({"actor/ppo_kl": torch.zeros(2)}, weights=torch.ones(3))
    with pytest.raises(ValueError, match="no row counts"):
        reduce_rows(torch.zeros(2), "mean", torch.zeros(2))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-100, 100), min_size=2, max_size=20), st.integers(1, 19))
def test_any_cut_gives_one_result(values: list[float], cut: int) -> None:
    cut = min(cut, len(values) - 1)
    for reduction, name in (("mean", "actor/ratio_mean"), ("std", "actor/ratio_std"), ("max", "critic/rewards/max")):
        whole = reduce_rows(torch.tensor(values, dtype=torch.float64), reduction)
        total = Accumulator()
        for piece in (values[:cut], values[cut:]):
            total.add({name: torch.tensor(piece, dtype=torch.float64)})
        assert total.result()[name] == pytest.approx(whole, rel=1e-9, abs=1e-9)
