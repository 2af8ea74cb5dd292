"""Run folders: making one, opening one, and listing them, whether or not their flows are alive."""

import dataclasses
import itertools
import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from verl_omni_core.errors import ConfigError, StoreError
from verl_omni_core.identity import digest
from verl_omni_core.store import mirror
from verl_omni_core.store.attempt import read_commit, stage_folder
from verl_omni_core.store.durable_files import replace_whole, storage_errors, sync_all
from verl_omni_core.store.lease import is_owned
from verl_omni_core.store.lineage import FIELD, Lineage, base_step
from verl_omni_core.store.places import RUN, SETTINGS, folder_of, remote_of, remote_store, store_of

ENGINE = "engine.json"
ORIGINS = "settings_origins.json"
PROGRESS = "progress.json"
STOPPED = "stopped"
"""Status of a run that ended before its last step, and goes on when it is started again."""
TRAIN, EVALUATE = "train", "evaluate"
"""Kinds of runs: one that learns, and one that only judges."""
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_LAST_STAGE = "update"
_LISTED_AT_ONCE = 8


@dataclass(frozen=True)
class RunFolder:
    """A run on disk. Reading it needs no live flow."""

    root: Path
    config: Mapping[str, Any]
    """The resolved settings, as the newest start had them."""
    config_digest: str
    code_version: str
    created: str
    """UTC, ISO 8601."""
    kind: str
    """``train`` or ``evaluate``."""
    uuid: str
    """Drawn once: another run that gets the same folder has another one."""
    request: str | None
    """Who asked for it, where the same may ask again, such as a flow run that is retried."""
    lineage: Lineage | None = None
    """Of a fork: which step of which run it goes on from."""

    @property
    def run_id(self) -> str:
        """The run's name, that of its folder."""
        return self.root.name

    def write_origins(self, origins: Mapping[str, str]) -> None:
        """Record where each setting came from, once; a run that is resumed keeps what was recorded first."""
        if not (self.root / ORIGINS).exists():
            replace_whole(self.root / ORIGINS, json.dumps(dict(origins), indent=1).encode())

    def record_settings(self, config: Mapping[str, Any], *, epoch: int, code_version: str) -> None:
        """Keep what a resumed run runs with, if it is new; ``run.json`` stays as it was.

        Settings that later starts changed are one file for each such start, named by its fence epoch.

        Args:
            epoch: fence epoch of the owner.
        """
        if digest(config) == self.config_digest:
            return
        content = {"config": dict(config), "config_digest": digest(config), "code_version": code_version}
        folder = self.root / SETTINGS
        data = json.dumps({**content, "created": _now()}, indent=1).encode()
        with storage_errors(folder):
            folder.mkdir(exist_ok=True)
        mirror.create_copied(self.root, folder / f"{epoch:06d}.json", data)
        sync_all([self.root])

    def write_engines(self, replicas: Sequence[Mapping[str, Any]]) -> None:
        """Record who generates: engine, version, pipeline class, count of requests.

        Args:
            replicas: what the living engines say about themselves, each with its ``instance``. Engines that were
                recorded before and do not live any more stay, as ``earlier``, with what they said last.
        """
        known = self.engines()
        living = {replica["instance"] for replica in replicas}
        earlier = [each for each in (*known["earlier"], *known["replicas"]) if each["instance"] not in living]
        content = {"replicas": [dict(replica) for replica in replicas], "earlier": earlier}
        replace_whole(self.root / ENGINE, json.dumps(content, indent=1).encode())

    def engines(self) -> dict[str, list[dict[str, Any]]]:
        """Return what :meth:`write_engines` recorded: ``replicas`` and ``earlier``; empty if nothing readable was."""
        return {"replicas": [], "earlier": [], **(_told(self.root / ENGINE) or {})}

    def write_progress(self, *, status: str, step: int, reward: float | None = None) -> None:
        """Say how far the run is, for listings. What is done is decided by commits, not by this.

        Args:
            status: ``running``, ``finished``, ``failed`` or ``stopped``.
            step: steps finished.
            reward: mean reward of the last of them; none leaves what was said before.
        """
        if reward is None:
            reward = self._progress().get("reward")
        value = {"status": status, "step": step, "reward": reward, "updated": _now()}
        replace_whole(self.root / PROGRESS, json.dumps(value).encode())

    def status(self) -> str:
        """Return what :meth:`write_progress` said last, or ``new``."""
        return str(self._progress().get("status", "new"))

    def _progress(self) -> dict[str, Any]:
        try:
            return _read_json(self.root / PROGRESS) or {}
        except StoreError:
            return {}  # torn by a power cut: it is not synced, and written anew now


@dataclass(frozen=True)
class RunSummary:
    """One line of a listing."""

    run_id: str
    status: str
    """``running``, ``finished``, ``failed``, ``stopped``; ``interrupted`` if it should run and nobody owns it; ``new``;
    ``unknown`` if what it said last cannot be read; ``damaged`` if its settings cannot."""
    steps_done: int
    steps: int | None
    """Steps that the settings ask for."""
    reward: float | None
    started: str
    updated: str
    kind: str = TRAIN
    """``train`` or ``evaluate``."""
    lineage: str = ""
    """``<run>@<step>`` that a fork goes on from."""


def create_run(
    store: str | Path,
    config: Mapping[str, Any],
    *,
    code_version: str,
    run_id: str | None = None,
    profile: str | None = None,
    kind: str = TRAIN,
    request: str | None = None,
    lineage: Lineage | None = None,
) -> RunFolder:
    """Make a run's folder with its resolved settings.

    Args:
        store: folder that holds all runs, made if it does not exist; or the address of an object store.
        config: resolved settings, JSON-like; a ``run.id`` of none becomes the run's name.
        code_version: version of this package that made them.
        run_id: name of the run; none derives one from the time and the profile.
        profile: name of the profile, for a derived id.
        kind: ``train``, or ``evaluate`` for a run that only judges.
        request: who asks, where the same may ask again.
        lineage: of a fork.
    Raises:
        ConfigError: ``run_id`` is no legal name.
        StoreError: such a run exists, or the store cannot be written.
    """
    if run_id is not None:
        check_name(run_id)
    folder = folder_of(store)
    with storage_errors(folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, FileNotFoundError, NotADirectoryError) as error:
            raise ConfigError(
                f"run.store is {str(store)!r}, where no folder can be made ({error.strerror}); give one that exists or "
                "can be made"
            ) from error
        root = _make_folder(folder, run_id, profile)
        config = _named(config, root.name)
        content = {
            "kind": kind,
            "uuid": uuid.uuid4().hex,
            "request": request,
            "config": config,
            "config_digest": digest(config),
            "code_version": code_version,
            "created": _now(),
            FIELD: None if lineage is None else lineage.to_json(),
        }
        try:
            mirror.create_copied(root, root / RUN, json.dumps(content, indent=1).encode())
        except FileExistsError:
            raise StoreError(f"run {root.name!r} was made in {store} at this moment; give another run.id") from None
        except BaseException:
            root.rmdir()  # a folder without its settings is no run, and would keep its name
            raise
        sync_all([folder])
    return open_run(store, root.name)


def check_name(run_id: str) -> None:
    """Raise ConfigError for what cannot be the name of a run."""
    if not _ID.fullmatch(run_id):
        raise ConfigError(
            f"run.id is {run_id!r}, expected letters, digits, '.', '_' or '-', at most 100, starting with a "
            "letter or digit"
        )


def open_run(store: str | Path, run_id: str) -> RunFolder:
    """Open a run's folder. Changes nothing, but copies what tells of a run in an object store.

    Raises:
        StoreError: there is no such run, or the folder is not one.
    """
    root = folder_of(store).absolute() / run_id
    if _ID.fullmatch(run_id):
        mirror.pull_run(root)
    if not _ID.fullmatch(run_id) or not root.is_dir():
        known = [path.name for path in _folders(folder_of(store))]
        raise StoreError(f"store {store} has no run {run_id!r}; it has {', '.join(known[-5:]) or 'none'}")
    made = _read_json(root / RUN)
    if made is None:
        raise StoreError(
            f"{root} is not a run: it has no {RUN}; give the folder that holds the runs, or another run id"
        )
    newest = newest_settings(root)
    value = {"kind": TRAIN, "uuid": "", "request": None, FIELD: None, **made}
    if newest.name != RUN:
        resumed = _read_json(newest) or {}
        value |= {name: resumed.get(name) for name in ("config", "config_digest")}
    names = [field.name for field in dataclasses.fields(RunFolder) if field.name != "root"]
    missing = [name for name in names if name not in value]
    if missing or value["config_digest"] != digest(value["config"]):
        wrong = f"lacks {missing}" if missing else "has settings that do not match their digest"
        raise StoreError(f"{newest} {wrong}; restore it from a copy: recorded settings never change")
    value[FIELD] = Lineage.from_json(value[FIELD])
    return RunFolder(root, **{name: value[name] for name in names})


def newest_settings(root: Path) -> Path:
    """Return the file with the settings of a run's newest start."""
    return max((root / SETTINGS).glob("*.json"), default=root / RUN)


def list_runs(store: str | Path) -> list[RunSummary]:
    """Return the runs of a store, oldest first; none if the store does not exist."""
    folders = _folders(folder_of(store))
    with ThreadPoolExecutor(_LISTED_AT_ONCE) as pool:
        found = list(pool.map(_summary, folders) if remote_store(folder_of(store)) else map(_summary, folders))
    return sorted(found, key=lambda run: (run.started, run.run_id))


def run_exists(store: str | Path, run_id: str) -> bool:
    """Say whether a store has something under the name of a run."""
    root = folder_of(store).absolute() / run_id
    remote = remote_of(root)
    return root.exists() if remote is None else remote.read(RUN) is not None


def config_differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any, Any]]:
    """Return the settings that differ, as (key, old value, new value), with none for an absent one."""
    differences: list[tuple[str, Any, Any]] = []
    for key in sorted({*old, *new}):
        before, after, name = old.get(key), new.get(key), f"{prefix}{key}"
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            differences += config_differences(before, after, f"{name}.")
        elif before != after:
            differences.append((name, before, after))
    return differences


def steps_done(root: Path) -> int:
    """Return the newest step whose update is committed; if none is, the one that a fork goes on from, or 0."""
    done = (step for step in reversed(mirror.steps(root)) if read_commit(stage_folder(root, step, _LAST_STAGE)))
    newest = next(done, None)
    return base_step(root) if newest is None else newest


def _summary(root: Path) -> RunSummary:
    try:
        run = open_run(root.parent, root.name)
    except StoreError:
        return RunSummary(root.name, "damaged", 0, None, None, "", "")
    progress = _told(root / PROGRESS) or {}
    status = progress.get("status", "unknown" if (root / PROGRESS).exists() else "new")
    if is_owned(root):
        status = "running"
    elif status == "running":
        status = "interrupted"
    return RunSummary(
        run.run_id,
        status,
        progress["step"] if "step" in progress else steps_done(root),
        run.config.get("run", {}).get("steps"),
        progress.get("reward"),
        run.created,
        progress.get("updated", run.created),
        run.kind,
        "" if run.lineage is None else str(run.lineage),
    )


def _folders(store: Path) -> list[Path]:
    remote = remote_store(store)
    if remote is None:
        return sorted(path for path in store.iterdir() if (path / RUN).is_file()) if store.is_dir() else []
    names = [name for name in remote.names() if _ID.fullmatch(name)]
    with ThreadPoolExecutor(_LISTED_AT_ONCE) as pool:
        are_runs = list(pool.map(lambda name: remote.read(f"{name}/{RUN}") is not None, names))
    return [store / name for name, is_run in zip(names, are_runs, strict=True) if is_run]


def new_run_id(store: str | Path, profile: str | None = None) -> str:
    """Return a name for a new run from the time and the profile; no folder is made."""
    taken = {path.name for path in _folders(folder_of(store))}
    return next(name for name in _derived_ids(profile) if name not in taken)


def _derived_ids(profile: str | None) -> Iterator[str]:
    stem = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    if profile:
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(profile).stem if "/" in profile else profile)
        stem = f"{stem}-{name}"[:90]
    yield stem
    yield from (f"{stem}.{number}" for number in itertools.count(2))


def _named(config: Mapping[str, Any], run_id: str) -> dict[str, Any]:
    run = config.get("run", {})
    return {**config, "run": {**run, "id": run_id}} if run.get("id", run_id) is None else dict(config)


def _make_folder(store: Path, run_id: str | None, profile: str | None) -> Path:
    for name in [run_id] if run_id is not None else itertools.islice(_derived_ids(profile), 99):
        try:
            return _new_folder(store / name)
        except FileExistsError:
            continue
    if run_id is None:
        raise StoreError(f"{store_of(store)} has 99 runs of this second; give run.id")
    raise StoreError(f"run {run_id!r} exists in {store_of(store)}; resume it, or give another run.id")


def _new_folder(path: Path) -> Path:
    """Make a run's folder; raises FileExistsError if there is such a run."""
    is_remote = remote_of(path) is not None
    mirror.pull_run(path)  # refuses the copy of a run that is gone
    if is_remote and (path / RUN).exists():
        raise FileExistsError(path)
    path.mkdir(exist_ok=is_remote)
    return path


def _told(path: Path) -> dict[str, Any] | None:
    """Return a file that only informs; none if there is none, or a damaged one: no run stops for it."""
    try:
        return _read_json(path)
    except StoreError:
        return None


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise StoreError(f"{path} is damaged ({error}); restore it from a copy") from error
    if not isinstance(value, dict):
        raise StoreError(f"{path} is damaged: expected a JSON object; restore it from a copy")
    return value


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
