"""Check a whole run's folder: settings, commits, manifests, files, lineage, ledger, checkpoints, index. Reads only."""

import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_omni_core.errors import StoreError
from verl_omni_core.identity import digest
from verl_omni_core.store import index
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.attempt import MANIFEST, attempt_folder
from verl_omni_core.store.collected import collected_files
from verl_omni_core.store.durable_files import safe_name
from verl_omni_core.store.index_files import STEPS, block_path, block_steps
from verl_omni_core.store.lease import owners
from verl_omni_core.store.ledger import Ledger
from verl_omni_core.store.lineage import base_step
from verl_omni_core.store.manifest import ArtifactRef, FileRecord, Manifest
from verl_omni_core.store.runs import RUN, SETTINGS

CHECKPOINT_INDEX = "checkpoint.json"
"""A checkpoint's own list of its files, as :mod:`verl_omni_core.training.checkpoint` writes it."""
_UPDATE = "update"
_RESTORE = "restore it from a copy of the run, or start another run from weights before it (verl-omni export)"

Progress = Callable[[int, int, int, int], None]
"""Called with files checked, files in all, bytes checked, bytes in all."""


@dataclass
class Verification:
    """What a check found."""

    steps: int = 0
    commits: int = 0
    files: int = 0
    bytes: int = 0
    collected: int = 0
    """Files that retention deleted, or is about to."""
    records: int = 0
    """Of the ledger."""
    notes: list[str] = field(default_factory=list)
    """What is no fault and worth knowing."""
    problems: list[str] = field(default_factory=list)
    """One line each: what was seen, what was expected, what to do."""


def verify_run(root: Path, progress: Progress | None = None) -> Verification:
    """Check everything that a run's folder holds against what was written down about it.

    A run that goes on meanwhile may be checked as well.

    Args:
        root: the run's folder.
        progress: told how far the files are.
    """
    store, found = RunStore(root), Verification()
    found.problems += [_one_line(problem) for problem in (*_settings(root), *_owners(root))]
    # commits before the ledger and the index: of a run that goes on, these are written in the opposite order
    refs = _commits(store, found)
    manifests = _manifests(store, refs, found)
    found.problems += [_one_line(problem) for problem in _lineage(refs, manifests)]
    found.problems += [_one_line(problem) for problem in _unlogged(refs)]
    _files(store, manifests, found, progress)
    found.problems += [_one_line(problem) for problem in _checkpoints(store, manifests)]
    records = _ledger(root, refs, found)
    _index(store, refs, records, found)
    return found


def _settings(root: Path) -> Iterator[str]:
    for path in (root / RUN, *sorted((root / SETTINGS).glob("*.json"))):
        try:
            value = json.loads(path.read_bytes())
            is_intact = value["config_digest"] == digest(value["config"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            yield f"{path} is missing or damaged ({type(error).__name__}: {error}); {_RESTORE}"
            continue
        if not is_intact:
            yield f"{path} has settings that do not match their digest; {_RESTORE}: recorded settings never change"


def _owners(root: Path) -> Iterator[str]:
    try:
        owners(root)
    except (OSError, ValueError) as error:
        yield f"{root / 'epoch'} has a damaged entry ({error}); {_RESTORE}"


def _commits(store: RunStore, found: Verification) -> dict[tuple[int, str], ArtifactRef]:
    refs: dict[tuple[int, str], ArtifactRef] = {}
    steps = store.steps()
    found.steps = len(steps)
    for step in steps:
        for stage in store.stages(step):
            try:
                ref = store.find(step, stage)
            except StoreError as error:
                found.problems.append(_one_line(f"step {step}, {stage}: {error}"))
                continue
            if ref is None:
                continue
            if (ref.step, ref.stage) != (step, stage):
                found.problems.append(
                    f"step {step}, {stage}: its COMMIT is of stage {ref.stage!r} of step {ref.step}; {_RESTORE}"
                )
                continue
            refs[step, stage] = ref
    found.commits = len(refs)
    return refs


def _manifests(
    store: RunStore, refs: Mapping[tuple[int, str], ArtifactRef], found: Verification
) -> dict[ArtifactRef, Manifest]:
    manifests = {}
    for (step, stage), ref in refs.items():
        try:
            manifest = store.manifest(ref)
        except StoreError as error:
            found.problems.append(_one_line(f"step {step}, {stage}: {error}"))
            continue
        told = (manifest.step, manifest.stage, manifest.stage_key, manifest.attempt_id)
        if told != (ref.step, ref.stage, ref.key, ref.attempt):
            path = attempt_folder(Path(store.root), ref) / MANIFEST
            found.problems.append(f"{path} is the manifest of another artifact than its COMMIT says; {_RESTORE}")
            continue
        manifests[ref] = manifest
    return manifests


def _lineage(refs: Mapping[tuple[int, str], ArtifactRef], manifests: Mapping[ArtifactRef, Manifest]) -> Iterator[str]:
    for ref, manifest in manifests.items():
        for parent in manifest.parents:
            there = refs.get((parent.step, parent.stage))
            if there == parent:
                continue
            seen = "nothing whole" if there is None else f"manifest {there.manifest_sha256[:12]}"
            yield (
                f"step {ref.step}, {ref.stage}: it was computed from manifest {parent.manifest_sha256[:12]} of stage "
                f"{parent.stage!r} of step {parent.step}, where {seen} is committed; {_RESTORE}"
            )


def _unlogged(refs: Mapping[tuple[int, str], ArtifactRef]) -> Iterator[str]:
    logged = sorted(step for step, stage in refs if stage == index.LAST_STAGE and step > 0)
    for before, after in itertools.pairwise(logged):
        if after != before + 1:
            yield (
                f"steps {before + 1} to {after - 1} have no committed {index.LAST_STAGE!r}, though step {after} has; "
                f"{_RESTORE}"
            )


def _files(
    store: RunStore, manifests: Mapping[ArtifactRef, Manifest], found: Verification, progress: Progress | None
) -> None:
    work: list[tuple[ArtifactRef, FileRecord]] = []
    waiting = 0
    for ref, manifest in manifests.items():
        folder = attempt_folder(Path(store.root), ref)
        try:
            gone = collected_files(folder)
        except StoreError as error:
            found.problems.append(_one_line(str(error)))
            continue
        work += [(ref, file) for file in manifest.files if file.name not in gone]
        found.collected += len(gone)
        waiting += sum((folder / safe_name(name)).exists() for name in gone)
    if waiting:
        name = Path(store.root).name
        found.notes.append(f"{waiting} files that retention let go are still there; verl-omni gc {name} deletes them")
    total = sum(file.size_bytes for _, file in work)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for (_, file), problem in zip(work, pool.map(lambda item: _file(store, *item), work), strict=True):
            found.files += 1
            found.bytes += file.size_bytes
            if problem:
                found.problems.append(_one_line(problem))
            if progress is not None:
                progress(found.files, len(work), found.bytes, total)


def _file(store: RunStore, ref: ArtifactRef, file: FileRecord) -> str:
    try:
        store.verify_file(ref, file)
    except StoreError as error:
        if file.name in collected_files(attempt_folder(Path(store.root), ref)):
            return ""  # it went in this moment
        return str(error)
    return ""


def _checkpoints(store: RunStore, manifests: Mapping[ArtifactRef, Manifest]) -> Iterator[str]:
    for ref, manifest in manifests.items():
        files = {file.name: file for file in manifest.files}
        folder = attempt_folder(Path(store.root), ref)
        if CHECKPOINT_INDEX not in files or CHECKPOINT_INDEX in collected_files(folder):
            continue
        path = folder / CHECKPOINT_INDEX
        try:
            listed = json.loads(path.read_bytes())["files"]
            odd = [
                name
                for name, record in listed.items()
                if name not in files or (files[name].size_bytes, files[name].sha256) != _listed(record)
            ]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            yield f"{path} is no list of a checkpoint's files ({type(error).__name__}: {error}); {_RESTORE}"
            continue
        if odd:
            yield f"{path} and the manifest beside it disagree on {', '.join(sorted(odd))}; {_RESTORE}"


def _listed(record: Mapping[str, Any]) -> tuple[Any, Any]:
    return record["size_bytes"], record["sha256"]


def _ledger(
    root: Path, refs: Mapping[tuple[int, str], ArtifactRef], found: Verification
) -> list[dict[str, Any]] | None:
    try:
        records = Ledger(root).records()
    except StoreError as error:
        found.problems.append(_one_line(str(error)))
        return None
    found.records = len(records)
    recorded = {record.get("step") for record in records}
    missing = sorted(step for step, stage in refs if stage == _UPDATE and step not in recorded)
    if missing and _keeps_a_ledger(root):
        found.problems.append(
            f"the ledger ({len(records)} records) has none of the committed updates of {len(missing)} steps, the first "
            f"{missing[0]}; restore {root / 'ledger'} from a copy of the run, or start another run from weights before "
            "it (verl-omni export)"
        )
    return records


def _keeps_a_ledger(root: Path) -> bool:
    try:
        return bool(json.loads((root / RUN).read_bytes())["config"].get("durability", {}).get("level") != "none")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return True


def _index(
    store: RunStore,
    refs: Mapping[tuple[int, str], ArtifactRef],
    records: list[dict[str, Any]] | None,
    found: Verification,
) -> None:
    root = Path(store.root)
    again = f"verl-omni verify {root.name} --rebuild-index writes it anew"
    present = block_steps(root)
    for last in present:
        try:
            block = index.read_block(store, last)
        except StoreError as error:
            found.problems.append(_one_line(str(error)))
            continue
        known = {(ref.step, ref.stage): ref for stages in block.stages.values() for ref in stages}
        if any(refs.get(place) != ref for place, ref in known.items()) or len(block.stages) != STEPS:
            found.problems.append(f"{block_path(root, last)} does not say what is committed; it is derived: {again}")
        elif records is not None and not _is_place(records, block):
            found.problems.append(f"{block_path(root, last)} names no place of the ledger; it is derived: {again}")
    base = base_step(root) if (root / RUN).is_file() else 0
    due = [last for last in range(STEPS, index.finished_steps(store) + 1, STEPS) if last > base]
    missing = sorted(set(due) - set(present))
    if missing:
        found.notes.append(
            f"{len(missing)} of {len(due)} blocks of the index are not there, which makes opening slower; {again}"
        )


def _is_place(records: list[dict[str, Any]], block: index.Block) -> bool:
    place = block.ledger
    if place.sequence > len(records):
        return False
    before = records[: place.sequence]
    return (before[-1]["sha256"] if before else "") == place.sha256 and all(
        record.get("step", 0) <= block.last for record in before
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())
