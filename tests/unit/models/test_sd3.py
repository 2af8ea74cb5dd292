"""The SD3 adapter computes what diffusers' own pipeline computes."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusion3Pipeline

from verl_omni_core.errors import ConfigError, ContractError, NumericError
from verl_omni_core.models import sd3

PROMPT, NEGATIVE = "the word HELLO on a sign", "two dogs"
SIZE, LENGTH, STEPS = 32, 24, 4


@pytest.fixture(scope="module")
def adapter() -> sd3.SD3Adapter:
    return sd3.build(None)


@pytest.fixture(scope="module")
def folder(adapter: sd3.SD3Adapter, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("sd3")
    adapter.build_tiny(str(path), seed=0)
    return str(path)


@pytest.fixture(scope="module")
def stock(folder: str) -> StableDiffusion3Pipeline:
    pipeline = StableDiffusion3Pipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _conditioning(
    adapter: sd3.SD3Adapter, folder: str, prompt: str = PROMPT, negative: str | None = NEGATIVE
) -> dict[str, torch.Tensor]:
    return dict(adapter.encode(adapter.load_encoders(folder, torch.float32), prompt, negative, LENGTH))


def _euler(adapter: sd3.SD3Adapter, folder: str, guidance_scale: float, grid: str, seeds: list[int]) -> torch.Tensor:
    geometry = adapter.geometry(SIZE, SIZE, adapter.decoder_config(folder))
    schedule = adapter.schedule(geometry, STEPS, adapter.scheduler_config(folder), grid)
    rows = {name: tensor.expand(len(seeds), *tensor.shape) for name, tensor in _conditioning(adapter, folder).items()}
    latents = adapter.initial_latents(geometry, [torch.Generator().manual_seed(seed) for seed in seeds])
    denoiser = adapter.load_denoiser(folder, torch.float32)
    with torch.no_grad():
        for step, timestep in enumerate(schedule.timesteps):
            velocity = adapter.velocity(denoiser, latents, timestep.expand(len(seeds)), rows, guidance_scale)
            latents = latents + (schedule.sigmas[step + 1] - schedule.sigmas[step]) * velocity
    return latents


@pytest.mark.parametrize("negative", [None, NEGATIVE, ""])
def test_encoding_is_bit_equal_to_the_stock_pipeline(
    adapter: sd3.SD3Adapter, folder: str, stock: StableDiffusion3Pipeline, negative: str | None
) -> None:
    ours = _conditioning(adapter, folder, negative=negative)
    embeds, negative_embeds, pooled, negative_pooled = stock.encode_prompt(
        PROMPT, None, None, do_classifier_free_guidance=negative is not None, negative_prompt=negative,
        max_sequence_length=LENGTH,
    )  # fmt: skip
    expected = {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}
    if negative is not None:
        expected |= {"negative_prompt_embeds": negative_embeds, "negative_pooled_prompt_embeds": negative_pooled}
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(ours[name], tensor[0]), name


def test_a_missing_t5_becomes_zeros_of_the_full_length(
    adapter: sd3.SD3Adapter, stock: StableDiffusion3Pipeline, tmp_path: Path
) -> None:
    StableDiffusion3Pipeline(**stock.components | {"text_encoder_3": None, "tokenizer_3": None}).save_pretrained(
        tmp_path
    )
    absent = {"text_encoder_3": None, "tokenizer_3": None}
    without = StableDiffusion3Pipeline.from_pretrained(tmp_path, torch_dtype=torch.float32, **absent)
    embeds, _, pooled, _ = without.encode_prompt(
        PROMPT, None, None, do_classifier_free_guidance=False, max_sequence_length=LENGTH
    )
    ours = _conditioning(adapter, str(tmp_path), negative=None)
    assert torch.equal(ours["prompt_embeds"], embeds[0])
    assert torch.equal(ours["pooled_prompt_embeds"], pooled[0])
    assert ours["prompt_embeds"].shape == (77 + LENGTH, 32)
    assert not ours["prompt_embeds"][77:].any()


def test_different_prompts_have_different_conditionings(adapter: sd3.SD3Adapter, folder: str) -> None:
    first, second = (_conditioning(adapter, folder, prompt) for prompt in ("a cat", "a cab"))
    for name in adapter.facts.conditioning:
        assert (first[name] - second[name]).abs().max() > 1e-3, name


@pytest.mark.parametrize("guidance_scale", [1.0, 4.5])
@pytest.mark.parametrize("grid", sd3.GRIDS)
def test_deterministic_sampling_gives_the_stock_latents(
    adapter: sd3.SD3Adapter, folder: str, stock: StableDiffusion3Pipeline, guidance_scale: float, grid: str
) -> None:
    sigmas = [1 - step / STEPS for step in range(STEPS)] if grid == "uniform" else None
    expected = stock(
        [PROMPT] * 2, negative_prompt=[NEGATIVE] * 2, height=SIZE, width=SIZE, num_inference_steps=STEPS, sigmas=sigmas,
        guidance_scale=guidance_scale, max_sequence_length=LENGTH, output_type="latent",
        generator=[torch.Generator().manual_seed(seed) for seed in (3, 4)],
    ).images  # fmt: skip
    ours = _euler(adapter, folder, guidance_scale, grid, [3, 4])
    assert (ours - expected).abs().max() < 1e-5 * expected.abs().max()
    assert (ours[0] - ours[1]).abs().max() > 0.1


def test_pixels_equal_the_stock_pipeline(adapter: sd3.SD3Adapter, folder: str, stock: StableDiffusion3Pipeline) -> None:
    latents = _euler(adapter, folder, 1.0, "scheduler", [3])
    images = stock(
        PROMPT, height=SIZE, width=SIZE, num_inference_steps=STEPS, guidance_scale=1.0, max_sequence_length=LENGTH,
        output_type="np", generator=torch.Generator().manual_seed(3),
    ).images  # fmt: skip
    ours = adapter.decode(adapter.load_decoder(folder, torch.float32), latents)
    assert ours.dtype == torch.uint8 and ours.shape == (1, 3, SIZE, SIZE)
    expected = torch.from_numpy(images).permute(0, 3, 1, 2) * 255
    assert (ours.float() - expected).abs().max() <= 0.501
    assert ours.float().std() > 5


def test_first_latents_equal_a_draw_of_diffusers(adapter: sd3.SD3Adapter, folder: str) -> None:
    from diffusers.utils.torch_utils import randn_tensor

    geometry = adapter.geometry(48, SIZE, adapter.decoder_config(folder))
    assert geometry.latent_shape == (16, 6, 4)
    ours = adapter.initial_latents(geometry, [torch.Generator().manual_seed(9)])
    drawn = randn_tensor((1, *geometry.latent_shape), generator=torch.Generator().manual_seed(9), dtype=torch.float32)
    assert torch.equal(ours, drawn)


@pytest.mark.parametrize(("height", "width", "named"), [(40, 32, "32 or 48"), (32, 100, "96 or 112"), (0, 32, "16")])
def test_an_impossible_size_names_the_nearest_legal_ones(
    adapter: sd3.SD3Adapter, folder: str, height: int, width: int, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        adapter.geometry(height, width, adapter.decoder_config(folder))


def test_an_unknown_grid_is_refused(adapter: sd3.SD3Adapter, folder: str) -> None:
    geometry = adapter.geometry(SIZE, SIZE, adapter.decoder_config(folder))
    with pytest.raises(ConfigError, match="scheduler, uniform"):
        adapter.schedule(geometry, STEPS, adapter.scheduler_config(folder), "karras")


def test_static_shift_grid_by_hand(adapter: sd3.SD3Adapter, folder: str) -> None:
    geometry = adapter.geometry(SIZE, SIZE, adapter.decoder_config(folder))
    schedule = adapter.schedule(geometry, 2, adapter.scheduler_config(folder), "uniform")
    # shift 3: 3 * 0.5 / (1 + 2 * 0.5) = 0.75
    assert torch.allclose(schedule.sigmas, torch.tensor([1.0, 0.75, 0.0]), atol=1e-7)
    assert torch.allclose(schedule.timesteps, torch.tensor([1000.0, 750.0]), atol=1e-4)


def test_dynamic_shift_by_hand(adapter: sd3.SD3Adapter, folder: str) -> None:
    geometry = adapter.geometry(512, 512, adapter.decoder_config(folder))  # 1024 image tokens
    # the scheduler's own default maximum, 1.15, always wins over the 1.16 that the pipeline would fall back to
    schedule = adapter.schedule(geometry, 2, {"use_dynamic_shifting": True}, "uniform")
    mu = 0.5 + (1024 - 256) * (1.15 - 0.5) / (4096 - 256)
    exponential = torch.tensor(mu).exp()
    assert torch.allclose(schedule.sigmas[1], exponential / (exponential + 1), atol=1e-6)


def test_guidance_without_an_unconditional_branch_is_refused(adapter: sd3.SD3Adapter) -> None:
    conditioning = {"prompt_embeds": torch.zeros(1, 3, 32), "pooled_prompt_embeds": torch.zeros(1, 64)}
    with pytest.raises(ContractError, match="negative_prompt_embeds"):
        adapter.calls(torch.zeros(1, 16, 2, 2), torch.zeros(1), conditioning, 4.0)


def test_guidance_formula_by_hand(adapter: sd3.SD3Adapter) -> None:
    outputs = {"positive": torch.tensor([2.0]).bfloat16(), "negative": torch.tensor([1.0]).bfloat16()}
    assert adapter.combine(outputs, 4.0).item() == 5.0
    assert adapter.combine(outputs, 1.0).item() == 2.0
    assert adapter.combine(outputs, 4.0).dtype == torch.float32


def test_noise_minus_data_is_the_sign_of_velocity(adapter: sd3.SD3Adapter) -> None:
    data, noise = torch.randn(1, 16, 2, 2), torch.randn(1, 16, 2, 2)
    conditioning = {"prompt_embeds": torch.zeros(1, 3, 32), "pooled_prompt_embeds": torch.zeros(1, 64)}
    velocity = adapter.velocity(lambda **_: (noise - data,), noise, torch.tensor([1000.0]), conditioning, 1.0)
    assert torch.allclose(noise - 1.0 * velocity, data, atol=1e-6)


def test_pixels_that_are_not_finite_are_an_error(adapter: sd3.SD3Adapter, folder: str) -> None:
    latents = torch.zeros(2, 16, 4, 4)
    latents[1] = torch.nan
    with pytest.raises(NumericError, match=r"rows \[1\] of 2"):
        adapter.decode(adapter.load_decoder(folder, torch.float32), latents)


def test_tokens_are_counted_by_tokenizer(adapter: sd3.SD3Adapter, folder: str) -> None:
    tokenizers = adapter.load_encoders(folder, torch.float32).tokenizers
    counts = adapter.token_counts(tokenizers, "abc de", 16)
    # CLIP: begin, five letters, end; T5: five letters, a space before each word, end
    assert counts == {"tokenizer": (7, 77), "tokenizer_2": (7, 77), "tokenizer_3": (8, 16)}
    assert adapter.token_counts(tokenizers, "a" * 200, 16)["tokenizer"] == (202, 77)


def test_a_folder_of_another_pipeline_is_refused(adapter: sd3.SD3Adapter, tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    with pytest.raises(ConfigError, match="FluxPipeline"):
        adapter.load_denoiser(str(tmp_path), torch.float32)
    with pytest.raises(ConfigError, match="does not exist"):
        adapter.load_encoders(str(tmp_path / "nothing"), torch.float32)


def test_lora_targets_all_match_and_leave_the_second_attention_alone(adapter: sd3.SD3Adapter, folder: str) -> None:
    names = [name for name, _ in adapter.load_denoiser(folder, torch.float32).named_modules()]
    for target in adapter.facts.lora_targets:
        matched = [name for name in names if name.endswith(f".{target}")]
        assert matched and not any("attn2" in name for name in matched), target
