"""A run's artifacts: what is committed, and where new attempts go.

Readers come in only through ``COMMIT``. Files that another process wrote are checked against their digests before the
first use in this one.
"""

import json
import re
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from verl_omni_core.batches.columns import SAMPLE_INDEX
from verl_omni_core.errors import ContractError, StoreError
from verl_omni_core.store import mirror
from verl_omni_core.store.attempt import (
    DESCRIPTION,
    MANIFEST,
    SHARDS,
    Attempt,
    other_key,
    read_commit,
    stage_folder,
    start_attempt,
)
from verl_omni_core.store.collected import collected_files, refuse_collected
from verl_omni_core.store.durable_files import check_free, safe_name
from verl_omni_core.store.lease import check_epoch
from verl_omni_core.store.manifest import ArtifactRef, FileRecord, Manifest, ShardRecord, sha256
from verl_omni_core.store.places import REJECTED
from verl_omni_core.store.runs import newest_settings
from verl_omni_core.store.trusted import is_trusted, trust

_STAGE = re.compile(r"[a-z][a-z0-9_.-]{0,63}")
_MAPPED = 4
_OR_START_ANOTHER = (
    "or go back to the step before it (run.resume), or go on from a snapshot in a run of its own (verl-omni fork)"
)


@dataclass(frozen=True)
class RunStore:
    """The artifacts of the run in ``root``. Plain values: it can be sent to other processes and shared by threads."""

    root: str
    epoch: int
    min_free_bytes: int

    def __init__(self, root: str | Path, *, epoch: int = 0, min_free_bytes: int = 0) -> None:
        """Open a run's artifacts.

        Args:
            root: the run's folder.
            epoch: fence epoch of the owner who commits; readers need none.
            min_free_bytes: space that every write leaves free.
        """
        object.__setattr__(self, "root", str(Path(root).absolute()))
        object.__setattr__(self, "epoch", epoch)
        object.__setattr__(self, "min_free_bytes", min_free_bytes)

    def committed(self, step: int, stage: str, key: str) -> ArtifactRef | None:
        """Return the stage's result under ``key``, or none if the stage is still to do.

        Raises:
            StoreError: it is committed under another key, or its manifest is missing or damaged.
        """
        ref = self.find(step, stage)
        if ref is None:
            return None
        if ref.key != key:
            raise other_key(ref, key)
        self.manifest(ref)
        return ref

    def find(self, step: int, stage: str) -> ArtifactRef | None:
        """Return the stage's result, whatever its key, or none."""
        return read_commit(self._stage_folder(step, stage))

    def steps(self) -> list[int]:
        """Return the steps that have a folder, in order; not all of them need a committed stage."""
        return mirror.steps(Path(self.root))

    def stages(self, step: int) -> list[str]:
        """Return the stages of a step that have a folder, by name; not all of them need be committed."""
        names = mirror.names(Path(self.root), Path(self.root) / "steps" / f"{step:06d}")
        return sorted(name for name in names if _STAGE.fullmatch(name))

    def attempt(
        self,
        step: int,
        stage: str,
        key: str,
        *,
        parents: Sequence[ArtifactRef] = (),
        weights_version: int | None = None,
    ) -> Attempt:
        """Start a new try at a stage.

        Args:
            step: training step; 0 before the first.
            stage: lower-case name.
            key: digest of everything that changes the result.
            parents: what the tables will be computed from, for their metadata.
            weights_version: policy version that makes the rows, if one does.
        Raises:
            FencedError: a newer owner exists.
            StoreError: the disk lacks the free space that is to be kept, or cannot be written.
        """
        root = Path(self.root)
        check_epoch(root, self.epoch)
        check_free(root, self.min_free_bytes)
        self._stage_folder(step, stage)
        config_digest, code_version = _origin(self.root)
        return start_attempt(
            Attempt(
                self.root,
                step,
                stage,
                key,
                f"{self.epoch:06d}-{uuid.uuid4().hex[:8]}",
                self.epoch,
                self.min_free_bytes,
                config_digest,
                code_version,
                weights_version,
                tuple(parent.manifest_sha256 for parent in parents),
                datetime.now(UTC).isoformat(timespec="milliseconds"),
            )
        )

    def manifest(self, ref: ArtifactRef) -> Manifest:
        """Return the manifest behind a reference.

        Raises:
            StoreError: it is missing, or its digest is not the reference's.
        """
        return _manifest(Path(self.root), self._attempt_folder(ref) / MANIFEST, ref.manifest_sha256)

    def tables(self, ref: ArtifactRef, name: str) -> list[pa.Table]:
        """Return the table ``name`` as its shards, memory-mapped, in shard order.

        Raises:
            StoreError: the artifact has no such table, or a file is missing, cut or changed, or retention deleted it.
        """
        files = [file for file in self.manifest(ref).files if file.table == name]
        if not files:
            known = sorted({file.table for file in self.manifest(ref).files if file.table})
            raise StoreError(f"stage {ref.stage!r} of step {ref.step} has no table {name!r}; it has {known}")
        files.sort(key=lambda file: file.shard)
        folder = self._attempt_folder(ref)
        refuse_collected(folder, files)
        with ThreadPoolExecutor(_MAPPED) as pool:
            return list(pool.map(lambda file: self._open_table(folder, file), files))

    def table(self, ref: ArtifactRef, name: str, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the table ``name`` as one, in canonical order: by ``sample_index`` where it has that column.

        Shards that follow each other in that order stay memory-mapped; others are copied into order.

        Raises:
            StoreError: see :meth:`tables`; or a column does not exist.
            ContractError: the shards' schemas differ.
        """
        shards = self.tables(ref, name)
        shards = [shard for shard in shards if shard.num_rows] or shards[:1]
        is_sample = all(SAMPLE_INDEX in shard.column_names for shard in shards)
        if columns is not None:
            missing = [column for column in columns if column not in shards[0].column_names]
            if missing:
                raise StoreError(f"table {name!r} has no columns {missing}; it has {shards[0].column_names}")
        if is_sample:
            shards.sort(key=lambda shard: shard[SAMPLE_INDEX][0].as_py() if shard.num_rows else -1)
        index = pa.chunked_array([c for s in shards for c in s[SAMPLE_INDEX].chunks], pa.int64()) if is_sample else None
        picked = [shard.select(columns) if columns is not None else shard for shard in shards]
        try:
            whole = pa.concat_tables([part.replace_schema_metadata(picked[0].schema.metadata) for part in picked])
        except pa.ArrowInvalid as error:
            raise ContractError(
                f"shards of table {name!r} do not fit together: {error}; they were written with different "
                "shapes or columns"
            ) from error
        if index is None or _is_sorted(index):
            return whole
        return whole.unify_dictionaries().take(pc.sort_indices(index))

    def path_of(self, ref: ArtifactRef, file_name: str) -> Path:
        """Return the path of a committed file, verified on first use; the artifact's other files lie beside it.

        Raises:
            StoreError: the artifact has no such file, or it is missing, cut or changed, or retention deleted it.
        """
        folder = self._attempt_folder(ref)
        for file in self.manifest(ref).files:
            if file.name == file_name:
                refuse_collected(folder, [file])
                gone = collected_files(folder)
                beside = [folder / safe_name(each.name) for each in self.manifest(ref).files if each.name not in gone]
                mirror.pull_missing(Path(self.root), beside)
                self._mapped(folder, file)
                return folder / file.name
        known = [file.name for file in self.manifest(ref).files]
        raise StoreError(f"stage {ref.stage!r} of step {ref.step} has no file {file_name!r}; it has {known}")

    def verify(self, ref: ArtifactRef) -> None:
        """Check every file of an artifact against its digest, also those that this process has used before.

        Files that retention deleted are passed over.
        """
        gone = collected_files(self._attempt_folder(ref))
        for file in self.manifest(ref).files:
            if file.name not in gone:
                self.verify_file(ref, file)

    def verify_file(self, ref: ArtifactRef, file: FileRecord) -> None:
        """Check one file of an artifact against its digest, also if this process has used it before."""
        self._mapped(self._attempt_folder(ref), file, again=True)

    def finished_shards(self, step: int, stage: str, key: str) -> dict[int, ShardRecord]:
        """Return the complete, undamaged shards that uncommitted attempts of the same key left, by shard number.

        A retried stage adopts them and produces only the others.
        """
        found: dict[int, ShardRecord] = {}
        folder = self._stage_folder(step, stage) / "attempts"
        mirror.pull_attempts(Path(self.root), folder)
        for attempt in sorted(folder.iterdir(), reverse=True) if folder.is_dir() else ():
            if _key_of(attempt) != key or (attempt / REJECTED).exists():
                continue
            for path in sorted((attempt / SHARDS).glob("*.json")):
                record = self._shard_record(attempt, path)
                if record is not None:
                    found.setdefault(record.shard, record)
        return found

    def sweep(self, steps: Iterable[int] | None = None, *, finished: bool = False) -> int:
        """Delete attempts of older epochs that nothing needs, and return how many.

        Kept are the committed one of each stage, and those of an uncommitted stage that have finished shards.

        Args:
            steps: those to look at; all by default, but in an object store those where an owner may have broken off.
            finished: whether the steps lie far behind: then all but the committed attempts go.
        Raises:
            FencedError: a newer owner exists.
        """
        root, swept = Path(self.root), 0
        check_epoch(root, self.epoch)
        for step in mirror.unfinished_steps(root) if steps is None else steps:
            mirror.pull_attempts(root, root / "steps" / f"{step:06d}")
        for attempt in self.stale_attempts(steps, finished=finished):
            mirror.delete_below(root, attempt)
            swept += 1
        return swept

    def stale_attempts(self, steps: Iterable[int] | None = None, *, finished: bool = False) -> Iterator[Path]:
        """Yield the folders of the attempts that :meth:`sweep` deletes."""
        root = Path(self.root)
        for step in self.steps() if steps is None else steps:
            folder = root / "steps" / f"{step:06d}"
            for stage in sorted(folder.iterdir()) if folder.is_dir() else ():
                winner = read_commit(stage)
                for attempt in sorted((stage / "attempts").glob("[0-9]*-*")):
                    is_old = int(attempt.name.partition("-")[0]) < self.epoch
                    is_winner = winner is not None and attempt.name == winner.attempt
                    is_useful = winner is None and any((attempt / SHARDS).glob("*.json"))
                    if not is_winner and (finished or (is_old and not is_useful)):
                        yield attempt

    def _stage_folder(self, step: int, stage: str) -> Path:
        if not _STAGE.fullmatch(stage) or step < 0:
            raise StoreError(
                f"stage {stage!r} of step {step} is no legal name; expected a lower-case word and a step >= 0"
            )
        return stage_folder(Path(self.root), step, stage)

    def _open_table(self, folder: Path, file: FileRecord) -> pa.Table:
        return pa.ipc.open_file(self._mapped(folder, file)).read_all()

    def _mapped(self, folder: Path, file: FileRecord, *, again: bool = False) -> pa.MemoryMappedFile | None:
        """Map a file once it is verified; where there are objects, one that is missing or damaged is copied anew."""
        path = folder / safe_name(file.name)
        try:
            return _verified(path, file, again=again)
        except StoreError:
            if not mirror.pull(Path(self.root), path):
                raise
        return _verified(path, file, again=again)

    def _shard_record(self, attempt: Path, path: Path) -> ShardRecord | None:
        try:
            record = ShardRecord.from_json(json.loads(path.read_bytes()))
            for file in record.files:
                self._mapped(attempt, file)
        except (ValueError, StoreError):
            return None  # not complete or not intact, so the shard is produced again
        return record

    def _attempt_folder(self, ref: ArtifactRef) -> Path:
        return self._stage_folder(ref.step, ref.stage) / "attempts" / safe_name(ref.attempt)


@lru_cache(maxsize=512)
def _manifest(root: Path, path: Path, digest: str) -> Manifest:
    try:
        data = mirror.read(root, path)
    except FileNotFoundError:
        raise StoreError(
            f"{path} is missing, though its stage is committed; restore it from a copy, {_OR_START_ANOTHER}"
        ) from None
    seen = sha256(data)
    if seen != digest:
        raise StoreError(
            f"{path} has sha256 {seen[:12]}, its COMMIT says {digest[:12]}; the manifest is torn or was changed: "
            f"restore it from a copy, {_OR_START_ANOTHER}"
        )
    return Manifest.from_bytes(data)


def _origin(root: str) -> tuple[str, str]:
    try:
        run = json.loads(newest_settings(Path(root)).read_bytes())
    except FileNotFoundError:
        return "", ""
    return run.get("config_digest", ""), run.get("code_version", "")


def _verified(path: Path, file: FileRecord, *, again: bool) -> pa.MemoryMappedFile | None:
    if file.size_bytes == 0 and path.is_file() and path.stat().st_size == 0:
        return None  # an empty file cannot be mapped
    source = _map(path, file)
    if again or not is_trusted(path, file.sha256):
        _check_digest(path, file, source)
    return source


def _map(path: Path, file: FileRecord) -> pa.MemoryMappedFile:
    size = path.stat().st_size if path.is_file() else None
    if size != file.size_bytes:
        raise StoreError(
            f"{path} has {'no file' if size is None else f'{size} bytes'}, its manifest says {file.size_bytes} "
            f"bytes; restore it from a copy, {_OR_START_ANOTHER}"
        )
    return pa.memory_map(str(path))


def _check_digest(path: Path, file: FileRecord, source: pa.MemoryMappedFile) -> None:
    # over the mapping that the reader gets, so that nothing can change in between
    seen = sha256(memoryview(source.read_buffer()))
    source.seek(0)
    if seen != file.sha256:
        raise StoreError(
            f"{path} has sha256 {seen[:12]}, its manifest says {file.sha256[:12]}; the file was changed or the "
            f"disk damaged it: restore it from a copy, {_OR_START_ANOTHER}"
        )
    trust(path, file.sha256)


def _is_sorted(index: pa.ChunkedArray) -> bool:
    values = index.to_numpy()
    return bool((values[1:] >= values[:-1]).all())


def _key_of(attempt: Path) -> str | None:
    try:
        return json.loads((attempt / DESCRIPTION).read_bytes())["key"]
    except (OSError, ValueError, KeyError):
        return None  # a crash before the description was written: the attempt holds nothing of use
