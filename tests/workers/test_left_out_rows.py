"""Rows that failed or were left out, padding too, have no part in the gradient: as if they had never been drawn."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.unit.training import tiny
from tests.workers.committed_step import PACK, commit_step
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.training.ppo_engine import PPODiffusersFSDPEngine
from verl_omni_core.workers.step_rows import StepRows

CONDITIONING = ("prompt_embeds", "pooled_prompt_embeds")
ALL = list(range(tiny.ROWS))
left_out = st.lists(st.integers(0, tiny.ROWS - 1), max_size=tiny.ROWS - 1, unique=True)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-sd3")
    tiny.ADAPTER.build_tiny(str(folder), seed=0)
    return folder


@pytest.fixture(scope="module")
def engine(pipeline: Path) -> Iterator[PPODiffusersFSDPEngine]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = tiny.engine(pipeline, micro_batch=4)
    tiny.stir(made)
    yield made
    torch.set_num_threads(threads)


def rows(folder: Path, pipeline: Path, invalid: list[int], lost: list[int]) -> StepRows:
    root = folder / f"run-{len(list(folder.iterdir()))}"
    samples, advantages = commit_step(root, pipeline, 1, invalid=tuple(invalid), lost=tuple(lost))
    return StepRows(RunStore(root), samples, conditioning=CONDITIONING, pack_size=PACK, advantages=advantages)


def gradient(engine: PPODiffusersFSDPEngine, batch) -> tuple[dict[str, torch.Tensor], float, dict[str, float]]:
    engine.optimizer_zero_grad()
    result = engine.forward_backward_batch(batch, tiny.policy_gradient())
    return tiny.gradients(engine), result.pairs, result.metrics.result()


@pytest.mark.parametrize("micro_batch", [1, 4, 2 * tiny.ROWS])
@given(invalid=left_out, lost=left_out)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_that_are_left_out_or_were_never_drawn_change_no_bit_of_the_gradient(
    engine, pipeline, tmp_path, micro_batch, invalid, lost
):
    kept = [i for i in ALL if i not in invalid and i not in lost]
    assume(kept and len(lost) < tiny.ROWS)
    engine.training = engine.training.model_copy(update={"micro_batch": micro_batch})
    with_gaps = rows(tmp_path, pipeline, invalid, lost).batch(ALL)
    found, pairs, metrics = gradient(engine, with_gaps)
    expected, expected_pairs, expected_metrics = gradient(engine, rows(tmp_path, pipeline, [], []).batch(kept))
    assert pairs == expected_pairs == 2 * len(kept)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    assert metrics == expected_metrics and max(float(g.abs().max()) for g in found.values()) > 0


@given(invalid=left_out, ranks=st.integers(1, 4))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_ranks_share_each_row_that_counts_once_and_pad_with_weight_0(pipeline, tmp_path, invalid, ranks):
    kept = [i for i in ALL if i not in invalid]
    table = rows(tmp_path, pipeline, invalid, [])
    batches = [table.batch(ALL, rank, ranks)["rows"] for rank in range(ranks)]
    assert all(len(batch) > 0 for batch in batches)
    counted = [int(i) for b in batches for i, w in zip(b["sample_index"], b["weight"], strict=True) if w > 0]
    assert counted == kept
    assert sum(float(batch["weight"].sum()) for batch in batches) == len(kept)
    assert all(torch.isfinite(batch["advantages"]).all() for batch in batches)


@given(invalid=left_out, ranks=st.integers(2, 4))
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_mean_over_the_rows_of_all_ranks_is_that_over_the_rows_that_count(
    engine, pipeline, tmp_path, invalid, ranks
):
    engine.training = engine.training.model_copy(update={"micro_batch": 4})
    table = rows(tmp_path, pipeline, invalid, [])
    whole, pairs, _ = gradient(engine, table.batch(ALL))
    parts = [gradient(engine, table.batch(ALL, rank, ranks)) for rank in range(ranks)]
    for name, expected in whole.items():
        added = sum(found[name] * own for found, own, _ in parts if own) / pairs
        assert torch.allclose(added, expected, atol=1e-5 * float(expected.norm()))
