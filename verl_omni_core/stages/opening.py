"""Open a run: check, own, and start or find its actors."""

import getpass
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from verl_omni_core.errors import ConfigError, FencedError, StoreError
from verl_omni_core.identity import digest
from verl_omni_core.settings.check import check
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.stages.checkpoint import STAGE as CHECKPOINT
from verl_omni_core.stages.ending import let_go_on_failure
from verl_omni_core.stages.log import STAGE as LAST_STAGE
from verl_omni_core.stages.plan import plan
from verl_omni_core.stages.session import RunRef, Session, let_go, register
from verl_omni_core.stages.trained import config_of
from verl_omni_core.store import runs
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.lease import Ownership, describe_holder, is_owned, take_ownership
from verl_omni_core.version import __version__
from verl_omni_core.workers.actors import Actors

logger = logging.getLogger(__name__)

_MAY_CHANGE = (
    *("run.id", "run.store", "run.steps", "run.*_every"),
    *("*timeout_s", "*.max_attempts", "cluster.*", "durability.*", "tracking.tensorboard", "weights.probe*"),
    *("algorithm.max_ratio_deviation", "reward.failure", "reward.max_invalid_fraction"),
)
"""Settings in which a resumed run may differ: no stage's key holds them, and they change no stage's result."""


def open_run(config: RunConfig, origins: Mapping[str, str] | None = None) -> RunRef:
    """Check the settings, make or open the run's folder, own it, and start or find its actors.

    A run id that exists is resumed: its committed stages are kept, its trainer is restored.

    Args:
        origins: dotted name of a setting to where its value comes from, and ``profile`` to the profile's name; saved.

    Raises:
        ConfigError, DataError: the settings cannot work; nothing was written. FencedError: somebody owns the run.
        StoreError: it is resumed with other training prompts.
    """
    folder = resumed(config)
    if folder is None or folder.config_digest != digest(config.model_dump(mode="json")):
        check(config)  # seconds that a run which goes on as it was need not spend again
        folder = folder or _created(config)
    if config.run.id is None:
        config = config_of(folder)
    let_go(str(folder.root))
    ownership = take_ownership(folder.root, this_process())
    ref = RunRef(str(folder.root), ownership.epoch)
    try:
        with let_go_on_failure(ref):
            if origins is not None:
                folder.write_origins(origins)
            return _open(config, folder, ref, ownership)
    except BaseException:
        ownership.release()
        raise


def _open(config: RunConfig, folder: runs.RunFolder, ref: RunRef, ownership: Ownership) -> RunRef:
    folder.record_settings(config.model_dump(mode="json"), epoch=ref.epoch, code_version=__version__)
    store = store_of(ref, config)
    store.sweep()
    folder.write_progress(status="running", step=runs.steps_done(folder.root))
    actors = Actors.start_or_find(config, folder, ownership.epoch)
    session = register(Session(ref, config, store, actors, ownership))
    done = runs.steps_done(folder.root)
    if done:
        plan(ref, done)  # planned anew it is the same, or the training prompts changed under the run
    restore(session)
    folder.write_engines(actors.describe_engines())
    session.ref = replace(ref, done=steps_behind(session))
    return session.ref


def attach(ref: RunRef) -> Session:
    """Return a session of a run that another process opened: its settings from disk, its actors by name."""
    root = Path(ref.root)
    folder = runs.open_run(root.parent, root.name)
    config = config_of(folder)
    actors = Actors.find(config, folder, ref.epoch, trains=folder.kind == runs.TRAIN)
    return Session(ref, config, store_of(ref, config), actors)


def restore(session: Session) -> None:
    """Bring a fresh trainer to the newest checkpoint that is whole; later updates are replayed from stored batches."""
    trainer, store = session.actors.trainer, session.store
    if trainer.version() > 0:
        return
    from verl_omni_core.training.checkpoint import INDEX_FILE  # late: it loads the training libraries

    done = runs.steps_done(session.root)
    for step in reversed(store.steps()):
        try:
            ref = store.find(step, CHECKPOINT) if step <= done else None
            if ref is not None:
                trainer.load_checkpoint(str(store.path_of(ref, INDEX_FILE).parent))
                return
        except StoreError as error:
            logger.warning("the checkpoint of step %d is damaged, and the one before it is taken: %s", step, error)


def steps_behind(session: Session) -> int:
    """Return the last step before the first that is not logged, or that the trainer has not learned from."""
    logged = 0
    while session.store.find(logged + 1, LAST_STAGE) is not None:
        logged += 1
    return min(logged, session.actors.trainer.version())


def this_process() -> str:
    """Return who this is, for the message that others get."""
    return f"{getpass.getuser()} (pid {os.getpid()})"


def store_of(ref: RunRef, config: RunConfig) -> RunStore:
    """Return the artifacts of a run, to commit as its owner."""
    return RunStore(ref.root, epoch=ref.epoch, min_free_bytes=int(config.durability.min_free_gb * 1e9))


def resumed(config: RunConfig) -> runs.RunFolder | None:
    """Return the run that these settings go on with, or none if they begin one. Changes nothing.

    Raises:
        ConfigError: it was started with other settings, or trains nothing. StoreError: its folder is damaged.
    """
    if config.run.id is None or not (Path(config.run.store) / config.run.id).exists():
        return None
    folder = runs.open_run(config.run.store, config.run.id)
    if folder.kind != runs.TRAIN:
        raise ConfigError(f"run {folder.run_id!r} is an evaluation and trains nothing; give run.id another value")
    _refuse_other_settings(folder, config.model_dump(mode="json"))
    return folder


def refuse_owned(folder: runs.RunFolder) -> None:
    """Refuse a run that a live process owns, this one too.

    Raises:
        FencedError: names the owner.
    """
    if is_owned(folder.root):
        raise FencedError(
            f"run {folder.run_id!r} is owned by {describe_holder(folder.root)}; wait for it, stop it, or give run.id "
            "another value"
        )


def _created(config: RunConfig) -> runs.RunFolder:
    settings = config.model_dump(mode="json")
    return runs.create_run(config.run.store, settings, code_version=__version__, run_id=config.run.id)


def _refuse_other_settings(folder: runs.RunFolder, settings: Mapping[str, Any]) -> None:
    for key, old, new in runs.config_differences(folder.config, settings):
        if not any(fnmatch(key, pattern) for pattern in _MAY_CHANGE):
            raise ConfigError(
                f"run {folder.run_id!r} exists with {key} = {old!r}, and now it is {new!r}; give run.id another value, "
                "or the settings that the run was started with"
            )
        schedule = settings["training"]["schedule"]
        if key == "run.steps" and schedule != "constant":
            raise ConfigError(
                f"run {folder.run_id!r} exists with run.steps = {old}, and now it is {new}, but training.schedule "
                f"{schedule!r} stretches over all of them, so that finished steps would have had other learning rates; "
                f"use {old} steps, or give run.id another value"
            )
