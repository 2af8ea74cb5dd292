"""Checkpoints that are damaged, or of another policy, are refused and change nothing."""

import json

import pytest
import torch

from tests.unit.training import programs, tiny
from verl_omni_core.errors import ConfigError, StoreError
from verl_omni_core.training import checkpoint


@pytest.fixture
def saved(pipeline, batch, tmp_path):
    made = tiny.engine(pipeline, ema_decay=0.9)
    programs.one_step(made, batch)
    files = made.save_checkpoint(tmp_path / "checkpoint", {"version": 7})
    assert files == sorted(path.name for path in (tmp_path / "checkpoint").iterdir())
    return tmp_path / "checkpoint"


def test_a_flipped_bit_is_found(pipeline, saved):
    path = next(saved.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    _refused(pipeline, saved, StoreError, "changed after it was written")


def test_a_cut_file_and_a_missing_one_are_found(pipeline, saved):
    path = saved / "random-00000.json"
    path.write_bytes(path.read_bytes()[:-1])
    _refused(pipeline, saved, StoreError, "changed after it was written")
    path.unlink()
    _refused(pipeline, saved, StoreError, "lacks random-00000.json")


def test_an_unfinished_checkpoint_is_none(pipeline, saved):
    (saved / checkpoint.INDEX_FILE).unlink()
    _refused(pipeline, saved, StoreError, "never finished")


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"rank": 2}, "r = 4, this trainer has r = 2"),
        ({"rank": 0}, "this trainer has adapters = None"),
        ({"targets": ["attn.to_q"]}, "target_modules"),
        ({"ema_decay": None}, "training.ema_decay must be set"),
        ({"optimizer": "sgd"}, "training.optimizer is 'sgd'"),
    ],
)
def test_a_checkpoint_of_another_policy_is_refused_with_the_difference(pipeline, saved, settings, message):
    _refused(pipeline, saved, ConfigError, message, **settings)


def test_what_is_written_is_compared_with_what_is_read_back(pipeline, tmp_path, monkeypatch):
    made = tiny.engine(pipeline)
    real = checkpoint._read

    def lies(engine, folder, into):
        real(engine, folder, into)
        next(iter(into.values())).view(-1)[0] += 1

    monkeypatch.setattr(checkpoint, "_read", lies)
    with pytest.raises(StoreError, match="reads back differently"):
        made.save_checkpoint(tmp_path / "c")
    assert not (tmp_path / "c" / checkpoint.INDEX_FILE).exists()


def test_random_states_and_counters_come_back(pipeline, saved):
    torch.manual_seed(1)
    made = tiny.engine(pipeline, ema_decay=0.9)
    assert made.load_checkpoint(saved) == {"version": 7}
    assert (made.counters.optimizer_steps, made.counters.training_steps, made.ema.updates) == (1, 1, 1)
    index = json.loads((saved / checkpoint.INDEX_FILE).read_text())
    assert index["ranks"] == 1
    drawn = torch.rand(3)
    made.load_checkpoint(saved)
    assert torch.equal(torch.rand(3), drawn)


def _refused(pipeline, folder, error, message, **settings):
    made = tiny.engine(pipeline, **{"ema_decay": 0.9, **settings})
    before = tiny.parameters(made)
    with pytest.raises(error, match=message):
        made.load_checkpoint(folder)
    assert all(torch.equal(t, before[n]) for n, t in tiny.parameters(made).items())
