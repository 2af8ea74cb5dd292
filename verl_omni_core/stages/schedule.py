"""When something that does not happen every step is due."""

from typing import Literal

from verl_omni_core.settings.run import RunConfig


def due(step: int, every: int, last: int) -> bool:
    """Say whether an event is due after ``step``: every so many steps (0: never) and after the last one.

    Args:
        step: 1-based.
        every: steps between events; 0 for none.
        last: the step after which it is due in any case; 0 for none.
    """
    return (every > 0 and step % every == 0) or step == last


def policy_version(step: int, sync_interval: int) -> int:
    """Return the version that draws ``step``: the newest that was synced before it."""
    return (step - 1) // sync_interval * sync_interval


def durability_level(config: RunConfig) -> Literal["none", "ledger", "snapshot"]:
    """Return ``durability.level``; ``auto`` is ``snapshot`` for adapters, whose state is small, else ``ledger``."""
    level = config.durability.level
    if level != "auto":
        return level
    return "snapshot" if config.model.lora.rank > 0 else "ledger"


def is_kept(config: RunConfig, step: int) -> bool:
    """Say whether the checkpoint of ``step`` is one that is kept for good."""
    return step > 0 and due(step, config.run.checkpoint_every, config.run.steps)


def snapshot_due(config: RunConfig, step: int) -> bool:
    """Say whether the trainer's whole state is committed after ``step``; never before the first."""
    if step < 1:
        return False
    level = durability_level(config)
    every = {"snapshot": 1, "ledger": config.durability.snapshot_every, "none": 0}[level]
    kept_whole = config.durability.checkpoint_contents == "all" and is_kept(config, step)
    return kept_whole or due(step, every, config.run.steps)
