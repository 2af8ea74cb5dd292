"""Building tables: columns in, a table that keeps its schema's promises out."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from verl_omni_core.batches.arrow import column_list, column_tensor, dtype_name, jagged_column, tensor_column
from verl_omni_core.batches.schema import SCHEMAS, Column, Jagged, Tensors, with_metadata
from verl_omni_core.errors import ContractError

Values: TypeAlias = Sequence[Any] | np.ndarray | Tensor | pa.Array | pa.ChunkedArray


def build_table(schema_id: str, columns: Mapping[str, Values]) -> pa.Table:
    """Build a table of one of the known schemas.

    Args:
        schema_id: a key of ``SCHEMAS``.
        columns: name to N values: a tensor [N, ...] for a tensor column, a list of N tensors (none where allowed) for a
            jagged one, any sequence for a plain one. Names beyond the schema's are kept; their type is inferred.
    Returns: the table with schema id and version in its metadata; columns in the schema's order, others after.
    Raises:
        ContractError: a required column is missing, lengths differ, a value is missing or of another dtype.
    """
    schema = SCHEMAS[schema_id]
    missing = [column.name for column in schema.columns if column.required and column.name not in columns]
    if missing:
        raise ContractError(f"table {schema_id!r} needs the columns {missing}; got {sorted(columns)}")
    known = {column.name: column for column in schema.columns}
    fields, arrays = [], []
    for name in (*(n for n in known if n in columns), *(n for n in columns if n not in known)):
        try:
            field, array = _column(name, columns[name], known.get(name))
        except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError) as error:
            raise ContractError(f"table {schema_id!r}, column {name!r}: {error}") from error
        fields.append(field)
        arrays.append(array)
    lengths = {field.name: len(array) for field, array in zip(fields, arrays, strict=True)}
    if len(set(lengths.values())) > 1:
        raise ContractError(f"table {schema_id!r} has columns of different lengths: {lengths}")
    return with_metadata(pa.Table.from_arrays(arrays, schema=pa.schema(fields)), schema_id)


def read_tensor(table: pa.Table, name: str, *, copy: bool = True, pin_memory: bool = False) -> Tensor:
    """Return the fixed-shape column ``name`` as a tensor [N, ...]; see :func:`arrow.column_tensor`."""
    _require(table, name)
    return column_tensor(table[name], table.schema.field(name), copy=copy, pin_memory=pin_memory)


def read_jagged(table: pa.Table, name: str, *, copy: bool = True) -> list[Tensor | None]:
    """Return the jagged column ``name`` as N tensors; see :func:`arrow.column_list`."""
    _require(table, name)
    return column_list(table[name], table.schema.field(name), copy=copy)


def _require(table: pa.Table, name: str) -> None:
    if name not in table.column_names:
        raise ContractError(f"the table has no column {name!r}; it has {table.column_names}")


def _column(name: str, values: Values, spec: Column | None) -> tuple[pa.Field, pa.Array | pa.ChunkedArray]:
    if spec is None:
        return _inferred(name, values)
    if isinstance(spec.type, Tensors):
        return _tensors(name, values, spec.type)
    if isinstance(spec.type, Jagged):
        return _jagged(name, values, spec)
    array = _plain(values, spec.type)
    if array.null_count and not spec.nullable:
        raise ContractError(f"column {name!r} has {array.null_count} missing values and allows none")
    return pa.field(name, spec.type, nullable=spec.nullable), array


def _tensors(name: str, values: Values, kind: Tensors) -> tuple[pa.Field, pa.Array]:
    if not isinstance(values, Tensor):
        raise ContractError(f"column {name!r}: got {type(values).__name__}, expected a tensor [N, ...]")
    if kind.dtype is not None and dtype_name(values.dtype) != kind.dtype:
        raise ContractError(
            f"column {name!r}: got {dtype_name(values.dtype)}, expected {kind.dtype}; a narrower copy "
            "would bias what is computed from it"
        )
    dims = next((dims for dims in kind.dims if len(dims) == values.ndim - 1), None)
    return tensor_column(name, values, dims)


def _jagged(name: str, values: Values, spec: Column) -> tuple[pa.Field, pa.Array]:
    rows = list(values.unbind()) if isinstance(values, Tensor) else list(values)
    dtype = spec.type.dtype if isinstance(spec.type, Jagged) else None
    wanted = getattr(torch, dtype) if dtype else None
    for index, row in enumerate(rows):
        if row is None and not spec.nullable:
            raise ContractError(f"column {name!r} has no value in row {index} and allows none missing")
        if row is not None and wanted is not None and row.dtype != wanted:
            raise ContractError(f"column {name!r}, row {index}: got {row.dtype}, expected {wanted}")
    if rows and all(row is None for row in rows):
        raise ContractError(f"column {name!r} has no value in any row; leave the column out of the table")
    field, array = jagged_column(
        name, rows, rest=None if rows else (), dtype=wanted or (None if rows else torch.float32)
    )
    # shards of one table must agree, whether or not this one happens to miss a row
    return field.with_nullable(spec.nullable), array


def _inferred(name: str, values: Values) -> tuple[pa.Field, pa.Array | pa.ChunkedArray]:
    if isinstance(values, Tensor):
        return tensor_column(name, values)
    if isinstance(values, list) and any(isinstance(value, Tensor) for value in values):
        return jagged_column(name, values)
    array = values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values)
    return pa.field(name, array.type), array


def _plain(values: Values, kind: pa.DataType) -> pa.Array | pa.ChunkedArray:
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values.cast(kind) if values.type != kind else values
    if pa.types.is_dictionary(kind):
        return pa.array(values, kind.value_type).dictionary_encode()
    return pa.array(values, kind)
