"""A view of stored data refuses every write and is an ordinary operand otherwise."""

import copy
import pickle

import numpy as np
import pyarrow as pa
import pytest
import torch

from verl_omni_core.batches.arrow import column_tensor, tensor_column
from verl_omni_core.batches.tables import read_tensor
from verl_omni_core.errors import ContractError


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def view(request) -> torch.Tensor:
    field, array = tensor_column("x", torch.arange(12, dtype=torch.float32).reshape(3, 4).to(request.param))
    return column_tensor(array, field, copy=False)


WRITES = {
    "add_": lambda x: x.add_(1),
    "iadd": lambda x: x.__iadd__(1),
    "setitem": lambda x: x.__setitem__(0, 1.0),
    "setitem_of_a_view": lambda x: x.view(-1)[2:].__setitem__(0, 1.0),
    "row": lambda x: x[1].zero_(),
    "unbound_row": lambda x: x.unbind()[0].fill_(1),
    "split": lambda x: x.split(1)[0].fill_(1),
    "transpose": lambda x: x.t().mul_(2),
    "detached": lambda x: x.detach().mul_(2),
    "data": lambda x: x.data.fill_(1),
    "out": lambda x: torch.add(x, 1, out=x),
    "copy_": lambda x: x.copy_(torch.ones(3, 4, dtype=x.dtype)),
    "foreach": lambda x: torch._foreach_add_([x], 1),
    "relu": lambda x: torch.nn.functional.relu(x, inplace=True),
    "resize": lambda x: x.resize_(2),
    "set": lambda x: x.set_(torch.zeros(2, dtype=x.dtype)),
    "contiguous": lambda x: x.contiguous().fill_(1),
    "reshape": lambda x: x.reshape(4, 3).fill_(1),
    "same_dtype": lambda x: x.to(x.dtype).fill_(1),
    "index_put": lambda x: x.index_put_((torch.tensor([0]),), torch.tensor(1, dtype=x.dtype)),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_a_write_raises_and_changes_nothing(view, write):
    before = view.clone()
    with pytest.raises(ContractError, match=r"read-only"):
        write(view)
    assert torch.equal(view, before)


def test_its_numpy_view_refuses_writes():
    field, array = tensor_column("x", torch.zeros(2, 2))
    view = column_tensor(array, field, copy=False)
    with pytest.raises(ValueError, match=r"read-only"):
        view.numpy()[0] = 1
    assert np.asarray(view).tolist() == [[0, 0], [0, 0]]


def test_it_takes_part_in_arithmetic_and_gradients(view):
    weight = torch.ones(4, 2, dtype=view.dtype, requires_grad=True)
    (view @ weight).sum().backward()
    assert weight.grad.tolist() == [[12, 12], [15, 15], [18, 18], [21, 21]]
    target = torch.zeros(3, 4, dtype=view.dtype)
    target += view
    assert target.tolist() == view.tolist()
    assert type(view + 1) is type(torch.stack([view, view])) is torch.Tensor


@pytest.mark.parametrize("duplicate", [torch.clone, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_of_it_is_an_ordinary_tensor(view, duplicate):
    other = duplicate(view)
    assert type(other) is torch.Tensor
    assert torch.equal(other, view)
    other.zero_()
    assert view.sum() == 66


def test_a_view_of_a_mapped_file_raises_instead_of_killing_the_process(tmp_path):
    field, array = tensor_column("x", torch.ones(3, 2))
    table = pa.Table.from_arrays([array], schema=pa.schema([field]))
    with pa.OSFile(str(tmp_path / "x.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    mapped = pa.ipc.open_file(pa.memory_map(str(tmp_path / "x.arrow"))).read_all()
    before = (tmp_path / "x.arrow").read_bytes()
    view = read_tensor(mapped, "x", copy=False)
    del mapped
    with pytest.raises(ContractError, match=r"read-only"):
        view[0] = 7
    assert view.sum() == 6
    assert (tmp_path / "x.arrow").read_bytes() == before


def test_copying_is_the_default_and_gives_writable_memory(view):
    field, array = tensor_column("x", torch.ones(2, 2))
    column_tensor(array, field).zero_()
    assert array.to_numpy_ndarray().sum() == 4
