"""Replicas are Ray actors; the router knows which one draws and what its silence means."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from peft import LoraConfig, get_peft_model_state_dict
from ray.actor import ActorHandle

from verl_omni_core.errors import ConfigError, DeadlineError, EngineError, StageLost, StoreError
from verl_omni_core.models import sd3
from verl_omni_core.rollout._contract import (
    DiffusionOutput,
    EngineOptions,
    PackPosition,
    SampleRequest,
    SamplingParams,
    WeightUpdate,
)
from verl_omni_core.weights.filesystem import read_update, write_update
from verl_omni_core.workers.replica import create_replica
from verl_omni_core.workers.router import ReplicaRouter

SAMPLING = SamplingParams(32, 32, 4, "flow_sde", {}, "uniform", 0.7, (0, 2), 1.0, 16)
LIMIT_S = 90


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("tiny_sd3"))
    sd3.build(None).build_tiny(folder, seed=0)
    return folder


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def pool(cluster: None, tiny: str) -> list[ActorHandle]:
    options = EngineOptions("sd3", tiny, "float32", 4, 30.0, 1, 1, 4, False, 60.0, 60.0)
    handles = [create_replica(f"replica-{index}", "diffusers", num_cpus=0) for index in range(2)]
    ray.get([handle.start.remote(options) for handle in handles], timeout=LIMIT_S)
    return handles


def _request(index: int, size: int | None = None) -> SampleRequest:
    pack = None if size is None else PackPosition(index, size)
    return SampleRequest(f"r{index}", "a red cube", None, 50 + index, SAMPLING, pack)


def _draw(router: ReplicaRouter, requests: list[SampleRequest], route_key: str = "") -> list[Any]:
    async def main() -> list[Any]:
        calls = [router.generate(request, route_key) for request in requests]
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), LIMIT_S)

    return asyncio.run(main())


def _update(tiny: str, version: int) -> WeightUpdate:
    network = sd3.build(None).load_denoiser(tiny, torch.float32)
    network.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=["attn.to_q"], init_lora_weights=False))
    return WeightUpdate(
        version, "lora", get_peft_model_state_dict(network), {"r": 4, "lora_alpha": 8, "target_modules": ["attn.to_q"]}
    )


def test_load_spreads_over_the_pool(pool: list[ActorHandle]) -> None:
    outputs: list[DiffusionOutput] = _draw(ReplicaRouter(pool), [_request(index) for index in range(6)])
    names = [output.extra_fields["replica"] for output in outputs]
    assert names.count("replica-0") == names.count("replica-1") == 3


def test_bits_do_not_depend_on_the_number_of_replicas(pool: list[ActorHandle]) -> None:
    requests = [_request(index, 4) for index in range(4)]
    both, one = ReplicaRouter(pool, deterministic=True), ReplicaRouter(pool[:1], deterministic=True)
    ours = [output for request in requests for output in _draw(both, [request], f"pack-{request.seed}")]
    theirs = _draw(one, requests, "pack-0")
    for first, second in zip(ours, theirs, strict=True):
        assert torch.equal(first.extra_fields["all_latents"], second.extra_fields["all_latents"])
        assert torch.equal(first.diffusion_output, second.diffusion_output)


def test_a_pack_stays_on_one_replica_whatever_the_load(pool: list[ActorHandle]) -> None:
    router = ReplicaRouter(pool, deterministic=True)
    names = {output.extra_fields["replica"] for output in _draw(router, [_request(i) for i in range(5)], "pack-3")}
    assert len(names) == 1
    assert {router.choose(f"pack-{number}") for number in range(20)} == {0, 1}
    assert router.choose("pack-3", attempt=1) != router.choose("pack-3")


def test_errors_arrive_in_their_own_class(pool: list[ActorHandle]) -> None:
    bad = replace(_request(1), sampling=replace(SAMPLING, height=40))
    good, error = _draw(ReplicaRouter(pool), [_request(0), bad])
    assert good.stop_reason == "completed"
    assert type(error) is ConfigError and "32 or 48" in str(error)


def test_a_late_answer_is_a_deadline_error(pool: list[ActorHandle]) -> None:
    slow = replace(_request(1), sampling=replace(SAMPLING, num_inference_steps=200))
    (error,) = _draw(ReplicaRouter(pool, request_timeout_s=0.1), [slow])
    assert isinstance(error, DeadlineError)


def test_weights_come_from_memory_or_from_a_folder(pool: list[ActorHandle], tiny: str, tmp_path: Path) -> None:
    update = _update(tiny, 5)
    write_update(tmp_path / "v5", update)
    memory = ray.get(pool[0].load_weights.remote(update), timeout=LIMIT_S)
    folder = ray.get(pool[1].load_weights.remote(str(tmp_path / "v5"), 5), timeout=LIMIT_S)
    assert memory == folder and memory.version == 5 and memory.bound_modules == 2
    first, second = (_draw(ReplicaRouter([handle]), [_request(0, 1)])[0] for handle in pool)
    assert torch.equal(first.extra_fields["latents_clean"], second.extra_fields["latents_clean"])
    assert first.extra_fields["weights_version"] == 5
    assert ray.get(pool[0].ping.remote(), timeout=LIMIT_S)["version"] == 5


def test_a_sleeping_replica_refuses_and_draws_the_same_afterwards(pool: list[ActorHandle]) -> None:
    router = ReplicaRouter(pool[:1])
    (before,) = _draw(router, [_request(0, 1)])
    ray.get(pool[0].sleep.remote(), timeout=LIMIT_S)
    (refused,) = _draw(router, [_request(0, 1)])
    assert isinstance(refused, EngineError) and "asleep" in str(refused)
    ray.get(pool[0].wake_up.remote(), timeout=LIMIT_S)
    (after,) = _draw(router, [_request(0, 1)])
    assert torch.equal(before.extra_fields["latents_clean"], after.extra_fields["latents_clean"])


def test_an_engine_that_counts_nothing_else_has_empty_statistics(pool: list[ActorHandle]) -> None:
    assert ray.get(pool[0].statistics.remote(), timeout=LIMIT_S) == {}


def test_a_written_adapter_is_read_back_bit_for_bit(tiny: str, tmp_path: Path) -> None:
    update = _update(tiny, 2)
    write_update(tmp_path / "lora", update)
    again = read_update(tmp_path / "lora", 2)
    assert again.kind == "lora" and again.peft_config["r"] == 4
    assert again.tensors.keys() == update.tensors.keys()
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in update.tensors.items())
    with pytest.raises(StoreError, match="neither"):
        read_update(tmp_path, 2)


def test_a_dead_replica_loses_the_stage_and_the_other_one_goes_on(cluster: None, tiny: str) -> None:
    options = EngineOptions("sd3", tiny, "float32", 4, 30.0, 1, 1, 4, False, 60.0, 60.0)
    handles = [create_replica(f"doomed-{index}", "diffusers", num_cpus=0) for index in range(2)]
    ray.get([handle.start.remote(options) for handle in handles], timeout=LIMIT_S)
    router = ReplicaRouter(handles)
    ray.kill(handles[0])
    (lost,) = _draw(router, [_request(0)])
    assert isinstance(lost, StageLost) and lost.retryable and router.dead == {0}
    assert _draw(router, [_request(0)])[0].extra_fields["replica"] == "doomed-1"
    hashed = ReplicaRouter([handles[0]], deterministic=True)
    assert isinstance(_draw(hashed, [_request(0)])[0], StageLost)
    assert "all 1 replicas" in str(_draw(hashed, [_request(0)])[0])
    ray.kill(handles[1])


def test_a_replica_without_an_engine_says_so(cluster: None) -> None:
    handle = create_replica("idle", "diffusers", num_cpus=0)
    (error,) = _draw(ReplicaRouter([handle]), [_request(0)])
    assert isinstance(error, EngineError) and "start first" in str(error)
    with pytest.raises(EngineError, match="no replica"):
        ReplicaRouter([])
    ray.kill(handle)
