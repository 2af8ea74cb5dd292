"""What training goes on from: parameters, optimizer moments, schedule, average, counters and random states.

Tensors go through torch's distributed checkpoint in safetensors files, one a rank, so any other number of ranks can
read them and nothing is ever unpickled. ``checkpoint.json`` comes last, with the digest of every other file: a folder
without it is no checkpoint. A saved checkpoint has been read back and compared.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException

from verl_omni_core.errors import ConfigError, StoreError
from verl_omni_core.store.durable_files import storage_errors
from verl_omni_core.training import sharding
from verl_omni_core.training.checkpoint_files import INDEX_FILE
from verl_omni_core.training.ranks import Ranks, vote
from verl_omni_core.training.snapshot import (
    Snapshot,
    like,
    network_of,
    policy_of,
    set_random_states,
    state_of,
    take,
)

if TYPE_CHECKING:
    from verl_omni_core.training.engine import DiffusersFSDPEngine
    from verl_omni_core.training.outline import Outline

FORMAT = 1
_USE_ANOTHER = "restore it from a copy, or start the run again: it goes on from the checkpoint before"
# one rank without a group is meant; for good, as filters that come and go are no matter for a thread
warnings.filterwarnings("ignore", "torch.distributed is disabled")
COMPARED_BYTES = 2**28
"""Tensors of a new checkpoint are read back in portions of this size, over all ranks."""


@dataclass(frozen=True)
class WrittenFile:
    """A file of a checkpoint that the disk has."""

    name: str
    size_bytes: int
    sha256: str


def save(engine: "DiffusersFSDPEngine", folder: Path, extra: Mapping[str, Any]) -> list[WrittenFile]:
    """Write, read back and compare; see :meth:`DiffusersFSDPEngine.save_checkpoint`."""
    ranks = engine.ranks if engine.ranks.size > 1 else Ranks()
    return write(take(engine, extra, ranks), folder, ranks)


def write(snapshot: Snapshot, folder: Path, ranks: Ranks) -> list[WrittenFile]:
    """Write a snapshot, read it back and compare; all ranks together.

    Args:
        ranks: those that the snapshot was taken for.
    Returns: all files, on every rank.
    Raises:
        StoreError: the disk is full or refuses the write, or what was read back differs; on the rank where it was so.
        ContractError: on the others.
    """
    vote(ranks, lambda: _write_own(snapshot, folder, ranks.rank))
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with _storage_errors(folder):
        dcp.save(snapshot.tensors, storage_writer=writer, process_group=ranks.group, no_dist=ranks.group is None)
    _compare(snapshot, folder, ranks)
    vote(ranks, lambda: _write_index(snapshot, folder) if ranks.rank == 0 else None)
    index = folder / INDEX_FILE
    files = json.loads(index.read_bytes())["files"]
    files[INDEX_FILE] = {"size_bytes": index.stat().st_size, "sha256": _sha256(index)}
    return [WrittenFile(name, **files[name]) for name in sorted(files)]


def load(engine: "DiffusersFSDPEngine", folder: Path) -> dict[str, Any]:
    """Go on from ``folder``; see :meth:`DiffusersFSDPEngine.load_checkpoint`."""
    index = read_index(folder)
    verify(folder, index)
    refuse_other_policy(engine, index, folder)
    _refuse(_other_shapes(state_of(engine)[0], index["tensors"]), index, folder)
    _prepare_moments(engine, index["optimizer"]["steps"])
    _read(folder, state_of(engine)[0], engine.ranks.group)
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


def _read(folder: Path, into: dict[str, Tensor], group: ProcessGroup | None) -> None:
    reader = HuggingFaceStorageReader(str(folder))
    with _storage_errors(folder):
        dcp.load(into, storage_reader=reader, process_group=group, no_dist=group is None)


@contextmanager
def _storage_errors(folder: Path) -> Iterator[None]:
    """Let what failed on a rank be seen as what it was, and a full disk as a StoreError."""
    with storage_errors(folder):
        try:
            yield
        except CheckpointException as error:
            raise next(cause for cause, _ in error.failures.values()) from error


def _write_own(snapshot: Snapshot, folder: Path, rank: int) -> None:
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / _random_name(rank), json.dumps(snapshot.random_states).encode())


def _compare(snapshot: Snapshot, folder: Path, ranks: Ranks) -> None:
    bad: list[str] = []
    for names in _portions(snapshot.tensors):
        parts = {name: sharding.local(snapshot.tensors[name]) for name in names}
        again = {name: torch.full_like(part, float("nan")) for name, part in parts.items()}
        _read(folder, {name: like(snapshot.tensors[name], again[name]) for name in names}, ranks.group)
        bad += [name for name in names if not _same_bits(parts[name], again[name])]
    if not ranks.agree(not bad):
        raise StoreError(
            f"the checkpoint in {str(folder)!r} reads back differently (rank {ranks.rank}: {bad[:3]}); the "
            "disk or the file system is not to be trusted"
        )


def _write_index(snapshot: Snapshot, folder: Path) -> None:
    files = sorted(path for path in folder.iterdir() if path.is_file() and _is_own(path.name))
    records = {path.name: {"size_bytes": path.stat().st_size, "sha256": _sha256(path)} for path in files}
    index = {"format": FORMAT, **snapshot.facts, "files": records}
    with storage_errors(folder):
        _write(folder / INDEX_FILE, json.dumps(index, indent=1, sort_keys=True).encode())


def _is_own(name: str) -> bool:
    """Say whether a file is the checkpoint's: the attempt that it is written into has one of its own."""
    return name.startswith("random-") or name.endswith(".safetensors")


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


def refuse_other_policy(engine: "DiffusersFSDPEngine | Outline", index: Mapping[str, Any], folder: Path) -> None:
    """Refuse a checkpoint of another network, policy or optimizer, or with an average where there is none.

    Raises:
        ConfigError: names every difference.
    """
    found = []
    for group, here in (("network", network_of(engine)), ("policy", policy_of(engine))):
        there = index.get(group, here)  # older ones do not tell the network
        found += [
            f"{key} = {there.get(key)!r} there, this trainer has {key} = {here.get(key)!r}"
            for key in sorted(here.keys() | there.keys())
            if here.get(key) != there.get(key)
        ]
    optimizer = index["optimizer"]["name"]
    if optimizer != engine.training.optimizer:
        found.append(f"the state of {optimizer!r} there, training.optimizer is {engine.training.optimizer!r}")
    if (index["ema_updates"] is None) != (engine.ema is None):
        has, must = ("no", "none") if index["ema_updates"] is None else ("an", "set")
        found.append(f"{has} average of the policy there, training.ema_decay must be {must}")
    _refuse(found, index, folder)


def _other_shapes(state: Mapping[str, Tensor], recorded: Mapping[str, list[int]]) -> list[str]:
    """Compare parameters and averages; moments have the shapes of what they are of."""
    here = {name: list(tensor.shape) for name, tensor in state.items() if not name.startswith("optimizer.")}
    there = {name: shape for name, shape in recorded.items() if not name.startswith("optimizer.")}
    odd = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
    if not odd:
        return []
    first = f"{odd[0]}: shape {there.get(odd[0])} there, {here.get(odd[0])} here"
    return [f"{len(odd)} tensors differ, first {first}"]


def _refuse(found: list[str], index: Mapping[str, Any], folder: Path) -> None:
    if not found:
        return
    written = ", ".join(f"{name} {version}" for name, version in index.get("versions", {}).items())
    raise ConfigError(
        f"checkpoint {str(folder)!r} does not fit this trainer: {'; '.join(found)}. Use the settings that it was "
        "written with, or start another run from its weights: verl-omni export RUN --out FOLDER, then "
        f"--set model.lora.adapter_path=FOLDER{f' (it was written by {written})' if written else ''}"
    )


def _load_random_states(engine: "DiffusersFSDPEngine", folder: Path) -> None:
    path = folder / _random_name(engine.ranks.rank)
    if not path.is_file():  # more ranks than before: training itself draws nothing from these
        return
    set_random_states(json.loads(path.read_text()), engine.device)


def _random_name(rank: int) -> str:
    return f"random-{rank:05d}.json"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
