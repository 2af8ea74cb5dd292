"""What a model offers: one adapter that rollout and training share, with the network as an argument.

Everything that decides a number (tokens, padding, timestep scaling, guidance, noise levels, sign of the prediction)
is written once, in the adapter; the engine passes its copy of the network, the trainer its sharded one. An adapter
knows no algorithm, no sampler and no engine.

Axes: ``B`` rows, ``C h w`` latent, ``H W`` pixels, ``L`` text tokens, ``D`` width, ``N`` denoising steps.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

Conditioning = Mapping[str, Tensor]
"""What the network is told about one prompt, without a batch axis: names to tensors. Names of the unconditional branch
start with ``negative_``. Complete: training runs no text encoder."""

Denoiser = Callable[..., Any]


@dataclass(frozen=True)
class Facts:
    """What holds for every checkpoint of a model."""

    pipeline_class: str
    """diffusers' pipeline class, also the engine's architecture name."""
    transformer_class: str
    lora_targets: tuple[str, ...]
    """Module names or suffixes (peft's ``target_modules``) that get an adapter by default."""
    shard_blocks: tuple[str, ...]
    """Class names of the blocks that FSDP shards."""
    conditioning: tuple[str, ...]
    """Names in a conditioning without guidance."""
    negative_conditioning: tuple[str, ...]
    """Names that guidance adds."""


@dataclass(frozen=True)
class Geometry:
    """Sizes of one sample; two rows share a batch only if theirs are equal."""

    height: int
    width: int
    latent_shape: tuple[int, ...]
    """[C, h, w]."""


@dataclass(frozen=True)
class Schedule:
    """Noise levels of one denoising run."""

    sigmas: Tensor
    """[N + 1] fp32, from 1, decreasing, last 0."""
    timesteps: Tensor
    """[N] fp32, as the model's scheduler names them."""


@dataclass
class Encoders:
    """Tokenizers and text encoders of a checkpoint, by the names of the pipeline's components."""

    tokenizers: dict[str, Any]
    modules: dict[str, torch.nn.Module]


class DenoiserAdapter(Protocol):
    """One model for both sides."""

    facts: Facts

    def load_encoders(self, path: str, dtype: torch.dtype) -> Encoders: ...

    def load_denoiser(self, path: str, dtype: torch.dtype) -> torch.nn.Module: ...

    def outline_denoiser(self, path: str) -> torch.nn.Module:
        """Return the network without weights, on the meta device: its modules and shapes, before anything starts."""
        ...

    def load_decoder(self, path: str, dtype: torch.dtype) -> torch.nn.Module: ...

    def scheduler_config(self, path: str) -> dict[str, Any]: ...

    def decoder_config(self, path: str) -> dict[str, Any]:
        """Return what :meth:`geometry` needs, without loading the decoder."""
        ...

    def build_tiny(self, folder: str, seed: int) -> None:
        """Write a tiny random-weight pipeline folder in diffusers format, without any download."""
        ...

    def token_counts(
        self, tokenizers: Mapping[str, Any], prompt: str, max_sequence_length: int
    ) -> dict[str, tuple[int, int]]:
        """Return, by tokenizer, how many tokens the prompt has and how many the encoder takes."""
        ...

    def encode(
        self, encoders: Encoders, prompt: str, negative_prompt: str | None, max_sequence_length: int
    ) -> Conditioning:
        """Encode one prompt; equal prompts give bit-equal results. ``negative_prompt`` none: no guidance."""
        ...

    def geometry(self, height: int, width: int, decoder_config: Mapping[str, Any]) -> Geometry:
        """Return the sizes. Raises ConfigError for sizes the VAE cannot make, with the nearest legal ones."""
        ...

    def initial_latents(self, geometry: Geometry, generators: Sequence[torch.Generator]) -> Tensor:
        """Return [B, C, h, w] fp32 standard normal latents on the CPU, one generator a row."""
        ...

    def schedule(
        self, geometry: Geometry, num_inference_steps: int, scheduler_config: Mapping[str, Any], grid: str
    ) -> Schedule:
        """Return the noise levels; the only place where shift rules live."""
        ...

    def calls(
        self, latents: Tensor, timestep: Tensor, conditioning: Mapping[str, Tensor], guidance_scale: float
    ) -> list[tuple[str, dict[str, Any]]]:
        """Return the network calls of one step as (branch, keyword arguments), batched [B, ...]."""
        ...

    def combine(self, outputs: Mapping[str, Tensor], guidance_scale: float) -> Tensor:
        """Return the velocity [B, C, h, w] fp32, towards noise, from the branches' outputs."""
        ...

    def velocity(
        self,
        denoiser: Denoiser,
        latents: Tensor,
        timestep: Tensor,
        conditioning: Mapping[str, Tensor],
        guidance_scale: float,
    ) -> Tensor:
        """Run :meth:`calls` through ``denoiser`` and :meth:`combine` the results."""
        ...

    def decode(self, decoder: torch.nn.Module, latents: Tensor) -> Tensor:
        """Return uint8 [B, 3, H, W] pixels of fp32 latents [B, C, h, w]."""
        ...
