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
from verl_omni_core.settings.check import check, check_store
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.stages.checkpoint import STAGE as CHECKPOINT
from verl_omni_core.stages.ending import let_go_on_failure
from verl_omni_core.stages.finish import finished_summary
from verl_omni_core.stages.plan import plan
from verl_omni_core.stages.progress_budget import STARTED_AT, mark, refuse_without_progress
from verl_omni_core.stages.rewind import finish_rewind, go_back, refuse_step, set_aside
from verl_omni_core.stages.schedule import durability_level
from verl_omni_core.stages.session import RunRef, Session, let_go, register
from verl_omni_core.stages.settings_changes import remedy, spelled_out
from verl_omni_core.stages.soundness import refuse_unsound
from verl_omni_core.stages.time_limit import refuse_past_end
from verl_omni_core.stages.trained import config_of
from verl_omni_core.store import index, runs
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.collected import is_collected
from verl_omni_core.store.lease import Ownership, describe_holder, is_owned, take_ownership
from verl_omni_core.store.ledger import Ledger
from verl_omni_core.store.lineage import base_step
from verl_omni_core.store.places import REWIND_MARKER
from verl_omni_core.training.checkpoint_files import INDEX_FILE
from verl_omni_core.version import __version__
from verl_omni_core.workers.actors import Actors

logger = logging.getLogger(__name__)

_MAY_CHANGE = (
    *("run.id", "run.store", "run.steps", "run.*_every", "run.resume", "run.end_by", "run.end_margin_s"),
    *("*timeout_s", "*.max_attempts", "cluster.*", "durability.*", "tracking.tensorboard", "weights.probe*"),
    *("algorithm.max_ratio_deviation", "reward.failure", "reward.max_invalid_fraction"),
    *("rollout.failure", "rollout.refill_rounds", "rollout.max_failed_fraction"),
)
"""Settings in which a resumed run may differ: no stage's key holds them. They change no result of a stage in which
nothing failed, and of others only what becomes of that from then on."""


def open_run(config: RunConfig, origins: Mapping[str, str] | None = None, *, request: str | None = None) -> RunRef:
    """Check the settings, make or open the run's folder, own it, and start or find its actors.

    A run id that exists is resumed: its committed stages are kept, its trainer is restored; ``run.resume`` says
    otherwise.

    Args:
        origins: dotted name of a setting to where its value comes from, and ``profile`` to the profile's name; saved.
        request: who asks, where the same may ask again: its run is its own, and it goes back to a step once.

    Raises:
        ConfigError, DataError: the settings cannot work; nothing was written. FencedError: somebody owns the run.
        StoreError: it is resumed with other training prompts.
    """
    refuse_past_end(config)
    folder = resumed(config, request)
    if folder is None or folder.config_digest != digest(config.model_dump(mode="json")):
        check(config)  # seconds that a run which goes on as it was need not spend again
        folder = folder or _created(config, request)
    else:
        check_store(config)
    if config.run.id is None:
        config = config_of(folder)
    let_go(str(folder.root))
    ownership = take_ownership(folder.root, this_process(), {STARTED_AT: mark(folder.root)})
    ref = RunRef(str(folder.root), ownership.epoch)
    try:
        with let_go_on_failure(ref):
            if origins is not None:
                folder.write_origins(origins)
            return _open(config, folder, ref, ownership, request)
    except BaseException:
        ownership.release()
        raise


def _open(config: RunConfig, folder: runs.RunFolder, ref: RunRef, ownership: Ownership, request: str | None) -> RunRef:
    folder.record_settings(config.model_dump(mode="json"), epoch=ref.epoch, code_version=__version__)
    store = store_of(ref, config)
    finish_rewind(store, Ledger(store.root, epoch=ref.epoch))
    index.repair(store, index.open_ledger(store))
    index.sweep(store)
    folder.write_progress(status="running", step=runs.steps_done(folder.root))
    actors = Actors.start_or_find(config, folder, ownership.epoch)
    session = register(Session(ref, config, store, actors, ownership))
    done = runs.steps_done(folder.root)
    if done > base_step(folder.root):
        plan(ref, done)  # planned anew it is the same, or the training prompts changed under the run
    resume = config.run.resume
    if not (isinstance(resume, int) and go_back(session, resume, request)):
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
    """Bring a fresh trainer to the newest checkpoint that is whole; later updates are replayed from stored batches.

    So is a living one that did not serve the owner before this one: the run may have gone another way without it.

    With ``durability.level = none`` they are not: what came after the checkpoint is set aside and done again.

    Raises:
        StoreError: a fork has none: the batches before its first step are its parent's.
    """
    trainer = session.actors.trainer
    if trainer.version() > 0:
        if trainer.owned_since() >= session.ref.epoch - 1:
            trainer.obey(session.ref.epoch)
            return
        logger.warning(
            "somebody else owned run %s since its trainer worked last: the trainer goes on from the newest checkpoint",
            session.root.name,
        )
        trainer.reset()
    trainer.obey(session.ref.epoch)
    done = runs.steps_done(session.root)
    _load_newest(session, done)
    held = trainer.version()
    if durability_level(session.config) == "none" and held < done:
        set_aside(session, held, f"durability.level is none, so that step {held + 1} to {done} are done again")


def _load_newest(session: Session, done: int) -> None:
    trainer, store = session.actors.trainer, session.store
    for step in reversed(store.steps()):
        try:
            ref = store.find(step, CHECKPOINT) if step <= done else None
            if ref is not None and not is_collected(session.root, ref):
                trainer.load_checkpoint(str(store.path_of(ref, INDEX_FILE).parent))
                return
        except StoreError as error:
            logger.warning("the checkpoint of step %d is damaged, and the one before it is taken: %s", step, error)
    base = base_step(session.root)
    if base:
        raise StoreError(
            f"run {session.root.name!r} goes on from step {base} of another run, and no checkpoint of it is whole; "
            "restore its folder from a copy, or fork that run again (verl-omni fork)"
        )


def steps_behind(session: Session) -> int:
    """Return the last step before the first that is not logged, or that the trainer has not learned from."""
    return min(index.finished_steps(session.store), session.actors.trainer.version())


def this_process() -> str:
    """Return who this is, for the message that others get."""
    return f"{getpass.getuser()} (pid {os.getpid()})"


def store_of(ref: RunRef, config: RunConfig) -> RunStore:
    """Return the artifacts of a run, to commit as its owner."""
    return RunStore(ref.root, epoch=ref.epoch, min_free_bytes=int(config.durability.min_free_gb * 1e9))


def resumed(config: RunConfig, request: str | None = None) -> runs.RunFolder | None:
    """Return the run that these settings go on with, or none if they begin one. Changes nothing.

    Args:
        request: see :func:`open_run`.
    Raises:
        ConfigError: it was started with other settings, or trains nothing; or ``run.resume`` forbids it, or names a
            step that it has not done. StoreError: its folder is damaged.
        NoProgressError: it broke off too often at the same place.
    """
    resume = config.run.resume
    if config.run.id is None or not runs.run_exists(config.run.store, config.run.id):
        if isinstance(resume, int):
            raise ConfigError(
                f"run.resume is {resume}, but there is no run {config.run.id or 'without a name'!r} in "
                f"{config.run.store!r} to go back in; give run.id its name (verl-omni runs lists them), or leave "
                "run.resume out"
            )
        return None
    folder = runs.open_run(config.run.store, config.run.id)
    if folder.kind != runs.TRAIN:
        raise ConfigError(f"run {folder.run_id!r} is an evaluation and trains nothing; give run.id another value")
    _refuse_other_settings(folder, config.model_dump(mode="json"))
    refuse_unsound(folder, config)
    refuse_without_progress(folder, config)
    if resume == "disable" and (request is None or folder.request != request):
        raise ConfigError(
            f"run {folder.run_id!r} exists in {config.run.store!r} with {runs.steps_done(folder.root)} steps, and "
            "run.resume is disable; give run.id another value, or set run.resume=auto to go on with it"
        )
    if isinstance(resume, int):
        refuse_step(folder.root, resume, request)
    return folder


def finished(config: RunConfig, request: str | None = None) -> str | None:
    """Return what to say of a run that these settings would go on with if nothing of it is left to do. Changes nothing.

    Args:
        request: see :func:`open_run`.
    Raises: see :func:`resumed`.
    """
    folder = resumed(config, request)
    if folder is None or is_owned(folder.root) or isinstance(config.run.resume, int):
        return None
    if (folder.root / REWIND_MARKER).exists():
        return None  # it is on its way back to an earlier step
    told = finished_summary(folder.root, config.run.steps)
    if told is None:
        return None
    return (
        f"Run {folder.run_id!r} is finished and nothing was done; more steps: --set run.steps=..., another run: "
        f"--run-id ...\n{told}"
    )


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


def _created(config: RunConfig, request: str | None) -> runs.RunFolder:
    settings = config.model_dump(mode="json")
    return runs.create_run(config.run.store, settings, code_version=__version__, run_id=config.run.id, request=request)


def _refuse_other_settings(folder: runs.RunFolder, settings: Mapping[str, Any]) -> None:
    changes = runs.config_differences(folder.config, settings)
    odd = [change for change in changes if not any(fnmatch(change[0], pattern) for pattern in _MAY_CHANGE)]
    if odd:
        raise ConfigError(
            f"run {folder.run_id!r} exists with {spelled_out(odd)}, which changes its results; "
            f"{remedy(folder, odd, settings['run']['store'])}"
        )
    for key, old, new in changes:
        schedule = settings["training"]["schedule"]
        if key == "run.steps" and schedule != "constant":
            raise ConfigError(
                f"run {folder.run_id!r} exists with run.steps = {old}, and now it is {new}, but training.schedule "
                f"{schedule!r} stretches over all of them, so that finished steps would have had other learning rates; "
                f"{remedy(folder, [(key, old, new)], settings['run']['store'])}"
            )
