"""Weights, sleep, limits and ranks of the real engine, on the tiny pipeline; one engine serves most tests, in order."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.parity.engine_process import EngineProcess, Pipeline, adapter_update, engine_process
from verl_omni_core.errors import ContractError, DeadlineError, EngineError
from verl_omni_core.models import sd3
from verl_omni_core.rollout._contract import DiffusionOutput, SampleRequest, SamplingParams, WeightUpdate
from verl_omni_core.weights.checksum import checksum

pytestmark = pytest.mark.engine

SAMPLING = SamplingParams(32, 32, 6, "flow_sde", {}, "uniform", 0.7, (0, 3), 1.0, 16)
REQUESTS = [SampleRequest(f"r{index}", "a red cube", None, 11 + index, SAMPLING) for index in range(3)]
SLOW = replace(REQUESTS[0], sampling=replace(SAMPLING, num_inference_steps=8000))
LIMIT_S = 4.0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    folder = str(tmp_path_factory.mktemp("tiny"))
    sd3.build(None).build_tiny(folder, seed=0)
    return Pipeline(folder, "a red cube", SAMPLING)


@pytest.fixture(scope="module")
def single(tiny: Pipeline) -> Iterator[EngineProcess]:
    model = {"model": "tests.painted_model", "model_options": {"level": 77}}
    with engine_process("vllm_omni", tiny.folder, max_batch=1, request_timeout_s=LIMIT_S, **model) as engine:
        yield engine


def _gap(one: list[DiffusionOutput], other: list[DiffusionOutput]) -> float:
    return max(
        (a.extra_fields["latents_clean"] - b.extra_fields["latents_clean"]).abs().max().item()
        for a, b in zip(one, other, strict=True)
    )


def test_the_batch_limit_holds(single: EngineProcess) -> None:
    single.each("generate", REQUESTS)
    assert single.call("statistics")["batches"] == {1: 3}
    assert single.call("describe").max_batch == 1


def test_a_model_outside_the_tree_draws_with_its_options(single: EngineProcess) -> None:
    assert single.call("generate", REQUESTS[0]).diffusion_output.unique().tolist() == [77]


def test_full_weights_are_taken_and_restored_bit_for_bit(tiny: Pipeline, single: EngineProcess) -> None:
    network = sd3.build(None).load_denoiser(tiny.folder, torch.float32)
    state = {name: tensor.detach().clone() for name, tensor in network.named_parameters()}
    moved = {name: tensor + 0.01 * (tensor.ndim > 1) for name, tensor in state.items()}
    standing, base = single.call("standing_checksum"), single.each("generate", REQUESTS)
    loaded = single.call("load_weights", WeightUpdate(1, "full", moved))
    assert (loaded.version, loaded.bound_modules, loaded.checksum) == (1, len(state), checksum(moved))
    assert single.call("standing_checksum") != standing
    changed = single.each("generate", REQUESTS)
    assert changed[0].extra_fields["weights_version"] == 1 and _gap(base, changed) > 1e-3
    single.call("load_weights", WeightUpdate(2, "full", state))
    assert single.call("standing_checksum") == standing
    assert _gap(base, single.each("generate", REQUESTS)) == 0
    partly = {name: tensor for name, tensor in state.items() if ".to_q." not in name}
    with pytest.raises(ContractError, match="parts of"):
        single.call("load_weights", WeightUpdate(3, "full", partly))
    with pytest.raises(EngineError, match="loading version 3 did not succeed"):
        single.call("generate", REQUESTS[0])
    single.call("load_weights", WeightUpdate(4, "full", state))
    assert _gap(base, single.each("generate", REQUESTS)) == 0


def test_sleep_leaves_the_bits_alone(single: EngineProcess) -> None:
    before = single.each("generate", REQUESTS)
    single.call("sleep")
    with pytest.raises(EngineError, match="asleep"):
        single.call("generate", REQUESTS[0])
    single.call("wake_up")
    assert _gap(before, single.each("generate", REQUESTS)) == 0


def test_a_sample_past_its_deadline_is_a_deadline_error(single: EngineProcess) -> None:
    with pytest.raises(DeadlineError, match=f"{LIMIT_S} s"):
        single.call("generate", SLOW)


def test_stopping_the_engine_fails_what_it_draws(tiny: Pipeline, single: EngineProcess) -> None:
    stopped = single.start_then_close(SLOW, 0.5)
    assert isinstance(stopped, EngineError) and "stopped" in str(stopped)
    with pytest.raises(EngineError, match="stopped"):
        single.call("generate", REQUESTS[0])


def test_two_ranks_give_the_latents_of_one(tiny: Pipeline) -> None:
    with engine_process("diffusers", tiny.folder) as reference:
        one = reference.each("generate", REQUESTS)
    with engine_process("vllm_omni", tiny.folder, tensor_parallel=2) as ranks:
        two = ranks.each("generate", REQUESTS)
        assert _gap(one, two) < 1e-4
        assert ranks.call("describe").requests == 3
        update = adapter_update(tiny, 1)
        assert ranks.call("load_weights", update).bound_modules == len(update.tensors) // 2
        assert _gap(two, ranks.each("generate", REQUESTS)) > 1e-2


def test_requests_of_others_take_the_engines_own_path(tiny: Pipeline, tmp_path: Path) -> None:
    script = tmp_path / "stock.py"
    script.write_text(
        "import sys\n"
        "from vllm_omni.entrypoints.omni import Omni\n"
        "from vllm_omni.inputs.data import OmniDiffusionSamplingParams as Params\n"
        "if __name__ == '__main__':\n"
        "    omni = Omni(model=sys.argv[1], dtype='float32', enforce_eager=True)\n"
        "    params = Params(height=32, width=48, num_inference_steps=2, seed=1, max_sequence_length=16)\n"
        "    (output,) = omni.generate('a red cube', params, use_tqdm=False)\n"
        "    assert output.images[0].size == (48, 32), output.images\n"
        "    omni.close()\n"
    )
    subprocess.run([sys.executable, str(script), tiny.folder], timeout=180, check=True)
