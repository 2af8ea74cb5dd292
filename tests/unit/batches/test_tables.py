"""Tables keep the promises of their schemas."""

import pyarrow as pa
import pytest
import torch

from verl_omni_core.batches.schema import (
    SCHEMAS,
    FileMetadata,
    Jagged,
    Tensors,
    check_schema,
    metadata_of,
    schema_label,
    with_metadata,
)
from verl_omni_core.batches.tables import build_table, read_jagged, read_tensor
from verl_omni_core.errors import ContractError


def identity(rows: int) -> dict:
    return {
        "sample_index": torch.arange(rows),
        "sample_id": [f"s{i}" for i in range(rows)],
        "uid": ["u"] * rows,
        "session": list(range(rows)),
    }


def advantages(**changes) -> dict:
    values = {"score": [0.5, 1.0], "group_mean": [0.75] * 2, "group_std": [0.25] * 2, "advantage": [-1.0, 1.0]}
    return {**identity(2), **values, "estimator": ["grpo"] * 2, **changes}


def trajectories(rows: int, **changes) -> dict:
    scalars = {
        "prompt_key": ["k"] * rows, "seed": [2**62] * rows, "status": ["ok"] * rows, "attempts": [1] * rows,
        "replica": ["r0"] * rows, "min_version": [3] * rows, "max_version": [3] * rows, "num_turns": [1] * rows,
        "num_preempted": [-1] * rows, "t_generate_s": [0.5] * rows, "t_tool_s": [0.0] * rows,
        "t_score_s": [0.0] * rows,
    }  # fmt: skip
    tensors = {"all_latents": torch.randn(rows, 3, 8, 4, 2), "all_timesteps": torch.rand(rows, 2)}
    return {**identity(rows), **scalars, **tensors, **changes}


def filler(name: str, kind: object, rows: int) -> object:
    """Some legal values for a column."""
    if isinstance(kind, Tensors):
        return torch.zeros(rows, 2, dtype=getattr(torch, kind.dtype or "bfloat16"))
    if isinstance(kind, Jagged):
        return [torch.ones(i, 3).to(getattr(torch, kind.dtype or "bfloat16")) for i in range(rows)]
    samples = {"int64": 7, "int32": 7, "float": 0.5, "double": 0.5, "bool": True, "string": "x"}
    samples["fixed_size_binary[32]"] = b"x" * 32
    if pa.types.is_dictionary(kind):
        return ["x"] * rows
    if pa.types.is_timestamp(kind):
        return [1_700_000_000_000_000] * rows
    if pa.types.is_nested(kind):
        return [[]] * rows
    return [samples[str(kind)]] * rows


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_schema_can_be_built_stored_and_read(name):
    columns = {column.name: filler(column.name, column.type, 3) for column in SCHEMAS[name].columns}
    table = build_table(name, columns)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    back = pa.ipc.open_file(sink.getvalue()).read_all()
    check_schema(back, name)
    assert schema_label(back.schema) == SCHEMAS[name].label
    assert back.equals(table, check_metadata=True)


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_schema_refuses_a_table_without_a_required_column(name):
    columns = {column.name: filler(column.name, column.type, 2) for column in SCHEMAS[name].columns}
    lost = next(column.name for column in SCHEMAS[name].columns if column.required)
    del columns[lost]
    with pytest.raises(ContractError, match=lost):
        build_table(name, columns)


def test_a_table_without_rows_is_legal():
    table = build_table("advantages", {name: [] for name in advantages()})
    assert table.num_rows == 0
    check_schema(table, "advantages")


def test_latents_keep_their_bits_and_their_dimension_names():
    columns = trajectories(2)
    table = build_table("trajectories", columns)
    assert table.schema.field("all_latents").type.dim_names == ["step", "channel", "height", "width"]
    assert torch.equal(read_tensor(table, "all_latents"), columns["all_latents"])
    assert table["seed"].to_pylist() == [2**62] * 2


def test_a_trajectory_in_bfloat16_is_refused_because_it_would_bias_the_ratio():
    with pytest.raises(ContractError, match=r"all_latents.*bfloat16.*float32"):
        build_table("trajectories", trajectories(2, all_latents=torch.zeros(2, 3, 8, 4, 2).bfloat16()))


def test_an_embedding_is_stored_in_its_own_dtype_without_padding():
    rows = [torch.randn(n, 4).bfloat16() for n in (3, 0, 5)]
    columns = {"prompt_key": list("abc"), "encoder_digest": ["d"] * 3, "prompt_embeds": rows,
               "prompt_embeds_len": [3, 0, 5]}  # fmt: skip
    table = build_table("embeddings", columns)
    assert all(torch.equal(a, b) for a, b in zip(read_jagged(table, "prompt_embeds"), rows, strict=True))


def test_a_column_beyond_the_schema_is_kept():
    table = build_table("advantages", advantages(note=["a", "b"], margin=torch.ones(2, 3)))
    assert table["note"].to_pylist() == ["a", "b"]
    assert read_tensor(table, "margin").shape == (2, 3)


def test_a_missing_score_stays_missing_and_a_nan_stays_a_nan():
    columns = {**identity(3), "rm_score": [0.5, None, float("nan")], "valid": [True, False, False]}
    table = build_table("reward_summary", columns)
    assert table["rm_score"].null_count == 1
    assert table["rm_score"][2].as_py() != table["rm_score"][2].as_py()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"score": [0.5]}, "different lengths"),
        ({"estimator": ["grpo", None]}, "estimator.*1 missing"),
        ({"score": ["high", "low"]}, "score"),
        ({"session": [2**40, 0]}, "session"),
        ({"is_weights": torch.ones(2, 2).double()}, "is_weights.*float64.*float32"),
        ({"is_weights": [1.0, 2.0]}, "is_weights.*expected a tensor"),
    ],
)
def test_a_value_that_breaks_the_schema_is_refused_with_its_column(changes, says):
    with pytest.raises(ContractError, match=says):
        build_table("advantages", advantages(**changes))


def test_a_reader_takes_any_minor_version_and_refuses_another_major_one():
    table = build_table("advantages", advantages())
    for version in ("1.0", "1.7"):
        check_schema(
            table.replace_schema_metadata({"schema_id": "advantages", "schema_version": version}), "advantages"
        )
    with pytest.raises(ContractError, match=r"version 2\.0"):
        check_schema(table.replace_schema_metadata({"schema_id": "advantages", "schema_version": "2.0"}), "advantages")


def test_a_reader_refuses_another_table_and_one_without_an_id():
    table = build_table("advantages", advantages())
    with pytest.raises(ContractError, match=r"expected a table of schema rewards/1.0, got advantages/1.0"):
        check_schema(table, "rewards")
    with pytest.raises(ContractError, match=r"without a schema id"):
        check_schema(table.replace_schema_metadata(None), "advantages")


def test_the_origin_of_a_file_is_in_its_schema():
    origin = FileMetadata(run_id="r", step=3, stage="advantage", shard=1, attempt_id="000002-ab", fence_epoch=2,
                          config_digest="c", code_version="0.1.0", weights_version=4, parents=("p", "q"),
                          row_order="sample_index")  # fmt: skip
    table = with_metadata(build_table("advantages", advantages()), "advantages", origin)
    assert metadata_of(table.schema) == origin
    with pytest.raises(ContractError, match=r"run_id"):
        metadata_of(pa.schema([]))
