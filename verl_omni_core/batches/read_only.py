"""Tensors over memory that must not be written: a memory-mapped artifact, or a buffer that others read.

Torch has no read-only tensors: writing through one made from mapped memory kills the process, and through one made from
a heap buffer changes the artifact in silence. This one refuses instead.
"""

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from verl_omni_core.errors import ContractError


class ReadOnlyTensor(Tensor):
    """A tensor whose every in-place operation raises; its views are read-only too, its copies are ordinary tensors."""

    _memory: Tensor
    _array: np.ndarray

    @staticmethod
    def __new__(cls, memory: Tensor) -> "ReadOnlyTensor":
        shape, stride = memory.shape, memory.stride()
        made = Tensor._make_wrapper_subclass(
            cls, shape, strides=stride, storage_offset=memory.storage_offset(), dtype=memory.dtype
        )
        made._memory = memory
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        for position, argument in enumerate(func._schema.arguments):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written = argument.alias_info is not None and argument.alias_info.is_write
            parts = value if isinstance(value, list | tuple) else [value]
            if written and any(isinstance(part, cls) for part in parts):
                raise ContractError(
                    f"{func} writes to a read-only view of stored data; clone it first, or read with copy=True"
                )
        memories: set[int] = set()

        def unwrap(value: Any) -> Any:
            if isinstance(value, cls):
                memories.add(value._memory.untyped_storage().data_ptr())
                return value._memory
            return value

        def wrap(value: Any) -> Any:
            is_view = type(value) is Tensor and value.untyped_storage().data_ptr() in memories
            return cls(value) if is_view else value

        return tree_map(wrap, func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs)))

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """Return a numpy view that refuses writes, as numpy's own read-only arrays do."""
        array = self._memory.numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        """Return nested Python numbers."""
        return self._memory.tolist()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._memory.clone().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict) -> Tensor:
        return self._memory.clone()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch leaves it untyped
        return f"ReadOnlyTensor({self._memory!r})"


def read_only(array: np.ndarray, dtype: torch.dtype) -> Tensor:
    """Return a tensor over ``array``'s memory, its bits read as ``dtype``; writing to it raises ContractError."""
    with warnings.catch_warnings():
        # torch warns that writing to such memory is undefined: the wrapper is the answer to that
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        memory = torch.from_numpy(array)
    return ReadOnlyTensor(memory.view(dtype) if memory.dtype != dtype else memory)
