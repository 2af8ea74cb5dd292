"""Run folders are made once, never change, and can be listed without their flows."""

import json

import pytest

from tests.unit.store.processes import LIMIT_S, start
from verl_omni_core.errors import ConfigError, StoreError
from verl_omni_core.identity import digest
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.lease import take_ownership
from verl_omni_core.store.runs import config_differences, create_run, list_runs, open_run, steps_done

CONFIG = {"run": {"steps": 5, "seed": 1}, "model": {"name": "sd3"}}


def test_a_run_keeps_its_resolved_settings(tmp_path):
    made = create_run(tmp_path / "runs", CONFIG, code_version="0.1.0", run_id="first")
    run = open_run(tmp_path / "runs", "first")
    assert run == made
    assert (run.run_id, run.config, run.config_digest, run.code_version) == ("first", CONFIG, digest(CONFIG), "0.1.0")


def test_origins_of_settings_are_kept_from_the_first_start(tmp_path):
    run = create_run(tmp_path, CONFIG, code_version="1", run_id="a")
    run.write_origins({"profile": "demo", "run.steps": "--set run.steps=5"})
    run.write_origins({"profile": "none", "run.steps": "default"})
    saved = json.loads((run.root / "settings_origins.json").read_text())
    assert saved == {"profile": "demo", "run.steps": "--set run.steps=5"}


def test_a_run_without_a_name_keeps_the_one_that_it_gets(tmp_path):
    run = create_run(tmp_path, {"run": {"id": None, "steps": 5}}, code_version="1")
    assert run.config == {"run": {"id": run.root.name, "steps": 5}}


def test_an_id_that_exists_is_refused_and_one_that_is_illegal_too(tmp_path):
    create_run(tmp_path, CONFIG, code_version="1", run_id="a")
    with pytest.raises(StoreError, match=r"'a' exists .*resume it"):
        create_run(tmp_path, {}, code_version="1", run_id="a")
    for name in ("../x", "", "a b", "x" * 101):
        with pytest.raises(ConfigError, match=r"run.id"):
            create_run(tmp_path, CONFIG, code_version="1", run_id=name)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_derived_ids_tell_time_and_profile_and_never_collide(tmp_path):
    runs = [create_run(tmp_path, CONFIG, code_version="1", profile="profiles/glyph-flow_grpo.toml") for _ in range(3)]
    assert len({run.run_id for run in runs}) == 3
    assert all("-glyph-flow_grpo" in run.run_id for run in runs)
    assert all(run.run_id[:8].isdigit() for run in runs)


def test_a_run_that_does_not_exist_is_named_with_those_that_do(tmp_path):
    create_run(tmp_path, CONFIG, code_version="1", run_id="there")
    with pytest.raises(StoreError, match=r"no run 'other'; it has there"):
        open_run(tmp_path, "other")
    with pytest.raises(StoreError, match=r"no run"):
        open_run(tmp_path, "../etc")


def test_a_foreign_folder_and_changed_settings_are_refused(tmp_path):
    (tmp_path / "foreign").mkdir()
    with pytest.raises(StoreError, match=r"not a run: it has no run\.json"):
        open_run(tmp_path, "foreign")
    run = create_run(tmp_path, CONFIG, code_version="1", run_id="a")
    value = json.loads((run.root / "run.json").read_text())
    value["config"]["run"]["seed"] = 2
    (run.root / "run.json").write_text(json.dumps(value))
    with pytest.raises(StoreError, match=r"do not match their digest"):
        open_run(tmp_path, "a")
    (run.root / "run.json").write_text("{")
    with pytest.raises(StoreError, match=r"damaged"):
        open_run(tmp_path, "a")
    assert [summary.status for summary in list_runs(tmp_path)] == ["damaged"]


def test_the_listing_tells_status_steps_and_reward(tmp_path):
    assert list_runs(tmp_path / "none") == []
    _, done = (create_run(tmp_path, CONFIG, code_version="1", run_id=name) for name in ("new", "done"))
    done.write_progress(status="finished", step=5, reward=0.75)
    listed = {summary.run_id: summary for summary in list_runs(tmp_path)}
    assert (listed["new"].status, listed["new"].steps_done, listed["new"].steps) == ("new", 0, 5)
    assert (listed["done"].status, listed["done"].steps_done, listed["done"].reward) == ("finished", 5, 0.75)


@pytest.mark.parametrize("torn", ["", '{"status": "run', "[]"])
def test_a_damaged_file_that_only_informs_stops_neither_listing_nor_run(tmp_path, torn):
    run = create_run(tmp_path, CONFIG, code_version="1", run_id="a")
    for name in ("progress.json", "engine.json"):
        (run.root / name).write_text(torn)
    [summary] = list_runs(tmp_path)
    assert (summary.status, summary.steps_done, summary.reward) == ("unknown", 0, None)
    assert run.engines() == {"replicas": [], "earlier": []}
    run.write_engines([{"instance": "a", "requests": 3}])
    run.write_progress(status="finished", step=5)
    assert run.engines()["replicas"] == [{"instance": "a", "requests": 3}]
    assert list_runs(tmp_path)[0].status == "finished"


def test_engines_that_ended_keep_their_counts(tmp_path):
    run = create_run(tmp_path, CONFIG, code_version="1")
    assert run.engines() == {"replicas": [], "earlier": []}
    run.write_engines([{"instance": "a", "requests": 3}])
    run.write_engines([{"instance": "a", "requests": 7}])
    assert run.engines() == {"replicas": [{"instance": "a", "requests": 7}], "earlier": []}
    run.write_engines([{"instance": "b", "requests": 0}])
    run.write_engines([{"instance": "b", "requests": 2}])
    assert run.engines()["earlier"] == [{"instance": "a", "requests": 7}]
    assert run.engines()["replicas"] == [{"instance": "b", "requests": 2}]


def test_a_run_is_running_while_somebody_owns_it_and_interrupted_after_a_kill(tmp_path):
    run = create_run(tmp_path, CONFIG, code_version="1", run_id="a")
    process = start('own = take_ownership(root, "x")\nsay("ready")\ntime.sleep(60)', run.root)
    assert process.stdout.readline() == "ready\n"
    run.write_progress(status="running", step=2)
    assert list_runs(tmp_path)[0].status == "running"
    process.kill()
    process.wait(LIMIT_S)
    [summary] = list_runs(tmp_path)
    assert (summary.status, summary.steps_done) == ("interrupted", 2)


def test_the_steps_done_are_those_with_a_committed_update(tmp_path):
    run = create_run(tmp_path, CONFIG, code_version="1", run_id="a")
    assert steps_done(run.root) == 0
    with take_ownership(run.root, "me") as own:
        store = RunStore(run.root, epoch=own.epoch)
        for step, stages in ((1, ("rollout", "update")), (2, ("rollout", "update")), (3, ("rollout",))):
            for stage in stages:
                store.attempt(step, stage, "k").commit([], rows=0, parents=[], producer={})
    assert steps_done(run.root) == list_runs(tmp_path)[0].steps_done == 2


def test_differing_settings_are_told_by_key_and_value():
    new = {"run": {"steps": 9, "seed": 1}, "model": {"name": "sd3", "path": "x"}}
    assert config_differences(CONFIG, new) == [("model.path", None, "x"), ("run.steps", 5, 9)]
