"""The run's ledger: what was done to the weights, in order, never changed.

One small file a record, created exclusively under the next number: the creation is the order and the fence at once, as
a second writer finds the number taken. Each record names the digest of the one before it.
"""

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from verl_omni_core.errors import ContractError, FencedError, StoreError
from verl_omni_core.store import mirror
from verl_omni_core.store.durable_files import storage_errors
from verl_omni_core.store.lease import check_epoch, describe_holder
from verl_omni_core.store.manifest import sha256

logger = logging.getLogger(__name__)

_OR_GO_ON = "fork the run from a snapshot before that (verl-omni fork)"
_OWN = ("sequence", "fence_epoch", "wall_time", "previous_sha256", "sha256")

FORK = "fork"
"""Kind of the record of a replay that came to other weights than were synced when its step was first made."""
REWIND = "rewind"
"""Kind of the record that takes back those before it whose step comes after its ``to_version``."""


@dataclass(frozen=True)
class Position:
    """A place in the ledger: all records up to it are of steps up to ``step``, and all of later steps come after it."""

    step: int
    sequence: int
    """Number of the last record; 0 before the first."""
    sha256: str
    """Its digest; empty before the first."""


BEGINNING = Position(0, 0, "")


class Ledger:
    """The ledger of the run in ``root``. Safe to share between threads; one process at a time appends."""

    def __init__(self, root: str | Path, *, epoch: int = 0, start: Position = BEGINNING) -> None:
        """Open the ledger.

        Args:
            root: the run's folder.
            epoch: fence epoch of the owner who appends; readers need none.
            start: records up to here are read only when they are asked for.
        """
        self.root = Path(root)
        self.epoch = epoch
        self._folder = self.root / "ledger"
        self._start = start
        self._records: list[dict[str, Any]] = []
        """Those after ``_start``."""
        self._last_sha256 = start.sha256
        self._lock = threading.Lock()
        self._loaded = False
        self._overtaken = False

    def append(self, record: Mapping[str, Any]) -> int:
        """Append a record durably and return its number, from 1.

        Args:
            record: JSON-like values; ``sequence``, ``fence_epoch``, ``wall_time`` (UTC, ISO 8601) and
                the digests ``previous_sha256`` and ``sha256`` are added.
        Raises:
            FencedError: a newer owner exists, or somebody else appended since this ledger was opened.
            ContractError: the record uses one of the added names, or JSON cannot hold it.
            StoreError: a record is missing or damaged, or the disk is full.
        """
        taken = sorted(set(record) & set(_OWN))
        if taken:
            raise ContractError(f"ledger record sets {taken}, which the ledger itself sets; rename them")
        with self._lock:
            self._refresh(only_once=True)
            check_epoch(self.root, self.epoch)
            sequence = self._known() + 1
            entry = {
                **record,
                "sequence": sequence,
                "fence_epoch": self.epoch,
                "previous_sha256": self._last_sha256,
                "wall_time": datetime.now(UTC).isoformat(timespec="microseconds"),
            }
            try:
                entry["sha256"] = _digest(entry)
            except (TypeError, ValueError) as error:
                raise ContractError(f"ledger record cannot become JSON: {error}") from error
            with storage_errors(self._folder):
                self._folder.mkdir(exist_ok=True)
            try:
                if not self._overtaken:
                    content = json.dumps(entry, sort_keys=True).encode()
                    mirror.create_copied(self.root, self._path(sequence), content)
            except FileExistsError:
                self._overtaken = True
            if self._overtaken:
                raise FencedError(
                    f"somebody else wrote to the ledger of run {self.root.name} since this process opened it; "
                    f"the run belongs to {describe_holder(self.root)} and this process must stop"
                )
            self._records.append(entry)
            self._last_sha256 = entry["sha256"]
            return sequence

    def records(self) -> list[dict[str, Any]]:
        """Return all records in order, those of other processes included.

        Raises:
            StoreError: a record is missing, damaged, or does not follow from the one before.
        """
        with self._lock:
            self._refresh(only_once=False)
            self._read_from_the_beginning()
            return [dict(record) for record in self._records]

    def records_since(self, step: int) -> list[dict[str, Any]]:
        """Return the records of ``step`` and of later steps, in order.

        Raises:
            StoreError: see :meth:`records`; of older records only the numbers are looked at.
        """
        with self._lock:
            self._refresh(only_once=False)
            if step <= self._start.step:
                self._read_from_the_beginning()
            return [dict(record) for record in self._records if _step(record) >= step]

    def position(self, step: int) -> Position:
        """Return where the records of steps up to ``step`` end: before the first one of a later step."""
        with self._lock:
            self._refresh(only_once=False)
            if step < self._start.step:
                self._read_from_the_beginning()
            position = Position(step, self._start.sequence, self._start.sha256)
            for record in self._records:
                if _step(record) > step:
                    break
                position = Position(step, record["sequence"], record["sha256"])
            return position

    def check_complete(self, step: int) -> None:
        """Check that no record is missing up to the last one of ``step``; reads the newest record alone.

        Args:
            step: the last one whose update is committed. A ledger without any record is not judged by it.
        Raises:
            StoreError: names the first record that is missing, or the step whose records are.
        """
        numbers = self._numbers()
        last = max(numbers, default=0)
        gap = next((number for number in range(1, last + 1) if number not in numbers), None)
        if gap is not None:
            raise self._lacks(gap, last)
        if not last:
            return
        newest = 0
        for sequence in range(last, 0, -1):
            newest, kind = self._step_and_kind(sequence)
            if kind != FORK:  # a replay that differed was noted under the step that it repeated
                break
        if newest < step:
            raise StoreError(
                f"ledger of run {self.root.name} ends with step {newest}, but the update of step {step} is committed; "
                f"restore the records from {last + 1} on from a copy, or {_OR_GO_ON}"
            )

    def _step_and_kind(self, sequence: int) -> tuple[int, str]:
        try:
            record = json.loads(mirror.read(self.root, self._path(sequence)))
            return int(record["step"]), str(record.get("kind", ""))
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(
                f"ledger record {sequence} of run {self.root.name} is damaged ({error!r}); restore it from a copy, or "
                f"{_OR_GO_ON}"
            ) from error

    def as_table(self) -> pa.Table:
        """Return the records as a table ``updates``; other fields of a record are in ``record_json``."""
        from verl_omni_core.batches.schema import SCHEMAS, with_metadata

        records = self.records()
        columns: dict[str, Any] = {column.name: column.type for column in SCHEMAS["updates"].columns}
        arrays: dict[str, pa.Array] = {"sequence": pa.array([r["sequence"] for r in records], pa.int64())}
        for name, kind in columns.items():
            values: list[Any] = [record.get(name) for record in records]
            if name == "wall_time":
                values = [datetime.fromisoformat(record[name]) for record in records]
            elif name == "metrics_json":
                values = [r.get("metrics_json", json.dumps(r.get("metrics", {}))) for r in records]
            is_name = pa.types.is_dictionary(kind)
            array = pa.array(values, kind.value_type if is_name else kind)
            arrays[name] = array.dictionary_encode() if is_name else array
        rest = [{k: v for k, v in r.items() if k not in columns and k not in ("sequence", "metrics")} for r in records]
        arrays["record_json"] = pa.array([json.dumps(value, sort_keys=True) for value in rest], pa.string())
        return with_metadata(pa.table(arrays), "updates")

    def _refresh(self, *, only_once: bool) -> None:
        """Read the records that are not known yet. An appender does so once: what appears later is somebody else's."""
        if only_once and self._loaded:
            return
        numbers = self._numbers()
        last = max([*numbers, self._start.sequence])
        self._overtaken |= self._loaded and last > self._known()
        fresh = range(self._known(), last + 1)
        mirror.pull_missing(self.root, [self._path(sequence) for sequence in fresh if sequence in numbers])
        for sequence in range(1, last + 1):
            if sequence not in numbers:
                raise self._lacks(sequence, last)
        if not self._loaded:
            self._check_start()
        self._read(last)
        self._loaded = True

    def _known(self) -> int:
        return self._start.sequence + len(self._records)

    def _read(self, last: int) -> None:
        for sequence in range(self._known() + 1, last + 1):
            entry = self._parse(sequence, mirror.read(self.root, self._path(sequence)))
            self._records.append(entry)
            self._last_sha256 = entry["sha256"]

    def _read_from_the_beginning(self) -> None:
        if self._start.sequence == 0:
            return
        last = self._known()
        self._start, self._records, self._last_sha256 = BEGINNING, [], ""
        self._read(last)

    def _check_start(self) -> None:
        """Compare the record at the start with what is known of it; one that differs is no place to start from."""
        if self._start.sequence == 0:
            return
        try:
            entry = json.loads(mirror.read(self.root, self._path(self._start.sequence)))
            is_there = entry["sha256"] == _digest(entry) == self._start.sha256
        except (ValueError, KeyError, TypeError):
            is_there = False
        if not is_there:
            logger.warning(
                "ledger of run %s: record %d is not the one that the index knows, so all records are read",
                *(self.root.name, self._start.sequence),
            )
            self._start, self._last_sha256 = BEGINNING, ""

    def _lacks(self, sequence: int, last: int) -> StoreError:
        return StoreError(
            f"ledger of run {self.root.name} lacks record {sequence} of {last}; restore {self._path(sequence).name} "
            f"from a copy, or {_OR_GO_ON}"
        )

    def _parse(self, sequence: int, data: bytes) -> dict[str, Any]:
        try:
            entry = json.loads(data)
            intact = entry["sha256"] == _digest(entry) and (
                (entry["sequence"], entry["previous_sha256"]) == (sequence, self._last_sha256)
            )
        except (ValueError, KeyError, TypeError):
            intact = False
        if not intact:
            raise StoreError(
                f"ledger record {sequence} of run {self.root.name} is damaged, or the one before it was "
                f"changed; restore both from a copy, or {_OR_GO_ON}"
            )
        return entry

    def _numbers(self) -> set[int]:
        found = mirror.names(self.root, self._folder, always=True)
        names = [name.removesuffix(".json") for name in found if name.endswith(".json")]
        return {int(name) for name in names if name.isdigit()}

    def _path(self, sequence: int) -> Path:
        return self._folder / f"{sequence:012d}.json"


def standing(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the records, in order, that no later rewind takes back, without the rewinds themselves."""
    kept: list[Mapping[str, Any]] = []
    for record in records:
        if record.get("kind") == REWIND:
            kept = [earlier for earlier in kept if earlier.get("step", 0) <= record["to_version"]]
        else:
            kept.append(record)
    return kept


def _step(record: Mapping[str, Any]) -> int:
    return int(record.get("step", 0))


def _digest(entry: Mapping[str, Any]) -> str:
    content = {name: value for name, value in entry.items() if name != "sha256"}
    return sha256(json.dumps(content, sort_keys=True).encode())
