"""An index that opens long runs fast: what stands behind a run's newest steps, a file for every 100 of them.

Everything in it is derived. A block says that all steps up to its last one are finished, and those before its first one
swept, so opening the run looks only at what comes after. One that is missing, damaged or overtaken is no obstacle: the
owner writes it anew from the commits. ``verl-omni verify`` compares all of it with them.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl_omni_core.errors import StoreError
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.durable_files import replace_whole, storage_errors, sync_all
from verl_omni_core.store.index_files import STEPS, block_path, block_steps
from verl_omni_core.store.lease import check_epoch
from verl_omni_core.store.ledger import Ledger, Position
from verl_omni_core.store.lineage import base_step
from verl_omni_core.store.manifest import ArtifactRef, sha256

logger = logging.getLogger(__name__)

LAST_STAGE = "log"
"""The stage that ends a step."""


@dataclass(frozen=True)
class Block:
    """What the index knows of ``STEPS`` steps, of which all are finished, as are all before them."""

    last: int
    """The last of them; a multiple of ``STEPS``."""
    stages: Mapping[int, tuple[ArtifactRef, ...]]
    """Step to what was committed in it when the block was written. A snapshot that is written beside the next steps may
    come later."""
    ledger: Position
    """Where the ledger's records of these steps and of those before them end."""


def newest_block(store: RunStore) -> Block | None:
    """Return the newest block that still holds, or none. Changes nothing."""
    for last in reversed(block_steps(Path(store.root))):
        try:
            block = read_block(store, last)
        except StoreError as error:
            logger.warning("the index of run %s is passed over: %s", Path(store.root).name, error)
            continue
        if is_current(store, block):
            return block
    return None


def finished_steps(store: RunStore) -> int:
    """Return the last step before the first that is not logged."""
    block = newest_block(store)
    step = block.last if block else base_step(Path(store.root))
    while store.find(step + 1, LAST_STAGE) is not None:
        step += 1
    return step


def open_ledger(store: RunStore) -> Ledger:
    """Return the run's ledger. What the index has of it is read only when it is asked for."""
    block = newest_block(store)
    return Ledger(store.root, epoch=store.epoch, **({"start": block.ledger} if block else {}))


def unsettled_steps(store: RunStore) -> list[int]:
    """Return the steps in which there may be something to sweep.

    The newest block's own steps are among them: a snapshot that was being written beside the next step may have been
    cut off after that block was written.
    """
    block = newest_block(store)
    first = block.last - STEPS + 1 if block else 0
    return [step for step in store.steps() if step >= first]


def sweep(store: RunStore) -> int:
    """Delete attempts that nothing needs, of the steps that the index has not settled; see :meth:`RunStore.sweep`."""
    return store.sweep(unsettled_steps(store))


def extend(store: RunStore, ledger: Ledger, step: int) -> None:
    """Write the block that ends with ``step``, if one does, once the step is finished."""
    if step % STEPS == 0:
        repair(store, ledger, at_least=step)


def repair(store: RunStore, ledger: Ledger, *, at_least: int = 0) -> list[int]:
    """Write what is missing of the index, and the newest block if it does not hold; return the last steps of those.

    Args:
        at_least: a block that is checked although there are newer ones.
    Raises:
        FencedError: a newer owner exists.
        StoreError: a commit or the ledger is damaged, or the disk is full.
    """
    check_epoch(Path(store.root), store.epoch)
    base, present = base_step(Path(store.root)), block_steps(Path(store.root))
    unchecked = {*present[:-1]} - {at_least}
    written = []
    for last in range(STEPS, max(store.steps(), default=0) + 1, STEPS):
        if last <= base or last in unchecked or (last in present and _holds(store, last)):
            continue
        block = build_block(store, ledger, last)
        if block is None:
            break
        # the block before it; in its own steps a snapshot may still be on its way
        store.sweep(range(last - 2 * STEPS + 1, last - STEPS + 1), finished=True)
        _write(store, block)
        written.append(last)
    return written


def rebuild(store: RunStore, ledger: Ledger) -> list[int]:
    """Throw the index away and write it anew; return the last steps of its blocks.

    Raises:
        FencedError, StoreError: see :func:`repair`.
    """
    check_epoch(Path(store.root), store.epoch)
    for last in block_steps(Path(store.root)):
        block_path(Path(store.root), last).unlink()
    return repair(store, ledger)


def read_block(store: RunStore, last: int) -> Block:
    """Return the block that ends with ``last``, as it was written.

    Raises:
        StoreError: there is none, or it is damaged.
    """
    path = block_path(Path(store.root), last)
    try:
        value = json.loads(path.read_bytes())
        if value["sha256"] != _digest(value):
            raise ValueError("its digest is another one")
        stages = {
            int(step): tuple(ArtifactRef.from_json(ref) for ref in refs) for step, refs in value["stages"].items()
        }
        return Block(value["last"], stages, Position(**value["ledger"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(
            f"{path} is missing or damaged ({type(error).__name__}: {error}); it is derived: verl-omni verify "
            f"{Path(store.root).name} --rebuild-index writes it anew"
        ) from error


def is_current(store: RunStore, block: Block) -> bool:
    """Say whether the block's last step is still finished, by the very commit that the block knows.

    Of a run that was taken back to an earlier step, and went another way from there, it is not.
    """
    return store.find(block.last, LAST_STAGE) in block.stages.get(block.last, ())


def build_block(store: RunStore, ledger: Ledger, last: int) -> Block | None:
    """Return the block that ends with ``last`` from the commits; none if a step of it is not finished.

    Of a fork the steps that it took over count as finished.
    """
    stages, base = {}, base_step(Path(store.root))
    for step in range(last - STEPS + 1, last + 1):
        refs = tuple(ref for stage in store.stages(step) if (ref := store.find(step, stage)))
        if step > base and all(ref.stage != LAST_STAGE for ref in refs):
            return None
        stages[step] = refs
    return Block(last, stages, ledger.position(last))


def _holds(store: RunStore, last: int) -> bool:
    try:
        return is_current(store, read_block(store, last))
    except StoreError as error:
        logger.warning("the index of run %s is written anew: %s", Path(store.root).name, error)
        return False


def _write(store: RunStore, block: Block) -> None:
    value: dict[str, Any] = {
        "last": block.last,
        "stages": {str(step): [ref.to_json() for ref in refs] for step, refs in block.stages.items()},
        "ledger": asdict(block.ledger),
    }
    value["sha256"] = _digest(value)
    path = block_path(Path(store.root), block.last)
    with storage_errors(path):
        path.parent.mkdir(exist_ok=True)
        # replaced rather than created: one that does not hold any more may lie there
        replace_whole(path, json.dumps(value, sort_keys=True).encode())
        sync_all([path, path.parent])


def _digest(value: Mapping[str, Any]) -> str:
    content = {name: entry for name, entry in value.items() if name != "sha256"}
    return sha256(json.dumps(content, sort_keys=True).encode())
