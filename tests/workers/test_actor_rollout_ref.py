"""One rank, fed from committed tables: exactly-once updates, scoring, weights out, checkpoints, probe."""

import dataclasses
import json
import math

import pytest
import torch

from tests.unit.training import tiny
from tests.workers.committed_step import command, commit_step, config, weights
from verl_omni_core.batches.tables import read_tensor
from verl_omni_core.errors import ContractError, FencedError, OffPolicyError
from verl_omni_core.rollout._contract import SamplingParams
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.weights.checksum import checksum
from verl_omni_core.workers.actor_rollout_ref import ActorRolloutRefWorker
from verl_omni_core.workers.commands import InferCommand, ProbeCommand

# every step's samples here are the base's
ANY_RATIO = {"max_ratio_deviation": None}


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny-sd3")
    tiny.ADAPTER.build_tiny(str(folder), seed=0)
    return folder


@pytest.fixture(scope="module")
def run(pipeline, tmp_path_factory):
    root = tmp_path_factory.mktemp("runs") / "run"
    return root, {step: commit_step(root, pipeline, step) for step in (1, 2)}


@pytest.fixture(autouse=True)
def _global_switches():
    threads = torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def made(pipeline, **settings):
    worker = ActorRolloutRefWorker(config(pipeline, **settings))
    worker.init_model()
    return worker


def started(root):
    return RunStore(root).attempt(1, "checkpoint", "key")


def test_an_update_moves_the_policy_and_says_what_it_did(pipeline, run, tmp_path):
    root, refs = run
    worker = made(pipeline)
    before, _ = weights(worker, tmp_path / "before")
    result = worker.update_actor(command(root, refs[1], 1))
    after, tensors = weights(worker, tmp_path / "after")
    assert (result.version, result.skipped, worker.ping().version) == (1, 0, 1)
    assert after != before and all(torch.isfinite(t).all() for t in tensors.values())
    assert result.ratio_deviation <= 1e-5
    names = {"loss", "grad_norm", "lr", "ratio_mean", "ratio_std", "pg_clipfrac", "ppo_kl", "skipped_steps"}
    assert result.metrics["actor/first_ratio_deviation"] == result.ratio_deviation
    assert result.metrics["actor/optimizer_steps"] == 2
    assert {f"actor/{name}" for name in names} <= result.metrics.keys()
    assert [record["update_id"] for record in result.records] == ["000001/0000", "000001/0001"]
    assert [record["version_after"] for record in result.records] == [0, 1]
    json.dumps(result.records)


def test_the_same_update_twice_steps_once(pipeline, run, tmp_path):
    root, refs = run
    worker = made(pipeline)
    first = worker.update_actor(command(root, refs[1], 1))
    once, _ = weights(worker, tmp_path / "once")
    again = worker.update_actor(command(root, refs[1], 1))
    assert again == first and again.replayed and not first.replayed
    assert weights(worker, tmp_path / "twice")[0] == once


def test_an_update_that_broke_off_goes_on_where_it_stopped(pipeline, run, tmp_path, monkeypatch):
    root, refs = run
    undisturbed = made(pipeline)
    undisturbed.update_actor(command(root, refs[1], 1))
    worker = made(pipeline)
    real = worker._worker.train_mini_batch
    calls = []

    def breaks(*arguments, **options):
        calls.append(1)
        if len(calls) == 2:
            raise OSError("lost")
        return real(*arguments, **options)

    monkeypatch.setattr(worker._worker, "train_mini_batch", breaks)
    with pytest.raises(OSError):
        worker.update_actor(command(root, refs[1], 1))
    worker.update_actor(command(root, refs[1], 1))
    assert len(calls) == 3
    assert weights(worker, tmp_path / "a")[0] == weights(undisturbed, tmp_path / "b")[0]


def test_a_pass_that_fails_leaves_no_gradient_behind(pipeline, run, tmp_path, monkeypatch):
    root, refs = run
    undisturbed = made(pipeline)
    undisturbed.update_actor(command(root, refs[1], 1))
    worker = made(pipeline)
    engine = worker._worker.engine
    real, calls = engine.prepare_model_outputs, []

    def breaks(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError
        return real(*arguments)

    monkeypatch.setattr(engine, "prepare_model_outputs", breaks)
    with pytest.raises(MemoryError):
        worker.update_actor(command(root, refs[1], 1))
    worker.update_actor(command(root, refs[1], 1))
    assert weights(worker, tmp_path / "a")[0] == weights(undisturbed, tmp_path / "b")[0]


def test_other_rows_under_a_known_update_are_refused(pipeline, run):
    root, refs = run
    worker = made(pipeline)
    worker.update_actor(command(root, refs[1], 1))
    with pytest.raises(ContractError, match="other rows"):
        worker.update_actor(command(root, refs[1], 1, mini_batches=[[0, 1], [2, 3]]))


def test_an_unexpected_version_is_refused(pipeline, run):
    root, refs = run
    with pytest.raises(ContractError, match="expects version 1, this trainer holds 0"):
        made(pipeline).update_actor(command(root, refs[2], 2))


def test_an_older_owner_is_refused(pipeline, run, tmp_path):
    root, refs = run
    worker = made(pipeline)
    worker.update_actor(command(root, refs[1], 1, epoch=3))
    with pytest.raises(FencedError):
        worker.update_actor(command(root, refs[2], 2, epoch=2))
    with pytest.raises(FencedError):
        worker.save_checkpoint(str(tmp_path), 2)


def test_a_worker_restored_from_a_checkpoint_trains_on_identically(pipeline, run, tmp_path):
    root, refs = run
    worker = made(pipeline, ema_decay=0.9, schedule="cosine", deterministic=True, algorithm=ANY_RATIO)
    first = worker.update_actor(command(root, refs[1], 1))
    worker.save_checkpoint(str(tmp_path / "checkpoint"))
    second = worker.update_actor(command(root, refs[2], 2))
    other = made(pipeline, ema_decay=0.9, schedule="cosine", deterministic=True, algorithm=ANY_RATIO)
    assert other.load_checkpoint(str(tmp_path / "checkpoint")) == 1
    assert other.update_actor(command(root, refs[1], 1)) == first
    repeated = other.update_actor(command(root, refs[2], 2))
    assert dataclasses.replace(repeated, seconds=0) == dataclasses.replace(second, seconds=0)
    for network in ("policy", "average"):
        found, expected = (weights(w, tmp_path / f"{network}-{i}", network)[0] for i, w in enumerate((other, worker)))
        assert found == expected


def moments_of_training(worker):
    """Return what must move exactly once a step besides the weights: counters, rate, average, position in the data."""
    engine = worker._worker.engine
    place = json.loads(json.dumps(worker._place()))
    return dataclasses.replace(engine.counters), engine.learning_rate, engine.ema.updates, place


@pytest.mark.parametrize("rank", [4, 0])
def test_a_worker_restored_from_a_snapshot_written_beside_the_next_step_trains_on_identically(
    pipeline, run, tmp_path, rank
):
    root, refs = run
    settings = {"ema_decay": 0.9, "schedule": "cosine", "deterministic": True, "algorithm": ANY_RATIO}
    worker = made(pipeline, **settings, lora={"rank": rank})
    first = worker.update_actor(command(root, refs[1], 1))
    at_first = moments_of_training(worker)
    snapshot = started(tmp_path)
    worker.begin_snapshot(snapshot)
    second = worker.update_actor(command(root, refs[2], 2))
    written = worker.finish_snapshot(snapshot, 60)
    ref = snapshot.commit(written.files, rows=1, parents=[], producer={})
    RunStore(tmp_path).verify(ref)
    assert "checkpoint.json" in [file.name for file in written.files]
    other = made(pipeline, **settings, lora={"rank": rank})
    assert other.load_checkpoint(str(snapshot.folder)) == 1
    assert moments_of_training(other) == at_first
    assert other.update_actor(command(root, refs[1], 1)) == first
    repeated = other.update_actor(command(root, refs[2], 2))
    assert dataclasses.replace(repeated, seconds=0) == dataclasses.replace(second, seconds=0)
    for network in ("policy", "average"):
        found, expected = (weights(w, tmp_path / f"{network}-{i}", network)[0] for i, w in enumerate((other, worker)))
        assert found == expected
    worker.close()


def test_no_command_that_arrives_twice_moves_average_schedule_or_position_twice(pipeline, run, tmp_path):
    root, refs = run
    worker = made(pipeline, ema_decay=0.9, schedule="cosine", algorithm=ANY_RATIO)
    before = moments_of_training(worker)
    worker.update_actor(command(root, refs[1], 1))
    once = moments_of_training(worker)
    assert (once[0].training_steps, once[0].optimizer_steps, once[2]) == (1, 2, 2)
    assert once[1] < before[1] and once[3]["data_position"] == {"step": 1}
    snapshot = started(tmp_path)
    for _ in range(2):
        worker.update_actor(command(root, refs[1], 1))
        worker.begin_snapshot(snapshot)
        worker.finish_snapshot(snapshot, 60)
        assert moments_of_training(worker) == once
    for _ in range(2):
        worker.load_checkpoint(str(snapshot.folder))
        worker.update_actor(command(root, refs[1], 1))
        assert moments_of_training(worker) == once


def test_an_update_that_broke_off_moves_average_and_schedule_once(pipeline, run, monkeypatch):
    root, refs = run
    undisturbed = made(pipeline, ema_decay=0.9, schedule="cosine")
    undisturbed.update_actor(command(root, refs[1], 1))
    worker = made(pipeline, ema_decay=0.9, schedule="cosine")
    real, calls = worker._worker.train_mini_batch, []

    def breaks(*arguments, **options):
        calls.append(1)
        if len(calls) == 2:
            raise OSError("lost")
        return real(*arguments, **options)

    monkeypatch.setattr(worker._worker, "train_mini_batch", breaks)
    with pytest.raises(OSError):
        worker.update_actor(command(root, refs[1], 1))
    assert moments_of_training(worker)[0].training_steps == 0
    worker.update_actor(command(root, refs[1], 1))
    assert moments_of_training(worker)[:3] == moments_of_training(undisturbed)[:3]


def test_a_snapshot_between_two_optimizer_steps_goes_on_with_the_second(pipeline, run, tmp_path, monkeypatch):
    root, refs = run
    undisturbed = made(pipeline, ema_decay=0.9)
    undisturbed.update_actor(command(root, refs[1], 1))
    worker = made(pipeline, ema_decay=0.9)
    real, calls = worker._worker.train_mini_batch, []

    def breaks(*arguments, **options):
        calls.append(1)
        if len(calls) == 2:
            raise OSError("lost")
        return real(*arguments, **options)

    monkeypatch.setattr(worker._worker, "train_mini_batch", breaks)
    with pytest.raises(OSError):
        worker.update_actor(command(root, refs[1], 1))
    snapshot = started(tmp_path)
    worker.begin_snapshot(snapshot)
    worker.finish_snapshot(snapshot, 60)
    other = made(pipeline, ema_decay=0.9)
    other.load_checkpoint(str(snapshot.folder))
    other.update_actor(command(root, refs[1], 1))
    assert weights(other, tmp_path / "a")[0] == weights(undisturbed, tmp_path / "b")[0]
    assert moments_of_training(other)[:3] == moments_of_training(undisturbed)[:3]


def test_a_worker_that_is_reset_trains_like_a_new_one(pipeline, run, tmp_path):
    root, refs = run
    worker = made(pipeline, ema_decay=0.9, schedule="cosine")
    before = moments_of_training(worker)
    worker.update_actor(command(root, refs[1], 1))
    once = weights(worker, tmp_path / "once")[0]
    worker.reset()
    assert moments_of_training(worker) == before and worker.ping().version == 0
    worker.update_actor(command(root, refs[1], 1))
    assert weights(worker, tmp_path / "again")[0] == once


def test_an_older_owner_neither_begins_a_snapshot_nor_resets(pipeline, run, tmp_path):
    root, refs = run
    worker = made(pipeline)
    worker.update_actor(command(root, refs[1], 1, epoch=3))
    snapshot = started(tmp_path)
    for refused in (lambda: worker.begin_snapshot(snapshot, 2), lambda: worker.reset(2)):
        with pytest.raises(FencedError):
            refused()
    assert worker.ping().version == 1
    with pytest.raises(ContractError, match="no snapshot was begun"):
        worker.finish_snapshot(snapshot, 60, 3)


def test_two_runs_with_one_seed_give_bit_equal_weights(pipeline, run, tmp_path):
    root, refs = run
    sums = []
    for number in range(2):
        worker = made(pipeline, deterministic=True)
        worker.update_actor(command(root, refs[1], 1))
        sums.append(weights(worker, tmp_path / str(number))[0])
    assert sums[0] == sums[1]


def test_learning_rate_zero_keeps_every_bit(pipeline, run, tmp_path):
    root, refs = run
    for lora in ({"rank": 4}, {"rank": 0}):
        worker = made(pipeline, learning_rate=0.0, lora=lora)
        before, _ = weights(worker, tmp_path / f"before-{lora['rank']}")
        worker.update_actor(command(root, refs[1], 1))
        assert weights(worker, tmp_path / f"after-{lora['rank']}")[0] == before


def test_invalid_and_lost_samples_do_not_count(pipeline, tmp_path):
    with_gaps = commit_step(tmp_path / "gaps", pipeline, 1, invalid=(0, 7), lost=(3,))
    whole = commit_step(tmp_path / "whole", pipeline, 1)
    worker, other = made(pipeline), made(pipeline)
    worker.update_actor(command(tmp_path / "gaps", with_gaps, 1, mini_batches=[list(range(10))]))
    other.update_actor(command(tmp_path / "whole", whole, 1, mini_batches=[[1, 2, 4, 5, 6, 8, 9]]))
    _, found = weights(worker, tmp_path / "a")
    _, expected = weights(other, tmp_path / "b")
    assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in expected)


def test_a_mini_batch_without_valid_rows_is_skipped_and_counted(pipeline, tmp_path):
    refs = commit_step(tmp_path / "run", pipeline, 1, invalid=tuple(range(5)))
    result = made(pipeline).update_actor(command(tmp_path / "run", refs, 1))
    assert result.skipped == 1 and result.metrics["actor/skipped_steps"] == 1


def test_a_forward_pass_that_is_not_finite_is_skipped_and_leaves_the_metrics_finite(pipeline, tmp_path):
    refs = commit_step(tmp_path / "run", pipeline, 1, infinite=(2,))
    worker, other = made(pipeline), made(pipeline)
    result = worker.update_actor(command(tmp_path / "run", refs, 1))
    assert result.skipped == 1 and result.metrics["actor/skipped_steps"] == 1
    assert all(math.isfinite(value) for value in result.metrics.values())
    assert [json.loads(record["metrics_json"]).get("actor/loss") is None for record in result.records] == [True, False]
    rest = other.update_actor(command(tmp_path / "run", refs, 1, mini_batches=[list(range(5, 10))]))
    assert result.metrics["actor/loss"] == rest.metrics["actor/loss"]
    assert result.ratio_deviation == rest.ratio_deviation
    assert weights(worker, tmp_path / "a")[0] == weights(other, tmp_path / "b")[0]


@pytest.mark.parametrize("invalid", [(), tuple(range(5))])
def test_samples_of_another_policy_stop_the_run_before_the_step(pipeline, tmp_path, invalid):
    refs = commit_step(tmp_path / "run", pipeline, 1, invalid=invalid)
    worker = made(pipeline, algorithm={"max_ratio_deviation": 1e-5})
    with torch.no_grad():
        worker._worker.engine.module.proj_out.weight.add_(1e-3)
    before, _ = weights(worker, tmp_path / "before")
    with pytest.raises(OffPolicyError, match="max_ratio_deviation"):
        worker.update_actor(command(tmp_path / "run", refs, 1))
    assert weights(worker, tmp_path / "after")[0] == before


def test_samples_of_an_older_version_between_syncs_are_trained_on_whatever_their_ratio(pipeline, tmp_path):
    root = tmp_path / "run"
    refs = {step: commit_step(root, pipeline, step, version=0) for step in (1, 2)}
    worker = made(pipeline, weights={"sync_interval": 2}, algorithm={"max_ratio_deviation": 1e-5})
    worker.update_actor(command(root, refs[1], 1))
    result = worker.update_actor(command(root, refs[2], 2))
    assert result.version == 2 and result.skipped == 0
    assert result.metrics["actor/first_ratio_deviation"] == result.ratio_deviation > 1e-5
    claimed = commit_step(tmp_path / "claimed", pipeline, 2, version=1)
    other = made(pipeline, weights={"sync_interval": 2}, algorithm={"max_ratio_deviation": 1e-5})
    other.update_actor(command(root, refs[1], 1))
    with pytest.raises(OffPolicyError, match="max_ratio_deviation"):
        other.update_actor(command(tmp_path / "claimed", claimed, 2))


def test_recomputed_log_probs_equal_the_engines(pipeline, run):
    root, refs = run
    store = RunStore(root)
    worker = made(pipeline)
    attempt = store.attempt(1, "old_log_probs", "k")
    files = worker.infer_actor_batch(InferCommand(attempt, refs[1][0], 0))
    ref = attempt.commit(files, rows=10, parents=[refs[1][0]], producer={})
    found = read_tensor(store.table(ref, "logprobs"), "old_log_probs")
    expected = read_tensor(store.table(refs[1][0], "trajectories"), "rollout_log_probs")
    assert torch.allclose(found, expected, atol=1e-6)
    result = worker.update_actor(command(root, refs[1], 1, old_log_probs=ref))
    assert result.ratio_deviation <= 1e-5


@pytest.mark.parametrize("rank", [4, 0])
def test_divergence_from_the_reference_is_trained_from_its_table(pipeline, tmp_path, rank):
    refs = commit_step(tmp_path / "run", pipeline, 1)
    store = RunStore(tmp_path / "run")
    worker = made(pipeline, lora={"rank": rank}, algorithm={"kl_coef": 0.1})
    attempt = store.attempt(1, "reference", "k")
    files = worker.infer_ref_batch(InferCommand(attempt, refs[0], 0))
    ref = attempt.commit(files, rows=10, parents=[refs[0]], producer={})
    result = worker.update_actor(command(tmp_path / "run", refs, 1, reference=ref))
    assert json.loads(result.records[0]["metrics_json"])["actor/kl_loss"] == pytest.approx(0, abs=1e-9)
    assert json.loads(result.records[1]["metrics_json"])["actor/kl_loss"] > 0


def test_an_adapter_that_the_algorithm_declares_is_averaged_and_copied(pipeline, run, tmp_path):
    root, refs = run
    worker = made(pipeline, algorithm={"name": "tests.workers.keeps_old_policy"})
    _, before = weights(worker, tmp_path / "before", "old")
    worker.update_actor(command(root, refs[1], 1))
    _, policy = weights(worker, tmp_path / "policy")
    assert checksum(weights(worker, tmp_path / "still", "old")[1]) == checksum(before) != checksum(policy)
    worker.ema_update_adapter("default", "old", 0.25)
    for name, tensor in weights(worker, tmp_path / "averaged", "old")[1].items():
        assert torch.allclose(tensor, 0.25 * before[name] + 0.75 * policy[name], atol=1e-7)
    worker.copy_adapter("default", "old")
    assert weights(worker, tmp_path / "copied", "old")[0] == checksum(policy)
    assert weights(worker, tmp_path / "unmoved")[0] == checksum(policy)


def test_scoring_with_another_version_is_refused(pipeline, run):
    root, refs = run
    attempt = RunStore(root).attempt(2, "old_log_probs", "k")
    with pytest.raises(ContractError, match="version 1, this trainer holds 0"):
        made(pipeline).infer_actor_batch(InferCommand(attempt, refs[2][0], 1))


def test_written_weights_carry_their_checksum(pipeline, tmp_path):
    for rank, kind in ((4, "lora"), (0, "full")):
        worker = made(pipeline, lora={"rank": rank})
        folder = tmp_path / kind
        written = worker.update_weights(str(folder))
        _, tensors = weights(worker, tmp_path / f"{kind}-again")
        assert (written.kind, written.tensor_count, written.version) == (kind, len(tensors), 0)
        assert written.checksum == checksum(tensors)
        assert sorted(written.files) == sorted(path.name for path in folder.iterdir())


def test_the_probe_draws_what_the_base_draws_before_training(pipeline):
    from diffusers import StableDiffusion3Pipeline

    pipe = StableDiffusion3Pipeline.from_pretrained(str(pipeline)).to("cpu")
    pipe.set_progress_bar_config(disable=True)
    encoders = tiny.ADAPTER.load_encoders(str(pipeline), torch.float32)
    told = tiny.ADAPTER.encode(encoders, "a red cube", None, 16)
    sampling = SamplingParams(32, 48, tiny.STEPS, "flow_sde", {}, "uniform", 0.0, None, 1.0, 16, logprobs=False)
    found = made(pipeline).sample(ProbeCommand(11, sampling, told))
    expected = pipe(
        "a red cube",
        height=32,
        width=48,
        guidance_scale=1.0,
        max_sequence_length=16,
        sigmas=[1 - i / tiny.STEPS for i in range(tiny.STEPS)],
        generator=torch.Generator().manual_seed(11),
        output_type="latent",
    ).images[0]
    assert torch.allclose(found, expected, atol=1e-4)
