"""Equal tensors, equal checksum; one bit, name, dtype or shape apart, another one."""

import torch

from verl_omni_core.weights.checksum import checksum


def _tensors() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1.5], dtype=torch.bfloat16)}


def test_order_and_strides_do_not_matter() -> None:
    tensors = _tensors()
    swapped = {"b": tensors["b"].clone(), "a": tensors["a"].t().contiguous().t()}
    assert checksum(tensors) == checksum(swapped)


def test_any_difference_matters() -> None:
    reference = checksum(_tensors())
    bit, name, dtype, shape = (_tensors() for _ in range(4))
    bit["a"][0, 0] = torch.nextafter(bit["a"][0, 0], torch.tensor(1.0))
    name["c"] = name.pop("b")
    dtype["b"] = dtype["b"].float()
    shape["a"] = shape["a"].reshape(3, 2)
    assert len({reference, *(checksum(other) for other in (bit, name, dtype, shape))}) == 5


def test_scalars_and_empty_tensors_have_a_checksum() -> None:
    assert checksum({"s": torch.tensor(1.0)}) != checksum({"s": torch.zeros(0)})
