"""Exported weights in stock libraries: no key missing or left over, and the trainer's own picture."""

import logging
import warnings

import peft
import pytest
import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline

from tests.unit.training import tiny
from verl_omni_core.errors import ConfigError, ContractError
from verl_omni_core.samplers._denoise import denoise
from verl_omni_core.training.export import export_adapter, export_pipeline


class _Complaints(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


PROMPT, SEED = "a red cube", 11


@pytest.fixture(scope="module")
def made(pipeline):
    made = tiny.engine(pipeline)
    tiny.stir(made, scale=0.5)
    return made


@pytest.fixture(scope="module")
def tensors(made):
    named, config = made.get_per_tensor_param()
    return dict(named), config


@pytest.fixture(scope="module")
def trained(made, pipeline):
    """The final latents that the trainer draws."""
    return _own_latents(made, pipeline)


def _own_latents(made, pipeline):
    encoders = tiny.ADAPTER.load_encoders(str(pipeline), torch.float32)
    told = {name: value[None] for name, value in tiny.ADAPTER.encode(encoders, PROMPT, None, 16).items()}
    how = made.denoising
    generator = torch.Generator().manual_seed(SEED)
    noise = torch.randn(1, 16, tiny.HEIGHT // 8, tiny.WIDTH // 8, generator=generator)
    with made.eval_mode() as module:
        drawn = denoise(
            lambda x, t, _: made.forward_step(x, t, told, 1.0, module),
            noise, how.schedule, how.rule, {}, noise_level=0.0, window=None, generators=[generator],
        )  # fmt: skip
    return drawn.latents_clean


def _draw(pipe):
    pipe.set_progress_bar_config(disable=True)
    return pipe(
        PROMPT, height=tiny.HEIGHT, width=tiny.WIDTH, guidance_scale=1.0, max_sequence_length=16, output_type="latent",
        sigmas=[1 - i / tiny.STEPS for i in range(tiny.STEPS)], generator=torch.Generator().manual_seed(SEED),
    ).images  # fmt: skip


def test_stock_diffusers_loads_the_adapter_and_draws_the_trainers_picture(pipeline, tensors, trained, tmp_path):
    export_adapter(tmp_path / "adapter", *tensors)
    pipe = StableDiffusion3Pipeline.from_pretrained(str(pipeline))
    base = _draw(pipe)
    complaints = _Complaints()  # diffusers logs missing and unexpected keys
    logging.getLogger("diffusers").addHandler(complaints)
    try:
        pipe.load_lora_weights(str(tmp_path / "adapter"))
    finally:
        logging.getLogger("diffusers").removeHandler(complaints)
    assert not [text for text in complaints.texts if "led to" in text]
    config = pipe.transformer.peft_config["default_0"]
    assert (config.r, config.lora_alpha) == (4, 8)
    loaded = {n for n, _ in pipe.transformer.named_parameters() if ".lora_" in n}
    assert len(loaded) == len(tensors[0])
    found = _draw(pipe)
    assert torch.allclose(found, trained, atol=1e-4) and not torch.allclose(found, base, atol=1e-2)


def test_stock_peft_loads_the_adapter_with_no_key_missing_or_left(pipeline, made, tensors, batch, tmp_path):
    export_adapter(tmp_path / "adapter", *tensors)
    transformer = SD3Transformer2DModel.from_pretrained(str(pipeline), subfolder="transformer")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = peft.PeftModel.from_pretrained(transformer, str(tmp_path / "adapter"))
    result = model.load_adapter(str(tmp_path / "adapter"), "again")
    assert not result.unexpected_keys and not [key for key in result.missing_keys if "lora" in key]
    found = peft.get_peft_model_state_dict(model)
    assert {name.removeprefix("base_model.model."): t.shape for name, t in found.items()} == {
        name: t.shape for name, t in tensors[0].items()
    }
    inputs = made.prepare_model_inputs(batch, [(0, 0), (1, 1)])
    expected = made.prepare_model_outputs(inputs).velocity
    assert torch.allclose(made.prepare_model_outputs(inputs, model).velocity, expected, atol=1e-6)


def test_a_merged_pipeline_draws_the_trainers_picture(pipeline, tensors, trained, tmp_path):
    export_pipeline(tmp_path / "merged", tiny.ADAPTER, pipeline, *tensors)
    assert torch.allclose(_draw(StableDiffusion3Pipeline.from_pretrained(str(tmp_path / "merged"))), trained, atol=1e-4)
    stock, merged = ({p.name for p in (f / "transformer").iterdir()} for f in (pipeline, tmp_path / "merged"))
    assert stock == merged


def test_a_fully_trained_pipeline_draws_the_trainers_picture(pipeline, tmp_path):
    made = tiny.engine(pipeline, rank=0)
    with torch.no_grad():
        made.module.proj_out.weight.mul_(1.1)
    named, config = made.get_per_tensor_param()
    export_pipeline(tmp_path / "full", tiny.ADAPTER, pipeline, dict(named), config)
    found = _draw(StableDiffusion3Pipeline.from_pretrained(str(tmp_path / "full")))
    assert torch.allclose(found, _own_latents(made, pipeline), atol=1e-4)


def test_tensors_of_another_model_are_refused(pipeline, tensors, tmp_path):
    with pytest.raises(ContractError, match="missing or unexpected"):
        export_pipeline(tmp_path / "a", tiny.ADAPTER, pipeline, {"x": torch.zeros(1)}, None)
    fewer = dict(list(tensors[0].items())[:-1])
    with pytest.raises(ContractError, match="does not fit"):
        export_pipeline(tmp_path / "b", tiny.ADAPTER, pipeline, fewer, tensors[1])


def test_a_folder_in_use_is_not_overwritten(tensors, tmp_path):
    (tmp_path / "note").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        export_adapter(tmp_path, *tensors)
