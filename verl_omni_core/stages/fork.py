"""Start a run from a step of another one, with other settings if wanted. The parent is only read."""

import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_omni_core.errors import ConfigError, StoreError
from verl_omni_core.settings.check import check
from verl_omni_core.settings.loader import apply_overrides, of_a_new_start, override_names
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.stages.checkpoint import STAGE as CHECKPOINT
from verl_omni_core.stages.keys import stage_key
from verl_omni_core.stages.schedule import policy_version
from verl_omni_core.stages.settings_changes import Change, is_of_the_snapshot, spelled_out
from verl_omni_core.stages.sync import AVERAGE, POLICY, weights_key
from verl_omni_core.stages.trained import STAGES, config_of, spans
from verl_omni_core.stages.validate import SAMPLES
from verl_omni_core.stages.validate import STAGE as VALIDATE
from verl_omni_core.store import mirror, runs
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.collected import is_collected
from verl_omni_core.store.durable_files import link_or_copy, storage_errors, sync_all
from verl_omni_core.store.lineage import Lineage
from verl_omni_core.store.manifest import ArtifactRef
from verl_omni_core.store.places import folder_of, remote_store
from verl_omni_core.training.checkpoint_files import INDEX_FILE
from verl_omni_core.training.outline import refuse_other_network
from verl_omni_core.version import __version__

_JUDGED_BY = ("model", "data", "sampler", "rollout", "reward")
"""Groups of settings that say what a validation draws and how it is scored."""
_OWN = ("run.id", "run.store")
_OF_THE_ATTEMPT = ("code_version", "config_digest", "host", "started", "finished")


@dataclass(frozen=True)
class Forked:
    """A run that has not begun: it goes on after its parent's step."""

    run: runs.RunFolder
    config: RunConfig
    """What it is started with."""
    lineage: Lineage


def fork(
    run_id: str,
    *,
    store: str | Path = "runs",
    step: int | None = None,
    new_id: str | None = None,
    overrides: Sequence[str] = (),
) -> Forked:
    """Make a run that goes on from a step of another one; :func:`verl_omni_core.train` starts it like any other.

    It takes over the step's snapshot and the weights that draw the next step, every file compared with its digest;
    files are shared with the parent where the file system can. Steps are counted from the parent's zero: the first
    one is ``step + 1``, and ``run.steps`` includes the parent's.

    Args:
        run_id: the parent, in ``store``; its flow may be alive.
        step: whose snapshot; none: the newest.
        new_id: name of the fork; none derives one from the parent's and the step.
        overrides: ``a.b=c`` texts over the parent's settings.
    Raises:
        ConfigError, DataError: there is no such snapshot, the name is taken, or settings that cannot work or that the
            snapshot cannot serve. StoreError: the parent is damaged or missing. Nothing is left behind.
    """
    parent = runs.open_run(store, run_id)
    if parent.kind != runs.TRAIN:
        raise ConfigError(f"run {run_id!r} is an evaluation, which has nothing to go on from; name a run that trains")
    source = RunStore(parent.root)
    base = _base(parent, source, step)
    config = _settings(parent, store, base, new_id, overrides)
    changes = [change for change in runs.config_differences(parent.config, _json(config)) if change[0] not in _OWN]
    _refuse_changes(parent, base, changes)
    check(config)
    snapshot = _found(source, base, CHECKPOINT)
    refuse_other_network(source.path_of(snapshot, INDEX_FILE).parent, config)
    weights = _weights(parent, source, config, base)
    judged = [] if _judges_otherwise(changes) else [(0, SAMPLES), (0, VALIDATE)]
    taken = [ref for at, stage in judged if (ref := source.find(at, stage)) is not None]
    if any(is_collected(parent.root, ref) for ref in taken):
        taken = []  # retention let some of it go: the fork judges the base itself, if it is asked to
    lineage = Lineage(
        run_id,
        parent.uuid,
        base,
        {f"{ref.step}/{ref.stage}": ref.manifest_sha256 for ref in (snapshot, *weights, *taken)},
        tuple(changes),
    )
    with _appearing(store, str(config.run.id)) as staging:
        made = runs.create_run(staging, _json(config), code_version=__version__, run_id=config.run.id, lineage=lineage)
        target = RunStore(made.root)
        key = stage_key(CHECKPOINT, base, [snapshot], lineage=lineage.uuid)
        own = _take_over(source, target, snapshot, key, [])
        for ref in weights:
            parents = [own] if ref.step == base else []
            network = POLICY if ref.stage == STAGES["policy"] else AVERAGE
            _take_over(source, target, ref, weights_key(config, network, ref.step, parents), parents)
        parents = []
        for ref in taken:
            parents = [_take_over(source, target, ref, stage_key(ref.stage, ref.step, [ref]), parents)]
    return Forked(runs.open_run(store, str(config.run.id)), config, lineage)


def _base(parent: runs.RunFolder, source: RunStore, step: int | None) -> int:
    done = runs.steps_done(parent.root)
    known = [at for at in source.steps() if 0 < at <= done and _is_whole(source, at)]
    if step is None and known:
        return known[-1]
    if step in known:
        return step
    which = "no snapshot yet" if step is None else f"no snapshot of step {step}"
    has = f"it has those of step {spans(known)}" if known else "it has none"
    every = parent.config.get("run", {}).get("checkpoint_every")
    raise ConfigError(
        f"run {parent.run_id!r} has {which}; {has} (run.checkpoint_every = {every}): fork one of those, or start a new "
        "run (verl-omni train)"
    )


def _is_whole(source: RunStore, step: int) -> bool:
    """Say whether a step has a snapshot that retention has not deleted."""
    ref = source.find(step, CHECKPOINT)
    return ref is not None and not is_collected(Path(source.root), ref)


def _settings(
    parent: runs.RunFolder, store: str | Path, base: int, new_id: str | None, overrides: Sequence[str]
) -> RunConfig:
    taken = sorted(set(override_names(overrides)) & set(_OWN))
    if taken:
        raise ConfigError(
            f"--set {taken[0]}: a fork lies in its parent's store; name it with --run-id, and the store with --store"
        )
    config = apply_overrides(of_a_new_start(config_of(parent)), overrides)
    if new_id is None:
        new_id = next(name for name in _derived_ids(parent.run_id, base) if not runs.run_exists(store, name))
    runs.check_name(new_id)
    if runs.run_exists(store, new_id):
        raise ConfigError(f"run {new_id!r} exists in {store}; give --run-id another value")
    named = config.run.model_copy(update={"id": new_id, "store": str(store)})
    config = config.model_copy(update={"run": named})
    if config.run.steps <= base:
        raise ConfigError(
            f"run.steps is {config.run.steps}, counted from the parent's first step, and the fork begins after step "
            f"{base}, so nothing is left to train; give more, for example --set run.steps={base + config.run.steps}"
        )
    return config


def _derived_ids(run_id: str, base: int) -> Iterator[str]:
    stem = f"{run_id[:80]}-from-{base}"
    yield stem
    number = 2
    while True:
        yield f"{stem}.{number}"
        number += 1


def _refuse_changes(parent: runs.RunFolder, base: int, changes: Sequence[Change]) -> None:
    odd = [change for change in changes if is_of_the_snapshot(change)]
    if odd:
        raise ConfigError(
            f"the snapshot of step {base} of run {parent.run_id!r} was made with {spelled_out(odd)}, which it cannot "
            "serve; leave that as it is, or start a new run with it (verl-omni train)"
        )


def _weights(parent: runs.RunFolder, source: RunStore, config: RunConfig, base: int) -> list[ArtifactRef]:
    """Return the parent's weights that the fork needs: to draw its first step, and the base to compare with."""
    version = policy_version(base + 1, config.weights.sync_interval)
    drawing = source.find(version, STAGES["policy"])
    if version < base and (drawing is None or is_collected(parent.root, drawing)):
        raise ConfigError(
            f"with weights.sync_interval = {config.weights.sync_interval} step {base + 1} is drawn by version "
            f"{version}, which run {parent.run_id!r} has not synced, or whose weights it has not kept; use the "
            f"parent's interval, or one that divides {base}"
        )
    wanted = [(0, "policy"), (version, "policy"), (base, "policy"), (base, "average")]
    found = (source.find(at, STAGES[network]) for at, network in dict.fromkeys(wanted))  # type: ignore[index]
    return [ref for ref in found if ref is not None and not is_collected(parent.root, ref)]


def _judges_otherwise(changes: Sequence[Change]) -> bool:
    return any(name.partition(".")[0] in _JUDGED_BY for name, _, _ in changes)


def _found(source: RunStore, step: int, stage: str) -> ArtifactRef:
    ref = source.find(step, stage)
    if ref is None:
        raise StoreError(f"{stage} of step {step} was deleted while the run was forked; fork another step")
    return ref


def _take_over(
    source: RunStore, target: RunStore, ref: ArtifactRef, key: str, parents: list[ArtifactRef]
) -> ArtifactRef:
    """Commit an artifact of the parent as the fork's own, its files shared where the file system can."""
    manifest = source.manifest(ref)
    attempt = target.attempt(ref.step, ref.stage, key)
    for file in manifest.files:
        path = attempt.folder / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        with storage_errors(path):
            path.unlink(missing_ok=True)  # a checkpoint counts the description of its attempt among its files
            link_or_copy(source.path_of(ref, file.name), path)
        seen = attempt.add_file(file.name).sha256
        if seen != file.sha256:
            raise StoreError(
                f"{file.name!r} of {ref.stage} of step {ref.step} has sha256 {seen[:12]}, its manifest says "
                f"{file.sha256[:12]}; the disk damaged it: fork another step"
            )
    facts = {name: value for name, value in manifest.producer.items() if name not in _OF_THE_ATTEMPT}
    taken = {"run": manifest.run_id, "manifest_sha256": ref.manifest_sha256}
    return attempt.commit(manifest.files, rows=ref.rows, parents=parents, producer={**facts, "taken_over": taken})


@contextmanager
def _appearing(store: str | Path, run_id: str) -> Iterator[Path]:
    """Yield a folder to make the run in; it appears in the store, whole, at the end, or not at all."""
    folder, taken = folder_of(store), ConfigError(f"run {run_id!r} exists in {store}; give --run-id another value")
    staging, remote = folder / f".fork-{os.getpid()}-{uuid.uuid4().hex[:8]}", remote_store(folder)
    try:
        yield staging
        if remote is not None and not mirror.publish_run(staging / run_id, remote.within(run_id)):
            raise taken
        with storage_errors(folder):
            try:
                (staging / run_id).rename(folder / run_id)
            except OSError as error:
                if (folder / run_id).exists():
                    raise taken from error
                raise
            sync_all([folder])
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _json(config: RunConfig) -> dict[str, Any]:
    return config.model_dump(mode="json")
