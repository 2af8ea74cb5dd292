import logging
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from verl_omni_core.report.images import image_grid
from verl_omni_core.report.tensorboard import TensorBoardTracker


def read(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0}).Reload()


def test_scalars_and_pictures_can_be_read_back(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path / "tensorboard")
    tracker.scalars(1, {"critic/rewards/mean": 0.5, "actor/lr": 1e-4})
    tracker.scalars(2, {"critic/rewards/mean": 0.75})
    picture = image_grid(np.zeros((1, 3, 32, 96), np.uint8), ["p"])
    tracker.image(2, "samples", picture)
    tracker.close()
    events = read(tmp_path / "tensorboard")
    assert [(e.step, e.value) for e in events.Scalars("critic/rewards/mean")] == [(1, 0.5), (2, 0.75)]
    assert events.Scalars("actor/lr")[0].value == pytest.approx(1e-4)
    (image,) = events.Images("samples")
    assert image.encoded_image_string == picture


def test_a_metrics_table_keeps_its_steps_and_times(tmp_path: Path) -> None:
    when = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    table = pa.table({"step": [1, 2], "name": ["a", "a"], "value": [1.0, 2.0], "wall_time": [when, when]})
    tracker = TensorBoardTracker(tmp_path)
    tracker.table(table)
    tracker.close()
    events = read(tmp_path).Scalars("a")
    assert [(e.step, e.value, e.wall_time) for e in events] == [(1, 1.0, when.timestamp()), (2, 2.0, when.timestamp())]


def test_steps_that_the_run_went_back_before_are_forgotten_also_by_a_later_process(tmp_path: Path) -> None:
    first = TensorBoardTracker(tmp_path)
    for step in (1, 2, 3, 4):
        first.scalars(step, {"a": 1.0})
    first.close()
    later = TensorBoardTracker(tmp_path)
    later.gone_back(2)
    later.scalars(3, {"a": 2.0})
    later.close()
    assert [(e.step, e.value) for e in read(tmp_path).Scalars("a")] == [(1, 1.0), (2, 1.0), (3, 2.0)]


def test_values_stand_on_disk_before_the_tracker_closes(tmp_path: Path) -> None:
    TensorBoardTracker(tmp_path).scalars(1, {"a": 1.0})
    assert len(read(tmp_path).Scalars("a")) == 1


def test_a_tracker_that_cannot_write_warns_once_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with caplog.at_level(logging.WARNING):
        tracker = TensorBoardTracker(blocked)
        tracker.scalars(1, {"a": 1.0})
        tracker.image(1, "b", b"not a picture")
        tracker.close()
    assert len(caplog.records) == 1
    assert "TensorBoard gets nothing more" in caplog.text


def test_a_bad_value_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker = TensorBoardTracker(tmp_path)
    tracker.image(1, "b", b"not a picture")
    assert len(caplog.records) == 1
