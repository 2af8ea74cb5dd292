"""A trainer's whole state at one moment: what the next steps change no more, and what a checkpoint is written from."""

import json
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from verl_omni_core.training import lora, sharding
from verl_omni_core.training.ranks import Ranks
from verl_omni_core.version import __version__

if TYPE_CHECKING:
    from verl_omni_core.training.engine import DiffusersFSDPEngine
    from verl_omni_core.training.outline import Outline


@dataclass(frozen=True)
class Snapshot:
    """One rank's share of everything that training goes on from, in the CPU's memory."""

    tensors: dict[str, Tensor]
    """Copies of parameters, moments and averages, by name; sharded ones over a mesh of CPUs."""
    random_states: dict[str, Any]
    """Of this rank's generators, JSON-like."""
    facts: dict[str, Any]
    """The rest, JSON-like and equal on all ranks: counters, schedule, policy, versions, and what was given along."""


def take(engine: "DiffusersFSDPEngine", extra: Mapping[str, Any], ranks: Ranks) -> Snapshot:
    """Copy the state of ``engine``; returns once the copy is made.

    Args:
        extra: JSON values to keep along.
        ranks: the engine's ranks as those who will write see each other; their group must take tensors of CPUs.
    """
    tensors, steps = state_of(engine)
    facts = {
        "ranks": ranks.size,
        "network": network_of(engine),
        "policy": policy_of(engine),
        "counters": asdict(engine.counters),
        "ema_updates": engine.ema.updates if engine.ema else None,
        "optimizer": {"name": engine.training.optimizer, "steps": steps},
        "tensors": {name: list(tensor.shape) for name, tensor in tensors.items()},
        "versions": versions(),
        "extra": json.loads(json.dumps(dict(extra))),  # a copy: the giver's own goes on changing
    }
    return Snapshot(_on_cpu(tensors, ranks), random_states(engine.device), facts)


def state_of(engine: "DiffusersFSDPEngine") -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return all tensors by name, the live ones, and the optimizer's step count of every parameter with moments."""
    sharding.reshard(engine.module)
    state: dict[str, Tensor] = {}
    for name, parameter in engine.module.named_parameters():
        if engine.lora_config is None or ".lora_" in name:
            state[f"model.{name}"] = parameter.detach()
    steps = {}
    for name, parameter in engine.trainable.items():
        for key, value in engine.optimizer.state.get(parameter, {}).items():
            if key == "step":
                steps[name] = int(value)
            elif isinstance(value, Tensor):
                state[f"optimizer.{name}.{key}"] = value
    if engine.ema is not None:
        state |= {f"ema.{name}": tensor for name, tensor in engine.ema.tensors.items()}
    return state, steps


def policy_of(engine: "DiffusersFSDPEngine | Outline") -> dict[str, Any]:
    """Return what decides which tensors train."""
    if engine.lora_config is None:
        return {"kind": "full"}
    config = lora.peft_config(engine.lora_config)
    kept = {key: config[key] for key in ("r", "lora_alpha", "target_modules", "exclude_modules")}
    return {"kind": "lora", **kept, "adapters": lora.adapter_names(engine.module)}


def network_of(engine: "DiffusersFSDPEngine | Outline") -> dict[str, Any]:
    """Return the network's own configuration, without where it was loaded from."""
    config = dict(getattr(engine.module, "config", {}))
    kept = {key: value for key, value in config.items() if key == "_class_name" or not key.startswith("_")}
    return json.loads(json.dumps(kept, default=str))


def versions() -> dict[str, str]:
    """Return the versions of what computes a step."""
    return {"verl_omni_core": __version__, **{name: version(name) for name in ("torch", "diffusers", "peft")}}


def random_states(device: str) -> dict[str, Any]:
    """Return the states of this process's generators, JSON-like."""
    _, keys, position, has_gauss, gauss = np.random.get_state()
    state, internal, gauss_next = random.getstate()
    return {
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": torch.cuda.get_rng_state().numpy().tobytes().hex() if device.startswith("cuda") else None,
        "numpy": [np.asarray(keys).tolist(), position, has_gauss, gauss],
        "python": [state, internal, gauss_next],
    }


def set_random_states(states: Mapping[str, Any], device: str) -> None:
    """Bring this process's generators to what :func:`random_states` returned."""
    torch.set_rng_state(_bytes(states["torch"]))
    if states["cuda"] and device.startswith("cuda"):
        torch.cuda.set_rng_state(_bytes(states["cuda"]))
    keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    state, internal, gauss_next = states["python"]
    random.setstate((state, tuple(internal), gauss_next))


def like(tensor: Tensor, local: Tensor) -> Tensor:
    """Return ``local``, of the shape of this rank's part of ``tensor``, sharded as ``tensor`` is."""
    if not isinstance(tensor, DTensor):
        return local
    return _sharded(local, tensor.device_mesh, tensor)


def _on_cpu(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """Copy every tensor's own part; the device works through all copies before it is waited for, once."""
    copies, is_cuda = {}, False
    for name, tensor in tensors.items():
        part = sharding.local(tensor)
        copies[name] = torch.empty_like(part, device="cpu", pin_memory=part.is_cuda).copy_(part, non_blocking=True)
        is_cuda |= part.is_cuda
    if is_cuda:
        torch.cuda.current_stream().synchronize()
    if ranks.size == 1:
        return copies
    # the engine's mesh may be of GPUs, and its group is busy with the next step while this is written
    mesh = DeviceMesh.from_group(ranks.group, "cpu")  # type: ignore[arg-type]
    return {
        name: _sharded(copies[name], mesh, tensor) if isinstance(tensor, DTensor) else copies[name]
        for name, tensor in tensors.items()
    }


def _sharded(local: Tensor, mesh: DeviceMesh, origin: DTensor) -> DTensor:
    # shape and stride are given: rows that do not divide by the ranks leave them shares of other sizes
    return DTensor.from_local(
        local, mesh, origin.placements, run_check=False, shape=origin.shape, stride=origin.stride()
    )


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
