"""How the samples of a batch are drawn, in training and in validation.

Equal to what the plan of a step writes down; used where a batch comes without a plan.
"""

import json
from typing import Any

from verl_omni_core.rollout._contract import SamplingParams
from verl_omni_core.samplers._window import window_of_step
from verl_omni_core.settings.run import RunConfig


def training_sampling(config: RunConfig, step: int) -> SamplingParams:
    """Return the sampling of a training step: stochastic in one window that all its samples share.

    Args:
        step: 1-based.
    Raises: ConfigError if the settings hold no window.
    """
    sampler = config.sampler
    window = window_of_step(
        config.run.seed,
        step,
        num_inference_steps=sampler.num_inference_steps,
        size=sampler.sde_window_size,
        range=sampler.sde_window_range,
        strategy=sampler.window,
    )
    return SamplingParams(
        height=sampler.height,
        width=sampler.width,
        num_inference_steps=sampler.num_inference_steps,
        sampler=sampler.name,
        sampler_options=sampler.options,
        grid=sampler.grid,
        noise_level=sampler.noise_level,
        window=window,
        guidance_scale=sampler.guidance_scale,
        max_sequence_length=sampler.max_sequence_length,
        logprobs=True,
    )


def validation_sampling(config: RunConfig) -> SamplingParams:
    """Return the sampling of validation: its own steps and guidance, no noise, no log-probs."""
    sampler, validation = config.sampler, config.sampler.validation
    scale = validation.guidance_scale
    return SamplingParams(
        height=sampler.height,
        width=sampler.width,
        num_inference_steps=validation.num_inference_steps,
        sampler=sampler.name,
        sampler_options=sampler.options,
        grid=sampler.grid,
        noise_level=0.0,
        window=None,
        guidance_scale=sampler.guidance_scale if scale is None else scale,
        max_sequence_length=sampler.max_sequence_length,
        logprobs=False,
    )


def sampling_from_json(text: str) -> SamplingParams:
    """Return the sampling that ``sampling_json`` of a requests table says."""
    values: dict[str, Any] = json.loads(text)
    window = values.get("window")
    return SamplingParams(**{**values, "window": None if window is None else (int(window[0]), int(window[1]))})
