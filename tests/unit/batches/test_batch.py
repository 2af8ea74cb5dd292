"""DataProto: rows as tensors and objects, joined and stored without knowledge of the model."""

import pickle

import numpy as np
import pyarrow as pa
import pytest
import torch

from verl_omni_core.batches.batch import DataProto
from verl_omni_core.batches.tables import build_table
from verl_omni_core.errors import ContractError


def some(rows: int = 3, *, start: int = 0, **meta) -> DataProto:
    tensors = {
        "sample_index": torch.arange(start, start + rows),
        "latents": torch.arange(rows * 4, dtype=torch.float32).reshape(rows, 2, 2) + start,
        "half": torch.full((rows, 2), 1.5, dtype=torch.bfloat16),
        "valid": torch.ones(rows, dtype=torch.bool),
        "embeds": [torch.full((i, 3), float(i)) for i in range(rows)],
    }
    objects = {"uid": [f"u{i}" for i in range(rows)], "extra": [{"k": i} if i else None for i in range(rows)]}
    return DataProto.from_dict(tensors, {**objects, "count": list(range(rows))}, meta)


def assert_equal(a: DataProto, b: DataProto) -> None:
    a.union(b)  # raises unless shared columns are equal bit for bit
    assert set(a.batch.keys()) == set(b.batch.keys())
    assert a.non_tensor_batch.keys() == b.non_tensor_batch.keys()
    assert a.meta_info == b.meta_info


def test_a_batch_survives_arrow_and_pickle():
    batch = some(validate=True, sampling={"steps": 10})
    assert_equal(DataProto.from_arrow(batch.to_arrow()), batch)
    assert_equal(pickle.loads(pickle.dumps(batch)), batch)


def test_an_empty_batch_survives_arrow_with_its_columns():
    empty = some().select_rows([])
    back = DataProto.from_arrow(empty.to_arrow())
    assert len(back) == 0
    assert back.batch["embeds"].shape[2] == 3


def test_batches_of_several_workers_concatenate_in_order():
    whole = DataProto.concat([some(2, start=0), some(1, start=2), some(3, start=3)])
    assert whole.batch["sample_index"].tolist() == list(range(6))
    assert [len(row) for row in whole.batch["embeds"].unbind()] == [0, 1, 0, 0, 1, 2]
    assert whole.non_tensor_batch["uid"].tolist() == ["u0", "u1", "u0", "u0", "u1", "u2"]


def test_concatenating_its_parts_gives_a_batch_back():
    batch = some(5)
    assert_equal(DataProto.concat([batch.select_rows(slice(0, 2)), batch.select_rows(np.array([2, 3, 4]))]), batch)


def test_metrics_are_joined_and_other_meta_values_must_agree():
    joined = DataProto.concat([some(metrics=[1], version=3), some(metrics=[2, 3], version=3)])
    assert joined.meta_info == {"metrics": [1, 2, 3], "version": 3}
    with pytest.raises(ContractError, match=r"meta_info\['version'\].*3 and 4"):
        DataProto.concat([some(version=3), some(version=4)])


def test_batches_that_do_not_fit_are_not_concatenated():
    with pytest.raises(ContractError, match=r"at least one"):
        DataProto.concat([])
    narrow = DataProto.from_dict({"x": torch.zeros(1, 2)})
    with pytest.raises(ContractError, match=r"batch 1 has other columns"):
        DataProto.concat([narrow, DataProto.from_dict({"y": torch.zeros(1, 2)})])
    with pytest.raises(ContractError, match=r"'x' has rows of different form"):
        DataProto.concat([narrow, DataProto.from_dict({"x": torch.zeros(1, 3)})])


@pytest.mark.parametrize("index", [[2, 0], np.array([2, 0]), torch.tensor([2, 0])])
def test_rows_are_selected_in_the_order_asked_for(index):
    picked = some().select_rows(index)
    assert picked.batch["sample_index"].tolist() == [2, 0]
    assert [len(row) for row in picked.batch["embeds"].unbind()] == [2, 0]
    assert picked.non_tensor_batch["count"].tolist() == [2, 0]


def test_rows_are_selected_by_a_mask():
    assert some().select_rows([True, False, True]).non_tensor_batch["uid"].tolist() == ["u0", "u2"]


def test_union_joins_columns_and_refuses_two_values_of_one():
    batch = some()
    joined = batch.union(DataProto.from_dict({"advantage": torch.ones(3)}, {"uid": ["u0", "u1", "u2"]}))
    assert "advantage" in joined.batch.keys()  # noqa: SIM118
    with pytest.raises(ContractError, match=r"'uid'"):
        batch.union(DataProto.from_dict({}, {"uid": ["u0", "u1", "x"]}))
    with pytest.raises(ContractError, match=r"3 rows and of 2 rows"):
        batch.union(some(2))


def test_a_column_of_the_wrong_length_is_refused():
    with pytest.raises(ContractError, match=r"different numbers of rows"):
        DataProto.from_dict({"a": torch.zeros(2)}, {"b": [1]})


def test_an_object_that_json_cannot_hold_is_refused_by_name():
    with pytest.raises(ContractError, match=r"'fn'"):
        DataProto.from_dict({}, {"fn": [print]}).to_arrow()


def table(name: str, indices: list[int], **columns) -> pa.Table:
    rows = len(indices)
    fixed = {
        "sample_index": indices,
        "sample_id": [str(i) for i in indices],
        "uid": ["u"] * rows,
        "session": [0] * rows,
    }
    return build_table(name, {**fixed, **columns})


def test_tables_are_joined_by_sample_and_embeddings_spread_from_prompts_to_samples():
    requests = table("requests", [0, 1, 2], prompt_key=["a", "b", "a"], seed=[1, 2, 3], sampling_json=["{}"] * 3,
                     validate=[False] * 3, wanted_version=[0] * 3, priority=[0, 1, 2])  # fmt: skip
    logprobs = table("logprobs", [2, 0, 1], weights_version=[5] * 3, old_log_probs=torch.tensor([[2.0], [0.0], [1.0]]))
    embeddings = build_table("embeddings", {
        "prompt_key": ["b", "a"], "encoder_digest": ["d"] * 2, "prompt_embeds_len": [1, 2],
        "prompt_embeds": [torch.ones(1, 3), torch.zeros(2, 3)], "pooled_prompt_embeds": torch.tensor([[9.0], [8.0]]),
    })  # fmt: skip
    batch = DataProto.from_arrow(requests, logprobs, embeddings)
    assert batch.batch["old_log_probs"].flatten().tolist() == [0, 1, 2]
    assert [len(row) for row in batch.batch["prompt_embeds"].unbind()] == [2, 1, 2]
    assert batch.batch["pooled_prompt_embeds"].flatten().tolist() == [8, 9, 8]
    assert batch.non_tensor_batch["prompt_key"].tolist() == ["a", "b", "a"]


def test_a_row_without_a_counterpart_or_with_two_is_an_error():
    first = table("logprobs", [0, 1], weights_version=[0, 0], old_log_probs=torch.zeros(2, 1))
    for indices, says in (([0], "1 rows have no counterpart"), ([0, 0, 1], "several rows")):
        rows = len(indices)
        other = table("reference", indices, ref_digest=["x"] * rows, ref_log_prob=torch.zeros(rows, 1))
        with pytest.raises(ContractError, match=says):
            DataProto.from_arrow(first, other)


def test_a_batch_over_stored_memory_refuses_writes_unless_copied():
    stored = some().to_arrow()
    with pytest.raises(ContractError, match=r"read-only"):
        DataProto.from_arrow(stored, copy=False).batch["latents"].zero_()
    DataProto.from_arrow(stored).batch["latents"].zero_()
    assert DataProto.from_arrow(stored).batch["latents"].sum() == 66
