"""A session's tracker follows the settings."""

from verl_omni_core.settings.run import RunConfig
from verl_omni_core.stages.session import NoTracker, RunRef, Session
from verl_omni_core.store.artifacts import RunStore


def _session(tmp_path, wanted):
    config = RunConfig.model_validate({"tracking": {"tensorboard": wanted}})
    return Session(RunRef(str(tmp_path), 1), config, RunStore(tmp_path), actors=None)


def test_without_tensorboard_nothing_is_written(tmp_path):
    tracker = _session(tmp_path, False).tracker
    tracker.scalars(1, {"x": 1.0})
    tracker.image(1, "x", b"not read")
    assert isinstance(tracker, NoTracker) and list(tmp_path.iterdir()) == []


def test_tensorboard_is_written_into_the_runs_folder(tmp_path):
    session = _session(tmp_path, True)
    session.tracker.scalars(1, {"x": 1.0})
    session.tracker.close()
    assert [path.name for path in tmp_path.iterdir()] == ["tensorboard"]
