"""The loop over batches in memory: what its methods change, and what they leave alone."""

import pytest
import torch

from tests.unit.training import tiny
from verl_omni_core.errors import ContractError
from verl_omni_core.workers.training_worker import TrainingWorker


def _worker(pipeline, **settings):
    return TrainingWorker(tiny.engine(pipeline, learning_rate=1e-2, **settings), tiny.policy_gradient())


def _same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_batch_is_a_step_on_each_mini_batch_and_one_advance_of_the_schedule(pipeline, batch):
    parts = [tiny.take(batch, [0, 1, 2]), tiny.take(batch, [3, 4])]
    whole, single = _worker(pipeline, warmup_steps=3), _worker(pipeline, warmup_steps=3)
    results = whole.train_batch(parts)
    for part in parts:
        single.train_mini_batch(part)
    assert _same(tiny.parameters(whole.engine), tiny.parameters(single.engine))
    assert [result.skipped for result in results] == [False, False]
    assert (whole.engine.counters.optimizer_steps, whole.engine.counters.training_steps) == (2, 1)
    assert (whole.engine.learning_rate, single.engine.learning_rate) == (0.5e-2, 0.25e-2)


def test_reset_is_as_before_the_first_step(pipeline, batch):
    worker = _worker(pipeline, ema_decay=0.5)
    before = tiny.parameters(worker.engine)
    worker.train_batch([batch])
    once = tiny.parameters(worker.engine)
    assert not _same(once, before)
    worker.reset()
    assert _same(tiny.parameters(worker.engine), before)
    assert (worker.engine.counters.optimizer_steps, worker.engine.ema.updates) == (0, 0)
    worker.engine.set_denoising(tiny.denoising(pipeline))
    worker.train_batch([batch])
    assert _same(tiny.parameters(worker.engine), once)


def test_the_chosen_loss_is_the_one_that_trains(pipeline, batch):
    worker = TrainingWorker(tiny.engine(pipeline))
    with pytest.raises(ContractError, match="set_loss_fn"):
        worker.train_mini_batch(batch)
    tiny.stir(worker.engine)
    found = []
    for scale in (1.0, -2.0):
        scaled = batch.clone()
        scaled["rows"]["advantages"] *= scale
        worker.set_loss_fn(tiny.policy_gradient())
        worker.engine.optimizer_zero_grad()
        worker.engine.forward_backward_batch(scaled, worker._loss_fn)
        found.append(tiny.gradients(worker.engine))
    assert tiny.relative(found[1], {name: -2 * value for name, value in found[0].items()}) <= 1e-5


def test_parameters_and_optimizer_move_apart_and_together(pipeline, batch):
    worker = _worker(pipeline, ema_decay=0.5)
    worker.train_mini_batch(batch)
    engine = worker.engine

    def places():
        moments = {state["exp_avg"].device.type for state in engine.optimizer.state.values()}
        average = {tensor.device.type for tensor in engine.ema.tensors.values()}
        return {parameter.device.type for parameter in engine.module.parameters()}, average, moments

    assert places() == ({"cpu"}, {"cpu"}, {"cpu"})
    worker.to("meta", model=False)
    assert places() == ({"cpu"}, {"cpu"}, {"meta"})
    worker.to("meta")
    assert places() == ({"meta"}, {"meta"}, {"meta"})


def test_adapters_are_copied_and_averaged_through_the_worker(pipeline, batch):
    worker = _worker(pipeline, extra_adapters=("old",))

    def scores(network="policy"):
        return worker.infer_batch(batch, network)["log_probs"]

    def equal(one, other):
        return float((one - other).abs().max()) <= 1e-6

    before = scores()
    worker.train_mini_batch(batch)
    once = scores()
    assert equal(scores("old"), before) and not equal(once, before)  # a new adapter changes nothing
    worker.copy_adapter("default", "old")
    assert equal(scores("old"), once)
    worker.train_mini_batch(batch)
    assert not equal(scores(), once)
    worker.ema_update_adapter("default", "old", 1.0)
    assert equal(scores("old"), once)
    worker.ema_update_adapter("default", "old", 0.0)
    assert equal(scores("old"), scores())
