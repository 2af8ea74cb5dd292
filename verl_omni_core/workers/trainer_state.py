"""A rank's commands about its whole state: copy and write it, load it, go back to before the first step."""

import dataclasses
from functools import partial
from typing import Any

import ray

from verl_omni_core.errors import ContractError
from verl_omni_core.identity import digest
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.store.attempt import Attempt
from verl_omni_core.store.manifest import FileRecord
from verl_omni_core.training.background import SnapshotWriter
from verl_omni_core.training.checkpoint import WrittenFile
from verl_omni_core.workers.commands import CONTROL, UpdateResult, WrittenSnapshot
from verl_omni_core.workers.training_worker import TrainingWorker


class TrainerState:
    """What :class:`ActorRolloutRefWorker` knows of its place in the run, saved and restored with the network.

    The average, the schedule and the counters are part of the trainer and move inside the update; the position in the
    data is the version alone, as the prompts of a step follow from seed and step.
    """

    config: RunConfig
    _rank: int
    _version: int
    _applied: dict[str, dict[str, Any]]
    _answer: UpdateResult | None
    _writer: SnapshotWriter | None = None

    def begin_snapshot(self, attempt: Attempt, epoch: int | None = None) -> None:
        """Copy all that training goes on from and begin to write it into an attempt; returns once the copy is made."""
        self._obey(epoch)
        worker = self._ready()
        if self._writer is None:
            self._writer = SnapshotWriter(worker.engine.ranks, self.config.durability.snapshot_timeout_s)
        # all ranks know all files; one of them keeps them
        record = partial(_record, attempt) if self._rank == 0 else None
        self._writer.begin(worker.engine, attempt.folder, self._place(), record)

    @ray.method(concurrency_group=CONTROL)
    def finish_snapshot(self, attempt: Attempt, timeout_s: float, epoch: int | None = None) -> WrittenSnapshot:
        """Wait until what :meth:`begin_snapshot` began is on the disk and read back; rank 0's answer counts.

        Raises:
            See :meth:`SnapshotWriter.finish`.
        """
        self._obey(epoch)
        if self._writer is None:
            raise ContractError(f"no snapshot was begun in {str(attempt.folder)!r}; begin it first")
        written = self._writer.finish(attempt.folder, timeout_s)
        return WrittenSnapshot(written.files if self._rank == 0 else [], written.seconds)

    def save_checkpoint(self, folder: str, epoch: int | None = None) -> list[str]:
        """Write all that training goes on from, verified by reading it back; returns the files' names."""
        self._obey(epoch)
        return self._ready().save_checkpoint(folder, self._place())

    def load_checkpoint(self, folder: str, epoch: int | None = None) -> int:
        """Go on from a checkpoint, written by any number of ranks; returns its policy version."""
        self._obey(epoch)
        extra = self._ready().load_checkpoint(folder)
        self._version, self._applied = extra["version"], extra["applied"]
        self._answer = UpdateResult(**extra["answer"]) if extra["answer"] else None
        return self._version

    def reset(self, epoch: int | None = None) -> None:
        """Be as before the first step."""
        self._obey(epoch)
        self._ready().reset()
        self._version, self._applied, self._answer = 0, {}, None

    def _place(self) -> dict[str, Any]:
        answer = dataclasses.asdict(self._answer) if self._answer else None
        return {
            "version": self._version,
            "applied": self._applied,
            "answer": answer,
            "data_position": {"step": self._version},
            "settings_digest": digest(self.config.model_dump(mode="json")),
        }

    def _obey(self, epoch: int | None) -> None:
        raise NotImplementedError

    def _ready(self) -> TrainingWorker:
        raise NotImplementedError


def _record(attempt: Attempt, file: WrittenFile) -> FileRecord:
    return attempt.record_file(file.name, file.size_bytes, file.sha256)
