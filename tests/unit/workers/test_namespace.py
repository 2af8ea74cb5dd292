"""Whose actors a run finds: those of its own folder, of this run in it, built from its settings."""

import shutil
from pathlib import Path

import pytest

from verl_omni_core.settings.loader import apply_overrides
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.store.runs import RunFolder, create_run
from verl_omni_core.workers.namespaces import namespace_of

CONFIG = RunConfig()


def _run(store: Path) -> RunFolder:
    return create_run(store, CONFIG.model_dump(mode="json"), code_version="1", run_id="demo")


@pytest.mark.parametrize(
    ("override", "is_served"),
    [
        ("run.steps=99", True),
        ("run.validate_every=1", True),
        ("cluster.keep_actors=true", True),
        ("tracking.tensorboard=false", True),
        ("training.learning_rate=1e-5", False),
        ("reward.scorers=[{name='jpeg_size'}]", False),
        ("rollout.request_timeout_s=900", False),
        ("algorithm.max_ratio_deviation=0.1", False),
        ("run.seed=1", False),
        ("run.deterministic=true", False),
    ],
)
def test_living_actors_serve_only_the_settings_that_they_were_built_from(tmp_path, override, is_served):
    run = _run(tmp_path)
    assert (namespace_of(apply_overrides(CONFIG, [override]), run) == namespace_of(CONFIG, run)) is is_served


def test_a_run_in_the_place_of_a_deleted_one_has_actors_of_its_own(tmp_path):
    old = _run(tmp_path)
    shutil.rmtree(old.root)
    assert namespace_of(CONFIG, _run(tmp_path)) != namespace_of(CONFIG, old)


def test_a_run_of_the_same_name_in_another_store_has_actors_of_its_own(tmp_path):
    one = _run(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    two = RunFolder(**{**vars(one), "root": tmp_path / "two" / "demo"})
    assert namespace_of(CONFIG, one) != namespace_of(CONFIG, two)


def test_a_store_that_is_reached_by_another_path_is_the_same(tmp_path):
    one = _run(tmp_path / "runs")
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    same = RunFolder(**{**vars(one), "root": tmp_path / "link" / "demo"})
    assert namespace_of(CONFIG, one) == namespace_of(CONFIG, same)
