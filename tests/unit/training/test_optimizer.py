"""Learning rates, policy average, skipped steps and micro-batches, by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.training import tiny
from verl_omni_core.errors import NumericError
from verl_omni_core.settings.training import TrainingSettings
from verl_omni_core.training.ema import PolicyAverage
from verl_omni_core.training.micro_batches import forward_passes, share
from verl_omni_core.training.optim import learning_rate_factor


def test_constant_schedule_warms_up_in_a_straight_line():
    schedule = TrainingSettings(warmup_steps=3)
    assert [learning_rate_factor(schedule, n, 10) for n in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_cosine_falls_to_its_floor_and_stays():
    schedule = TrainingSettings(schedule="cosine", min_lr_ratio=0.2)
    found = [learning_rate_factor(schedule, n, 4) for n in range(7)]
    assert found == pytest.approx(
        [1.0, 0.2 + 0.4 * (1 + math.sqrt(0.5)), 0.6, 0.2 + 0.4 * (1 - math.sqrt(0.5)), 0.2, 0.2, 0.2]
    )


def test_learning_rate_advances_once_a_training_step(pipeline):
    made = tiny.engine(pipeline, learning_rate=1.0, warmup_steps=1)
    assert made.learning_rate == 0.5
    assert (made.lr_scheduler_step(), made.lr_scheduler_step()) == (1.0, 1.0)


def test_average_follows_the_hand_computed_sequence():
    parameter = torch.nn.Parameter(torch.tensor([0.0]))
    average = PolicyAverage({"p": parameter}, decay=0.15)
    decays = []
    for value in (1.0, 2.0, 3.0):
        parameter.data.fill_(value)
        decays.append(average.update())
    assert decays == pytest.approx([1 / 10, 0.15, 0.15])
    first = 0.9 * 1.0
    second = first + 0.85 * (2.0 - first)
    assert average.tensors["p"].item() == pytest.approx(second + 0.85 * (3.0 - second))


def test_average_stands_in_and_steps_back_also_on_errors():
    parameter = torch.nn.Parameter(torch.tensor([1.0]))
    average = PolicyAverage({"p": parameter}, decay=0.5)
    parameter.data.fill_(3.0)

    def fail_inside():
        with average.applied():
            assert parameter.item() == 1.0
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_inside()
    assert parameter.item() == 3.0


def test_skipped_steps_do_not_tick_the_average_and_stop_the_run(pipeline, batch):
    made = tiny.engine(pipeline, ema_decay=0.9, max_consecutive_skips=2)
    good = tiny.take(batch, [0, 1])
    bad = tiny.take(batch, [0, 1])
    bad["rows"]["advantages"][0] = float("nan")
    before = tiny.parameters(made)
    made.forward_backward_batch(bad, tiny.policy_gradient())
    assert made.optimizer_step().skipped
    assert all(torch.equal(t, before[n]) for n, t in tiny.parameters(made).items())
    assert made.ema.updates == 0 and made.counters.skipped_steps == 1 and not tiny.gradients(made)
    made.forward_backward_batch(good, tiny.policy_gradient())
    assert not made.optimizer_step().skipped and made.ema.updates == 1
    made.forward_backward_batch(bad, tiny.policy_gradient())
    made.optimizer_step()
    made.forward_backward_batch(bad, tiny.policy_gradient())
    with pytest.raises(NumericError, match="2 optimizer steps in a row"):
        made.optimizer_step()


def test_gradient_is_clipped_to_its_largest_norm(pipeline, batch):
    made = tiny.engine(pipeline, optimizer="sgd", learning_rate=1.0, grad_clip=1e-3, weight_decay=0.0)
    tiny.stir(made)
    before = tiny.parameters(made)
    made.forward_backward_batch(batch, tiny.policy_gradient())
    norm = made.optimizer_step().grad_norm
    moved = sum(float((t - before[n]).square().sum()) for n, t in tiny.parameters(made).items()) ** 0.5
    assert norm > 1e-3 and moved == pytest.approx(1e-3, rel=1e-2)


@settings(deadline=None)
@given(st.integers(0, 20), st.integers(1, 4), st.integers(1, 9), st.booleans(), st.integers(1, 7))
def test_passes_hold_each_pair_once_and_keep_their_promises(samples, steps, micro_batch, mix, pack):
    packs = [i // pack for i in range(samples)]
    for by_pack in (None, packs):
        passes = forward_passes(list(range(samples)), steps, micro_batch, packs=by_pack, mix_steps=mix)
        pairs = [pair for one in passes for pair in one]
        assert sorted(pairs) == [(sample, step) for sample in range(samples) for step in range(steps)]
        assert all(0 < len(one) <= micro_batch for one in passes)
        if not mix:
            assert all(len({step for _, step in one}) == 1 for one in passes)
        if by_pack:
            assert all(len({packs[sample] for sample, _ in one}) == 1 for one in passes)


@given(st.integers(0, 30), st.integers(1, 5))
def test_shares_cover_all_rows_and_differ_by_one_at_most(rows, size):
    parts = [share(range(rows), rank, size) for rank in range(size)]
    assert [row for part in parts for row in part] == list(range(rows))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
