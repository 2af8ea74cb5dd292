"""Runs that break off at the same place: which starts count, what refuses one more, and what begins the count anew."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.stages.forked_run import tree
from verl_omni_core.errors import EngineError, NoProgressError
from verl_omni_core.settings.loader import apply_overrides
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.stages import opening
from verl_omni_core.stages.ending import let_go_on_failure
from verl_omni_core.stages.observe import stage
from verl_omni_core.stages.opening import open_run
from verl_omni_core.stages.progress_budget import FINISHED, mark, record_ending, refuse_without_progress
from verl_omni_core.stages.session import RunRef, let_go, session_of
from verl_omni_core.store import runs
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.attempt import Attempt
from verl_omni_core.store.lease import newest_epoch, take_ownership
from verl_omni_core.store.rejection import reject

_KILLED = """
import os, pathlib, signal, sys
from verl_omni_core.stages.progress_budget import STARTED_AT, mark
from verl_omni_core.store.lease import take_ownership
root = pathlib.Path(sys.argv[1])
held = take_ownership(root, "doomed", {STARTED_AT: mark(root)})
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def without_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    actors = SimpleNamespace(trainer=SimpleNamespace(version=lambda: 0, obey=lambda epoch: None), describe_engines=list)
    monkeypatch.setattr(opening, "check", lambda config: None)
    monkeypatch.setattr(opening, "plan", lambda run, step: None)
    monkeypatch.setattr(opening.Actors, "start_or_find", lambda *_, **__: actors)


def asked(store: Path, *overrides: str) -> RunConfig:
    base = ["rollout.name=diffusers", f"run.store={store}", "run.id=a", "durability.min_free_gb=0"]
    return apply_overrides(RunConfig(), [*base, "tracking.tensorboard=false", *overrides])


@stage("reward")
def scorer_breaks(run: RunRef, step: int) -> None:
    raise EngineError("the scorer's machine is gone")


def breaks_off(config: RunConfig, error: Callable[[RunRef], None] = lambda run: scorer_breaks(run, 1)) -> None:
    """Start the run and let it end by an error in a stage."""
    ref = open_run(config)
    with pytest.raises((EngineError, KeyboardInterrupt, SystemExit)), let_go_on_failure(ref):
        error(ref)


def commit(root: Path, step: int, name: str) -> Attempt:
    with take_ownership(root, "test") as own:
        attempt = RunStore(root, epoch=own.epoch).attempt(step, name, "key")
        attempt.commit([], rows=0, parents=[], producer={})
    return attempt


@pytest.mark.parametrize("budget", [1, 3])
def test_the_start_after_a_budget_of_starts_without_progress_is_refused_and_says_where_and_why(tmp_path, budget):
    config = asked(tmp_path, f"durability.no_progress_budget={budget}")
    for _ in range(budget):
        breaks_off(config)
    before = tree(tmp_path)
    with pytest.raises(NoProgressError) as refused:
        open_run(config)
    assert tree(tmp_path) == before
    message = str(refused.value)
    assert f"was started {budget} times in a row" in message and "in reward of step 1." in message
    assert "The last error: verl_omni_core.errors.EngineError: the scorer's machine is gone." in message
    assert f"verl-omni train --run-id a --set run.store={tmp_path}" in message
    assert f"--set durability.no_progress_budget={2 * budget}" in message
    assert not NoProgressError.retryable


def test_the_command_that_the_refusal_prints_starts_the_run_again(tmp_path):
    for _ in range(3):
        breaks_off(asked(tmp_path))
    with pytest.raises(NoProgressError):
        open_run(asked(tmp_path))
    let_go(open_run(asked(tmp_path, "durability.no_progress_budget=6")).root)
    let_go(open_run(asked(tmp_path, "durability.no_progress_budget=6")).root)


def test_a_crash_loop_that_starts_the_run_whatever_it_says_ends_at_once_from_then_on(tmp_path):
    config, begun = asked(tmp_path), 0
    for _ in range(20):
        try:
            ref = open_run(config)
        except NoProgressError:
            continue
        begun += 1
        with pytest.raises(EngineError), let_go_on_failure(ref):
            scorer_breaks(ref, 1)
    assert begun == newest_epoch(tmp_path / "a") == 3


def test_processes_that_are_killed_count_and_leave_no_error(tmp_path):
    let_go(open_run(asked(tmp_path)).root)
    record_ending(tmp_path / "a", 1, FINISHED)
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path / "a")], timeout=120, check=False)
        assert done.returncode == -signal.SIGKILL
    with pytest.raises(NoProgressError, match=r"after step 0\. Each time it was killed or lost its machine"):
        open_run(asked(tmp_path))


def test_an_error_is_told_also_if_the_last_start_was_killed(tmp_path):
    breaks_off(asked(tmp_path))
    for _ in range(2):
        let_go(open_run(asked(tmp_path)).root)  # no ending is recorded, as with a kill
    with pytest.raises(NoProgressError, match=r"machine is gone\. 2 of these starts were killed"):
        open_run(asked(tmp_path))


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_a_run_that_its_user_stops_is_started_as_often_as_he_likes(tmp_path, stop):
    def interrupted(run: RunRef) -> None:
        raise stop

    for _ in range(5):
        breaks_off(asked(tmp_path), interrupted)


def test_a_run_that_ended_well_is_started_as_often_as_anybody_likes(tmp_path):
    for _ in range(5):
        ref = open_run(asked(tmp_path))
        record_ending(Path(ref.root), ref.epoch, FINISHED)
        let_go(ref.root)


def shard(root: Path, number: int) -> None:
    with take_ownership(root, "test") as own:
        attempt = RunStore(root, epoch=own.epoch).attempt(1, "rollout", "key")
        attempt.finish_shard(number, [])


@pytest.mark.parametrize(
    "progress",
    [
        lambda root: commit(root, 1, "plan"),
        lambda root: commit(root, 0, "sync"),
        lambda root: shard(root, 0),
    ],
)
def test_a_new_stage_or_shard_begins_the_count_anew(tmp_path, progress):
    for _ in range(2):
        breaks_off(asked(tmp_path))
    progress(tmp_path / "a")
    record_ending(tmp_path / "a", newest_epoch(tmp_path / "a"), "failed")
    for _ in range(3):
        breaks_off(asked(tmp_path))
    with pytest.raises(NoProgressError):
        open_run(asked(tmp_path))


def test_samples_that_are_drawn_and_set_aside_each_time_are_no_progress(tmp_path):
    def drawn_and_rejected(run: RunRef) -> None:
        store = session_of(run).store
        attempt = store.attempt(1, "rollout", "key")
        attempt.finish_shard(0, [])
        reject(store, attempt.commit([], rows=0, parents=[], producer={}), "off policy")
        raise EngineError("ratios are off")

    for _ in range(3):
        breaks_off(asked(tmp_path), drawn_and_rejected)
    with pytest.raises(NoProgressError, match="ratios are off"):
        open_run(asked(tmp_path))


def test_a_run_that_cannot_even_open_says_so(tmp_path, monkeypatch):
    def no_engine(*_: object, **__: object) -> None:
        raise EngineError("no engine")

    monkeypatch.setattr(opening.Actors, "start_or_find", no_engine)
    for _ in range(3):
        with pytest.raises(EngineError):
            open_run(asked(tmp_path))
    with pytest.raises(NoProgressError, match="while it is opened.*no engine"):
        open_run(asked(tmp_path))


def test_a_mark_counts_each_shard_once_however_many_attempts_hold_it(tmp_path):
    root = Path(open_run(asked(tmp_path)).root)
    let_go(str(root))
    for number in (0, 1, 1):
        shard(root, number)
    assert mark(root) == {"step": 0, "stages": [], "shards": ["1/rollout/00000", "1/rollout/00001"]}
    commit(root, 1, "rollout")
    assert mark(root) == {"step": 0, "stages": ["1/rollout"], "shards": []}
    commit(root, 1, "update")
    assert mark(root) == {"step": 1, "stages": ["1/rollout", "1/update"], "shards": []}


@given(st.lists(st.sampled_from(["fails", "killed", "stopped", "finished", "progress"]), max_size=8), st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_exactly_a_budget_of_broken_starts_at_one_place_refuses(tmp_path_factory, history, budget):
    root = runs.create_run(
        tmp_path_factory.mktemp("runs"), asked(Path("x")).model_dump(mode="json"), code_version="1", run_id="a"
    ).root
    config = asked(root.parent, f"durability.no_progress_budget={budget}")
    broken = 0
    for number, event in enumerate(history):
        with take_ownership(root, "test", {"started_at": mark(root)}) as own:
            broken += 1
            if event == "progress":
                RunStore(root, epoch=own.epoch).attempt(1, f"stage{number}", "key").commit(
                    [], rows=0, parents=[], producer={}
                )
                broken = 0
            elif event != "killed":
                record_ending(root, own.epoch, {"fails": "failed"}.get(event, event))
                broken = broken if event == "fails" else 0
    folder = runs.open_run(root.parent, "a")
    if broken < budget:
        refuse_without_progress(folder, config)
    else:
        with pytest.raises(NoProgressError, match=f"started {broken} times"):
            refuse_without_progress(folder, config)
