"""Two ranks as real Ray actors: one call reaches both, a dead one ends the group."""

import os
import time

import pytest
import ray
import torch

from tests.unit.training import tiny
from tests.workers.committed_step import command, commit_step, config, weights
from verl_omni_core.batches.tables import read_tensor
from verl_omni_core.cluster.ray_head import ENVIRONMENT
from verl_omni_core.errors import ContractError, FencedError, StageLost
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.weights.checksum import checksum
from verl_omni_core.weights.filesystem import read_update
from verl_omni_core.workers.actor_rollout_ref import ActorRolloutRefWorker
from verl_omni_core.workers.commands import InferCommand
from verl_omni_core.workers.train_group import TrainGroup

NAMESPACE = "train-group-test"
START_S = 240
ALGORITHM = {"name": "tests.workers.keeps_old_policy", "max_ratio_deviation": None}


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny-sd3")
    tiny.ADAPTER.build_tiny(str(folder), seed=0)
    return folder


@pytest.fixture(scope="module")
def run(pipeline, tmp_path_factory):
    root = tmp_path_factory.mktemp("runs") / "run"
    return root, {step: commit_step(root, pipeline, step) for step in (1, 2)}


@pytest.fixture(scope="module")
def settings(pipeline):
    return config(pipeline, ranks=2, ema_decay=0.9, algorithm=ALGORITHM)


@pytest.fixture(scope="module")
def group(settings):
    os.environ.update(ENVIRONMENT)
    ray.init(
        address="local", num_cpus=2, namespace=NAMESPACE, include_dashboard=False, object_store_memory=100 * 2**20,
        log_to_driver=False, logging_level="ERROR",
    )  # fmt: skip
    made = TrainGroup.start(settings, NAMESPACE)
    made.wait_until_ready(START_S)
    yield made
    ray.shutdown()


@pytest.fixture(scope="module")
def alone(pipeline):
    threads = torch.get_num_threads()
    worker = ActorRolloutRefWorker(config(pipeline, ema_decay=0.9, algorithm=ALGORITHM))
    worker.init_model()
    yield worker
    torch.set_num_threads(threads)


def test_two_ranks_train_like_one_and_apply_a_command_once(group, alone, run, tmp_path):
    root, refs = run
    first = group.update_actor(command(root, refs[1], 1))
    assert first.ratio_deviation <= 1e-5 and group.version() == 1
    again = group.update_actor(command(root, refs[1], 1))
    assert again == first and again.replayed
    expected = alone.update_actor(command(root, refs[1], 1))
    assert first.metrics == pytest.approx(expected.metrics, rel=1e-3, abs=1e-6)
    for network in ("policy", "average"):
        written = group.update_weights(str(tmp_path / network), network)
        tensors = dict(read_update(tmp_path / network, 1).tensors)
        assert checksum(tensors) == written.checksum == group.weights_checksum(network) and written.version == 1
        _, other = weights(alone, tmp_path / f"alone-{network}", network)
        # Adam: rounding of a gradient near 0 moves a parameter by a share of the learning rate
        assert max(float((tensors[n] - other[n]).abs().max()) for n in other) < 2e-4


def test_two_ranks_average_and_copy_the_adapters_that_an_algorithm_declares(group, tmp_path):
    def read(network, name):
        group.update_weights(str(tmp_path / name), network)
        return dict(read_update(tmp_path / name, 1).tensors)

    policy, before = read("policy", "policy"), read("old", "before")
    assert checksum(policy) != checksum(before)
    group.ema_update_adapter("default", "old", 0.25)
    for name, tensor in read("old", "averaged").items():
        assert torch.allclose(tensor, 0.25 * before[name] + 0.75 * policy[name], atol=1e-7)
    group.copy_adapter("default", "old")
    assert checksum(read("old", "copied")) == checksum(policy) == group.weights_checksum()


def test_each_rank_writes_its_own_shard_of_scores(group, run):
    root, refs = run
    store = RunStore(root, epoch=1)
    attempt = store.attempt(2, "old_log_probs", "k")
    files = group.infer_actor_batch(InferCommand(attempt, refs[2][0], 1))
    ref = attempt.commit(files, rows=10, parents=[refs[2][0]], producer={})
    assert [file.rows for file in files] == [5, 5]
    assert read_tensor(store.table(ref, "logprobs"), "old_log_probs").shape == (10, 2)


def test_a_refusal_reaches_the_driver_as_it_was_raised_and_the_group_lives(group, run):
    root, refs = run
    with pytest.raises(ContractError, match="expects version 4"):
        group.update_actor(command(root, refs[2], 5))
    assert group.version() == 1


def test_another_process_finds_the_group_and_starting_again_is_quick(group, settings):
    assert TrainGroup.find(settings, NAMESPACE).version() == group.version()
    started = time.monotonic()
    again = TrainGroup.start(settings, NAMESPACE)
    again.wait_until_ready(START_S)
    assert time.monotonic() - started < 10 and again.version() == group.version()
    with pytest.raises(StageLost, match="does not live"):
        TrainGroup.find(settings, "elsewhere")


def test_an_older_owner_is_refused_by_all_ranks(group, settings, tmp_path):
    TrainGroup(settings, group.handles, epoch=5).update_weights(str(tmp_path / "new"))
    with pytest.raises(FencedError):
        TrainGroup(settings, group.handles, epoch=4).update_weights(str(tmp_path / "old"))


def test_a_dead_rank_ends_the_group_and_a_fresh_one_goes_on_from_the_checkpoint(group, settings, run, tmp_path):
    root, refs = run
    snapshot = RunStore(tmp_path).attempt(1, "checkpoint", "key")
    group.begin_snapshot(snapshot)
    written = group.finish_snapshot(snapshot)
    RunStore(tmp_path).verify(snapshot.commit(written.files, rows=1, parents=[], producer={}))
    os.kill(group.states()[1].pid, 9)
    with pytest.raises(StageLost, match="actor 1 of 2 died"):
        group.update_actor(command(root, refs[2], 2, epoch=5))
    fresh = TrainGroup.start(settings, f"{NAMESPACE}-again")
    fresh.wait_until_ready(START_S)
    assert fresh.version() == 0
    assert fresh.load_checkpoint(str(snapshot.folder)) == 1
    assert fresh.update_actor(command(root, refs[1], 1)).replayed
    assert fresh.update_actor(command(root, refs[2], 2)).version == 2
    fresh.stop()
