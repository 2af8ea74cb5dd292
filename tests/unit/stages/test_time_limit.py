"""A run whose machine's time ends saves and stops before that, by what its own steps and snapshots took."""

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from tests.unit.stages import owned_run
from tests.unit.stages.trained_run import TrainedRun
from verl_omni_core.errors import ConfigError
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.stages.session import let_go
from verl_omni_core.stages.time_limit import has_time, refuse_past_end, stop_early, stopped_early
from verl_omni_core.store.lease import is_owned

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


def ending(config: RunConfig, **run) -> RunConfig:
    return config.model_copy(
        update={"run": config.run.model_copy(update={"end_by": NOON, "end_margin_s": 10.0, **run})}
    )


@pytest.fixture
def session(tmp_path):
    made = owned_run.take(ending(owned_run.make(tmp_path)))
    yield made
    let_go(str(made.root))


def begins(session, *times):
    session.begins |= {step: {"plan": time} for step, time in enumerate(times, 1)}


def at(seconds_left):
    return NOON - timedelta(seconds=seconds_left)


def test_a_run_without_an_end_always_has_time(tmp_path):
    session = owned_run.take(owned_run.make(tmp_path))
    begins(session, 0, 10**9)
    assert has_time(session.ref, 3)
    let_go(str(session.root))


def test_the_longest_step_the_last_snapshot_and_the_margin_must_fit(session):
    begins(session, 100, 120, 150, 155)  # steps of 20, 30 and 5 s
    session.spans[4] = {"rollout": 4.0, "validate": 3.0}
    attempt = session.store.attempt(2, "checkpoint", "key")
    attempt.commit([], rows=0, parents=[], producer={"seconds": 2.5})
    assert has_time(session.ref, 5, at(30 + 2.5 + 10))
    assert not has_time(session.ref, 5, at(30 + 2.5 + 10 - 0.01))
    session.spans[4] = {"rollout": 40.0, "validate": 3.0}  # the step that ended last is the longest
    assert has_time(session.ref, 5, at(43 + 2.5 + 10))
    assert not has_time(session.ref, 5, at(43 + 2.5 + 10 - 0.01))


def test_a_pause_between_two_starts_is_no_step(session):
    begins(session, 100, 120)
    session.begins[9] = {"plan": 10_000.0}
    assert has_time(session.ref, 10, at(20 + 10))


def test_before_any_step_only_the_margin_must_fit(session):
    assert has_time(session.ref, 1, at(10)) and not has_time(session.ref, 1, at(9.9))


def test_a_resumed_run_goes_by_the_log_of_the_step_before(session):
    from verl_omni_core.stages.metric_table import metric_table

    attempt = session.store.attempt(6, "log", "key")
    files = [attempt.write_table("metrics", 0, metric_table(6, {"timing_s/step": 77.0}))]
    attempt.commit(files, rows=1, parents=[], producer={})
    assert has_time(session.ref, 7, at(87)) and not has_time(session.ref, 7, at(86.9))


def test_an_end_that_has_passed_is_refused_before_anything_starts():
    config = ending(RunConfig())
    refuse_past_end(config, at(1))
    with pytest.raises(ConfigError, match=r"run\.end_by is 2026-03-01T12:00:00\+00:00, which has passed"):
        refuse_past_end(config, at(0))


@pytest.mark.parametrize("level", ["snapshot", "ledger", "none"])
def test_stopping_saves_the_last_step_whatever_the_level_and_lets_go(pipeline, tmp_path, level):
    run = TrainedRun(tmp_path / "runs", pipeline, durability={"level": level})
    session = run.restart()
    session.config = run.config = ending(run.config)
    ended = []
    session.actors = SimpleNamespace(trainer=session.actors.trainer, stop=lambda: ended.append(1))
    for step in (1, 2):
        run.learn(session, step)
    text = stop_early(session.ref, 2)
    assert run.checkpoints()[-1] == 2
    assert "stopped after step 2 of 4" in text and "--run-id trained" in text and "2026-03-01 12:00:00" in text
    assert ended == [1] and not is_owned(run.root)
    assert stopped_early(run.config) and run.folder.status() == "stopped"
    assert run.resume().actors.trainer.version() == 2
    let_go(str(run.root))
