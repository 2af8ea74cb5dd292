"""Numbers and pictures of a run as TensorBoard event files."""

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

logger = logging.getLogger(__name__)


class TensorBoardTracker:
    """Writes scalars and pictures. What it cannot write it warns about, once: a tracker never stops a run."""

    def __init__(self, folder: str | Path) -> None:
        """Open event files in ``folder``, which is made."""
        self._folder = Path(folder)
        self._writer: EventFileWriter | None = None
        self._broken = False
        self._guarded(self._open)

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step under their names."""
        self._guarded(self._write_scalars, step, metrics, time.time())

    def table(self, metrics: "pa.Table") -> None:
        """Write a ``metrics`` table: ``step``, ``name``, ``value``, and ``wall_time`` where it has one."""
        self._guarded(self._write_table, metrics)

    def image(self, step: int, name: str, data: bytes) -> None:
        """Write a PNG, such as an image grid, under ``name``."""
        self._guarded(self._write_image, step, name, data)

    def gone_back(self, step: int) -> None:
        """Let readers forget what was written of later steps than ``step``: the run does them again."""
        self._guarded(self._write_start, step + 1)

    def close(self) -> None:
        """Flush and close. Doing it twice is harmless."""
        self._guarded(self._close)

    def _guarded(self, write: Any, *args: Any) -> None:
        if self._broken:
            return
        try:
            write(*args)
        except Exception as error:  # noqa: BLE001 - whatever it is, the run goes on without the tracker
            self._broken = True
            logger.warning(
                "TensorBoard gets nothing more: %s: %s (folder %s); the metrics tables are complete",
                type(error).__name__,
                error,
                self._folder,
            )

    def _open(self) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(self._folder))

    def _write_scalars(self, step: int, metrics: Mapping[str, float], wall_time: float) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
        self._add(step, Summary(value=values), wall_time)

    def _write_table(self, metrics: "pa.Table") -> None:
        by_step: dict[int, dict[str, float]] = {}
        times: dict[int, float] = {}
        for row in metrics.to_pylist():
            by_step.setdefault(row["step"], {})[row["name"]] = row["value"]
            written = row.get("wall_time")
            times[row["step"]] = written.timestamp() if written is not None else time.time()
        for step in sorted(by_step):
            self._write_scalars(step, by_step[step], times[step])

    def _write_image(self, step: int, name: str, data: bytes) -> None:
        import io

        from PIL import Image
        from tensorboard.compat.proto.summary_pb2 import Summary

        width, height = Image.open(io.BytesIO(data)).size
        picture = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=data)
        self._add(step, Summary(value=[Summary.Value(tag=name, image=picture)]), time.time())

    def _add(self, step: int, summary: Any, wall_time: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._write(Event(wall_time=wall_time, step=step, summary=summary))

    def _write_start(self, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._write(Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START)))

    def _write(self, event: Any) -> None:
        if self._writer is None:
            raise ValueError("the tracker is closed")
        self._writer.add_event(event)
        # a run may be killed at any moment, and readers look while it goes
        self._writer.flush()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
