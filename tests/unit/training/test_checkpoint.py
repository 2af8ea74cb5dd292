"""Checkpoints that are damaged, or of another policy, are refused and change nothing."""

import json

import pytest
import torch

from tests.unit.training import programs, tiny
from verl_omni_core.errors import ConfigError, StoreError
from verl_omni_core.training import checkpoint
from verl_omni_core.training.engine import Counters
from verl_omni_core.training.snapshot import state_of
from verl_omni_core.workers.training_worker import TrainingWorker


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
        ({"rank": 2}, "r = 4 there, this trainer has r = 2"),
        ({"rank": 0}, "this trainer has adapters = None"),
        ({"targets": ["attn.to_q"]}, "target_modules"),
        ({"ema_decay": None}, "training.ema_decay must be set"),
        ({"optimizer": "sgd"}, "training.optimizer is 'sgd'"),
    ],
)
def test_a_checkpoint_of_another_policy_is_refused_with_the_difference(pipeline, saved, settings, message):
    _refused(pipeline, saved, ConfigError, message, **settings)


def test_every_difference_is_told_at_once_and_what_helps(pipeline, saved):
    made = tiny.engine(pipeline, rank=2, targets=["attn.to_q"], optimizer="sgd", ema_decay=None)
    with pytest.raises(ConfigError) as refusal:
        made.load_checkpoint(saved)
    text = str(refusal.value)
    assert all(word in text for word in ("r = 4", "target_modules", "'adamw'", "ema_decay", "verl-omni export RUN"))
    assert f"torch {torch.__version__}" in text


def test_a_checkpoint_of_a_network_of_another_size_is_refused_by_the_name_of_what_differs(pipeline, saved):
    index = json.loads((saved / checkpoint.INDEX_FILE).read_text())
    assert index["network"]["num_layers"] == 2
    index["network"]["num_layers"] = 24
    (saved / checkpoint.INDEX_FILE).write_text(json.dumps(index))
    _refused(pipeline, saved, ConfigError, "num_layers = 24 there, this trainer has num_layers = 2")


def test_a_checkpoint_with_other_tensors_is_refused_and_leaves_the_moments(pipeline, batch, saved):
    index = json.loads((saved / checkpoint.INDEX_FILE).read_text())
    name = next(name for name in index["tensors"] if name.startswith("model."))
    index["tensors"][name] = [3, 3]
    (saved / checkpoint.INDEX_FILE).write_text(json.dumps(index))
    made = tiny.engine(pipeline, ema_decay=0.9)
    programs.one_step(made, batch)
    before = {name: tensor.clone() for name, tensor in state_of(made)[0].items()}
    with pytest.raises(ConfigError, match=r"1 tensors differ, first .*: shape \[3, 3\] there"):
        made.load_checkpoint(saved)
    after, _ = state_of(made)
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


def test_what_is_written_is_compared_with_what_is_read_back(pipeline, tmp_path, monkeypatch):
    made = tiny.engine(pipeline)
    real = checkpoint._read

    def lies(folder, into, group):
        real(folder, into, group)
        next(iter(into.values())).view(-1)[0] += 1

    monkeypatch.setattr(checkpoint, "_read", lies)
    with pytest.raises(StoreError, match="reads back differently"):
        made.save_checkpoint(tmp_path / "c")
    assert not (tmp_path / "c" / checkpoint.INDEX_FILE).exists()


def test_what_is_written_is_read_back_in_portions_that_fit_beside_the_model(pipeline, tmp_path, monkeypatch):
    made = tiny.engine(pipeline, ema_decay=0.9)
    real, portions = checkpoint._read, []

    def reads(folder, into, group):
        portions.append({name: tensor.nbytes for name, tensor in into.items()})
        real(folder, into, group)
        if last in into:
            into[last].view(-1)[0] += 1

    monkeypatch.setattr(checkpoint, "_read", reads)
    monkeypatch.setattr(checkpoint, "COMPARED_BYTES", 4000)
    names = list(state_of(made)[0])
    last = None
    made.save_checkpoint(tmp_path / "whole")
    assert [name for portion in portions for name in portion] == names
    assert len(portions) > 1
    assert all(sum(portion.values()) <= 4000 for portion in portions if len(portion) > 1)
    last = names[-1]
    with pytest.raises(StoreError, match="reads back differently"):
        made.save_checkpoint(tmp_path / "damaged")


def test_a_reset_worker_is_as_before_its_first_step(pipeline, batch):
    worker = TrainingWorker(tiny.engine(pipeline, learning_rate=1e-2), tiny.policy_gradient())
    before = tiny.parameters(worker.engine)
    worker.train_batch([batch])
    assert (worker.engine.counters.optimizer_steps, worker.engine.counters.training_steps) == (1, 1)
    worker.reset()
    assert worker.engine.counters == Counters()
    assert all(torch.equal(tensor, before[name]) for name, tensor in tiny.parameters(worker.engine).items())


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
