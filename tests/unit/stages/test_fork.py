"""Forking a run that a real rank trained: what the fork trains, what it takes over, and what it refuses."""

import json
import shutil
from pathlib import Path

import pytest

from tests.unit.stages import forked_run
from tests.unit.stages.forked_run import STEPS, start, train, tree
from verl_omni_core.errors import ConfigError, StoreError
from verl_omni_core.stages import fork as fork_module
from verl_omni_core.stages.fork import Forked, fork
from verl_omni_core.stages.session import let_go
from verl_omni_core.stages.time_limit import stop_early
from verl_omni_core.store import runs, trusted
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.ledger import Ledger
from verl_omni_core.training.checkpoint import INDEX_FILE


@pytest.fixture(scope="module")
def trained(pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose run ``parent`` made three steps, with snapshots of the first two."""
    store = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        train(start(forked_run.settings(pipeline, store), patch), pipeline, STEPS)
    return store


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the look at prompts and engine, which has tests of its own."""
    monkeypatch.setattr(fork_module, "check", lambda config: None)


def checksums(root: Path) -> dict[tuple[int, str], str]:
    store = RunStore(root)
    found = {(step, name): store.find(step, name) for step in store.steps() for name in ("sync", "sync-average")}
    return {key: str(store.manifest(ref).producer["checksum"]) for key, ref in found.items() if ref is not None}


def go_on(made: Forked, pipeline: Path, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, str], str]:
    session = start(made.config, monkeypatch)
    assert session.ref.done == made.lineage.step == session.actors.trainer.version()
    train(session, pipeline, STEPS)
    return checksums(made.run.root)


@pytest.mark.parametrize("step", [1, 2])
def test_a_fork_with_the_parents_settings_trains_the_parents_weights_bit_for_bit(trained, pipeline, monkeypatch, step):
    before = tree(trained / "parent")
    made = fork("parent", store=trained, step=step)
    own = go_on(made, pipeline, monkeypatch)
    parents = checksums(trained / "parent")
    assert {at for at, _ in own} == {0, *range(step, STEPS + 1)}
    assert own == {key: parents[key] for key in own}
    assert len({parents[at, "sync"] for at in range(STEPS + 1)}) == STEPS + 1
    records = [record["update_id"] for record in Ledger(made.run.root).records()]
    assert records == [f"{at:06d}/{number:04d}" for at in range(step + 1, STEPS + 1) for number in (0, 1)]
    assert tree(trained / "parent") == before


def test_a_fork_with_another_learning_rate_trains_other_weights_from_the_same_step(trained, pipeline, monkeypatch):
    made = fork("parent", store=trained, step=2, overrides=["training.learning_rate=1e-2"])
    own, parents = go_on(made, pipeline, monkeypatch), checksums(trained / "parent")
    assert own[2, "sync"] == parents[2, "sync"] and own[3, "sync"] != parents[3, "sync"]


def test_a_fork_of_a_fork_trains_what_the_first_run_did(trained, pipeline, monkeypatch):
    between = fork("parent", store=trained, step=1)
    go_on(between, pipeline, monkeypatch)
    for step in (1, 2):  # the snapshot that it took over, and one of its own
        made = fork(between.run.run_id, store=trained, step=step)
        own, parents = go_on(made, pipeline, monkeypatch), checksums(trained / "parent")
        assert own == {key: parents[key] for key in own} and (STEPS, "sync") in own
        assert str(made.lineage) == f"{between.run.run_id}@{step}"


def test_a_fork_starts_at_the_newest_snapshot_and_says_where_it_comes_from(trained):
    made = fork("parent", store=trained, new_id="child", overrides=["training.learning_rate=1e-2", "run.steps=9"])
    again = runs.open_run(trained, "child")
    assert (again.lineage, again.uuid) == (made.lineage, made.run.uuid)
    assert again.uuid != runs.open_run(trained, "parent").uuid == made.lineage.uuid
    assert (made.lineage.run_id, made.lineage.step) == ("parent", 2)
    assert made.lineage.settings == (("run.steps", 3, 9), ("training.learning_rate", 1e-3, 1e-2))
    parent = RunStore(trained / "parent")
    for name, digest in made.lineage.manifests.items():
        step, stage = name.split("/")
        assert parent.find(int(step), stage).manifest_sha256 == digest
    assert "2/checkpoint" in made.lineage.manifests
    assert runs.steps_done(again.root) == 2
    (listed,) = [run for run in runs.list_runs(trained) if run.run_id == "child"]
    assert (listed.lineage, listed.steps_done, listed.steps, listed.status) == ("parent@2", 2, 9, "new")


def test_what_a_fork_takes_over_is_whole_its_own_and_no_copy(trained):
    made = fork("parent", store=trained, step=1)
    store, parent = RunStore(made.run.root), RunStore(trained / "parent")
    for name in made.lineage.manifests:
        step, stage = name.split("/")
        ref = store.find(int(step), stage)
        store.verify(ref)
        assert store.manifest(ref).run_id == made.run.run_id
        for file in store.manifest(ref).files:
            theirs = parent.path_of(parent.find(int(step), stage), file.name)
            assert store.path_of(ref, file.name).samefile(theirs)


def test_forks_that_nobody_names_have_names_of_their_own(trained):
    names = [fork("parent", store=trained, step=2).run.run_id for _ in range(2)]
    assert len(set(names)) == 2 and all(name.startswith("parent-from-2") for name in names)


def test_a_restarted_fork_goes_on_from_its_snapshot_and_repeats_what_it_had_trained(trained, pipeline, monkeypatch):
    made = fork("parent", store=trained, step=2, overrides=["run.steps=4"])
    first = start(made.config, monkeypatch)
    train(first, pipeline, 3)
    again = start(made.config, monkeypatch)
    assert again.actors.trainer.version() == again.ref.done == 2
    train(again, pipeline, 3)
    assert again.actors.trainer.weights_checksum() == checksums(trained / "parent")[3, "sync"]
    assert len(Ledger(made.run.root).records()) == 2


@pytest.mark.parametrize("back_to", [2, 3])
def test_a_fork_goes_back_to_the_step_that_it_begins_after_and_to_its_own(trained, pipeline, monkeypatch, back_to):
    made = fork("parent", store=trained, step=2, overrides=["run.steps=4"])
    train(start(made.config, monkeypatch), pipeline, 3)
    config = made.config.model_copy(update={"run": made.config.run.model_copy(update={"resume": back_to})})
    again = start(config, monkeypatch)
    assert again.ref.done == 2 and (again.store.find(3, "update") is None) == (back_to == 2)
    train(again, pipeline, 3)
    assert checksums(made.run.root)[3, "sync"] == checksums(trained / "parent")[3, "sync"]


@pytest.mark.parametrize("back_to", [0, 1])
def test_a_fork_does_not_go_back_into_its_parents_steps(trained, monkeypatch, back_to):
    made = fork("parent", store=trained, step=2)
    config = made.config.model_copy(update={"run": made.config.run.model_copy(update={"resume": back_to})})
    before = tree(made.run.root)
    with pytest.raises(ConfigError, match=r"is a fork that begins after step 2; .* fork its parent"):
        start(config, monkeypatch)
    assert tree(made.run.root) == before


def test_a_fork_does_not_inherit_how_the_parent_was_started_last(trained, pipeline):
    config = forked_run.settings(pipeline, trained, resume=1, end_by="2030-01-01T00:00:00Z").model_dump(mode="json")
    runs.open_run(trained, "parent").record_settings(config, epoch=99, code_version="1")
    try:
        made = fork("parent", store=trained)
        assert (made.config.run.resume, made.config.run.end_by) == ("auto", None)
        assert (
            fork("parent", store=trained, overrides=["run.end_by=2031-01-01T00:00:00Z"]).config.run.end_by.year == 2031
        )
    finally:
        (trained / "parent" / "settings" / "000099.json").unlink()


def test_a_fork_that_stops_before_its_first_step_keeps_its_snapshot_and_does_not_count_as_broken(
    trained, pipeline, monkeypatch
):
    made = fork("parent", store=trained, step=2)
    for _ in range(4):
        session = start(made.config, monkeypatch)
        assert "stopped after step 2" in stop_early(session.ref, 2)
    assert go_on(made, pipeline, monkeypatch)[3, "sync"] == checksums(trained / "parent")[3, "sync"]


def test_a_fork_whose_snapshot_is_damaged_does_not_begin_at_the_parents_zero(trained, pipeline, monkeypatch, tmp_path):
    shutil.copytree(trained / "parent", tmp_path / "parent")
    made = fork("parent", store=tmp_path, step=2)
    folder = RunStore(made.run.root).path_of(RunStore(made.run.root).find(2, "checkpoint"), INDEX_FILE).parent
    tensors = next(folder.glob("*.safetensors"))
    flipped = bytearray(tensors.read_bytes())
    flipped[-1] ^= 1
    tensors.write_bytes(flipped)
    with pytest.raises(StoreError, match=r"goes on from step 2 of another run.*verl-omni fork"):
        start(made.config, monkeypatch)


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        ({"step": 3}, ConfigError, r"no snapshot of step 3; it has those of step 1-2"),
        ({"overrides": ["model.lora.rank=8"]}, ConfigError, r"made with model\.lora\.rank = 4, and now it is 8"),
        ({"overrides": ["model.path=glyph"]}, ConfigError, r"model\.path = .*and now it is 'glyph'"),
        ({"overrides": ["training.optimizer=sgd"]}, ConfigError, r"training\.optimizer = 'adamw', and now it is 'sgd'"),
        ({"overrides": ["training.ema_decay=none"]}, ConfigError, r"training\.ema_decay = 0\.9, and now it is None"),
        (
            {"overrides": ["algorithm.name=tests.workers.keeps_old_policy"]},
            ConfigError,
            "adapters = .* there, this trainer has adapters",
        ),
        ({"overrides": ["run.steps=2"]}, ConfigError, r"nothing is left to train; .*--set run\.steps=4"),
        ({"overrides": ["run.store=elsewhere"]}, ConfigError, "--store"),
        ({"overrides": ["run.id=other"]}, ConfigError, "--run-id"),
        ({"overrides": ["training.lr=1"]}, ConfigError, "learning_rate"),
        ({"new_id": "parent"}, ConfigError, "'parent' exists"),
        ({"new_id": "../parent"}, ConfigError, "expected letters"),
        ({"new_id": ""}, ConfigError, "expected letters"),
    ],
)
def test_a_fork_that_cannot_be_is_refused_and_leaves_nothing(trained, asked, error, message):
    before = tree(trained)
    with pytest.raises(error, match=message):
        fork("parent", store=trained, **asked)
    assert tree(trained) == before


def test_a_fork_whose_first_step_an_older_version_draws_takes_that_version_over_or_is_refused(trained, tmp_path):
    shutil.copytree(trained / "parent", tmp_path / "parent")
    asked = {"store": tmp_path, "step": 2, "overrides": ["weights.sync_interval=5"]}
    made = fork("parent", **asked)
    assert RunStore(made.run.root).find(0, "sync") is not None
    (tmp_path / "parent" / "steps" / "000000" / "sync" / "COMMIT").unlink()
    with pytest.raises(ConfigError, match=r"sync_interval = 5 step 3 is drawn by version 0, which .* not synced"):
        fork("parent", **asked)


def test_a_damaged_snapshot_is_not_taken_over(trained, tmp_path):
    shutil.copytree(trained / "parent", tmp_path / "parent")
    store = RunStore(tmp_path / "parent")
    folder = store.path_of(store.find(2, "checkpoint"), INDEX_FILE).parent
    tensors = next(folder.glob("*.safetensors"))
    flipped = bytearray(tensors.read_bytes())
    flipped[-1] ^= 1
    tensors.write_bytes(flipped)
    trusted._trusted.clear()
    before = tree(tmp_path / "parent")
    with pytest.raises(StoreError, match=f"{tensors.name}.*sha256"):
        fork("parent", store=tmp_path)
    assert tree(tmp_path / "parent") == before and [path.name for path in tmp_path.iterdir()] == ["parent"]


def test_a_fork_that_dies_midway_is_no_run(trained, monkeypatch):
    before = tree(trained)
    whole, calls = fork_module._take_over, []

    def dies(*args):
        calls.append(1)
        if len(calls) == 2:
            raise OSError("power is out")
        return whole(*args)

    monkeypatch.setattr(fork_module, "_take_over", dies)
    with pytest.raises(OSError, match="power"):
        fork("parent", store=trained, new_id="half")
    assert tree(trained) == before


def test_an_evaluation_cannot_be_forked(trained, pipeline):
    config = forked_run.settings(pipeline, trained, id="judged").model_dump(mode="json")
    runs.create_run(trained, config, code_version="1", run_id="judged", kind=runs.EVALUATE)
    with pytest.raises(ConfigError, match="'judged' is an evaluation"):
        fork("judged", store=trained)


def test_a_lineage_that_cannot_be_read_is_told(trained):
    made = fork("parent", store=trained, new_id="torn")
    path = made.run.root / "run.json"
    value = json.loads(path.read_text())
    value["lineage"] = {"run_id": "parent"}
    path.write_text(json.dumps(value))
    with pytest.raises(StoreError, match=r"lineage of run\.json is damaged"):
        runs.open_run(trained, "torn")
    let_go(str(made.run.root))
