"""Opening, resuming and breaking off a run, with a trainer that only keeps its version; living actors: tests/flows."""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from verl_omni_core.errors import ConfigError, EngineError, StoreError
from verl_omni_core.settings.loader import apply_overrides
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.stages import ending, evaluate, opening, rewind
from verl_omni_core.stages.ending import let_go_on_failure
from verl_omni_core.stages.opening import open_run, restore
from verl_omni_core.stages.plan import plan
from verl_omni_core.stages.session import let_go, session_of
from verl_omni_core.stages.subjects import Evaluation
from verl_omni_core.store import runs, trusted
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.lease import is_owned, take_ownership
from verl_omni_core.training.checkpoint import INDEX_FILE


@dataclass
class _Trainer:
    held: int = 0
    epoch: int = 0
    loaded: list[str] = field(default_factory=list)
    refused: set[int] = field(default_factory=set)

    def version(self) -> int:
        return self.held

    def owned_since(self) -> int:
        return self.epoch

    def obey(self, epoch: int) -> None:
        self.epoch = epoch

    def load_checkpoint(self, folder: str) -> int:
        step = int(Path(folder).parents[2].name)
        self.loaded.append(folder)
        if step in self.refused:
            raise StoreError("a tensor file changed after it was written")
        self.held = step
        return step

    def reset(self) -> None:
        self.held = 0


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the look at prompts and model, which has tests of its own and takes seconds."""
    monkeypatch.setattr(opening, "check", lambda config: None)
    monkeypatch.setattr(evaluate, "check", lambda config, splits: None)


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> _Trainer:
    made = _Trainer()
    actors = SimpleNamespace(trainer=made, describe_engines=list, stop=lambda: None)
    monkeypatch.setattr(opening.Actors, "start_or_find", lambda *_, **__: actors)
    monkeypatch.setattr(opening.Actors, "find", lambda *_, **__: actors)
    return made


def _settings(store: Path, *overrides: str) -> RunConfig:
    base = ["rollout.name=diffusers", f"run.store={store}", "durability.min_free_gb=0", "tracking.tensorboard=false"]
    return apply_overrides(RunConfig(), [*base, *overrides])


def _opened(config: RunConfig) -> runs.RunFolder:
    """Open a run, let go of it, and return its folder."""
    ref = open_run(config)
    let_go(ref.root)
    return runs.open_run(Path(ref.root).parent, Path(ref.root).name)


def _commit(root: Path, step: int, stage: str, content: bytes = b"{}") -> Path:
    with take_ownership(root, "test") as own:
        attempt = RunStore(root, epoch=own.epoch).attempt(step, stage, "key")
        attempt.commit([attempt.write_file(INDEX_FILE, content)], rows=1, parents=[], producer={})
        return attempt.folder / INDEX_FILE


def test_a_run_that_was_started_without_a_name_is_resumed_by_the_one_that_it_got(tmp_path, trainer):
    made = _opened(_settings(tmp_path))
    assert made.config["run"]["id"] == made.run_id
    again = _opened(_settings(tmp_path, f"run.id={made.run_id}"))
    assert (again.root, again.uuid) == (made.root, made.uuid)
    assert len(list(tmp_path.iterdir())) == 1


def test_settings_are_checked_when_a_run_is_made_or_changes_and_not_when_it_goes_on(tmp_path, trainer, monkeypatch):
    checked: list[int] = []
    monkeypatch.setattr(opening, "check", lambda config: checked.append(config.run.steps))
    for steps in (3, 3, 5, 5, 3):
        _opened(_settings(tmp_path, "run.id=a", f"run.steps={steps}", "durability.no_progress_budget=9"))
    assert checked == [3, 5, 3]


@pytest.mark.parametrize(
    "override",
    [
        "run.steps=99",
        "run.checkpoint_every=1",
        "run.end_by=2999-01-01T00:00:00Z",
        "run.end_margin_s=5",
        "durability.level=ledger",
        "rollout.request_timeout_s=900",
        "training.step_timeout_s=9",
        "rollout.max_attempts=5",
        "durability.min_free_gb=0.5",
        "tracking.tensorboard=true",
        "cluster.actor_timeout_s=99",
        "algorithm.max_ratio_deviation=0.5",
        "weights.probe=true",
        "reward.max_invalid_fraction=0.5",
    ],
)
def test_a_resumed_run_may_have_other_settings_that_change_no_result_and_keeps_them(tmp_path, trainer, override):
    made = _opened(_settings(tmp_path, "run.id=a"))
    as_made = (made.root / "run.json").read_bytes()
    resumed = _settings(tmp_path, "run.id=a", override)
    assert _opened(resumed).config == resumed.model_dump(mode="json") != made.config
    assert (made.root / "run.json").read_bytes() == as_made
    session = session_of(opening.RunRef(str(made.root), 99))
    let_go(str(made.root))
    assert session.config == resumed
    assert [run.steps for run in runs.list_runs(tmp_path)] == [resumed.run.steps]


@pytest.mark.parametrize(
    "override",
    ["run.seed=7", "training.learning_rate=1e-9", "rollout.group_size=2", "sampler.noise_level=0.1",
     "data.shuffle=false", "training.max_consecutive_skips=9", "tracking.grid_prompts=2"],
)  # fmt: skip
def test_a_resumed_run_may_not_have_other_settings_that_change_a_result(tmp_path, trainer, override):
    _opened(_settings(tmp_path, "run.id=a"))
    with pytest.raises(ConfigError, match=f"exists with {override.split('=')[0]}"):
        open_run(_settings(tmp_path, "run.id=a", override))
    assert not is_owned(tmp_path / "a")


def test_a_cosine_schedule_keeps_its_length(tmp_path, trainer):
    _opened(_settings(tmp_path, "run.id=a", "training.schedule=cosine", "run.steps=20"))
    with pytest.raises(ConfigError, match=r"run\.steps = 20, and now it is 40, but training\.schedule 'cosine'"):
        open_run(_settings(tmp_path, "run.id=a", "training.schedule=cosine", "run.steps=40"))
    _opened(_settings(tmp_path, "run.id=a", "training.schedule=cosine", "run.steps=20"))


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_it(tmp_path, trainer, caplog, monkeypatch):
    root = _opened(_settings(tmp_path, "run.id=a")).root
    files = {}
    monkeypatch.setattr(opening, "plan", lambda run, step: None)
    for step in (1, 2, 3):
        _commit(root, step, "update")
        files[step] = _commit(root, step, "checkpoint", b'{"step": %d}' % step)
    trainer.refused = {2}
    flipped = bytearray(files[3].read_bytes())
    flipped[3] ^= 1
    files[3].write_bytes(flipped)

    trusted._trusted.clear()  # as in a new process
    with caplog.at_level(logging.WARNING):
        open_run(_settings(tmp_path, "run.id=a"))
    let_go(str(root))
    assert trainer.held == 1
    assert trainer.loaded == [str(files[2].parent), str(files[1].parent)]
    assert [("of step 3" in r.message, "of step 2" in r.message) for r in caplog.records] == [
        (True, False),
        (False, True),
    ]


def test_a_living_trainer_goes_on_for_the_next_owner_and_is_restored_where_another_came_between(
    tmp_path, trainer, monkeypatch
):
    root = _run_of_three_steps(tmp_path, monkeypatch)
    for _ in range(2):  # the first brings the fresh trainer to step 3, the second finds it there
        _opened(_settings(tmp_path, "run.id=a"))
    assert (trainer.held, len(trainer.loaded)) == (3, 1)
    take_ownership(root, "on another cluster").release()
    _opened(_settings(tmp_path, "run.id=a"))
    assert (trainer.held, len(trainer.loaded)) == (3, 2)


def _run_of_three_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = _opened(_settings(tmp_path, "run.id=a")).root
    monkeypatch.setattr(opening, "plan", lambda run, step: None)
    for step in (1, 2, 3):
        for stage in ("plan", "update", "log", "checkpoint"):
            _commit(root, step, stage, b'{"step": %d}' % step)
    return root


@pytest.mark.parametrize("held", [0, 3])
def test_a_run_that_goes_back_to_a_step_begins_after_it_also_with_a_living_trainer(
    tmp_path, trainer, monkeypatch, held
):
    root = _run_of_three_steps(tmp_path, monkeypatch)
    trainer.held = held
    ref = open_run(_settings(tmp_path, "run.id=a", "run.resume=2"))
    assert (ref.done, trainer.held) == (2, 2)
    assert runs.steps_done(root) == 2
    let_go(ref.root)
    ref = open_run(_settings(tmp_path, "run.id=a", "run.resume=0"))
    assert (ref.done, trainer.held) == (0, 0)
    let_go(ref.root)


def test_a_flow_run_that_is_retried_goes_back_once(tmp_path, trainer, monkeypatch):
    root = _run_of_three_steps(tmp_path, monkeypatch)
    config = _settings(tmp_path, "run.id=a", "run.resume=1")
    for expected in (1, 2):
        ref = open_run(config, request="flow run 1")
        assert ref.done == expected
        let_go(ref.root)
        for stage in ("plan", "update", "log", "checkpoint"):
            _commit(root, 2, stage)
        trainer.held = 2
    ref = open_run(config, request="flow run 2")
    assert ref.done == 1
    let_go(ref.root)


def test_a_start_finishes_a_rewind_that_broke_off_before_it_looks_at_anything(tmp_path, trainer, monkeypatch):
    root = _run_of_three_steps(tmp_path, monkeypatch)
    ref = open_run(_settings(tmp_path, "run.id=a"))
    with monkeypatch.context() as patch:
        patch.setattr(rewind, "finish_rewind", lambda *_: None)
        rewind.set_aside(session_of(ref), 1, "broken off at its beginning")
    let_go(ref.root)
    trainer.held = 0
    ref = open_run(_settings(tmp_path, "run.id=a"))
    assert (ref.done, trainer.held, runs.steps_done(root)) == (1, 1, 1)
    let_go(ref.root)


def test_a_run_that_exists_is_refused_where_resuming_is_disabled_unless_it_is_the_flow_runs_own(tmp_path, trainer):
    config = _settings(tmp_path, "run.id=a", "run.resume=disable")
    for _ in range(2):
        let_go(open_run(config, request="flow run 1").root)
    before = sorted(path for path in tmp_path.rglob("*"))
    for request in (None, "flow run 2"):
        with pytest.raises(ConfigError, match=r"'a' exists .* run\.resume is disable; give run\.id another value"):
            open_run(config, request=request)
    assert sorted(path for path in tmp_path.rglob("*")) == before and not is_owned(tmp_path / "a")


@pytest.mark.parametrize(
    ("run_id", "message"), [("a", r"run\.resume is 5, but run 'a' has done 3 steps"), ("b", "there is no run 'b'")]
)
def test_a_step_that_there_is_not_is_refused_and_nothing_changes(tmp_path, trainer, monkeypatch, run_id, message):
    _run_of_three_steps(tmp_path, monkeypatch)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=message):
        open_run(_settings(tmp_path, f"run.id={run_id}", "run.resume=5"))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_step_that_can_be_neither_loaded_nor_replayed_is_refused_before_anything_changes(
    tmp_path, trainer, monkeypatch
):
    root = _run_of_three_steps(tmp_path, monkeypatch)
    for step in (1, 2):
        next(root.glob(f"steps/{step:06d}/checkpoint/attempts/*/{INDEX_FILE}")).unlink()
    (root / "steps/000001/update/COMMIT").unlink()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"of step 0, and the batches of steps 1 to 1.*a checkpoint: 3$"):
        open_run(_settings(tmp_path, "run.id=a", "run.resume=2"))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_machine_whose_time_has_ended_starts_nothing(tmp_path, trainer):
    with pytest.raises(ConfigError, match="which has passed"):
        open_run(_settings(tmp_path, "run.id=a", "run.end_by=2020-01-01T00:00:00Z"))
    assert list(tmp_path.iterdir()) == []


def test_other_training_prompts_under_the_same_file_name_are_told(tmp_path, trainer):
    prompts = tmp_path / "prompts.jsonl"
    asked = ("run.id=a", f"data.train={prompts}", "data.prompts_per_step=1")
    prompts.write_text('{"prompt": "draw", "ground_truth": "A"}\n')
    ref = open_run(_settings(tmp_path / "runs", *asked))
    plan(ref, 1)
    let_go(ref.root)
    _commit(Path(ref.root), 1, "update")
    _opened(_settings(tmp_path / "runs", *asked))
    prompts.write_text('{"prompt": "draw", "ground_truth": "B"}\n')
    with pytest.raises(StoreError, match="'plan' of step 1 is committed"):
        open_run(_settings(tmp_path / "runs", *asked))
    assert not is_owned(Path(ref.root))


def test_a_checkpoint_without_its_steps_update_is_not_taken(tmp_path, trainer, monkeypatch):
    root = _opened(_settings(tmp_path, "run.id=a")).root
    monkeypatch.setattr(opening, "plan", lambda run, step: None)
    _commit(root, 1, "update")
    _commit(root, 2, "checkpoint")
    ref = open_run(_settings(tmp_path, "run.id=a"))
    restore(session_of(ref))
    let_go(ref.root)
    assert trainer.loaded == []


@pytest.mark.parametrize(
    ("error", "status"),
    [(EngineError("no"), "failed"), (KeyboardInterrupt(), "stopped"), (SystemExit(1), "stopped")],
)
def test_a_run_that_breaks_off_says_so_and_lets_go(tmp_path, trainer, error, status, caplog):
    ref = open_run(_settings(tmp_path, "run.id=a", "tracking.tensorboard=true"))
    session = session_of(ref)
    session.folder().write_progress(status="running", step=4, reward=0.5)
    closed: list[Any] = []
    session.tracker.close = lambda: closed.append(1)
    with pytest.raises(type(error)) as raised, caplog.at_level(logging.WARNING), let_go_on_failure(ref):
        raise error
    assert raised.value is error
    [summary] = runs.list_runs(tmp_path)
    assert (summary.status, summary.reward) == (status, 0.5)
    assert not is_owned(tmp_path / "a") and closed == [1]
    assert f"verl-omni teardown a --store {tmp_path}" in caplog.text


def test_what_fails_afterwards_does_not_hide_why_the_run_broke_off(tmp_path, trainer, monkeypatch, caplog):
    ref = open_run(_settings(tmp_path, "run.id=a"))

    def refuse(*_: object, **__: object) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(runs.RunFolder, "write_progress", refuse)
    with pytest.raises(EngineError, match="the first fault"), let_go_on_failure(ref):
        raise EngineError("the first fault")
    assert not is_owned(tmp_path / "a") and "the disk is full" in caplog.text


def test_a_fenced_run_leaves_the_status_to_its_new_owner(tmp_path, trainer):
    ref = open_run(_settings(tmp_path, "run.id=a"))
    session_of(ref).ownership.release()
    newer = open_run(_settings(tmp_path, "run.id=a"))
    with pytest.raises(EngineError), let_go_on_failure(ref):
        raise EngineError("a zombie's")
    assert runs.open_run(tmp_path, "a")._progress()["status"] == "running"
    let_go(newer.root)


def test_a_start_that_fails_lets_go(tmp_path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise EngineError("no engine")

    monkeypatch.setattr(opening.Actors, "start_or_find", refuse)
    with pytest.raises(EngineError, match="no engine"):
        open_run(_settings(tmp_path, "run.id=a"))
    assert [run.status for run in runs.list_runs(tmp_path)] == ["failed"]
    assert not is_owned(tmp_path / "a")


def test_an_evaluation_that_cannot_start_ends_its_actors(tmp_path, monkeypatch):
    ended: list[Path] = []
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # a cluster is up, as far as this shows
    monkeypatch.setattr(ending, "end_actors", lambda settings, root: ended.append(root))

    def refuse(*_: object, **__: object) -> None:
        raise EngineError("no engine")

    monkeypatch.setattr(evaluate.Actors, "start_or_find", refuse)
    with pytest.raises(EngineError, match="no engine"):
        evaluate.open_evaluation(Evaluation("x", _settings(tmp_path, "run.id=judged"), ()))
    assert ended == [tmp_path / "judged"]
    assert [run.status for run in runs.list_runs(tmp_path)] == ["failed"]
    assert not is_owned(tmp_path / "judged")
