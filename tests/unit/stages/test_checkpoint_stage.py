"""When the trainer's state is committed, and what a run loses that loses its trainer; with a real rank and store."""

import resource
import threading

import pytest

from tests.unit.stages.trained_run import STEPS, TrainedRun
from verl_omni_core.errors import ContractError, StoreError
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.stages.checkpoint import checkpoint, commit_state
from verl_omni_core.stages.schedule import durability_level, is_kept, snapshot_due
from verl_omni_core.stages.session import let_go
from verl_omni_core.stages.snapshot import begin_checkpoint
from verl_omni_core.store.ledger import standing
from verl_omni_core.training import background
from verl_omni_core.training import checkpoint as checkpoint_files


@pytest.fixture
def made(pipeline, tmp_path):
    runs = []

    def make(**groups):
        runs.append(TrainedRun(tmp_path / f"store-{len(runs)}", pipeline, **groups))
        return runs[-1]

    yield make
    for run in runs:
        let_go(str(run.root))


@pytest.mark.parametrize(
    ("level", "contents", "whole"),
    [
        ("snapshot", "all", [1, 2, 3, 4, 5, 6, 7]),
        ("snapshot", "weights", [1, 2, 3, 4, 5, 6, 7]),
        ("ledger", "all", [2, 3, 4, 6, 7]),
        ("ledger", "weights", [2, 4, 6, 7]),
        ("none", "all", [3, 6, 7]),
    ],
)
def test_the_level_says_after_which_steps_the_whole_state_is_committed(level, contents, whole):
    durability = {"level": level, "snapshot_every": 2, "checkpoint_contents": contents}
    config = RunConfig.model_validate({"run": {"steps": 7, "checkpoint_every": 3}, "durability": durability})
    assert [step for step in range(8) if snapshot_due(config, step)] == whole
    assert [step for step in range(8) if is_kept(config, step)] == [3, 6, 7]


def test_adapters_are_saved_after_every_step_and_whole_networks_by_the_ledger():
    levels = [durability_level(RunConfig.model_validate({"model": {"lora": {"rank": rank}}})) for rank in (4, 0)]
    assert levels == ["snapshot", "ledger"]


def test_nothing_to_resume_from_is_refused():
    with pytest.raises(ValueError, match="leaves nothing to resume from; use level ledger"):
        RunConfig.model_validate({"durability": {"level": "none", "checkpoint_contents": "weights"}})


def test_every_step_is_saved_and_a_lost_trainer_goes_on_after_the_last_one(made):
    run = made()
    session = run.restart()
    whole = run.train(session)
    assert run.checkpoints() == [1, 2, 3, 4]
    again = run.resume()
    assert again.actors.trainer.version() == STEPS
    assert run.weights(again, STEPS) == whole[STEPS]
    index = checkpoint_files.read_index(
        again.store.path_of(again.store.find(2, "checkpoint"), "checkpoint.json").parent
    )
    assert index["extra"]["data_position"] == {"step": 2} and len(index["extra"]["settings_digest"]) == 64
    again.store.verify(again.store.find(STEPS, "checkpoint"))


@pytest.mark.parametrize("groups", [{}, {"model": {"lora": {"rank": 0}}, "durability": {"level": "snapshot"}}])
def test_a_crash_while_a_snapshot_is_written_loses_nothing(made, groups, monkeypatch):
    undisturbed = made(**groups)
    expected = undisturbed.train(undisturbed.restart())
    run = made(**groups)
    session = run.restart()
    run.train(session, 2)
    run.learn(session, 3)  # begins the snapshot of step 3, whose driver and trainer are then lost
    assert run.checkpoints() == [1, 2]
    again = run.resume()
    assert again.actors.trainer.version() == 2
    assert run.train(again) == {step: expected[step] for step in (3, 4)}
    assert [r["update_id"] for r in again.ledger.records()] == [
        f"{s:06d}/{m:04d}" for s in (1, 2, 3, 4) for m in (0, 1)
    ]


def test_by_the_ledger_a_lost_trainer_replays_what_came_after_the_last_snapshot(made):
    undisturbed = made()
    expected = undisturbed.train(undisturbed.restart())
    run = made(durability={"level": "ledger", "snapshot_every": 2})
    run.train(run.restart(), 3)
    assert run.checkpoints() == [2]
    again = run.resume()
    assert again.actors.trainer.version() == 2
    assert run.train(again) == {step: expected[step] for step in (3, 4)}
    assert run.checkpoints() == [2, 4]
    assert len(again.ledger.records()) == 2 * STEPS


def test_without_durability_what_came_after_the_last_checkpoint_is_done_again(made, caplog):
    undisturbed = made()
    expected = undisturbed.train(undisturbed.restart())
    run = made(durability={"level": "none"}, run={"checkpoint_every": 2})
    session = run.restart()
    run.train(session, 3)
    assert run.checkpoints() == [2] and session.snapshot is None
    again = run.resume()
    assert again.actors.trainer.version() == 2
    assert "step 3 to 3 are done again" in caplog.text
    assert again.store.find(3, "rollout") is None and again.store.find(2, "update") is not None
    assert run.train(again) == {step: expected[step] for step in (3, 4)}
    kinds = [record["kind"] for record in again.ledger.records()]
    assert kinds == ["opt"] * 6 + ["rewind"] + ["opt"] * 4
    assert [r["update_id"] for r in standing(again.ledger.records())] == [
        f"{step:06d}/{number:04d}" for step in (1, 2, 3, 4) for number in (0, 1)
    ]


def test_a_kept_step_of_weights_alone_has_those_and_no_state(made):
    run = made(durability={"level": "ledger", "checkpoint_contents": "weights"}, run={"checkpoint_every": 2})
    session = run.restart()
    for step in (1, 2):
        run.learn(session, step)
    assert run.checkpoints() == []
    assert [session.store.find(step, "sync") is not None for step in (1, 2)] == [False, True]
    assert session.store.find(2, "sync-average") is not None
    assert run.resume().actors.trainer.version() == 0


def test_a_state_that_nobody_began_to_write_is_written_when_it_is_asked_for(made):
    run = made()
    session = run.restart()
    run.update(session, 1)
    assert checkpoint(session.ref, 1) == session.store.find(1, "checkpoint") is not None
    assert checkpoint(session.ref, 1) == checkpoint(run.restart().ref, 1)


def test_a_trainer_that_has_gone_on_is_not_saved_as_it_was(made, caplog):
    run = made()
    session = run.restart()
    run.update(session, 1)
    run.update(session, 2)
    assert checkpoint(session.ref, 1) is None and run.checkpoints() == []
    assert "step 1 has no checkpoint: the trainer holds version 2" in caplog.text


def test_a_state_that_cannot_be_written_ends_the_run_with_the_reason(made):
    run = made()
    session = run.restart()
    run.train(session, 1)
    run.update(session, 2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        begin_checkpoint(session.ref, 2)
        with pytest.raises(StoreError, match="could not be written"):
            checkpoint(session.ref, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert run.checkpoints() == [1]
    assert run.resume().actors.trainer.version() == 1


def test_the_state_of_a_step_without_an_update_is_no_checkpoint(made):
    run = made()
    with pytest.raises(ContractError, match="no committed update"):
        commit_state(run.restart(), 1)


def test_a_checkpoint_that_another_run_made_is_taken_as_it_is(made):
    run = made()
    session = run.restart()
    attempt = session.store.attempt(3, "checkpoint", "the other run's key")
    taken_over = attempt.commit([], rows=0, parents=[], producer={})
    assert checkpoint(session.ref, 3) == taken_over


def test_the_copy_is_all_that_a_step_waits_for(made, monkeypatch):
    run, released, real = made(), threading.Event(), checkpoint_files.write

    def waits(*arguments):
        assert released.wait(60)
        return real(*arguments)

    monkeypatch.setattr(background.checkpoint, "write", waits)
    session = run.restart()
    run.learn(session, 1)
    assert session.actors.trainer.version() == 1 and run.checkpoints() == []
    released.set()
    run.learn(session, 2)
    assert run.checkpoints() == [1]
