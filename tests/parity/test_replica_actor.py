"""The real engine in its Ray actor."""

from collections.abc import Iterator

import pytest
import ray
import torch

from tests.parity.engine_process import engine_options
from verl_omni_core.models import sd3
from verl_omni_core.rollout._contract import PackPosition, SampleRequest, SamplingParams
from verl_omni_core.workers.replica import create_replica

pytestmark = pytest.mark.engine

SAMPLING = SamplingParams(32, 32, 4, "flow_sde", {}, "uniform", 0.7, (0, 2), 1.0, 16)
LIMIT_S = 120


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    yield
    ray.shutdown()


def test_two_replicas_boot_the_engine_and_agree_bit_for_bit(cluster: None, tmp_path: object) -> None:
    sd3.build(None).build_tiny(str(tmp_path), seed=0)
    replicas = [create_replica(f"replica-{index}", num_cpus=0) for index in range(2)]
    infos = ray.get([replica.start.remote(engine_options(str(tmp_path))) for replica in replicas], timeout=LIMIT_S)
    assert {info.engine for info in infos} == {"vllm_omni"} and infos[0].requests == 0
    requests = [SampleRequest(f"r{i}", "a red cube", None, i, SAMPLING, PackPosition(i, 4)) for i in range(4)]
    first, second = (
        ray.get([replica.generate.remote(request) for request in requests], timeout=LIMIT_S) for replica in replicas
    )
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.extra_fields["all_latents"], other.extra_fields["all_latents"])
        assert torch.equal(one.log_probs, other.log_probs)
        assert torch.equal(one.diffusion_output, other.diffusion_output)
    assert {output.extra_fields["replica"] for output in second} == {"replica-1"}
    assert ray.get(replicas[0].describe.remote(), timeout=LIMIT_S).requests == 4
    ray.get([replica.close.remote() for replica in replicas], timeout=LIMIT_S)
