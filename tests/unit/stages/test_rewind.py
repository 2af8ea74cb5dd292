"""Going back to a step: the run trains on as it did, nothing that is taken back counts, and a crash changes nothing."""

import json

import pytest

from tests.unit.stages import owned_run
from tests.unit.stages.trained_run import STEPS, TrainedRun
from verl_omni_core.errors import ConfigError
from verl_omni_core.stages import rewind
from verl_omni_core.stages.plan import plan
from verl_omni_core.stages.rewind import finish_rewind, go_back, set_aside
from verl_omni_core.stages.session import let_go
from verl_omni_core.store import rejection
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.ledger import Ledger, standing
from verl_omni_core.store.places import REJECTED, REWIND_MARKER
from verl_omni_core.store.runs import steps_done

IDS = [f"{step:06d}/{number:04d}" for step in range(1, STEPS + 1) for number in (0, 1)]


@pytest.fixture(scope="module")
def expected(pipeline, tmp_path_factory):
    run = TrainedRun(tmp_path_factory.mktemp("undisturbed"), pipeline)
    yield run.train(run.restart())
    let_go(str(run.root))


@pytest.fixture
def made(pipeline, tmp_path):
    runs = []

    def make(**groups):
        runs.append(TrainedRun(tmp_path / f"store-{len(runs)}", pipeline, **groups))
        return runs[-1]

    yield make
    for run in runs:
        let_go(str(run.root))


def ids(root):
    return [record["update_id"] for record in standing(Ledger(root).records())]


def committed(root):
    store = RunStore(root)
    return {step: {p.parent.name for p in (root / "steps" / f"{step:06d}").glob("*/COMMIT")} for step in store.steps()}


@pytest.mark.parametrize(
    ("durability", "lives"),
    [({}, True), ({"level": "ledger", "snapshot_every": 2}, False)],
    ids=["a snapshot of each step and a living trainer", "the ledger and a new trainer"],
)
def test_from_any_step_the_run_trains_on_exactly_as_it_did(made, expected, durability, lives):
    run = made(durability=durability)
    session = run.restart()
    assert run.train(session) == expected
    for step in (3, 0, 4, 1, 2):
        before = committed(run.root)
        session = run.restart(session.actors.trainer if lives else None)
        assert go_back(session, step, None)
        assert session.actors.trainer.version() == (step if not durability else step // 2 * 2)
        assert committed(run.root) == {s: before[s] if s <= step else set() for s in before}
        assert ids(run.root) == IDS[: 2 * step]
        assert session.folder().status() == "running" and steps_done(run.root) == step
        found = run.train(session)
        assert found == {s: expected[s] for s in found} and max(found, default=STEPS) == STEPS
        assert ids(run.root) == IDS


def test_a_whole_network_goes_back_as_well(made):
    run = made(model={"lora": {"rank": 0}}, durability={"snapshot_every": 2})
    whole = run.train(run.restart())
    session = run.restart()
    go_back(session, 3, None)
    assert run.train(session) == {step: whole[step] for step in (3, 4)}


def test_what_is_taken_back_stays_with_a_note_and_the_ledger_says_so_once(made):
    run = made()
    run.train(run.restart())
    session = run.restart()
    gone = session.store.find(3, "update")
    go_back(session, 2, "a request")
    note = json.loads((run.root / "steps/000003/update/attempts" / gone.attempt / REJECTED).read_text())
    assert note["reason"] == "the run went back to step 2" and note["attempt"] == gone.attempt
    (record,) = [r for r in session.ledger.records() if r["kind"] == "rewind"]
    assert (record["to_version"], record["version_before"], record["version_after"]) == (2, 4, 2)
    assert session.ledger.as_table()["kind"].to_pylist() == ["opt"] * 8 + ["rewind"]


def test_one_request_goes_back_once_and_others_go_back_again(made):
    run = made()
    run.train(run.restart())
    session = run.restart()
    assert go_back(session, 2, "a")
    run.train(session)
    session = run.restart(session.actors.trainer)
    assert not go_back(session, 2, "a") and steps_done(run.root) == STEPS
    assert go_back(session, 2, "b") and steps_done(run.root) == 2
    assert go_back(session, 2, None) and go_back(session, 2, None)
    assert [r["kind"] for r in session.ledger.records()].count("rewind") == 4


def test_a_step_that_the_run_has_not_done_is_refused_and_nothing_changes(made):
    run = made()
    run.train(run.restart(), 2)
    before = committed(run.root)
    with pytest.raises(ConfigError, match=r"run\.resume is 3, but run 'trained' has done 2 steps"):
        go_back(run.restart(), 3, None)
    assert committed(run.root) == before and not (run.root / REWIND_MARKER).exists()


def test_a_step_that_can_be_neither_loaded_nor_replayed_is_refused_and_nothing_changes(made):
    run = made(durability={"level": "ledger", "snapshot_every": 2})
    session = run.restart()
    run.train(session)
    rollout = session.store.find(3, "rollout")
    next((run.root / "steps/000003/rollout/attempts" / rollout.attempt).glob("*.arrow")).unlink()
    before = committed(run.root)
    session = run.restart()
    with pytest.raises(ConfigError, match=r"of step 2, and the batches of steps 3 to 3.*a checkpoint: 2, 4$"):
        go_back(session, 3, None)
    assert session.actors.trainer.version() == 0
    assert committed(run.root) == before and not (run.root / REWIND_MARKER).exists()
    assert go_back(session, 2, None)


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_it(made, expected, caplog):
    run = made()
    session = run.restart()
    run.train(session)
    path = session.store.path_of(session.store.find(3, "checkpoint"), "random-00000.json")
    path.write_bytes(path.read_bytes()[:-1])
    session = run.restart()
    go_back(session, 3, None)
    assert session.actors.trainer.version() == 2 and "checkpoint of step 3 is damaged" in caplog.text
    assert run.train(session) == {step: expected[step] for step in (3, 4)}


def test_a_step_with_a_damaged_manifest_is_taken_back_like_any_other(made):
    run = made()
    session = run.restart()
    run.train(session)
    gone = session.store.find(4, "update")
    (run.root / "steps/000004/update/attempts" / gone.attempt / "manifest.json").write_text("{")
    assert go_back(run.restart(), 3, None)
    assert committed(run.root)[4] == set()


class Dies(BaseException):
    pass


def commit_by_hand(session, step):
    """Commit a few stages of a step, and its update in the ledger."""
    parents = []
    for stage in ("plan", "rollout", "update", "sync"):
        attempt = session.store.attempt(step, stage, "key", parents=parents)
        parents = [attempt.commit([attempt.write_file("a", b"a")], rows=1, parents=parents, producer={})]
        if stage == "rollout":
            session.ledger.append({"update_id": f"{step:06d}/0000", "step": step, "kind": "opt"})


def test_a_rewind_that_breaks_off_anywhere_is_finished_by_the_next_start(tmp_path, monkeypatch):
    config = owned_run.make(tmp_path)
    broke_off = []
    for survived in range(11):
        session = owned_run.take(config)
        finish_rewind(session.store, session.ledger)
        for step in range(steps_done(session.root) + 1, 5):
            commit_by_hand(session, step)
        whole = committed(session.root)
        calls = []

        def dies(paths, real=rejection.sync_all, calls=calls, survived=survived):
            if len(calls) == survived:
                raise Dies
            calls.append(paths)
            real(paths)

        with monkeypatch.context() as patch:
            patch.setattr(rejection, "sync_all", dies)
            patch.setattr(rewind, "sync_all", dies)
            try:
                set_aside(session, 2, "a test goes back")
            except Dies:
                broke_off.append(survived)
        owned_run.leave(session)
        let_go(str(session.root))
        for _ in range(2):
            later = owned_run.take(config)
            finish_rewind(later.store, later.ledger)
            assert not (later.root / REWIND_MARKER).exists()
            assert committed(later.root) == {**whole, 3: set(), 4: set()}
            assert ids(later.root) == ["000001/0000", "000002/0000"]
            kinds = [record["kind"] for record in later.ledger.records()]
            assert kinds.count("rewind") == survived + 1
            owned_run.leave(later)
            let_go(str(later.root))
    assert broke_off == list(range(9))  # each of the eight stages taken back, and the marker


def test_a_rewind_that_breaks_off_after_its_record_is_recorded_once(tmp_path, monkeypatch):
    config = owned_run.make(tmp_path)
    session = owned_run.take(config)
    commit_by_hand(session, 1)
    append = session.ledger.append

    def dies(record):
        append(record)
        raise Dies

    monkeypatch.setattr(session.ledger, "append", dies)
    with pytest.raises(Dies):
        set_aside(session, 0, "a test goes back")
    owned_run.leave(session)
    let_go(str(session.root))
    later = owned_run.take(config)
    finish_rewind(later.store, later.ledger)
    assert [record["kind"] for record in later.ledger.records()] == ["opt", "rewind"]
    assert not (later.root / REWIND_MARKER).exists()


def test_the_prompts_after_going_back_are_those_from_before_across_the_ends_of_epochs(tmp_path):
    """Three prompts, two a step: the first epoch ends within step 2, the second with step 3."""
    prompts = tmp_path / "three.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"sign {i}", "ground_truth": str(i)}) + "\n" for i in range(3)))
    config = owned_run.make(tmp_path)
    config = config.model_copy(update={"data": config.data.model_copy(update={"train": str(prompts)})})
    for step in (3, 2, 1, 0):
        session = owned_run.take(config)
        tables = {s: plans(session, s) for s in range(1, 5)}
        assert [t["prompts"]["epoch"].to_pylist() for t in tables.values()] == [[0, 0], [0, 1], [1, 1], [2, 2]]
        set_aside(session, step, "a test goes back")
        assert [s for s in range(1, 5) if session.store.find(s, "plan")] == list(range(1, step + 1))
        for later in range(step + 1, 5):
            assert all(plans(session, later)[name].equals(table) for name, table in tables[later].items())
        owned_run.leave(session)
        let_go(str(session.root))


def plans(session, step):
    ref = plan(session.ref, step)
    return {name: session.store.table(ref, name) for name in ("prompts", "requests")}
