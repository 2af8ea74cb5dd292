"""Open a run: check, own, and start or find its actors."""

import getpass
import os
from dataclasses import replace
from pathlib import Path

from verl_omni_core.errors import ConfigError, StoreError
from verl_omni_core.settings.check import check
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.stages.log import STAGE as LAST_STAGE
from verl_omni_core.stages.session import RunRef, Session, let_go, register
from verl_omni_core.stages.trained import config_of
from verl_omni_core.store import runs
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.lease import Ownership, take_ownership
from verl_omni_core.version import __version__
from verl_omni_core.workers.actors import Actors

_MAY_CHANGE = {"run.id", "run.steps", "run.store"}
"""Settings in which a resumed run may differ from its folder: they change no result of a finished stage."""


def open_run(config: RunConfig) -> RunRef:
    """Check the settings, make or open the run's folder, own it, and start or find its actors.

    A run id that exists is resumed: its committed stages are kept, its trainer is restored.

    Raises:
        ConfigError, DataError: the settings cannot work; nothing was written. FencedError: somebody owns the run.
    """
    check(config)
    folder = _folder(config)
    config = config_of(folder)
    let_go(str(folder.root))
    ownership = take_ownership(folder.root, this_process())
    try:
        return _open(config, folder, ownership)
    except BaseException:
        ownership.release()
        raise


def _open(config: RunConfig, folder: runs.RunFolder, ownership: Ownership) -> RunRef:
    ref = RunRef(str(folder.root), ownership.epoch)
    store = store_of(ref, config)
    store.sweep()
    folder.write_progress(status="running", step=runs.steps_done(folder.root))
    actors = Actors.start_or_find(config, folder, ownership.epoch)
    session = register(Session(ref, config, store, actors, ownership))
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
    """Bring a fresh trainer to the newest checkpoint; later updates are replayed from stored batches as they come."""
    if session.actors.trainer.version() > 0:
        return
    done = runs.steps_done(session.root)
    for step in sorted(session.store.steps(), reverse=True):
        ref = session.store.find(step, "checkpoint")
        if ref is not None and step <= done:
            manifest = session.store.manifest(ref)
            folder = session.store.path_of(ref, manifest.files[0].name).parent
            session.actors.trainer.load_checkpoint(str(folder))
            return


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


def _folder(config: RunConfig) -> runs.RunFolder:
    settings = config.model_dump(mode="json")
    if config.run.id is None:
        return runs.create_run(config.run.store, settings, code_version=__version__)
    try:
        folder = runs.open_run(config.run.store, config.run.id)
    except StoreError:
        if (Path(config.run.store) / config.run.id).exists():
            raise
        return runs.create_run(config.run.store, settings, code_version=__version__, run_id=config.run.id)
    if folder.kind != runs.TRAIN:
        raise ConfigError(f"run {folder.run_id!r} is an evaluation and trains nothing; give run.id another value")
    changed = [item for item in runs.config_differences(folder.config, settings) if item[0] not in _MAY_CHANGE]
    if changed:
        key, old, new = changed[0]
        raise ConfigError(
            f"run {folder.run_id!r} exists with {key} = {old!r}, and now it is {new!r}; give run.id another value, or "
            "the settings that the run was started with"
        )
    return replace(folder, config=settings)
