"""The reference engine keeps the promises of the engine contract."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model_state_dict

from verl_omni_core.errors import ConfigError, ContractError, DeadlineError, EngineError
from verl_omni_core.models import sd3
from verl_omni_core.rollout import diffusers as engine_module
from verl_omni_core.rollout._contract import (
    DiffusionOutput,
    EngineOptions,
    PackPosition,
    SampleRequest,
    SamplingParams,
    WeightUpdate,
)
from verl_omni_core.weights.checksum import checksum

SAMPLING = SamplingParams(32, 32, 4, "flow_sde", {}, "uniform", 0.7, (0, 2), 1.0, 16)
LIMIT_S = 60


def _options(path: str, **changes: Any) -> EngineOptions:
    options = EngineOptions("sd3", path, "float32", 4, 20.0, 1, 1, 4, False, 60.0, 60.0)
    return replace(options, **changes)


def _request(seed: int, **changes: Any) -> SampleRequest:
    return replace(SampleRequest(f"r{seed}", "a red cube", None, seed, SAMPLING), **changes)


@asynccontextmanager
async def _engine(path: str, **changes: Any) -> AsyncIterator[engine_module.DiffusersEngine]:
    engine = await engine_module.build(_options(path, **changes))
    try:
        yield engine
    finally:
        await engine.close()


def _run(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(main(), LIMIT_S))


async def _together(*calls: Awaitable[DiffusionOutput]) -> list[DiffusionOutput]:
    return await asyncio.gather(*calls)


def _adapter_update(path: str, version: int, targets: list[str]) -> WeightUpdate:
    network = sd3.build(None).load_denoiser(path, torch.float32)
    network.add_adapter(LoraConfig(r=4, lora_alpha=12, target_modules=targets, init_lora_weights=False))
    return WeightUpdate(version, "lora", get_peft_model_state_dict(network), {"r": 4, "lora_alpha": 12})


def test_a_model_outside_the_tree_draws_with_its_options(tiny: str) -> None:
    async def main() -> list[int]:
        async with _engine(tiny, model="tests.painted_model", model_options={"level": 77}) as engine:
            return (await engine.generate(_request(1))).diffusion_output.unique().tolist()

    assert _run(main) == [77]


def test_a_sample_carries_what_training_needs(tiny: str) -> None:
    async def main() -> DiffusionOutput:
        async with _engine(tiny) as engine:
            return await engine.generate(_request(1))

    output = _run(main)
    assert output.diffusion_output.dtype == torch.uint8 and output.diffusion_output.shape == (3, 32, 32)
    assert output.log_probs.dtype == torch.float32 and output.log_probs.shape == (2,)
    fields = output.extra_fields
    assert fields["all_latents"].shape == (3, 16, 4, 4) and fields["all_latents"].dtype == torch.float32
    assert fields["all_timesteps"].shape == (2,) and fields["step_indices"].tolist() == [0, 1]
    assert fields["latents_clean"].shape == (16, 4, 4)
    assert fields["prompt_embeds"].shape == (77 + 16, 32) and fields["pooled_prompt_embeds"].shape == (64,)
    assert fields["weights_version"] == 0 and fields["generate_s"] > 0
    # a view would carry the storage of its whole batch with it
    assert fields["all_latents"].untyped_storage().nbytes() == fields["all_latents"].nbytes


def test_requests_that_arrive_together_share_a_batch_and_equal_those_alone(tiny: str) -> None:
    async def main() -> tuple[list[DiffusionOutput], list[DiffusionOutput]]:
        async with _engine(tiny) as engine, _engine(tiny, max_batch=1) as single:
            together = await _together(*(engine.generate(_request(seed)) for seed in range(4)))
            alone = await _together(*(single.generate(_request(seed)) for seed in range(4)))
            assert (await engine.describe()).requests == 4
            return together, alone

    together, alone = _run(main)
    for one, other in zip(together, alone, strict=True):
        difference = one.extra_fields["all_latents"] - other.extra_fields["all_latents"]
        assert difference.abs().max() < 1e-5
    seeds = torch.stack([output.extra_fields["latents_clean"] for output in together])
    assert (seeds[0] - seeds[1]).abs().max() > 0.1


def test_different_windows_in_one_batch_do_not_mix(tiny: str) -> None:
    late = replace(SAMPLING, window=(1, 3), noise_level=0.4)
    plain = replace(SAMPLING, window=None)

    async def main() -> tuple[list[DiffusionOutput], list[DiffusionOutput]]:
        async with _engine(tiny) as engine:
            requests = [_request(1), _request(1, sampling=late), _request(1, sampling=plain)]
            mixed = await _together(*(engine.generate(request) for request in requests))
            return mixed, [await engine.generate(request) for request in requests]

    mixed, alone = _run(main)
    assert mixed[2].log_probs is None
    assert mixed[1].extra_fields["step_indices"].tolist() == [1, 2]
    for one, other in zip(mixed, alone, strict=True):
        assert torch.equal(one.extra_fields["latents_clean"], other.extra_fields["latents_clean"])


def test_fixed_places_give_equal_bits_in_any_company(tiny: str) -> None:
    requests = [_request(seed, pack=PackPosition(seed, 4)) for seed in range(4)]

    async def main() -> list[list[DiffusionOutput]]:
        async with _engine(tiny) as engine:
            whole = await _together(*(engine.generate(request) for request in requests))
            turned = (await _together(*(engine.generate(request) for request in reversed(requests))))[::-1]
            split = [await engine.generate(request) for request in requests]
            return [whole, turned, split]

    whole, *others = _run(main)
    for other in others:
        for one, two in zip(whole, other, strict=True):
            assert torch.equal(one.diffusion_output, two.diffusion_output)
            assert torch.equal(one.log_probs, two.log_probs)
            assert torch.equal(one.extra_fields["all_latents"], two.extra_fields["all_latents"])


def test_a_bad_request_fails_alone(tiny: str) -> None:
    async def main() -> list[Any]:
        async with _engine(tiny) as engine:
            bad = _request(2, sampling=replace(SAMPLING, height=40))
            calls = [engine.generate(_request(1)), engine.generate(bad), engine.generate(_request(3))]
            return await asyncio.gather(*calls, return_exceptions=True)

    good, bad, other = _run(main)
    assert isinstance(bad, ConfigError) and "32 or 48" in str(bad)
    assert good.stop_reason == other.stop_reason == "completed"


def test_an_adapter_changes_samples_and_its_checksum_is_the_senders(tiny: str) -> None:
    update = _adapter_update(tiny, 3, ["attn.to_q", "attn.to_out.0"])

    async def main() -> tuple[DiffusionOutput, DiffusionOutput, Any]:
        async with _engine(tiny) as engine:
            before = await engine.generate(_request(1))
            loaded = await engine.load_weights(update)
            return before, await engine.generate(_request(1)), loaded

    before, after, loaded = _run(main)
    assert (loaded.version, loaded.bound_modules, loaded.checksum) == (3, 4, checksum(update.tensors))
    assert after.extra_fields["weights_version"] == 3
    assert (before.extra_fields["latents_clean"] - after.extra_fields["latents_clean"]).abs().max() > 1e-3


def test_an_adapter_is_replaced_by_the_next_version(tiny: str) -> None:
    first, second = (_adapter_update(tiny, version, ["attn.to_q"]) for version in (1, 2))

    async def main() -> tuple[DiffusionOutput, ...]:
        async with _engine(tiny) as engine, _engine(tiny) as fresh:
            await engine.load_weights(first)
            await engine.load_weights(second)
            await fresh.load_weights(second)
            return await engine.generate(_request(1)), await fresh.generate(_request(1))

    one, other = _run(main)
    assert torch.equal(one.extra_fields["latents_clean"], other.extra_fields["latents_clean"])


def test_an_adapter_for_another_network_is_an_error(tiny: str) -> None:
    update = _adapter_update(tiny, 1, ["attn.to_q"])
    moved = {name.replace("transformer_blocks", "blocks"): tensor for name, tensor in update.tensors.items()}
    partly = dict(update.tensors) | {
        name.replace(".0.", ".9."): tensor for name, tensor in update.tensors.items() if ".0." in name
    }

    async def main() -> None:
        async with _engine(tiny) as engine:
            with pytest.raises(ContractError, match="0 of 2 LoRA modules"):
                await engine.load_weights(replace(update, tensors=moved))
            with pytest.raises(ContractError, match="2 of 3 LoRA modules"):
                await engine.load_weights(replace(update, tensors=partly))
            assert (await engine.generate(_request(1))).extra_fields["weights_version"] == 0

    _run(main)


def test_an_adapter_that_is_refused_leaves_the_one_before_in_force(tiny: str) -> None:
    good = _adapter_update(tiny, 1, ["attn.to_q"])
    narrow = {name: tensor[:, :-1].clone() for name, tensor in good.tensors.items()}

    async def main() -> list[DiffusionOutput]:
        async with _engine(tiny) as engine:
            outputs = [await engine.generate(_request(1))]
            for update in (good, replace(good, version=2)):
                await engine.load_weights(update)
                outputs.append(await engine.generate(_request(1)))
                with pytest.raises(ContractError, match="does not fit"):
                    await engine.load_weights(replace(good, version=9, tensors=narrow))
                outputs.append(await engine.generate(_request(1)))
            return outputs

    base, *others = _run(main)
    assert [output.extra_fields["weights_version"] for output in others] == [1, 1, 2, 2]
    latents = [output.extra_fields["latents_clean"] for output in others]
    assert all(torch.equal(each, latents[0]) for each in latents)
    assert (base.extra_fields["latents_clean"] - latents[0]).abs().max() > 1e-3


def test_a_tensor_that_stands_otherwise_than_sent_is_found(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    update = _adapter_update(tiny, 1, ["attn.to_q"])
    set_state = peft.set_peft_model_state_dict

    def lossy(model: Any, state: dict[str, torch.Tensor], **options: Any) -> Any:
        first, *rest = state
        return set_state(model, {first: state[first] * 1.001, **{name: state[name] for name in rest}}, **options)

    async def main() -> None:
        async with _engine(tiny) as engine:
            monkeypatch.setattr(peft, "set_peft_model_state_dict", lossy)
            with pytest.raises(ContractError, match="as it was sent"):
                await engine.load_weights(update)
            assert (await engine.generate(_request(1))).extra_fields["weights_version"] == 0

    _run(main)


def test_full_weights_of_another_shape_change_nothing(tiny: str) -> None:
    network = sd3.build(None).load_denoiser(tiny, torch.float32)
    moved = {name: tensor + 0.01 for name, tensor in network.named_parameters()}
    last = list(moved)[-1]
    moved[last] = moved[last][:-1]

    async def main() -> list[DiffusionOutput]:
        async with _engine(tiny) as engine:
            before = await engine.generate(_request(1))
            with pytest.raises(ContractError, match="was sent with shape"):
                await engine.load_weights(WeightUpdate(1, "full", moved))
            return [before, await engine.generate(_request(1))]

    before, after = _run(main)
    assert torch.equal(before.extra_fields["latents_clean"], after.extra_fields["latents_clean"])


def test_full_weights_are_taken_and_restored_bit_for_bit(tiny: str) -> None:
    state = {
        name: tensor.clone() for name, tensor in sd3.build(None).load_denoiser(tiny, torch.float32).named_parameters()
    }
    moved = {name: tensor + 0.01 for name, tensor in state.items()}

    async def main() -> list[DiffusionOutput]:
        async with _engine(tiny) as engine:
            outputs = [await engine.generate(_request(1))]
            for version, tensors in enumerate((moved, state), start=1):
                loaded = await engine.load_weights(WeightUpdate(version, "full", tensors))
                assert loaded.bound_modules == len(state)
                outputs.append(await engine.generate(_request(1)))
            with pytest.raises(ContractError, match="own parameters"):
                await engine.load_weights(WeightUpdate(3, "full", dict(list(state.items())[:-1])))
            return outputs

    base, changed, restored = _run(main)
    assert (base.extra_fields["latents_clean"] - changed.extra_fields["latents_clean"]).abs().max() > 1e-3
    assert torch.equal(base.extra_fields["latents_clean"], restored.extra_fields["latents_clean"])


def test_a_closed_or_sleeping_engine_refuses(tiny: str) -> None:
    async def main() -> None:
        async with _engine(tiny) as engine:
            await engine.sleep()
            with pytest.raises(EngineError, match="asleep"):
                await engine.generate(_request(1))
            await engine.wake_up()
            await engine.generate(_request(1))
            pending = asyncio.create_task(
                engine.generate(_request(2, sampling=replace(SAMPLING, num_inference_steps=300)))
            )
            await asyncio.sleep(0.1)
            await engine.close()
            with pytest.raises(EngineError, match="closed"):
                await pending
            with pytest.raises(EngineError, match="closed"):
                await engine.generate(_request(1))

    _run(main)


def test_a_request_past_its_deadline_is_a_deadline_error(tiny: str) -> None:
    async def main() -> None:
        async with _engine(tiny, request_timeout_s=0.05) as engine:
            with pytest.raises(DeadlineError, match="r1"):
                await engine.generate(_request(1, sampling=replace(SAMPLING, num_inference_steps=100)))

    _run(main)


def test_more_than_one_device_is_refused(tiny: str) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel"):
        asyncio.run(engine_module.build(_options(tiny, tensor_parallel=2)))
