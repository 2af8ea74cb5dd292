"""Where tensors stand in the engine's network: fused layers, shards, adapter buffers.

The engine fuses projections (``to_q``, ``to_k``, ``to_v`` into ``to_qkv``) and shards layers over ranks, so what was
sent is compared with the part of a layer that it must have become.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.model_executor.layers.linear import LinearBase

from verl_omni_core.errors import ContractError
from verl_omni_core.rollout import _weights


def tensors_of(network: torch.nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name."""
    return {**dict(network.named_parameters()), **dict(network.named_buffers())}


def fused_parts(network: torch.nn.Module, sent: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return the network's name of every sent tensor, or of the layer it is fused into, with the sent names in order.

    Raises:
        ContractError: some parts of a fused layer were sent and others not.
    """
    mapping = getattr(network, "stacked_params_mapping", [])
    plan: dict[str, list[str]] = {}
    for name in sent:
        fused, part = next(((fused, part) for fused, part, _ in mapping if part in name), ("", ""))
        if not fused:
            plan[name] = [name]
            continue
        whole = name.replace(part, fused)
        parts = [whole.replace(fused, each) for candidate, each, _ in mapping if candidate == fused]
        _weights.check_bound(parts, sent, f"parts of {whole}")
        plan[whole] = parts
    return plan


def bindable_modules(network: torch.nn.Module, packed: Mapping[str, Sequence[str]]) -> set[str]:
    """Return the names, as diffusers has them, of all layers that can take an adapter."""
    names: set[str] = set()
    for name, module in network.named_modules():
        if not isinstance(module, LinearBase | BaseLayerWithLoRA) or name.endswith(".base_layer"):
            continue
        prefix, dot, leaf = name.rpartition(".")
        names.update(f"{prefix}{dot}{part}" for part in packed.get(leaf, [leaf]))
    return names


def check_parameter(name: str, standing: Tensor, parts: Sequence[Tensor]) -> None:
    """Compare a parameter with the tensors that it was made of.

    Raises:
        ContractError: a bit differs, in the parameter's dtype.
    """
    if len(parts) > 1:
        # a shard of a fused layer is the shards of its parts, one after the other
        shards = max(1, sum(part.shape[0] for part in parts) // standing.shape[0])
        expected = torch.cat([part.chunk(shards)[get_tensor_model_parallel_rank() % shards] for part in parts])
    else:
        expected = parts[0]
    _check_equal(name, standing, expected)


def check_adapter(manager: Any, module: str, lora_a: Tensor, lora_b: Tensor) -> None:
    """Compare the buffers that compute an adapter of one module with its ``A`` [r, in] and scaled ``B`` [out, r].

    Raises:
        ContractError: the module computes without the adapter, or with other numbers.
    """
    layer, index = _adapter_layer(manager, module)
    active = getattr(layer, "_diffusion_lora_active_slices", None)
    if active is not None and not active[index]:
        raise ContractError(f"LoRA module {module} was registered but is switched off in the engine")
    rank = lora_a.shape[0]
    _check_equal(f"{module}.lora_A", layer.lora_a_stacked[index][0, 0, :rank], lora_a)
    _check_equal(f"{module}.lora_B", layer.lora_b_stacked[index][0, 0, :, :rank], lora_b)


def _adapter_layer(manager: Any, module: str) -> tuple[Any, int]:
    layers = manager._lora_modules
    if module in layers:
        return layers[module], 0
    prefix, _, leaf = module.rpartition(".")
    for packed, parts in manager._packed_modules_mapping.items():
        if leaf in parts and f"{prefix}.{packed}" in layers:
            return layers[f"{prefix}.{packed}"], parts.index(leaf)
    raise ContractError(f"LoRA module {module} has no layer in the engine; check model.lora.targets")


def _check_equal(name: str, standing: Tensor, sent: Tensor) -> None:
    expected = sent.to(standing.device, standing.dtype)
    for axis, (have, want) in enumerate(zip(standing.shape, expected.shape, strict=True)):
        if have != want and want % have == 0:
            expected = expected.chunk(want // have, dim=axis)[get_tensor_model_parallel_rank() % (want // have)]
    if standing.shape != expected.shape or not torch.equal(standing, expected):
        raise ContractError(
            f"{name} does not stand in the engine as it was sent (shape {tuple(standing.shape)} {standing.dtype}, sent "
            f"{tuple(sent.shape)} {sent.dtype}); do not use this replica's samples, start it again"
        )
