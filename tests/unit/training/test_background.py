"""Snapshots that are written while training goes on: what is in them, and what becomes of one that fails."""

import resource
import threading
from dataclasses import replace

import pytest
import torch

from tests.unit.training import programs, tiny
from verl_omni_core.errors import ContractError, DeadlineError, StoreError
from verl_omni_core.training import background, checkpoint
from verl_omni_core.training.background import SnapshotWriter
from verl_omni_core.training.ranks import Ranks

LIMIT_S = 60


@pytest.fixture
def writer():
    made = SnapshotWriter(Ranks(), LIMIT_S)
    yield made
    made.close()


@pytest.fixture
def held(monkeypatch):
    """Hold up every write until the event is set."""
    event, real = threading.Event(), checkpoint.write

    def waits(*arguments):
        assert event.wait(LIMIT_S)
        return real(*arguments)

    monkeypatch.setattr(background.checkpoint, "write", waits)
    yield event
    event.set()


def trained(pipeline, **settings):
    return tiny.engine(pipeline, micro_batch=4, learning_rate=1e-3, ema_decay=0.9, **settings)


def restored(pipeline, folder, **settings):
    made = trained(pipeline, **settings)
    made.load_checkpoint(folder)
    return made


def state(made):
    average = {name: tensor.clone() for name, tensor in made.get_per_tensor_param("average")[0]}
    moments = {
        f"{name}.{key}": value.clone()
        for name, parameter in made.trainable.items()
        for key, value in made.optimizer.state[parameter].items()
    }
    return tiny.parameters(made), average, moments, made.learning_rate, replace(made.counters), made.ema.updates


def same(found, expected):
    return found[3:] == expected[3:] and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in b)
        for a, b in zip(found[:3], expected[:3], strict=True)
    )


@pytest.mark.parametrize("rank", [4, 0])
def test_steps_made_while_a_snapshot_is_written_are_not_in_it(pipeline, batch, tmp_path, writer, held, rank):
    made = trained(pipeline, rank=rank, schedule="cosine", total_steps=4)
    programs.one_step(made, batch)
    expected = state(made)
    extra = {"applied": [1]}
    writer.begin(made, tmp_path / "s", extra)
    extra["applied"].append(2)
    after = programs.one_step(made, batch)
    assert not same(state(made), expected) and not (tmp_path / "s").exists()  # not a byte was waited for
    held.set()
    writer.finish(tmp_path / "s", LIMIT_S)
    again = trained(pipeline, rank=rank, schedule="cosine", total_steps=4)
    assert again.load_checkpoint(tmp_path / "s") == {"applied": [1]}
    assert same(state(again), expected)
    repeated = programs.one_step(again, batch)
    assert all(torch.equal(repeated["parameters"][name], tensor) for name, tensor in after["parameters"].items())


def test_what_is_answered_is_what_lies_there(pipeline, batch, tmp_path, writer):
    made = trained(pipeline)
    programs.one_step(made, batch)
    writer.begin(made, tmp_path / "s", {})
    written = writer.finish(tmp_path / "s", LIMIT_S)
    assert [file.name for file in written.files] == sorted(path.name for path in (tmp_path / "s").iterdir())
    for file in written.files:
        path = tmp_path / "s" / file.name
        assert (file.size_bytes, file.sha256) == (path.stat().st_size, checkpoint._sha256(path))
    assert writer.finish(tmp_path / "s", LIMIT_S) is written


def test_a_snapshot_holds_the_other_adapters_and_what_it_was_made_by(pipeline, tmp_path, writer):
    made = trained(pipeline, extra_adapters=("old",))
    tiny.stir(made)
    made.ema_update_adapter("default", "old", 0.25)
    old = {name: tensor.clone() for name, tensor in made.get_per_tensor_param("old")[0]}
    writer.begin(made, tmp_path / "s", {})
    writer.finish(tmp_path / "s", LIMIT_S)
    again = restored(pipeline, tmp_path / "s", extra_adapters=("old",))
    assert any(tensor.abs().sum() for tensor in old.values())
    assert all(torch.equal(tensor, old[name]) for name, tensor in again.get_per_tensor_param("old")[0])
    versions = checkpoint.read_index(tmp_path / "s")["versions"]
    assert versions["torch"] == torch.__version__ and versions.keys() == {
        "verl_omni_core",
        "torch",
        "diffusers",
        "peft",
    }


def test_begun_twice_it_is_written_once_as_it_was_first(pipeline, batch, tmp_path, writer, held):
    made = trained(pipeline)
    programs.one_step(made, batch)
    expected = state(made)
    writer.begin(made, tmp_path / "s", {})
    programs.one_step(made, batch)
    writer.begin(made, tmp_path / "s", {})
    held.set()
    writer.finish(tmp_path / "s", LIMIT_S)
    assert same(state(restored(pipeline, tmp_path / "s")), expected)


def test_a_disk_that_takes_no_more_fails_whoever_waits_with_the_reason(pipeline, tmp_path, writer):
    made = trained(pipeline)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        writer.begin(made, tmp_path / "s", {})
        with pytest.raises(StoreError, match=r"could not be written: OSError: .*File too large.*goes on from the snap"):
            writer.finish(tmp_path / "s", LIMIT_S)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with pytest.raises(StoreError, match="never finished"):
        checkpoint.read_index(tmp_path / "s")


def test_one_that_nobody_asked_for_does_not_disturb_the_next(pipeline, tmp_path, writer, caplog):
    made = trained(pipeline)
    (tmp_path / "file").write_text("no folder can be made in here")
    writer.begin(made, tmp_path / "file" / "s", {})
    writer.begin(made, tmp_path / "s", {})
    assert len(writer.finish(tmp_path / "s", LIMIT_S).files) == 3
    assert "no owner asked for" in caplog.text
    with pytest.raises(ContractError, match="no snapshot was begun"):
        writer.finish(tmp_path / "file" / "s", LIMIT_S)


def test_a_disk_that_does_not_answer_ends_the_wait(pipeline, tmp_path, writer, held):
    writer.begin(trained(pipeline), tmp_path / "s", {})
    with pytest.raises(DeadlineError, match=r"durability\.snapshot_timeout_s"):
        writer.finish(tmp_path / "s", 0.01)
