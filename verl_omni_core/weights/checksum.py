"""Order-independent checksum of named tensors: equal on both ends of a weight transfer, or the transfer failed."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def checksum(named: Mapping[str, Tensor]) -> str:
    """Return the sha256 of all names, dtypes, shapes and bytes.

    The order of the mapping, strides and devices do not enter; one different bit does.
    """
    total = hashlib.sha256()
    for name in sorted(named):
        tensor = named[name].detach().cpu().contiguous()
        total.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()
