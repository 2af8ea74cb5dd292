"""FSDP2: which modules are sharded, and in which dtype they compute.

Each block that the model adapter names becomes a unit of its own, the root takes the rest. One rank that computes in
its parameters' own dtype is left alone: there is nothing to gather, and its numbers are those of the plain module.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from verl_omni_core.errors import ConfigError
from verl_omni_core.training.ranks import Ranks


def shard(
    module: nn.Module,
    blocks: tuple[str, ...],
    ranks: Ranks,
    *,
    device: str,
    compute_dtype: torch.dtype | None = None,
) -> bool:
    """Shard ``module`` in place over all ranks.

    Args:
        module: with equal parameters on every rank, on the CPU or on ``device``.
        blocks: class names of the units, ``Facts.shard_blocks``.
        compute_dtype: dtype of the forward and backward pass; gradients are reduced in float32. None: the parameters'
            own dtypes, which may differ among frozen ones.
    Returns: whether anything was sharded.
    Raises: ConfigError if no module has one of the class names.
    """
    units = [part for part in module.modules() if type(part).__name__ in blocks]
    if not units:
        classes = sorted({type(part).__name__ for part in module.modules()})
        raise ConfigError(
            f"no module of {type(module).__name__} is one of the blocks {list(blocks)} that its adapter shards; it has "
            f"{classes}"
        )
    if ranks.size == 1 and compute_dtype is None:
        module.to(device)
        return False
    if compute_dtype is not None:
        _cast_buffers(module, compute_dtype)
    mesh = init_device_mesh(torch.device(device).type, (ranks.size,))
    # the adapter casts what the network computes with; timesteps stay in float32, as an engine leaves them
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # gathering is what costs ranks on CPUs their time, and the machine's memory is theirs: once a mini-batch is enough
    gives_back = torch.device(device).type != "cpu"
    for part in (*units, module):
        sharded = fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=gives_back)
        sharded.set_reshard_after_backward(gives_back, recurse=False)
    return True


def _cast_buffers(module: nn.Module, dtype: torch.dtype) -> None:
    """Give stored buffers the dtype in which an engine that loads the network in ``dtype`` has them."""
    stored = module.state_dict().keys()
    for name, buffer in module.named_buffers():
        if name in stored and buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)


def sync_gradients(module: nn.Module, now: bool) -> None:
    """Choose whether the next backward pass reduces gradients over ranks or only adds them up locally."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(now)


def reshard(module: nn.Module) -> None:
    """Give back gathered parameters, so that the module's parameters are the ones that the optimizer holds."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded tensor, as a view without gradient; a plain tensor is its own part."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor on the CPU; all ranks call it together."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()
