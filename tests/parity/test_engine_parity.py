"""vLLM-Omni, the diffusers engine and diffusers' own pipeline are one model; an engine's promises hold where it runs.

Bounds are in latent units, whose spread is about 1 for glyph and several for the tiny random network.
"""

import importlib.metadata
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import StableDiffusion3Pipeline

from tests.parity.engine_process import EngineProcess, Pipeline, adapter_update
from verl_omni_core import registry
from verl_omni_core.errors import ConfigError, ContractError, EngineError
from verl_omni_core.models import sd3
from verl_omni_core.rollout._contract import DiffusionOutput, PackPosition, SampleRequest
from verl_omni_core.weights.checksum import checksum

pytestmark = pytest.mark.engine

NEGATIVE = "blurry"
SEEDS = (11, 12, 13)


def _requests(pipeline: Pipeline, count: int = 3, pack: bool = False, **changes: Any) -> list[SampleRequest]:
    sampling = replace(pipeline.sampling, **changes)
    return [
        SampleRequest(
            f"r{i}", f"{pipeline.prompt} {i % 2}", NEGATIVE, 11 + i, sampling, PackPosition(i, count) if pack else None
        )
        for i in range(count)
    ]


def _latents(outputs: list[DiffusionOutput], name: str = "latents_clean") -> torch.Tensor:
    failed = [output for output in outputs if isinstance(output, Exception)]
    if failed:
        raise failed[0]
    return torch.stack([output.extra_fields[name] for output in outputs])


def _gap(one: list[DiffusionOutput], other: list[DiffusionOutput], name: str = "latents_clean") -> float:
    return (_latents(one, name) - _latents(other, name)).abs().max().item()


def _network(pipeline: Pipeline) -> torch.nn.Module:
    return sd3.build(None).load_denoiser(pipeline.folder, torch.float32)


def _replayed_ratio(pipeline: Pipeline, output: DiffusionOutput, network: torch.nn.Module) -> torch.Tensor:
    """Ratio of each recorded step: the trainer's network on what the engine recorded, over the engine's log-prob."""
    adapter, fields, sampling = sd3.build(None), output.extra_fields, pipeline.sampling
    geometry = adapter.geometry(sampling.height, sampling.width, adapter.decoder_config(pipeline.folder))
    schedule = adapter.schedule(
        geometry, sampling.num_inference_steps, adapter.scheduler_config(pipeline.folder), sampling.grid
    )
    rule = registry.component("sampler", sampling.sampler)
    steps = fields["step_indices"]
    names = adapter.facts.conditioning
    conditioning = {name: fields[name].expand(len(steps), *fields[name].shape) for name in names}
    before, after = fields["all_latents"][:-1], fields["all_latents"][1:]
    with torch.no_grad():
        velocity = adapter.velocity(network, before, fields["all_timesteps"], conditioning, 1.0)
        scored = rule.step(
            before,
            velocity,
            sigma=schedule.sigmas[steps],
            sigma_next=schedule.sigmas[steps + 1],
            sigma_second=float(schedule.sigmas[1]),
            noise_level=sampling.noise_level,
            prev_sample=after,
        )
    return (scored.log_prob - output.log_probs).exp()


@pytest.mark.parametrize("guidance_scale", [1.0, 4.5])
def test_engine_equals_diffusers(
    pipeline: Pipeline, omni: EngineProcess, reference: EngineProcess, guidance_scale: float
) -> None:
    requests = _requests(pipeline, guidance_scale=guidance_scale)
    ours, theirs = omni.each("generate", requests), reference.each("generate", requests)
    assert _gap(ours, theirs) < 1e-4
    assert _gap(ours, theirs, "prompt_embeds") == 0
    assert _gap(ours, theirs, "all_timesteps") == 0
    for one, other in zip(ours, theirs, strict=True):
        assert (one.diffusion_output.int() - other.diffusion_output.int()).abs().max() <= 1
        assert (one.log_probs - other.log_probs).abs().max() < 1e-5
        assert ("negative_prompt_embeds" in one.extra_fields) == (guidance_scale > 1)


@pytest.mark.parametrize("guidance_scale", [1.0, 4.5])
@pytest.mark.parametrize("grid", ["scheduler", "uniform"])
def test_without_noise_both_engines_equal_the_stock_pipeline(
    pipeline: Pipeline, omni: EngineProcess, reference: EngineProcess, guidance_scale: float, grid: str
) -> None:
    requests = _requests(pipeline, guidance_scale=guidance_scale, grid=grid, noise_level=0.0, window=None)
    steps = pipeline.sampling.num_inference_steps
    stock = StableDiffusion3Pipeline.from_pretrained(pipeline.folder, torch_dtype=torch.float32)
    stock.set_progress_bar_config(disable=True)
    expected = stock(
        [request.prompt for request in requests],
        negative_prompt=[NEGATIVE] * len(requests),
        height=pipeline.sampling.height,
        width=pipeline.sampling.width,
        num_inference_steps=steps,
        sigmas=[1 - step / steps for step in range(steps)] if grid == "uniform" else None,
        guidance_scale=guidance_scale,
        max_sequence_length=pipeline.sampling.max_sequence_length,
        generator=[torch.Generator().manual_seed(request.seed) for request in requests],
        output_type="latent",
    ).images
    for engine in (omni, reference):
        outputs = engine.each("generate", requests)
        assert (_latents(outputs) - expected).abs().max() < 1e-4
        assert all(output.log_probs is None for output in outputs)


def test_ratio_is_one_where_the_trainer_replays_the_engine(pipeline: Pipeline, omni: EngineProcess) -> None:
    network = _network(pipeline)
    for output in omni.each("generate", _requests(pipeline)):
        assert (_replayed_ratio(pipeline, output, network) - 1).abs().max() <= 1e-5


def test_ratio_is_off_where_the_weights_are_off_by_a_thousandth(pipeline: Pipeline, omni: EngineProcess) -> None:
    network = _network(pipeline)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 1e-3
    outputs = omni.each("generate", _requests(pipeline))
    assert max((_replayed_ratio(pipeline, output, network) - 1).abs().max() for output in outputs) > 1e-5


def test_fixed_places_give_equal_bits_in_any_company(pipeline: Pipeline, omni: EngineProcess) -> None:
    requests = _requests(pipeline, count=4, pack=True)
    whole = omni.each("generate", requests)
    turned = omni.each("generate", requests[::-1])[::-1]
    split = omni.each("generate", requests[:1]) + omni.each("generate", requests[1:])
    for other in (turned, split):
        for one, two in zip(whole, other, strict=True):
            assert torch.equal(one.diffusion_output, two.diffusion_output)
            assert torch.equal(one.log_probs, two.log_probs)
            for name in ("all_latents", "latents_clean", "prompt_embeds"):
                assert torch.equal(one.extra_fields[name], two.extra_fields[name])


def test_requests_of_different_sampling_share_a_batch_and_do_not_mix(pipeline: Pipeline, omni: EngineProcess) -> None:
    (first,) = _requests(pipeline, count=1)
    window = replace(first, sampling=replace(first.sampling, window=(2, 4), noise_level=0.3))
    plain = replace(first, sampling=replace(first.sampling, window=None))
    mixed = omni.each("generate", [first, window, plain])
    alone = [omni.call("generate", request) for request in (first, window, plain)]
    assert _gap(mixed, alone) == 0
    assert [output.extra_fields["step_indices"].tolist() for output in mixed] == [[0, 1, 2], [2, 3], []]


def test_a_bad_request_fails_alone(pipeline: Pipeline, omni: EngineProcess) -> None:
    good, bad, other = _requests(pipeline)
    size = replace(bad, sampling=replace(bad.sampling, height=33))
    sampler = replace(bad, request_id="s", sampling=replace(bad.sampling, sampler="flow_sd"))
    outputs = omni.each("generate", [good, size, sampler, other])
    assert isinstance(outputs[1], ConfigError) and "multiples of" in str(outputs[1])
    assert isinstance(outputs[2], ConfigError) and "flow_sde" in str(outputs[2])
    assert outputs[0].stop_reason == outputs[3].stop_reason == "completed"


def test_a_sample_owns_its_tensors(pipeline: Pipeline, omni: EngineProcess) -> None:
    for output in omni.each("generate", _requests(pipeline)):
        latents = output.extra_fields["all_latents"].requires_grad_()  # an inference tensor would refuse
        assert latents.untyped_storage().nbytes() == latents.nbytes
        assert output.diffusion_output.dtype == torch.uint8
        assert output.diffusion_output.shape == (3, pipeline.sampling.height, pipeline.sampling.width)


def test_the_engine_counts_and_names_itself(pipeline: Pipeline, omni: EngineProcess) -> None:
    before = omni.call("describe")
    omni.each("generate", _requests(pipeline))
    after = omni.call("describe")
    expected = ("vllm_omni", importlib.metadata.version("vllm-omni"), "SD3TrajectoryPipeline")
    assert (after.engine, after.version, after.pipeline_class) == expected
    assert after.requests - before.requests == 3 and after.max_batch == 8


def test_batch_size_moves_the_first_step_by_rounding_only(pipeline: Pipeline, omni: EngineProcess) -> None:
    requests = _requests(pipeline, count=8)
    together = omni.each("generate", requests)
    assert 8 in omni.call("statistics")["batches"]
    alone = [omni.call("generate", request) for request in requests]
    first = slice(0, 2)
    assert (_latents(together, "all_latents")[:, first] - _latents(alone, "all_latents")[:, first]).abs().max() < 1e-5


def test_adapter_from_memory_equals_peft(pipeline: Pipeline, omni: EngineProcess, reference: EngineProcess) -> None:
    requests = _requests(pipeline)
    update, following = adapter_update(pipeline, 1), adapter_update(pipeline, 2)
    base = omni.each("generate", requests)
    for weights in (update, following):
        loaded = omni.call("load_weights", weights)
        assert (loaded.version, loaded.checksum) == (weights.version, checksum(weights.tensors))
        assert loaded.bound_modules == len(weights.tensors) // 2
        assert reference.call("load_weights", weights) == loaded
        ours, theirs = omni.each("generate", requests), reference.each("generate", requests)
        assert ours[0].extra_fields["weights_version"] == weights.version
        assert (_latents(ours, "all_latents")[:, 1] - _latents(theirs, "all_latents")[:, 1]).abs().max() < 1e-5
        assert _gap(ours, theirs) < 1e-4
        assert _gap(base, ours) > 1e-2
    assert omni.call("load_weights", following) == loaded
    nowhere = {name.replace("transformer_blocks", "blocks"): tensor for name, tensor in update.tensors.items()}
    with pytest.raises(ContractError, match=r"only 0 of \d+ LoRA modules"):
        omni.call("load_weights", replace(update, version=3, tensors=nowhere))
    with pytest.raises(EngineError, match="takes no request: loading version 3"):
        omni.call("generate", requests[0])
    assert omni.call("load_weights", following) == loaded
    assert _gap(ours, omni.each("generate", requests)) == 0
    nothing = {name: tensor * ("lora_A" in name) for name, tensor in update.tensors.items()}
    for engine in (omni, reference):
        engine.call("load_weights", replace(update, version=4, tensors=nothing))
    assert _gap(base, omni.each("generate", requests)) == 0
