"""A run in an object store that a real rank trains: resumed and forked where nothing of it lies on the disk."""

import shutil
from pathlib import Path

import pytest

from tests.unit.stages import forked_run
from tests.unit.stages.forked_run import STEPS, start, train
from verl_omni_core.errors import ConfigError
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.stages import fork as fork_module
from verl_omni_core.stages.fork import fork
from verl_omni_core.stages.trained import find_weights
from verl_omni_core.store import runs
from verl_omni_core.store.ledger import Ledger
from verl_omni_core.store.places import folder_of


def settings(pipeline: Path, store: str) -> RunConfig:
    config = forked_run.settings(pipeline, Path("runs"))
    return config.model_copy(update={"run": config.run.model_copy(update={"store": store})})


def checksums(store: str | Path, run_id: str, steps: range) -> list[str]:
    return [find_weights(store, run_id, step=step, network="policy").checksum for step in steps]


def test_a_run_whose_copies_are_deleted_is_resumed_and_forked_with_the_bits_of_a_local_one(
    uri, pipeline, tmp_path, monkeypatch
):
    monkeypatch.setenv("VERL_OMNI_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(fork_module, "check", lambda config: None)
    train(start(forked_run.settings(pipeline, tmp_path / "runs"), monkeypatch), pipeline, STEPS)
    local = checksums(tmp_path / "runs", "parent", range(STEPS + 1))

    train(start(settings(pipeline, uri), monkeypatch), pipeline, 2)
    shutil.rmtree(folder_of(uri))
    session = start(settings(pipeline, uri), monkeypatch)
    assert session.ref.done == 2 == session.actors.trainer.version()
    train(session, pipeline, STEPS)
    shutil.rmtree(folder_of(uri))
    assert checksums(uri, "parent", range(STEPS + 1)) == local
    records = Ledger(folder_of(uri) / "parent").records()
    assert [record["update_id"] for record in records] == [f"{at:06d}/{n:04d}" for at in (1, 2, 3) for n in (0, 1)]

    made = fork("parent", store=uri, step=1, new_id="branch")
    shutil.rmtree(folder_of(uri))
    session = start(made.config, monkeypatch)
    assert session.ref.done == 1 == session.actors.trainer.version()
    train(session, pipeline, STEPS)
    assert checksums(uri, "branch", range(1, STEPS + 1)) == local[1:]
    assert sorted(run.run_id for run in runs.list_runs(uri)) == ["branch", "parent"]
    with pytest.raises(ConfigError, match=r"run 'branch' exists in s3://"):
        fork("parent", store=uri, step=1, new_id="branch")
