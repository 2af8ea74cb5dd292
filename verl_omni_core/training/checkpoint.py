"""What training goes on from: parameters, optimizer moments, schedule, average, counters and random states.

Tensors go through torch's distributed checkpoint in safetensors files, one a rank, so any other number of ranks can
read them and nothing is ever unpickled. ``checkpoint.json`` comes last, with the digest of every other file: a folder
without it is no checkpoint. A saved checkpoint has been read back and compared.
"""

import hashlib
import json
import os
import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

from verl_omni_core.errors import ConfigError, StoreError
from verl_omni_core.training import lora, sharding

if TYPE_CHECKING:
    from verl_omni_core.training.engine import DiffusersFSDPEngine
    from verl_omni_core.training.outline import Outline

FORMAT = 1
INDEX_FILE = "checkpoint.json"
_USE_ANOTHER = "restore it from a copy, or start the run again: it goes on from the checkpoint before"
COMPARED_BYTES = 2**28
"""Tensors of a new checkpoint are read back in portions of this size, over all ranks."""


def save(engine: "DiffusersFSDPEngine", folder: Path, extra: Mapping[str, Any]) -> list[str]:
    """Write, read back and compare; see :meth:`DiffusersFSDPEngine.save_checkpoint`."""
    folder.mkdir(parents=True, exist_ok=True)
    _save_random_states(engine, folder)
    state, steps = _tensors(engine)
    group = engine.ranks.group
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with _quiet_alone():
        dcp.save(state, storage_writer=writer, process_group=group, no_dist=group is None)
    engine.ranks.barrier()
    _compare(engine, folder, state)
    if engine.ranks.rank == 0:
        files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != INDEX_FILE)
        index = {
            "format": FORMAT,
            "ranks": engine.ranks.size,
            "policy": _policy(engine),
            "counters": asdict(engine.counters),
            "ema_updates": engine.ema.updates if engine.ema else None,
            "optimizer": {"name": engine.training.optimizer, "steps": steps},
            "tensors": {name: list(tensor.shape) for name, tensor in state.items()},
            "extra": dict(extra),
            "files": {path.name: {"size_bytes": path.stat().st_size, "sha256": _sha256(path)} for path in files},
        }
        _write(folder / INDEX_FILE, json.dumps(index, indent=1, sort_keys=True).encode())
    engine.ranks.barrier()
    return sorted(path.name for path in folder.iterdir() if path.is_file())


def load(engine: "DiffusersFSDPEngine", folder: Path) -> dict[str, Any]:
    """Go on from ``folder``; see :meth:`DiffusersFSDPEngine.load_checkpoint`."""
    index = read_index(folder)
    verify(folder, index)
    refuse_other_policy(engine, index, folder)
    steps = index["optimizer"]["steps"]
    _prepare_moments(engine, steps)
    state, _ = _tensors(engine)
    expected = {name: list(tensor.shape) for name, tensor in state.items()}
    odd = sorted(
        name for name in expected.keys() | index["tensors"].keys() if expected.get(name) != index["tensors"].get(name)
    )
    if odd:
        name = odd[0]
        raise ConfigError(
            f"checkpoint {str(folder)!r} differs from this trainer in {len(odd)} tensors, first {name}: shape "
            f"{index['tensors'].get(name)} there, {expected.get(name)} here; use the settings it was written with"
        )
    _read(engine, folder, state)
    counters = index["counters"]
    for name, value in counters.items():
        setattr(engine.counters, name, value)
    if engine.ema is not None:
        engine.ema.updates = index["ema_updates"]
    engine.scheduler.last_epoch = counters["training_steps"]
    for group, base in zip(engine.optimizer.param_groups, engine.scheduler.base_lrs, strict=True):
        group["lr"] = base * engine.scheduler.lr_lambdas[0](counters["training_steps"])
    _load_random_states(engine, folder)
    engine.ranks.barrier()
    return index["extra"]


def read_index(folder: Path) -> dict[str, Any]:
    """Read ``checkpoint.json``.

    Raises:
        StoreError: there is none, or it is of another format.
    """
    path = folder / INDEX_FILE
    if not path.is_file():
        raise StoreError(f"{str(folder)!r} has no {INDEX_FILE}: it is no checkpoint, or one that was never finished")
    index = json.loads(path.read_text())
    if index.get("format") != FORMAT:
        raise StoreError(f"{str(path)!r} is of format {index.get('format')}; this version reads {FORMAT}")
    return index


def verify(folder: Path, index: Mapping[str, Any]) -> None:
    """Compare every file with its recorded digest.

    Raises:
        StoreError: a file is missing or has changed.
    """
    for name, record in index["files"].items():
        path = folder / name
        if not path.is_file():
            raise StoreError(f"checkpoint {str(folder)!r} lacks {name}; {_USE_ANOTHER}")
        if path.stat().st_size != record["size_bytes"] or _sha256(path) != record["sha256"]:
            raise StoreError(
                f"checkpoint file {str(path)!r} changed after it was written ({path.stat().st_size} bytes, expected "
                f"{record['size_bytes']}); {_USE_ANOTHER}"
            )


def _tensors(engine: "DiffusersFSDPEngine") -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return all tensors by name, and the optimizer's step count of every parameter that has moments."""
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


def _prepare_moments(engine: "DiffusersFSDPEngine", steps: Mapping[str, int]) -> None:
    engine.optimizer.state.clear()
    for name, count in steps.items():
        parameter = engine.trainable.get(name)
        if parameter is not None:
            engine.optimizer.state[parameter] = {
                "step": torch.tensor(float(count)),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def _read(engine: "DiffusersFSDPEngine", folder: Path, into: dict[str, Tensor]) -> None:
    group = engine.ranks.group
    reader = HuggingFaceStorageReader(str(folder))
    with _quiet_alone():
        dcp.load(into, storage_reader=reader, process_group=group, no_dist=group is None)


@contextmanager
def _quiet_alone() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one rank without a group is meant
        yield


def _compare(engine: "DiffusersFSDPEngine", folder: Path, state: Mapping[str, Tensor]) -> None:
    bad: list[str] = []
    for names in _portions(state):
        again = {name: torch.full_like(state[name], float("nan")) for name in names}
        _read(engine, folder, again)
        bad += [name for name in names if not _same_bits(sharding.local(state[name]), sharding.local(again[name]))]
    if not engine.ranks.agree(not bad):
        raise StoreError(
            f"the checkpoint in {str(folder)!r} reads back differently (rank {engine.ranks.rank}: {bad[:3]}); the "
            "disk or the file system is not to be trusted"
        )


def _portions(state: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Yield the names of tensors that are read back at a time: a second copy of everything may not fit the device."""
    names: list[str] = []
    size = 0
    for name, tensor in state.items():
        if names and size + tensor.nbytes > COMPARED_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor.nbytes
    if names:
        yield names


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _policy(engine: "DiffusersFSDPEngine | Outline") -> dict[str, Any]:
    if engine.lora_config is None:
        return {"kind": "full"}
    config = lora.peft_config(engine.lora_config)
    kept = {key: config[key] for key in ("r", "lora_alpha", "target_modules", "exclude_modules")}
    return {"kind": "lora", **kept, "adapters": lora.adapter_names(engine.module)}


def refuse_other_policy(engine: "DiffusersFSDPEngine | Outline", index: Mapping[str, Any], folder: Path) -> None:
    """Refuse a checkpoint of another kind of policy, of another optimizer, or with an average where there is none.

    Raises:
        ConfigError: names the first difference.
    """
    here, there = _policy(engine), index["policy"]
    for key in sorted(here.keys() | there.keys()):
        if here.get(key) != there.get(key):
            raise ConfigError(
                f"checkpoint {str(folder)!r} was written with {key} = {there.get(key)}, this trainer has {key} = "
                f"{here.get(key)}; use the settings it was written with, or start from an exported adapter"
            )
    if index["optimizer"]["name"] != engine.training.optimizer:
        raise ConfigError(
            f"checkpoint {str(folder)!r} holds the state of {index['optimizer']['name']!r}, but training.optimizer is "
            f"{engine.training.optimizer!r}; set it to the former"
        )
    if (index["ema_updates"] is None) != (engine.ema is None):
        raise ConfigError(
            f"checkpoint {str(folder)!r} has {'no' if index['ema_updates'] is None else 'an'} average of the policy; "
            "training.ema_decay must be " + ("none" if index["ema_updates"] is None else "set")
        )


def _save_random_states(engine: "DiffusersFSDPEngine", folder: Path) -> None:
    _, keys, position, has_gauss, gauss = np.random.get_state()
    version, internal, gauss_next = random.getstate()
    states = {
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": torch.cuda.get_rng_state().numpy().tobytes().hex() if engine.device.startswith("cuda") else None,
        "numpy": [np.asarray(keys).tolist(), position, has_gauss, gauss],
        "python": [version, internal, gauss_next],
    }
    _write(folder / _random_name(engine.ranks.rank), json.dumps(states).encode())


def _load_random_states(engine: "DiffusersFSDPEngine", folder: Path) -> None:
    path = folder / _random_name(engine.ranks.rank)
    if not path.is_file():  # more ranks than before: training itself draws nothing from these
        return
    states = json.loads(path.read_text())
    torch.set_rng_state(_bytes(states["torch"]))
    if states["cuda"] and engine.device.startswith("cuda"):
        torch.cuda.set_rng_state(_bytes(states["cuda"]))
    keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    version, internal, gauss_next = states["python"]
    random.setstate((version, tuple(internal), gauss_next))


def _random_name(rank: int) -> str:
    return f"random-{rank:05d}.json"


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
