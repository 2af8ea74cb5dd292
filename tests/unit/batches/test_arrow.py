"""Tensors become Arrow columns and come back bit for bit."""

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings

from verl_omni_core.batches.arrow import (
    any_shape_column,
    any_shape_tensors,
    column_list,
    column_tensor,
    is_jagged,
    is_tensor,
    jagged_column,
    tensor_column,
)
from verl_omni_core.errors import ContractError

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bit pattern: NaN payloads, infinities, subnormals and -0.0 among them."""
    rng = np.random.default_rng(seed)
    if dtype == torch.bool:
        return torch.from_numpy(rng.integers(0, 2, shape).astype(bool))
    tensor = torch.empty(shape, dtype=dtype)
    if tensor.numel():
        raw = rng.integers(0, 256, tensor.numel() * tensor.element_size(), dtype=np.uint8)
        tensor.view(-1).view(torch.uint8).copy_(torch.from_numpy(raw))
    return tensor


def bits(tensor: torch.Tensor) -> tuple:
    raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return tensor.dtype, tuple(tensor.shape), raw


def through_a_file(table: pa.Table) -> pa.Table:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return pa.ipc.open_file(sink.getvalue()).read_all()


shapes = st.lists(st.integers(0, 4), min_size=0, max_size=4)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(0, 6), shapes, st.integers(0, 2**32), st.booleans(), st.data())
def test_a_fixed_shape_column_round_trips_bit_for_bit_also_through_a_file_and_a_slice(
    dtype, rows, shape, seed, copy, data
):
    tensor = random_bits((rows, *shape), dtype, seed)
    field, array = tensor_column("x", tensor)
    table = through_a_file(pa.Table.from_arrays([array], schema=pa.schema([field])))
    start = data.draw(st.integers(0, rows))
    part = table.slice(start)
    back = column_tensor(part["x"], part.schema.field("x"), copy=copy)
    assert bits(back.clone()) == bits(tensor[start:])


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.lists(st.one_of(st.none(), st.integers(0, 5)), min_size=1, max_size=6),
    st.lists(st.integers(0, 3), max_size=2),
    st.integers(0, 2**32),
    st.booleans(),
    st.data(),
)
def test_a_jagged_column_round_trips_bit_for_bit_also_through_a_file_and_a_slice(
    dtype, lengths, rest, seed, copy, data
):
    rows = [None if n is None else random_bits((n, *rest), dtype, seed + i) for i, n in enumerate(lengths)]
    field, array = jagged_column("x", rows, rest=rest, dtype=dtype)
    table = through_a_file(pa.Table.from_arrays([array], schema=pa.schema([field])))
    start = data.draw(st.integers(0, len(rows)))
    part = table.slice(start)
    back = column_list(part["x"], part.schema.field("x"), copy=copy)
    assert [r if r is None else bits(r.clone()) for r in back] == [r if r is None else bits(r) for r in rows[start:]]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), shapes), min_size=1, max_size=5), st.integers(0, 2**32))
def test_a_column_of_any_shapes_round_trips_bit_for_bit(cells, seed):
    rows = [random_bits(tuple(shape), dtype, seed + i) for i, (dtype, shape) in enumerate(cells)]
    field, array = any_shape_column("x", rows)
    table = through_a_file(pa.Table.from_arrays([array], schema=pa.schema([field])))
    assert [bits(row) for row in any_shape_tensors(table["x"])] == [bits(row) for row in rows]


def test_minus_zero_and_nan_payloads_survive():
    payload = torch.tensor([0x7FC01234, -0x80000000], dtype=torch.int32).view(torch.float32)
    field, array = tensor_column("x", payload)
    assert column_tensor(array, field).view(torch.int32).tolist() == [0x7FC01234, -0x80000000]


def test_bfloat16_is_stored_as_its_sixteen_bits_with_the_dtype_in_the_field():
    field, array = tensor_column("x", torch.tensor([[1.0, -2.0]], dtype=torch.bfloat16), ["width"])
    assert field.type == pa.fixed_shape_tensor(pa.uint16(), [2], dim_names=["width"])
    assert field.metadata[b"torch_dtype"] == b"bfloat16"
    assert array.storage.flatten().to_pylist() == [0x3F80, 0xC000]


def test_bool_is_stored_as_a_byte_and_half_as_half():
    assert tensor_column("x", torch.tensor([True, False]))[1].to_pylist() == [1, 0]
    assert tensor_column("x", torch.zeros(1, dtype=torch.float16))[0].type == pa.float16()


def test_a_jagged_column_has_64_bit_offsets_and_says_its_shape():
    field, _ = jagged_column("x", [torch.zeros(2, 3, 4)])
    assert pa.types.is_large_list(field.type)
    assert field.type.value_type.list_size == 12
    assert field.metadata[b"ragged_shape"] == b'["*", 3, 4]'
    assert is_jagged(field)
    assert not is_tensor(field)


def test_a_column_shares_the_memory_of_its_tensor_and_a_view_that_of_its_column():
    tensor = torch.zeros(4, 3)
    field, array = tensor_column("x", tensor)
    assert array.storage.values.buffers()[1].address == tensor.data_ptr()
    view = column_tensor(array, field, copy=False)
    assert view.numpy().__array_interface__["data"][0] == tensor.data_ptr()


def test_a_non_contiguous_tensor_that_needs_a_gradient_is_stored_by_value():
    tensor = torch.arange(6.0).reshape(2, 3).t().requires_grad_()
    field, array = tensor_column("x", tensor)
    assert torch.equal(column_tensor(array, field), tensor.detach())


def test_chunks_of_a_column_are_joined_in_order():
    parts = [tensor_column("x", torch.full((n, 2), float(n))) for n in (1, 2)]
    column = pa.chunked_array([array for _, array in parts])
    assert column_tensor(column, parts[0][0]).tolist() == [[1, 1], [2, 2], [2, 2]]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: tensor_column("x", torch.zeros(())), "without dimensions"),
        (lambda: tensor_column("x", torch.zeros(1, dtype=torch.complex64)), "complex64 cannot be stored"),
        (lambda: tensor_column("x", torch.zeros(1, 2), ["a", "b"]), "2 dimension names"),
        (
            lambda: tensor_column("x", torch.zeros(1, 1, 1, dtype=torch.uint8).expand(1, 2**16, 2**15)),
            "2147483648 values",
        ),
        (lambda: jagged_column("x", [torch.zeros(1, 2), torch.zeros(1, 3)]), "row 1"),
        (lambda: jagged_column("x", [torch.zeros(1), torch.zeros(1).int()]), "row 1"),
        (lambda: jagged_column("x", []), "rest= and dtype="),
    ],
)
def test_what_cannot_be_a_column_is_refused_with_the_reason(make, says):
    with pytest.raises(ContractError, match=says):
        make()


def test_a_missing_tensor_in_a_fixed_shape_column_is_refused():
    kind = pa.fixed_shape_tensor(pa.float32(), [2])
    column = pa.ExtensionArray.from_storage(kind, pa.array([[1, 2], None], kind.storage_type))
    with pytest.raises(ContractError, match=r"1 missing tensors"):
        column_tensor(column, pa.field("x", kind))
