"""What a stage left behind: the files with their digests, where they came from, and the reference to all that."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_omni_core.errors import StoreError

SCHEMA_ID = "manifest"
SCHEMA_VERSION = "1.0"


@dataclass(frozen=True)
class FileRecord:
    """One file of an attempt."""

    name: str
    """Relative to the attempt's folder."""
    table: str
    """Name of the table; empty for a file that is no table."""
    shard: int
    rows: int
    size_bytes: int
    sha256: str
    schema: str
    """Schema id and version, such as ``trajectories/1.0``; empty for a file that is no table."""

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON-like values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "FileRecord":
        """Return the record that :meth:`to_json` wrote; raises StoreError on anything else."""
        return _from_json(cls, value)


@dataclass(frozen=True)
class ShardRecord:
    """Files of one shard that belong together: what one pack left, complete."""

    shard: int
    attempt: str
    files: tuple[FileRecord, ...]
    payload: Mapping[str, Any] = field(default_factory=dict)
    """JSON-like facts about the shard."""

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON-like values."""
        files = [record.to_json() for record in self.files]
        return {"shard": self.shard, "attempt": self.attempt, "files": files, "payload": dict(self.payload)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "ShardRecord":
        """Return the record that :meth:`to_json` wrote; raises StoreError on anything else."""
        record = _from_json(cls, value)
        return dataclasses.replace(record, files=tuple(FileRecord.from_json(item) for item in record.files))


@dataclass(frozen=True)
class ArtifactRef:
    """A committed stage. All that tasks exchange: less than 1 kB as JSON."""

    stage: str
    step: int
    key: str
    """Digest of everything that changes the result."""
    manifest_sha256: str
    attempt: str
    rows: int

    def to_json(self) -> dict[str, Any]:
        """Return the reference as JSON-like values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "ArtifactRef":
        """Return the reference that :meth:`to_json` wrote; raises StoreError on anything else."""
        return _from_json(cls, value)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The full account of an attempt; its own digest names the artifact."""

    run_id: str
    step: int
    stage: str
    stage_key: str
    attempt_id: str
    fence_epoch: int
    files: tuple[FileRecord, ...]
    parents: tuple[ArtifactRef, ...]
    producer: Mapping[str, Any]
    """``code_version``, ``config_digest``, ``weights_version``, ``host``, ``started``, ``finished`` and what else the
    stage says about itself."""
    row_count: int
    failed_count: int = 0
    complete: bool = True
    schema_id: str = SCHEMA_ID
    schema_version: str = SCHEMA_VERSION

    def to_bytes(self) -> bytes:
        """Return the manifest as it stands on disk."""
        value = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        value["files"] = [record.to_json() for record in self.files]
        value["parents"] = [parent.to_json() for parent in self.parents]
        value["producer"] = dict(self.producer)
        return json.dumps(value, sort_keys=True, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Manifest":
        """Return the manifest that :meth:`to_bytes` wrote.

        Raises:
            StoreError: the bytes are no manifest, or one of another major version.
        """
        try:
            value = json.loads(data)
        except ValueError as error:
            raise StoreError(f"manifest is not JSON ({error}); the file is torn or not a manifest") from error
        if not isinstance(value, dict) or value.get("schema_id") != SCHEMA_ID:
            raise StoreError("manifest has no schema_id 'manifest'; the file is torn or not a manifest")
        if str(value.get("schema_version")).partition(".")[0] != SCHEMA_VERSION.partition(".")[0]:
            raise StoreError(
                f"manifest has schema version {value.get('schema_version')}, this package reads "
                f"{SCHEMA_VERSION}; read the run with the version that wrote it"
            )
        manifest = _from_json(cls, value)
        return dataclasses.replace(
            manifest,
            files=tuple(FileRecord.from_json(item) for item in manifest.files),
            parents=tuple(ArtifactRef.from_json(item) for item in manifest.parents),
        )


def sha256(data: bytes | memoryview) -> str:
    """Return the hexadecimal sha256 of ``data``."""
    return hashlib.sha256(data).hexdigest()


def _from_json(cls: type, value: Mapping[str, Any]) -> Any:
    if not isinstance(value, Mapping):
        raise StoreError(f"expected a {cls.__name__} as a JSON object, got {type(value).__name__}")
    names = [f.name for f in dataclasses.fields(cls)]
    needed = [
        f.name
        for f in dataclasses.fields(cls)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    missing = [name for name in needed if name not in value]
    if missing:
        raise StoreError(f"{cls.__name__} lacks {missing}; the record is torn or from a foreign program")
    # keys that a newer minor version added are ignored
    return cls(**{name: value[name] for name in names if name in value})
