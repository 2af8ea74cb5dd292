"""Settings that differ from those of a run that exists: what a fork could do with them, and how to ask for it."""

import json
import shlex
from collections.abc import Sequence
from typing import Any

from verl_omni_core.stages.checkpoint import STAGE as CHECKPOINT
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.runs import RunFolder

Change = tuple[str, Any, Any]
"""Name, the run's value, the value asked for."""

_OF_THE_SNAPSHOT = (
    *("model.name", "model.path", "model.options"),
    *("model.lora.rank", "model.lora.alpha", "model.lora.targets", "model.lora.exclude", "model.lora.dtype"),
    "training.optimizer",
)


def is_of_the_snapshot(change: Change) -> bool:
    """Say whether the tensors of a snapshot were made with the old value, so that they cannot serve the new one."""
    name, old, new = change
    if name == "training.ema_decay":
        return None in (old, new)  # there is an average, or there is none
    return any(name == fixed or name.startswith(f"{fixed}.") for fixed in _OF_THE_SNAPSHOT)


def spelled_out(changes: Sequence[Change]) -> str:
    """Return the differences for a message."""
    return "; ".join(f"{name} = {old!r}, and now it is {new!r}" for name, old, new in changes)


def remedy(folder: RunFolder, changes: Sequence[Change], store: str) -> str:
    """Return what to do instead of resuming a run with other settings: the command where there is one."""
    artifacts = RunStore(folder.root)
    snapshots = [step for step in artifacts.steps() if step and artifacts.find(step, CHECKPOINT) is not None]
    other = "give the settings that the run was started with, or give run.id another value to begin anew"
    if not snapshots or any(map(is_of_the_snapshot, changes)):
        return other
    options = " ".join(f"--set {shlex.quote(f'{name}={_text(new)}')}" for name, _, new in changes)
    return (
        f"{other}; to go on from its step {snapshots[-1]} with these settings: verl-omni fork {folder.run_id} --step "
        f"{snapshots[-1]} --store {shlex.quote(store)} {options}"
    )


def _text(value: Any) -> str:
    """Return a value as ``--set`` reads it."""
    if value is None:
        return "none"
    return value if isinstance(value, str) else _toml(value)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        kept = {key: entry for key, entry in value.items() if entry is not None}
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(entry)}" for key, entry in kept.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)
