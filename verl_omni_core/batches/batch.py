"""The batch that agent loops, workers and trainers hand each other in memory.

Axes: ``N`` rows.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from verl_omni_core.batches.arrow import column_list, column_tensor, empty_row, is_jagged, jagged_column, tensor_column
from verl_omni_core.batches.arrow import is_tensor as is_tensor_field
from verl_omni_core.batches.columns import PROMPT_KEY, SAMPLE_INDEX
from verl_omni_core.errors import ContractError

if TYPE_CHECKING:
    from tensordict import TensorDict

_JSON = {b"encoding": b"json"}
_META = b"meta_info"


@dataclass
class DataProto:
    """Rows as tensors, rows as objects, and what holds for all rows.

    Concatenation needs no knowledge of the model: whatever columns the parts agree on are joined row by row.
    """

    batch: "TensorDict"
    """Tensors [N, ...], jagged ones as nested tensors."""
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    """Name to an object array [N]."""
    meta_info: dict[str, Any] = field(default_factory=dict)
    """JSON-like values that hold for the whole batch."""

    def __post_init__(self) -> None:
        if self.batch.batch_dims != 1:
            raise ContractError(f"batch has batch size {tuple(self.batch.batch_size)}, expected one dimension [N]")
        for name, values in self.non_tensor_batch.items():
            if not isinstance(values, np.ndarray) or values.dtype != object or values.shape != (len(self),):
                seen = f"{values.dtype} {values.shape}" if isinstance(values, np.ndarray) else type(values).__name__
                raise ContractError(f"non_tensor_batch[{name!r}] is {seen}, expected an object array ({len(self)},)")

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor | Sequence[Tensor]] | None = None,
        objects: Mapping[str, Sequence[Any]] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> "DataProto":
        """Build a batch from tensors [N, ...], lists of N tensors (made jagged) and sequences of N objects.

        Raises:
            ContractError: the columns have different numbers of rows.
        """
        tensors, objects = dict(tensors or {}), dict(objects or {})
        lengths = {name: len(values) for name, values in (*tensors.items(), *objects.items())}
        if len(set(lengths.values())) > 1:
            raise ContractError(f"columns have different numbers of rows: {lengths}")
        rows = next(iter(lengths.values()), 0)
        columns = {name: value if isinstance(value, Tensor) else jagged(value) for name, value in tensors.items()}
        return cls(
            _tensors(columns, batch_size=[rows]),
            {name: object_array(values) for name, values in objects.items()},
            dict(meta_info or {}),
        )

    @classmethod
    def from_arrow(
        cls, table: pa.Table, *others: pa.Table, columns: Sequence[str] | None = None, copy: bool = True
    ) -> "DataProto":
        """Build a batch from a table and from tables that add columns to its rows.

        Args:
            table: N rows; their order is the batch's.
            others: tables with ``sample_index``, matched by it, or else with ``prompt_key``, spread to the samples.
            columns: those to read; all by default.
            copy: false gives read-only views where a column is one piece of memory and needs no reordering.
        Raises:
            ContractError: a row of ``table`` has no counterpart, or several, in another table.
        """
        tensors: dict[str, Any] = {}
        objects: dict[str, Any] = {}
        for index, part in enumerate((table, *others)):
            skip = set() if index == 0 else {*tensors, *objects}
            names = [n for n in part.column_names if n not in skip and (columns is None or n in columns)]
            rows = None if index == 0 else _matching_rows(table, part)
            for name in names:
                _read_column(part, name, rows, copy, tensors, objects)
        meta = (table.schema.metadata or {}).get(_META)
        batch = _tensors(tensors, batch_size=[table.num_rows])
        return cls(batch, objects, json.loads(meta) if meta else {})

    def to_arrow(self) -> pa.Table:
        """Return the batch as a table that :meth:`from_arrow` turns into an equal one.

        Objects that are not all strings, whole numbers, floats or missing become JSON.

        Raises:
            ContractError: an object or ``meta_info`` that JSON cannot hold.
        """
        columns = []
        for name in self.batch.keys():  # noqa: SIM118 - iterating a TensorDict iterates rows
            value = self.batch.get(name)
            columns.append(_jagged_column(name, value) if value.is_nested else tensor_column(name, value))
        columns += [_object_column(name, values) for name, values in self.non_tensor_batch.items()]
        schema = pa.schema([f for f, _ in columns], metadata={_META: _to_json("meta_info", self.meta_info)})
        return pa.Table.from_arrays([array for _, array in columns], schema=schema)

    def __len__(self) -> int:
        return self.batch.batch_size[0]

    def select_rows(self, index: Sequence[int] | np.ndarray | Tensor | slice) -> "DataProto":
        """Return the rows at ``index`` (positions or a boolean mask), in its order."""
        # an array first: an empty list makes a float tensor, which is no index
        chosen = index if isinstance(index, slice) else np.asarray(index, dtype=None if len(index) else np.int64)
        rows = torch.from_numpy(np.arange(len(self))[chosen])
        tensors = {name: _take(self.batch.get(name), rows) for name in self.batch.keys()}  # noqa: SIM118
        objects = {name: values[rows.numpy()] for name, values in self.non_tensor_batch.items()}
        return DataProto(_tensors(tensors, batch_size=[len(rows)]), objects, dict(self.meta_info))

    @staticmethod
    def concat(parts: Sequence["DataProto"]) -> "DataProto":
        """Join batches row-wise, in order.

        ``meta_info`` must agree where parts share a key, except ``metrics``, whose lists are joined.

        Raises:
            ContractError: no parts, or parts with different columns, row shapes or meta values.
        """
        if not parts:
            raise ContractError("got no batches to concatenate; expected at least one")
        first = parts[0]
        for position, part in enumerate(parts):
            here, there = _names(first), _names(part)
            if here != there:
                raise ContractError(
                    f"batch {position} has other columns than batch 0: {sorted(here ^ there)} are in one of them only"
                )
        tensors = {name: _join(name, [part.batch.get(name) for part in parts]) for name in first.batch.keys()}  # noqa: SIM118
        objects = {
            name: np.concatenate([part.non_tensor_batch[name] for part in parts]) for name in first.non_tensor_batch
        }
        meta: dict[str, Any] = {}
        for part in parts:
            for key, value in part.meta_info.items():
                if key == "metrics" and key in meta:
                    meta[key] = [*meta[key], *value]
                elif key in meta and meta[key] != value:
                    raise ContractError(f"meta_info[{key!r}] differs between batches: {meta[key]!r} and {value!r}")
                else:
                    meta[key] = value
        return DataProto(_tensors(tensors, batch_size=[sum(map(len, parts))]), objects, meta)

    def union(self, other: "DataProto") -> "DataProto":
        """Return the columns of both; columns that both have must be equal.

        Raises:
            ContractError: different numbers of rows, or a shared name with different values.
        """
        if len(self) != len(other):
            raise ContractError(f"cannot join the columns of {len(self)} rows and of {len(other)} rows")
        for name in _names(self) & _names(other):
            kind, key = name
            mine, theirs = ((p.batch.get(key) if kind == "tensor" else p.non_tensor_batch[key]) for p in (self, other))
            if not _equal(mine, theirs):
                raise ContractError(f"both batches have a column {key!r}, with different values; rename or drop one")
        for key in self.meta_info.keys() & other.meta_info.keys():
            if self.meta_info[key] != other.meta_info[key]:
                raise ContractError(f"meta_info[{key!r}] differs: {self.meta_info[key]!r}, {other.meta_info[key]!r}")
        tensors = {name: p.batch.get(name) for p in (other, self) for name in p.batch.keys()}  # noqa: SIM118
        return DataProto(
            _tensors(tensors, batch_size=[len(self)]),
            {**other.non_tensor_batch, **self.non_tensor_batch},
            {**other.meta_info, **self.meta_info},
        )


def _tensors(columns: Mapping[str, Any], *, batch_size: Sequence[int]) -> "TensorDict":
    # imported late: it loads torch's compiler, and a process that only passes packs on makes no batch
    from tensordict import TensorDict

    return TensorDict(columns, batch_size=batch_size)


def object_array(values: Sequence[Any]) -> np.ndarray:
    """Return ``values`` as a one-dimensional object array, whatever they are."""
    array: np.ndarray = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        array[index] = value
    return array


def jagged(rows: Sequence[Any], *, like: Tensor | None = None) -> Tensor:
    """Return N tensors [L_i, ...] as one nested tensor in jagged layout.

    Args:
        rows: may be of length L_i = 0.
        like: any tensor [L, ...] of the same form; needed if there are no rows.
    """
    if len(rows):
        return torch.nested.nested_tensor(list(rows), layout=torch.jagged)
    if like is None:
        raise ContractError("got no rows to make a jagged tensor of; pass like= to say their form")
    return torch.nested.nested_tensor_from_jagged(like[:0], offsets=torch.zeros(1, dtype=torch.int64))


def _names(batch: DataProto) -> set[tuple[str, str]]:
    return {("tensor", name) for name in batch.batch.keys()} | {("object", name) for name in batch.non_tensor_batch}  # noqa: SIM118


def _take(value: Tensor, rows: Tensor) -> Tensor:
    if not value.is_nested:
        return value[rows]
    parts = value.unbind()
    return jagged([parts[row] for row in rows.tolist()], like=value.values())


def _join(name: str, values: Sequence[Tensor]) -> Tensor:
    if values[0].is_nested:
        return jagged([row for value in values for row in value.unbind()], like=values[0].values())
    shapes = {(tuple(value.shape[1:]), value.dtype) for value in values}
    if len(shapes) > 1:
        raise ContractError(f"column {name!r} has rows of different form: {sorted(map(str, shapes))}")
    return torch.cat(list(values))


def _equal(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, np.ndarray):
        return all(a is b or a == b for a, b in zip(mine, theirs, strict=True))
    if mine.is_nested or theirs.is_nested:
        pairs = zip(mine.unbind(), theirs.unbind(), strict=True)
        return mine.is_nested and theirs.is_nested and all(_equal(a, b) for a, b in pairs)
    if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
        return False
    if not mine.numel():
        return True
    # bits, not numbers: the same missing value in both is equal
    return torch.equal(*(value.contiguous().reshape(-1).view(torch.uint8) for value in (mine, theirs)))


def _matching_rows(table: pa.Table, other: pa.Table) -> pa.Array:
    shared = [k for k in (SAMPLE_INDEX, PROMPT_KEY) if k in table.column_names and k in other.column_names]
    if not shared:
        raise ContractError(
            f"tables share neither {SAMPLE_INDEX!r} nor {PROMPT_KEY!r}; columns of the second: {other.column_names}"
        )
    key = shared[0]
    keys = other[key].combine_chunks()
    if len(pc.unique(keys)) != len(keys):
        raise ContractError(f"the second table has several rows of one {key!r}; expected one each")
    rows = pc.index_in(table[key].combine_chunks(), value_set=keys)
    if rows.null_count:
        lost = table[key].filter(pc.is_null(rows))[0].as_py()
        raise ContractError(
            f"{rows.null_count} rows have no counterpart in the second table, the first has {key} {lost}"
        )
    return rows


def _read_column(
    part: pa.Table, name: str, rows: pa.Array | None, copy: bool, tensors: dict[str, Any], objects: dict[str, Any]
) -> None:
    column_field, column = part.schema.field(name), part[name]
    if rows is not None and not (len(rows) == part.num_rows and rows.equals(pa.array(range(len(rows)), rows.type))):
        column, copy = column.take(rows), True
    if is_jagged(column_field):
        lists = column_list(column, column_field)
        if any(row is None for row in lists):
            objects[name] = object_array(lists)
        else:
            tensors[name] = jagged(lists, like=empty_row(column_field))
    elif is_tensor_field(column_field):
        tensors[name] = column_tensor(column, column_field, copy=copy)
    elif not column.null_count and pa.types.is_boolean(column_field.type):
        tensors[name] = torch.from_numpy(column.to_numpy().astype(bool))
    elif not column.null_count and (pa.types.is_integer(column_field.type) or pa.types.is_floating(column_field.type)):
        if (column_field.metadata or {}).get(b"encoding") == b"object":
            objects[name] = object_array(column.to_pylist())
        else:
            tensors[name] = torch.from_numpy(np.array(column.to_numpy()))
    else:
        values = column.to_pylist()
        if (column_field.metadata or {}).get(b"encoding") == b"json":
            values = [json.loads(value) for value in values]
        objects[name] = object_array(values)


def _jagged_column(name: str, value: Tensor) -> tuple[pa.Field, pa.Array]:
    return jagged_column(name, value.unbind(), rest=value.values().shape[1:], dtype=value.dtype)


def _object_column(name: str, values: np.ndarray) -> tuple[pa.Field, pa.Array]:
    kinds = {type(value) for value in values if value is not None}
    plain = {frozenset([str]): pa.string(), frozenset([int]): pa.int64(), frozenset([float]): pa.float64()}
    kind = plain.get(frozenset(kinds))
    if kind is not None:
        metadata = {b"encoding": b"object"}
        return pa.field(name, kind, metadata=metadata), pa.array(values.tolist(), kind)
    encoded = [_to_json(name, value) for value in values]
    return pa.field(name, pa.string(), metadata=_JSON), pa.array(encoded, pa.string())


def _to_json(name: str, value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ContractError(
            f"{name!r} holds a value that JSON cannot ({error}); convert it, or drop the column before "
            "storing the batch"
        ) from error
