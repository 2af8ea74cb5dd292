"""Tensors as Arrow columns and back, bit for bit.

A row of a column is one sample. Dtypes that Arrow lacks (bfloat16, float8, and bool, which Arrow packs into bits)
travel as unsigned integers of their width; the field's metadata names the torch dtype, and both ways are views, never
casts, so NaN payloads and -0.0 survive.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from verl_omni_core.batches.read_only import read_only
from verl_omni_core.errors import ContractError

TORCH_DTYPE = b"torch_dtype"
RAGGED_SHAPE = b"ragged_shape"

_NATIVE = {
    torch.float64: pa.float64(),
    torch.float32: pa.float32(),
    torch.float16: pa.float16(),
    torch.int64: pa.int64(),
    torch.int32: pa.int32(),
    torch.int16: pa.int16(),
    torch.int8: pa.int8(),
    torch.uint64: pa.uint64(),
    torch.uint32: pa.uint32(),
    torch.uint16: pa.uint16(),
    torch.uint8: pa.uint8(),
}
_AS_BITS = {
    torch.bfloat16: torch.uint16,
    torch.bool: torch.uint8,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}
_LARGEST_ROW = 2**31 - 1
_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in (*_NATIVE, *_AS_BITS)}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that field metadata carries, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def value_type(dtype: torch.dtype) -> pa.DataType:
    """Return the Arrow type that holds the bits of ``dtype``.

    Raises:
        ContractError: a dtype without a representation, such as complex or quantized.
    """
    stored = _AS_BITS.get(dtype, dtype)
    if stored not in _NATIVE:
        raise ContractError(f"tensors of {dtype} cannot be stored; expected one of {', '.join(sorted(_BY_NAME))}")
    return _NATIVE[stored]


def dtype_of(field: pa.Field) -> torch.dtype:
    """Return the torch dtype of a tensor column: its metadata's, or that of its value type."""
    name = (field.metadata or {}).get(TORCH_DTYPE, b"").decode() or str(_innermost(field.type))
    name = {"float": "float32", "halffloat": "float16", "double": "float64"}.get(name, name)
    if name not in _BY_NAME:
        raise ContractError(f"column {field.name!r} of {field.type} holds no tensor; expected a numeric value type")
    return _BY_NAME[name]


def is_tensor(field: pa.Field) -> bool:
    """Say whether a column holds one tensor of one shape a row."""
    return isinstance(field.type, pa.FixedShapeTensorType) or (
        TORCH_DTYPE in (field.metadata or {}) and not is_jagged(field)
    )


def is_jagged(field: pa.Field) -> bool:
    """Say whether a column holds tensors that differ in their first dimension."""
    return RAGGED_SHAPE in (field.metadata or {})


def tensor_column(name: str, tensor: Tensor, dims: Sequence[str] | None = None) -> tuple[pa.Field, pa.Array]:
    """Make a column of ``tensor``'s rows, without a copy where the tensor is contiguous and on the CPU.

    Args:
        name: of the column.
        tensor: [N, ...]; [N] becomes a plain column. It must not change while the column lives.
        dims: names of the dimensions after the first.
    Raises:
        ContractError: no row dimension, a dtype that cannot be stored, or a wrong number of names.
    """
    if tensor.ndim == 0:
        raise ContractError(f"column {name!r}: got a tensor without dimensions; expected one row a sample, [N, ...]")
    if dims is not None and len(dims) != tensor.ndim - 1:
        raise ContractError(
            f"column {name!r}: {len(dims)} dimension names {list(dims)} for rows of shape "
            f"{tuple(tensor.shape[1:])}; give one for each"
        )
    rows, shape = tensor.shape[0], list(tensor.shape[1:])
    if math.prod(shape) > _LARGEST_ROW:
        raise ContractError(
            f"column {name!r}: rows of shape {shape} have {math.prod(shape)} values, Arrow's fixed-size lists hold "
            f"{_LARGEST_ROW}; split the rows, or store them with any_shape_column"
        )
    values = _values(tensor)
    metadata = {TORCH_DTYPE: dtype_name(tensor.dtype).encode()}
    if not shape:
        return pa.field(name, values.type, nullable=False, metadata=metadata), values
    kind = pa.fixed_shape_tensor(values.type, shape, dim_names=list(dims) if dims else None)
    storage = pa.Array.from_buffers(kind.storage_type, rows, [None], children=[values])
    return pa.field(name, kind, nullable=False, metadata=metadata), pa.ExtensionArray.from_storage(kind, storage)


def column_tensor(
    column: pa.ChunkedArray | pa.Array, field: pa.Field, *, copy: bool = True, pin_memory: bool = False
) -> Tensor:
    """Return a fixed-shape column as a tensor [N, ...].

    Args:
        column: the values, in any number of chunks.
        field: its field; the metadata names the dtype.
        copy: false gives a view of the Arrow memory; writing to it raises. It needs one chunk, else it is a copy.
        pin_memory: allocate the copy page-locked, for transfer to a GPU.
    Raises:
        ContractError: nulls inside, or a column that holds no tensor.
    """
    dtype = dtype_of(field)
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    if any(chunk.null_count for chunk in chunks):
        raise ContractError(
            f"column {field.name!r} has {sum(c.null_count for c in chunks)} missing tensors; expected "
            "none: keep failed rows in a table of their own"
        )
    shape = tuple(field.type.shape) if isinstance(field.type, pa.FixedShapeTensorType) else ()
    parts = [_chunk_view(chunk, shape) for chunk in chunks if len(chunk)]
    if not copy and len(parts) == 1:
        return read_only(parts[0], dtype)
    stored = _AS_BITS.get(dtype, dtype)
    out = torch.empty((sum(map(len, parts)), *shape), dtype=stored, pin_memory=pin_memory)
    target, start = out.numpy(), 0
    for part in parts:
        target[start : start + len(part)] = part
        start += len(part)
    return out.view(dtype) if stored != dtype else out


def jagged_column(
    name: str, rows: Sequence[Tensor | None], *, rest: Sequence[int] | None = None, dtype: torch.dtype | None = None
) -> tuple[pa.Field, pa.Array]:
    """Make a column of tensors that differ in their first dimension only.

    Args:
        name: of the column.
        rows: N tensors [L_i, *rest]; L_i may be 0; none is a missing row.
        rest: the dimensions after the first; needed if no row is given.
        dtype: needed if no row is given.
    Raises:
        ContractError: rows that differ in dtype or in later dimensions, or nothing to infer them from.
    """
    given = [row for row in rows if row is not None]
    if given:
        rest = tuple(given[0].shape[1:]) if rest is None else tuple(rest)
        dtype = dtype or given[0].dtype
    if rest is None or dtype is None:
        raise ContractError(f"column {name!r} has no row to infer its shape from; pass rest= and dtype=")
    for index, row in enumerate(rows):
        if row is not None and (row.ndim == 0 or tuple(row.shape[1:]) != tuple(rest) or row.dtype != dtype):
            raise ContractError(
                f"column {name!r}, row {index}: got {row.dtype} {tuple(row.shape)}, expected {dtype} "
                f"(*, {', '.join(map(str, rest))}) as in the other rows"
            )
    flat = torch.cat([row.reshape(-1) for row in given]) if given else torch.empty(0, dtype=dtype)
    values = _values(flat)
    width = int(np.prod(rest, dtype=np.int64)) if rest else 1
    lengths = np.array([0 if row is None else row.shape[0] for row in rows], dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    if rest:
        items = pa.list_(pa.field("item", values.type, nullable=False), width)
        values = pa.Array.from_buffers(items, int(offsets[-1]), [None], children=[values])
    kind = pa.large_list(pa.field("item", values.type, nullable=False))
    missing = np.array([row is None for row in rows], dtype=bool)
    valid = pa.array(~missing).buffers()[1] if missing.any() else None
    column = pa.Array.from_buffers(
        kind, len(rows), [valid, pa.py_buffer(offsets)], null_count=int(missing.sum()), children=[values]
    )
    metadata = {TORCH_DTYPE: dtype_name(dtype).encode(), RAGGED_SHAPE: json.dumps(["*", *rest]).encode()}
    return pa.field(name, kind, nullable=bool(missing.any()), metadata=metadata), column


def column_list(column: pa.ChunkedArray | pa.Array, field: pa.Field, *, copy: bool = True) -> list[Tensor | None]:
    """Return a jagged column as N tensors [L_i, *rest]; missing rows are none.

    Args:
        column: the values, in any number of chunks.
        field: its field; the metadata names dtype and shape.
        copy: false gives views of the Arrow memory; writing to them raises.
    """
    if not is_jagged(field):
        raise ContractError(f"column {field.name!r} of {field.type} is not jagged; read it with column_tensor")
    dtype = dtype_of(field)
    rest = tuple(json.loads(field.metadata[RAGGED_SHAPE])[1:])
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    return [row for chunk in chunks for row in _jagged_rows(chunk, rest, dtype, copy)]


def empty_row(field: pa.Field) -> Tensor:
    """Return a row of length 0 in the form of a jagged column's rows."""
    return torch.empty(0, *json.loads(field.metadata[RAGGED_SHAPE])[1:], dtype=dtype_of(field))


def any_shape_column(name: str, rows: Sequence[Tensor]) -> tuple[pa.Field, pa.Array]:
    """Make a column of tensors of any shapes and dtypes, such as media of mixed resolution."""
    cells = [
        {"data": _values(row.reshape(-1)).buffers()[1], "shape": list(row.shape), "dtype": dtype_name(row.dtype)}
        for row in rows
    ]
    kind = pa.struct([("data", pa.large_binary()), ("shape", pa.list_(pa.int32())), ("dtype", pa.string())])
    data = pa.array([b"" if c["data"] is None else memoryview(c["data"]) for c in cells], pa.large_binary())
    shapes = pa.array([c["shape"] for c in cells], pa.list_(pa.int32()))
    dtypes = pa.array([c["dtype"] for c in cells], pa.string())
    return pa.field(name, kind, nullable=False), pa.StructArray.from_arrays([data, shapes, dtypes], fields=list(kind))


def any_shape_tensors(column: pa.ChunkedArray | pa.Array) -> list[Tensor]:
    """Return the tensors of an any-shape column, as copies."""
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    tensors = []
    for chunk in chunks:
        for cell in chunk:
            dtype = _BY_NAME[cell["dtype"].as_py()]
            stored = _AS_BITS.get(dtype, dtype)
            shape = tuple(cell["shape"].as_py())
            flat = np.frombuffer(cell["data"].as_buffer(), dtype=_numpy_dtype(stored))
            tensors.append(torch.from_numpy(flat.copy()).view(dtype).reshape(shape))
    return tensors


def _values(tensor: Tensor) -> pa.Array:
    """Return all elements of ``tensor`` as one flat Arrow array that shares its memory where it can."""
    kind = value_type(tensor.dtype)
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    array = flat.view(_AS_BITS.get(tensor.dtype, tensor.dtype)).numpy()
    return pa.Array.from_buffers(kind, len(array), [None, pa.py_buffer(array)])


def _numpy_dtype(dtype: torch.dtype) -> np.dtype:
    return torch.empty(0, dtype=dtype).numpy().dtype


def _innermost(kind: pa.DataType) -> pa.DataType:
    while True:
        if isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        elif isinstance(kind, pa.ListType | pa.LargeListType | pa.FixedSizeListType):
            kind = kind.value_type
        else:
            return kind


def _flat_numpy(values: pa.Array) -> np.ndarray:
    """View a primitive array without nulls, slices included."""
    dtype = np.dtype(values.type.to_pandas_dtype())
    data = values.buffers()[1]
    if data is None or not len(values):
        return np.empty(0, dtype)
    return np.frombuffer(data, dtype, count=len(values), offset=values.offset * dtype.itemsize)


def _chunk_view(chunk: pa.Array, shape: tuple[int, ...]) -> np.ndarray:
    # unlike .values, .flatten() honours the slice
    values = chunk.storage.flatten() if isinstance(chunk, pa.ExtensionArray) else chunk
    return _flat_numpy(values).reshape(len(chunk), *shape)


def _jagged_rows(chunk: pa.Array, rest: tuple[int, ...], dtype: torch.dtype, copy: bool) -> Iterator[Tensor | None]:
    offsets = chunk.offsets.to_numpy()
    values = chunk.values
    if rest:
        values = values.flatten()
    flat = _flat_numpy(values).reshape(len(chunk.values), *rest)
    to_tensor: Callable[[np.ndarray], Tensor] = (
        (lambda part: torch.from_numpy(part.copy()).view(dtype)) if copy else (lambda part: read_only(part, dtype))
    )
    for index in range(len(chunk)):
        start, end = int(offsets[index]), int(offsets[index + 1])
        if chunk.null_count and not chunk[index].is_valid:
            yield None
        else:
            yield to_tensor(flat[start:end])
