"""The embedded model and prompts are what their card says, and the script that makes them is repeatable."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from diffusers import StableDiffusion3Pipeline

import verl_omni_core
from scripts.glyph.networks import Glyph
from scripts.glyph.prompts import pieces, split_texts
from scripts.glyph.recipe import WIDE
from scripts.glyph.render import HEIGHT, WIDTH, Renderer, StyleMixture, StyleSampler
from scripts.glyph.sample import draw, start_noise
from scripts.glyph.text import ALPHABET, MAX_SEQUENCE_LENGTH, TEXT_LENGTH, TokenTable, prompt_of, random_ids, spell

GLYPH = Path(verl_omni_core.__file__).parent / "glyph"
PROMPTS = ["train", "validation"]


@pytest.fixture(scope="module")
def pipeline() -> StableDiffusion3Pipeline:
    loaded = StableDiffusion3Pipeline.from_pretrained(GLYPH / "pipeline", torch_dtype=torch.float32)
    loaded.set_progress_bar_config(disable=True)
    return loaded


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer()


def rows(split: str) -> list[dict]:
    return pq.read_table(GLYPH / "prompts" / f"{split}.parquet").to_pylist()


def encoded(pipeline: StableDiffusion3Pipeline, prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        embeds, _, pooled, _ = pipeline.encode_prompt(
            prompts, None, None, do_classifier_free_guidance=False, max_sequence_length=MAX_SEQUENCE_LENGTH
        )
    return embeds, pooled


def test_package_stays_small() -> None:
    assert sum(path.stat().st_size for path in (GLYPH / "pipeline").rglob("*") if path.is_file()) < 12e6
    assert sum(path.stat().st_size for path in (GLYPH / "prompts").iterdir()) < 200e3


def test_weights_are_float16_safetensors_only() -> None:
    from safetensors import safe_open

    files = sorted((GLYPH / "pipeline").rglob("*.safetensors"))
    assert len(files) == 5
    for path in files:
        with safe_open(path, "pt") as tensors:
            assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == {"F16"}  # noqa: SIM118
    assert not [path for path in (GLYPH / "pipeline").rglob("*") if path.suffix in {".bin", ".pt", ".pkl", ".ckpt"}]


@pytest.mark.parametrize("part", ["transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3"])
def test_every_stored_tensor_is_loaded_and_none_is_missing(pipeline: StableDiffusion3Pipeline, part: str) -> None:
    owner = type(getattr(pipeline, part))
    _, report = owner.from_pretrained(GLYPH / "pipeline" / part, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]


def test_configs_name_no_folder_of_the_machine_that_made_them() -> None:
    for path in (GLYPH / "pipeline").rglob("*.json"):
        assert "/tmp" not in path.read_text(), path
        assert "/home" not in path.read_text(), path


def test_t5_output_is_exactly_zero(pipeline: StableDiffusion3Pipeline) -> None:
    embeds, _ = encoded(pipeline, ['text "K7QX"', "something else"])
    assert embeds.shape == (2, 2 * MAX_SEQUENCE_LENGTH, 128)
    assert embeds[:, :MAX_SEQUENCE_LENGTH].abs().max() > 0
    assert (embeds[:, MAX_SEQUENCE_LENGTH:] == 0).all()


def test_training_conditions_are_those_of_the_stock_pipeline(pipeline: StableDiffusion3Pipeline) -> None:
    ids_BN = random_ids(16, torch.Generator().manual_seed(0))
    expected_embeds, expected_pooled = encoded(pipeline, [prompt_of(text) for text in spell(ids_BN)])
    glyph = Glyph(pipeline.vae, pipeline.transformer, (pipeline.text_encoder, pipeline.text_encoder_2))
    with torch.no_grad():
        embeds, pooled = glyph.conditions(TokenTable(pipeline.tokenizer)(ids_BN))
    assert torch.equal(embeds, expected_embeds)
    assert torch.equal(pooled, expected_pooled)


def test_sampling_equals_the_stock_pipeline(pipeline: StableDiffusion3Pipeline) -> None:
    noise, steps = start_noise(1, seed=0), 4
    tokens = pipeline.tokenizer(
        'text "K7QX"', padding="max_length", max_length=MAX_SEQUENCE_LENGTH, return_tensors="pt"
    ).input_ids
    glyph = Glyph(pipeline.vae, pipeline.transformer, (pipeline.text_encoder, pipeline.text_encoder_2))
    picture = pipeline(
        'text "K7QX"',
        height=HEIGHT,
        width=WIDTH,
        num_inference_steps=steps,
        sigmas=[1 - step / steps for step in range(steps)],
        guidance_scale=1.0,
        max_sequence_length=MAX_SEQUENCE_LENGTH,
        latents=noise,
    ).images[0]
    ours = draw(glyph, tokens, noise, steps)[0].transpose(1, 2, 0)
    assert np.abs(ours.astype(int) - np.asarray(picture).astype(int)).max() <= 1


def test_start_up_request_of_an_engine_fits(pipeline: StableDiffusion3Pipeline) -> None:
    side = pipeline.transformer.config.pos_embed_max_size * pipeline.transformer.config.patch_size
    assert side * pipeline.vae_scale_factor >= 512
    assert pipeline.scheduler.config.shift == 1.0
    assert pipeline.tokenizer_max_length == MAX_SEQUENCE_LENGTH


@pytest.mark.parametrize("split", PROMPTS)
def test_prompt_rows_have_the_card_columns(split: str) -> None:
    table = rows(split)
    assert len({row["ground_truth"] for row in table}) == len(table) == {"train": 8192, "validation": 128}[split]
    for index, row in enumerate(table):
        assert row["prompt"] == f'text "{row["ground_truth"]}"'
        assert len(row["ground_truth"]) == TEXT_LENGTH
        assert set(row["ground_truth"]) <= set(ALPHABET)
        assert row["data_source"] == "glyph"
        assert json.loads(row["extra_info"]) == {"split": split, "index": index}


def test_held_out_texts_share_no_three_characters_with_training() -> None:
    train, validation = ([row["ground_truth"] for row in rows(split)] for split in PROMPTS)
    seen = {piece for text in train for piece in pieces(text)}
    assert all(len(piece) == 3 for piece in seen)
    assert not seen & {piece for text in validation for piece in pieces(text)}


def test_prompt_files_are_what_the_script_writes() -> None:
    assert split_texts() == tuple([row["ground_truth"] for row in rows(split)] for split in PROMPTS)


def test_renderer_repeats_itself_for_a_seed(renderer: Renderer) -> None:
    pictures = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        ids_BN = random_ids(6)
        pictures.append(renderer(ids_BN, StyleSampler(WIDE, renderer.fonts)(6)))
    assert torch.equal(pictures[0], pictures[1])
    assert not torch.equal(pictures[0], pictures[2])
    assert pictures[0].shape == (6, 3, HEIGHT, WIDTH)
    assert pictures[0].abs().max() <= 1


def test_easy_styles_can_be_read_and_pale_ones_cannot(renderer: Renderer) -> None:
    from dataclasses import replace

    from scripts.glyph.ocr import reward
    from scripts.glyph.sample import to_uint8

    torch.manual_seed(0)
    ids_BN = random_ids(12)
    easy = StyleSampler(StyleMixture(), renderer.fonts)(12)
    pale = replace(easy, contrast=torch.full((12,), 0.002))
    means = []
    for style in (easy, pale):
        pictures = to_uint8(renderer(ids_BN, style))
        means.append(np.mean([reward(picture, text) for picture, text in zip(pictures, spell(ids_BN), strict=True)]))
    assert means[0] > 0.95
    assert means[1] < 0.2


def test_card_states_measured_numbers() -> None:
    card = (GLYPH / "README.md").read_text()
    row = next(line for line in card.splitlines() if line.startswith("| 10 |"))
    assert 0.40 <= float(row.split("|")[2]) <= 0.65
