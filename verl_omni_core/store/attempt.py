"""One try at a stage: a folder of its own, files in it, and the commit that makes it the stage's result.

Until the commit nobody reads the folder. The commit creates one file, ``COMMIT``, exclusively and whole: of several
tries the first one wins, and a crash at any point leaves either a finished stage or none.
"""

import hashlib
import json
import os
import socket
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from verl_omni_core.batches.schema import FileMetadata, schema_label, with_metadata
from verl_omni_core.errors import ContractError, FencedError, StoreError
from verl_omni_core.store import mirror
from verl_omni_core.store.durable_files import (
    check_free,
    publish,
    replace_whole,
    safe_name,
    staged,
    storage_errors,
    sync_all,
    write_synced,
)
from verl_omni_core.store.lease import check_epoch
from verl_omni_core.store.manifest import ArtifactRef, FileRecord, Manifest, ShardRecord, sha256
from verl_omni_core.store.places import COMMIT
from verl_omni_core.store.trusted import trust

MANIFEST = "manifest.json"
DESCRIPTION = "attempt.json"
SHARDS = "shards"


@dataclass(frozen=True)
class Attempt:
    """A try at ``stage`` of ``step``. Plain values: it can be sent to the processes that write its shards."""

    root: str
    """The run's folder."""
    step: int
    stage: str
    key: str
    name: str
    epoch: int
    min_free_bytes: int = 0
    config_digest: str = ""
    code_version: str = ""
    weights_version: int | None = None
    parents: tuple[str, ...] = ()
    """Digests of the manifests that the tables are computed from, for their metadata."""
    started: str = ""

    @property
    def stage_folder(self) -> Path:
        """Where the stage's attempts and its ``COMMIT`` lie."""
        return stage_folder(Path(self.root), self.step, self.stage)

    @property
    def folder(self) -> Path:
        """Where this attempt's files lie."""
        return self.stage_folder / "attempts" / self.name

    def write_table(self, name: str, shard: int, table: pa.Table) -> FileRecord:
        """Write a table durably as ``<name>-<shard>.arrow``: Arrow IPC file format, uncompressed.

        A second write of the same shard, as after a lost reply, gets a name of its own: each caller commits the files
        that its own records name.

        Raises:
            StoreError: the disk is full or lacks the free space that is to be kept.
        """
        folder = self.folder
        check_free(folder, self.min_free_bytes + table.nbytes)
        origin = FileMetadata(
            run_id=Path(self.root).name,
            step=self.step,
            stage=self.stage,
            shard=shard,
            attempt_id=self.name,
            fence_epoch=self.epoch,
            config_digest=self.config_digest,
            code_version=self.code_version,
            weights_version=self.weights_version,
            parents=self.parents,
            row_order="sample_index" if "sample_index" in table.column_names else "",
        )
        table = with_metadata(table, _schema_id(table, name), origin).unify_dictionaries()
        file_name, path = _claim(folder, f"{name}-{shard:05d}", ".arrow")
        with storage_errors(path):
            try:
                digest = _write_arrow(path, table)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
        record = FileRecord(
            file_name, name, shard, table.num_rows, path.stat().st_size, digest, schema_label(table.schema)
        )
        self._keep(path, digest)
        return record

    def write_file(self, name: str, data: bytes) -> FileRecord:
        """Write a file durably under a relative name of its own, such as ``adapter.safetensors``.

        Raises:
            StoreError: the name leaves the folder or is taken, or the disk is full.
        """
        path = self.folder / safe_name(name)
        check_free(self.folder, self.min_free_bytes + len(data))
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                write_synced(path, data)
            except FileExistsError:
                raise StoreError(f"{name!r} was written twice in attempt {self.name}; choose another name") from None
            except BaseException:
                path.unlink(missing_ok=True)
                raise
        digest = sha256(data)
        self._keep(path, digest)
        return FileRecord(name, "", 0, 0, len(data), digest, "")

    def add_file(self, name: str) -> FileRecord:
        """Record a file that another library wrote into :attr:`folder`, once the disk has it.

        Raises:
            StoreError: the name leaves the folder, or there is no such file.
        """
        path = self.folder / safe_name(name)
        if not path.is_file():
            raise StoreError(f"attempt {self.name} has no file {name!r}; write it under the attempt's folder first")
        with path.open("rb") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        sync_all([path.parent])
        self._keep(path, digest)
        return FileRecord(name, "", 0, 0, path.stat().st_size, digest, "")

    def record_file(self, name: str, size_bytes: int, digest: str) -> FileRecord:
        """Record a file whose writer has it on the disk and took its sha256, without reading it once more.

        Raises:
            StoreError: the name leaves the folder, or there is no such file of that size.
        """
        path = self.folder / safe_name(name)
        size = path.stat().st_size if path.is_file() else None
        if size != size_bytes:
            raise StoreError(
                f"attempt {self.name} has {'no file' if size is None else f'{size} bytes in'} {name!r}, {size_bytes} "
                "bytes were written; write it again"
            )
        trust(path, digest)
        return FileRecord(name, "", 0, 0, size_bytes, digest, "")

    def finish_shard(
        self, shard: int, files: Sequence[FileRecord], payload: Mapping[str, Any] | None = None
    ) -> ShardRecord:
        """Declare all files of a shard complete, so that a later attempt of the same key can take them over.

        Of several calls for one shard the first one wins; every caller gets the winner's record. It survives the death
        of the process; after a power cut the shard may count as unfinished.
        """
        record = ShardRecord(shard, self.name, tuple(files), dict(payload or {}))
        path = self.folder / SHARDS / f"{shard:05d}.json"
        with storage_errors(path):
            path.parent.mkdir(exist_ok=True)
        data = json.dumps(record.to_json()).encode()
        try:
            if not mirror.create(Path(self.root), path, data):
                raise FileExistsError(path)
            with staged(path, data) as temporary:
                publish(temporary, path, sync=False)
        except FileExistsError:
            return ShardRecord.from_json(json.loads(mirror.read(Path(self.root), path)))
        return record

    def adopt(self, record: ShardRecord) -> ShardRecord:
        """Take over a finished shard of an earlier attempt, without copying its files.

        Raises:
            StoreError: a file of the shard is missing.
        """
        source = self.stage_folder / "attempts" / safe_name(record.attempt)
        for file in record.files:
            try:
                with storage_errors(self.folder / file.name):
                    os.link(source / safe_name(file.name), self.folder / file.name)
            except FileNotFoundError:
                raise StoreError(
                    f"shard {record.shard} of attempt {record.attempt} lost its file {file.name!r}; start the "
                    "run again, it produces the shard anew"
                ) from None
            mirror.push(Path(self.root), self.folder / file.name)
        return self.finish_shard(record.shard, record.files, record.payload)

    def commit(
        self,
        files: Sequence[FileRecord],
        *,
        rows: int,
        parents: Sequence[ArtifactRef],
        producer: Mapping[str, Any],
        failed: int = 0,
    ) -> ArtifactRef:
        """Make this attempt the stage's result, or return the result that was there first.

        Args:
            files: all files that belong to the result.
            rows: rows of the stage, in its own unit, such as samples.
            parents: what it was computed from.
            producer: JSON-like facts about who made it; host, times, code version and config digest are added.
            failed: rows that failed.
        Returns: the committed reference. If another attempt under the same key was first it is that one's, and this
            attempt is deleted.
        Raises:
            FencedError: a newer owner exists.
            StoreError: another key is committed here, a file is missing or of another size, or the disk is full.
            ContractError: two files claim to be the same shard of the same table.
        """
        check_epoch(Path(self.root), self.epoch)
        self._check_files(files)
        manifest = Manifest(
            run_id=Path(self.root).name,
            step=self.step,
            stage=self.stage,
            stage_key=self.key,
            attempt_id=self.name,
            fence_epoch=self.epoch,
            files=tuple(files),
            parents=tuple(parents),
            row_count=rows,
            failed_count=failed,
            producer={
                "code_version": self.code_version,
                "config_digest": self.config_digest,
                "weights_version": self.weights_version,
                "host": socket.gethostname(),
                "started": self.started,
                "finished": datetime.now(UTC).isoformat(timespec="milliseconds"),
                **producer,
            },
        )
        data = self._write_manifest(manifest)
        ref = ArtifactRef(self.stage, self.step, self.key, sha256(data), self.name, Manifest.from_bytes(data).row_count)
        marker = json.dumps({**ref.to_json(), "fence_epoch": self.epoch}).encode()
        with staged(self.stage_folder / COMMIT, marker) as temporary:
            # all of it before COMMIT appears, which must not reach the disk before what it points to
            folders = [self.folder, self.folder.parent, self.stage_folder, *self.stage_folder.parents[:3]]
            sync_all([self.folder / MANIFEST, temporary, *folders])
            check_epoch(Path(self.root), self.epoch)
            try:
                self._publish(temporary, marker)
            except FileExistsError:
                return self._lose()
        trust(self.folder / MANIFEST, ref.manifest_sha256)
        return ref

    def discard(self) -> None:
        """Delete the attempt's files."""
        mirror.delete_below(Path(self.root), self.folder)

    def _keep(self, path: Path, digest: str) -> None:
        trust(path, digest)
        mirror.push(Path(self.root), path)

    def _publish(self, temporary: Path, marker: bytes) -> None:
        """Make ``COMMIT`` appear, among the objects first: they decide."""
        path = self.stage_folder / COMMIT
        try:
            if not mirror.create(Path(self.root), path, marker):
                raise FileExistsError(path)
            publish(temporary, path)
        except FileExistsError:
            mirror.pull(Path(self.root), path)
            raise

    def _write_manifest(self, manifest: Manifest) -> bytes:
        data, path = manifest.to_bytes(), self.folder / MANIFEST
        try:
            with staged(path, data) as temporary:
                publish(temporary, path, sync=False)
        except FileExistsError:
            # this very commit was called before and its answer was lost: repeat what it said
            data = path.read_bytes()
        if not mirror.create(Path(self.root), path, data):
            mirror.pull(Path(self.root), path)  # it was called on another machine
            data = path.read_bytes()
        return data

    def _check_files(self, files: Sequence[FileRecord]) -> None:
        seen: set[tuple[str, int]] = set()
        for file in files:
            path = self.folder / safe_name(file.name)
            size = path.stat().st_size if path.is_file() else None
            if size != file.size_bytes:
                raise StoreError(
                    f"{path} has {'no file' if size is None else f'{size} bytes'}, its record says "
                    f"{file.size_bytes} bytes; write the shard again"
                )
            if file.table and (file.table, file.shard) in seen:
                raise ContractError(f"two files are shard {file.shard} of table {file.table!r}; commit one of them")
            seen.add((file.table, file.shard))

    def _lose(self) -> ArtifactRef:
        winner = read_commit(self.stage_folder)
        if winner is None or winner.attempt != self.name:
            self.discard()
        if winner is None:
            raise StoreError(
                f"{self.stage_folder / COMMIT} vanished while it was read; the run's folder is being deleted"
            )
        check_epoch(Path(self.root), self.epoch)
        if winner.key != self.key:
            raise other_key(winner, self.key)
        return winner


def start_attempt(attempt: Attempt) -> Attempt:
    """Make the attempt's folder and say in it what the attempt is for."""
    with storage_errors(attempt.folder):
        attempt.folder.mkdir(parents=True)
        description = {"key": attempt.key, "fence_epoch": attempt.epoch, "started": attempt.started}
        replace_whole(attempt.folder / DESCRIPTION, json.dumps(description).encode())
    mirror.push(Path(attempt.root), attempt.folder / DESCRIPTION)
    return attempt


def stage_folder(root: Path, step: int, stage: str) -> Path:
    """Return the folder of a stage: ``steps/<step>/<stage>``."""
    return root / "steps" / f"{step:06d}" / stage


def attempt_folder(root: Path, ref: ArtifactRef) -> Path:
    """Return the folder of the attempt that a reference names."""
    return stage_folder(root, ref.step, ref.stage) / "attempts" / safe_name(ref.attempt)


def read_commit(folder: Path) -> ArtifactRef | None:
    """Return what is committed in a stage's folder, or none.

    Raises:
        StoreError: the marker is damaged.
    """
    try:
        data = mirror.read_marker(folder.parents[2], folder / COMMIT)
    except FileNotFoundError:
        return None
    try:
        value = json.loads(data)
    except ValueError as error:
        raise StoreError(f"{folder / COMMIT} is damaged ({error}); restore it from a copy of the run") from error
    return ArtifactRef.from_json(value)


def other_key(committed: ArtifactRef, key: str) -> StoreError:
    """Return the error for a stage that is committed under other settings."""
    return StoreError(
        f"stage {committed.stage!r} of step {committed.step} is committed under key {committed.key[:12]}, these "
        f"settings and prompts give key {key[:12]}; use those it was made with, or start a new run"
    )


def _schema_id(table: pa.Table, name: str) -> str:
    return schema_label(table.schema).partition("/")[0] or name


def _claim(folder: Path, stem: str, suffix: str) -> tuple[str, Path]:
    """Create an empty file under a name that nobody else has."""
    for tag in ("", *(f".{uuid.uuid4().hex[:8]}" for _ in range(8))):
        path = folder / f"{stem}{tag}{suffix}"
        try:
            with storage_errors(path):
                path.touch(exist_ok=False)
        except FileExistsError:
            continue
        except FileNotFoundError:
            raise FencedError(
                f"{folder} is gone: the attempt was swept because another one was committed or a newer owner "
                "took the run; this process must stop"
            ) from None
        return path.name, path
    raise StoreError(f"cannot find a free name for {stem}{suffix} in {folder}")


def _write_arrow(path: Path, table: pa.Table) -> str:
    """Write, sync and hash; the disk and the processor work at the same time."""
    # a column of a shard may hold more than 2^31 values: a few clips do
    options = pa.ipc.IpcWriteOptions(allow_64bit=True)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    with path.open("rb") as file, ThreadPoolExecutor(1) as pool:
        synced = pool.submit(os.fsync, file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        synced.result()
    return digest
