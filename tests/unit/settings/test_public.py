"""The settings groups under VeRL-Omni's class names."""

import pytest

from verl_omni_core.settings import public
from verl_omni_core.settings.loader import load


@pytest.fixture
def config():
    return load("sd3_5-flow_grpo-ocr-1gpu", environ={}).config


def test_each_view_takes_its_part_of_a_run(config):
    assert public.DiffusionModelConfig.of(config).lora == config.model.lora
    assert public.DiffusionLossConfig.of(config).clip_range == 1e-5
    assert public.DiffusionActorConfig.of(config).training == config.training
    assert public.DiffusionActorConfig.of(config).diffusion_loss == public.DiffusionLossConfig.of(config)
    assert public.FSDPDiffusionActorConfig.of(config).dtype == "bfloat16"
    rollout = public.DiffusionRolloutConfig.of(config)
    assert rollout.group_size == 8 and rollout.pipeline.height == 384 and rollout.algo.noise_level == 0.8


def test_validation_draws_without_noise(config):
    sampling = public.DiffusionSamplingConfig.of(config)
    assert sampling.algo.noise_level == 0.0
    assert public.DiffusionRolloutAlgoConfig.of(config).noise_level == 0.8
    assert sampling.pipeline.num_inference_steps == 28
    assert public.DiffusionPipelineConfig.of(config).num_inference_steps == 10
    assert sampling.pipeline.guidance_scale == config.sampler.guidance_scale


@pytest.mark.parametrize(
    "name",
    [
        "DiffusionModelConfig",
        "DiffusionActorConfig",
        "FSDPDiffusionActorConfig",
        "DiffusionLossConfig",
        "DiffusionRolloutConfig",
        "DiffusionRolloutAlgoConfig",
        "DiffusionPipelineConfig",
        "DiffusionSamplingConfig",
    ],
)
def test_each_has_defaults_and_refuses_unknown_keys(name):
    cls = getattr(public, name)
    assert cls() == cls.model_validate(cls().model_dump())
    with pytest.raises(ValueError, match="Extra inputs"):
        cls(no_such_key=1)
