"""Stable Diffusion 3 and 3.5: MMDiT over 2D latents, two CLIP encoders and a T5.

Padding is attended to (no mask exists), so the padded length is part of the input and a missing T5 becomes zeros of the
full length. Guidance is plain classifier-free guidance. The network predicts the velocity ``noise - data``: no sign
change. Source: Esser et al. 2024 (arXiv:2403.03206) and diffusers' ``StableDiffusion3Pipeline``.

Axes: ``B`` rows, ``C h w`` latent, ``H W`` pixels, ``L`` text tokens, ``D`` width, ``N`` denoising steps.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from torch import Tensor

from verl_omni_core.errors import ConfigError, ContractError, NumericError
from verl_omni_core.given_files import json_object
from verl_omni_core.models import _tiny
from verl_omni_core.models._contract import Conditioning, Denoiser, Encoders, Facts, Geometry, Schedule
from verl_omni_core.models._guidance import classifier_free_guidance, is_guided

_PATCH = 2  # of every published checkpoint; diffusers' pipeline asks the network, which a geometry must not need
_ENCODERS = {"text_encoder": "tokenizer", "text_encoder_2": "tokenizer_2", "text_encoder_3": "tokenizer_3"}
_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
GRIDS = ("scheduler", "uniform")


class AbsentTextEncoder(torch.nn.Module):
    """Stands where a pipeline has no T5; remembers the width of the zeros that replace its output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width


class SD3Adapter:
    """The SD3 family for rollout and training; see :class:`verl_omni_core.models._contract.DenoiserAdapter`."""

    facts = Facts(
        pipeline_class="StableDiffusion3Pipeline",
        transformer_class="SD3Transformer2DModel",
        # with the prefix, because the bare suffix also names attn2, the second self-attention of 3.5's first blocks
        lora_targets=tuple(f"attn.{name}" for name in _ATTENTION),
        shard_blocks=("JointTransformerBlock",),
        conditioning=("prompt_embeds", "pooled_prompt_embeds"),
        negative_conditioning=("negative_prompt_embeds", "negative_pooled_prompt_embeds"),
    )

    def load_encoders(self, path: str, dtype: torch.dtype) -> Encoders:
        """Load tokenizers and text encoders of the pipeline folder ``path``.

        Raises:
            ConfigError: the folder is no pipeline of this family.
        """
        index = self._index(path)
        tokenizers: dict[str, Any] = {}
        modules: dict[str, torch.nn.Module] = {}
        for encoder, tokenizer in _ENCODERS.items():
            _, class_name = index.get(encoder) or (None, None)
            if class_name is None:
                modules[encoder] = AbsentTextEncoder(
                    _json(Path(path, "transformer", "config.json"))["joint_attention_dim"]
                )
                continue
            modules[encoder] = (
                getattr(transformers, class_name).from_pretrained(path, subfolder=encoder, dtype=dtype).eval()
            )
            tokenizers[tokenizer] = getattr(transformers, index[tokenizer][1]).from_pretrained(
                path, subfolder=tokenizer
            )
        return Encoders(tokenizers, modules)

    def load_denoiser(self, path: str, dtype: torch.dtype) -> torch.nn.Module:
        """Load the transformer, in evaluation mode."""
        self._index(path)
        return SD3Transformer2DModel.from_pretrained(path, subfolder="transformer", torch_dtype=dtype).eval()

    def outline_denoiser(self, path: str) -> torch.nn.Module:
        """Return the transformer without weights, on the meta device.

        Raises:
            ConfigError: the folder has no configuration of one.
        """
        config = _json(Path(path, "transformer", "config.json"))
        with torch.device("meta"):
            return SD3Transformer2DModel.from_config(config)

    def load_decoder(self, path: str, dtype: torch.dtype) -> torch.nn.Module:
        """Load the VAE, in evaluation mode."""
        self._index(path)
        return AutoencoderKL.from_pretrained(path, subfolder="vae", torch_dtype=dtype).eval()

    def scheduler_config(self, path: str) -> dict[str, Any]:
        """Return the scheduler's configuration as the checkpoint states it."""
        return _json(Path(path, "scheduler", "scheduler_config.json"))

    def decoder_config(self, path: str) -> dict[str, Any]:
        """Return the VAE's configuration without loading it; what :meth:`geometry` needs before anything starts."""
        return _json(Path(path, "vae", "config.json"))

    def build_tiny(self, folder: str, seed: int) -> None:
        """Write a pipeline of about 60,000 parameters: 3.5's structure (second attention, normalised queries and
        keys), VAE factor 8, 16 latent channels, sizes in multiples of 16 pixels."""
        clip_1, clip_2 = (_tiny.clip_tokenizer(max_length=77) for _ in range(2))
        t5 = _tiny.t5_tokenizer(max_length=512)
        transformer = SD3Transformer2DModel(
            sample_size=32,
            patch_size=_PATCH,
            in_channels=16,
            out_channels=16,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=32,
            caption_projection_dim=16,
            pooled_projection_dim=64,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
        )
        decoder = AutoencoderKL(
            block_out_channels=(8, 8, 8, 8),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            latent_channels=16,
            norm_num_groups=4,
            use_quant_conv=False,
            use_post_quant_conv=False,
            scaling_factor=1.5305,
            shift_factor=0.0609,
        )
        StableDiffusion3Pipeline(
            transformer=_tiny.randomize(transformer, seed, scale=0.3),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=_tiny.randomize(decoder, seed + 1),
            text_encoder=_tiny.clip_text_encoder(clip_1, width=16, projection=32, seed=seed + 2),
            tokenizer=clip_1,
            text_encoder_2=_tiny.clip_text_encoder(clip_2, width=16, projection=32, seed=seed + 3),
            tokenizer_2=clip_2,
            text_encoder_3=_tiny.t5_encoder(t5, width=32, seed=seed + 4),
            tokenizer_3=t5,
        ).save_pretrained(folder)

    def token_counts(
        self, tokenizers: Mapping[str, Any], prompt: str, max_sequence_length: int
    ) -> dict[str, tuple[int, int]]:
        """Return, by tokenizer, the prompt's tokens (special ones counted) and how many the encoder takes."""
        counts = {}
        for name, tokenizer in tokenizers.items():
            limit = max_sequence_length if name == "tokenizer_3" else tokenizer.model_max_length
            counts[name] = (len(tokenizer(prompt, verbose=False).input_ids), limit)
        return counts

    @torch.no_grad()
    def encode(
        self, encoders: Encoders, prompt: str, negative_prompt: str | None, max_sequence_length: int
    ) -> Conditioning:
        """Encode one prompt, and the unconditional branch where ``negative_prompt`` is given.

        Args:
            max_sequence_length: tokens of the T5 part; the result has 77 + ``max_sequence_length`` tokens.
        Returns: ``prompt_embeds`` [L, D] and ``pooled_prompt_embeds`` [D] in the encoders' dtype, on their device, and
            the two names with ``negative_``. Bit-equal to diffusers' ``encode_prompt`` for a batch of one.
        """
        embeds, pooled = self._encode_one(encoders, prompt, max_sequence_length)
        conditioning = {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}
        if negative_prompt is not None:
            embeds, pooled = self._encode_one(encoders, negative_prompt, max_sequence_length)
            conditioning |= {"negative_prompt_embeds": embeds, "negative_pooled_prompt_embeds": pooled}
        return conditioning

    def geometry(self, height: int, width: int, decoder_config: Mapping[str, Any]) -> Geometry:
        """Return the sizes of one sample.

        Raises:
            ConfigError: not positive multiples of the VAE's factor times the patch; names the nearest legal sizes.
        """
        factor = 2 ** (len(decoder_config["block_out_channels"]) - 1)
        unit = factor * _PATCH
        for name, size in (("height", height), ("width", width)):
            if size <= 0 or size % unit:
                below, above = size // unit * unit, (size // unit + 1) * unit
                legal = f"{below} or {above}" if below > 0 else f"{max(above, unit)}"
                raise ConfigError(
                    f"sampler.{name} is {size}, but this VAE makes multiples of {unit} pixels; use {legal}"
                )
        return Geometry(height, width, (decoder_config["latent_channels"], height // factor, width // factor))

    def initial_latents(self, geometry: Geometry, generators: Sequence[torch.Generator]) -> Tensor:
        """Return [B, C, h, w] fp32 standard normal latents, row ``i`` drawn from ``generators[i]`` on the CPU.

        Equal to what diffusers' pipeline draws from the same generators in fp32.
        """
        return torch.stack(
            [torch.randn(geometry.latent_shape, generator=generator, dtype=torch.float32) for generator in generators]
        )

    def schedule(
        self, geometry: Geometry, num_inference_steps: int, scheduler_config: Mapping[str, Any], grid: str
    ) -> Schedule:
        """Return the noise levels of ``num_inference_steps`` steps.

        Args:
            grid: ``scheduler``: diffusers' own levels, whose last step is short; ``uniform``: 1, 1-1/N, ..., 1/N
                through the scheduler's shift.
        Raises:
            ConfigError: unknown grid.
        """
        if grid not in GRIDS:
            raise ConfigError(f"sampler.grid is {grid!r}; use one of {', '.join(GRIDS)}")
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(dict(scheduler_config))
        sigmas = None
        if grid == "uniform":
            sigmas = [1.0 - step / num_inference_steps for step in range(num_inference_steps)]
        scheduler.set_timesteps(num_inference_steps, sigmas=sigmas, mu=_dynamic_shift(geometry, scheduler.config))
        return Schedule(scheduler.sigmas.float(), scheduler.timesteps.float())

    def calls(
        self, latents: Tensor, timestep: Tensor, conditioning: Mapping[str, Tensor], guidance_scale: float
    ) -> list[tuple[str, dict[str, Any]]]:
        """Return the network calls of one step as (branch, keyword arguments).

        Args:
            latents: [B, C, h, w] fp32. timestep: [B] fp32, 0 to 1000; never cast, the network embeds it in fp32.
            conditioning: [B, ...] tensors; the network computes in the dtype of ``prompt_embeds``.
        Raises:
            ContractError: guidance is on and the unconditional branch is missing.
        """
        branches = [("positive", "")]
        if is_guided(guidance_scale):
            branches.append(("negative", "negative_"))
            missing = [name for name in self.facts.negative_conditioning if name not in conditioning]
            if missing:
                raise ContractError(
                    f"guidance_scale is {guidance_scale}, which needs {missing}, but the conditioning has "
                    f"{sorted(conditioning)}; encode with a negative prompt (an empty one will do)"
                )
        return [
            (
                branch,
                {
                    "hidden_states": latents.to(conditioning["prompt_embeds"].dtype),
                    "timestep": timestep,
                    "encoder_hidden_states": conditioning[f"{prefix}prompt_embeds"],
                    "pooled_projections": conditioning[f"{prefix}pooled_prompt_embeds"],
                    "return_dict": False,
                },
            )
            for branch, prefix in branches
        ]

    def combine(self, outputs: Mapping[str, Tensor], guidance_scale: float) -> Tensor:
        """Return the velocity [B, C, h, w] fp32, towards noise, from the branches' outputs."""
        positive = outputs["positive"].float()
        if not is_guided(guidance_scale):
            return positive
        return classifier_free_guidance(positive, outputs["negative"].float(), guidance_scale)

    def velocity(
        self,
        denoiser: Denoiser,
        latents: Tensor,
        timestep: Tensor,
        conditioning: Mapping[str, Tensor],
        guidance_scale: float,
    ) -> Tensor:
        """Return the velocity [B, C, h, w] fp32 of ``denoiser``, any network with diffusers' keyword arguments."""
        calls = self.calls(latents, timestep, conditioning, guidance_scale)
        return self.combine({branch: denoiser(**arguments)[0] for branch, arguments in calls}, guidance_scale)

    @torch.no_grad()
    def decode(self, decoder: torch.nn.Module, latents: Tensor) -> Tensor:
        """Return uint8 [B, 3, H, W] pixels of fp32 latents [B, C, h, w].

        Raises:
            NumericError: a pixel is not finite; names the rows.
        """
        vae: Any = decoder
        config = vae.config
        shift = 0.0 if config.shift_factor is None else config.shift_factor
        pixels = vae.decode((latents.to(vae.dtype) / config.scaling_factor) + shift, return_dict=False)[0]
        rows = (~torch.isfinite(pixels).flatten(1).all(dim=1)).nonzero().flatten().tolist()
        if rows:
            raise NumericError(
                f"rows {rows} of {len(pixels)} decode to pixels that are not finite; lower training.learning_rate, or "
                "compute in float32 if the latents themselves are finite"
            )
        return (pixels.float() / 2 + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8)

    def _encode_one(self, encoders: Encoders, prompt: str, max_sequence_length: int) -> tuple[Tensor, Tensor]:
        clip_length = encoders.tokenizers["tokenizer"].model_max_length
        clips = []
        for encoder in ("text_encoder", "text_encoder_2"):
            module: Any = encoders.modules[encoder]
            ids = _token_ids(encoders.tokenizers[_ENCODERS[encoder]], prompt, clip_length)
            clips.append(module(ids.to(module.device), output_hidden_states=True))
        clip = torch.cat([output.hidden_states[-2] for output in clips], dim=-1)
        t5_module: Any = encoders.modules["text_encoder_3"]
        if isinstance(t5_module, AbsentTextEncoder):
            t5 = clip.new_zeros((1, max_sequence_length, t5_module.width))
        else:
            ids = _token_ids(encoders.tokenizers["tokenizer_3"], prompt, max_sequence_length)
            t5 = t5_module(ids.to(t5_module.device))[0]
        clip = torch.nn.functional.pad(clip, (0, t5.shape[-1] - clip.shape[-1]))
        embeds = torch.cat([clip, t5], dim=-2)
        return embeds[0], torch.cat([output[0] for output in clips], dim=-1)[0]

    def _index(self, path: str) -> dict[str, Any]:
        index = _json(Path(path, "model_index.json"))
        if index.get("_class_name") != self.facts.pipeline_class:
            raise ConfigError(
                f"model.path {path!r} holds a {index.get('_class_name')}, but model 'sd3' needs a "
                f"{self.facts.pipeline_class}; choose the model adapter of that pipeline"
            )
        return index


def build(options: Any) -> SD3Adapter:
    """Return the adapter; it has no options."""
    return SD3Adapter()


def _json(path: Path) -> dict[str, Any]:
    try:
        return json_object(path)
    except FileNotFoundError:
        raise ConfigError(
            f"model.path: {str(path)!r} does not exist; give a pipeline folder in diffusers format"
        ) from None
    except ConfigError as error:
        raise ConfigError(f"model.path: {error}") from error


def _token_ids(tokenizer: Any, prompt: str, length: int) -> Tensor:
    return tokenizer([prompt], padding="max_length", max_length=length, truncation=True, return_tensors="pt").input_ids


def _dynamic_shift(geometry: Geometry, config: Mapping[str, Any]) -> float | None:
    # diffusers' pipeline: linear in the number of image tokens, with these defaults where the checkpoint is silent
    if not config.get("use_dynamic_shifting"):
        return None
    _, height, width = geometry.latent_shape
    return diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3.calculate_shift(
        (height // _PATCH) * (width // _PATCH),
        config.get("base_image_seq_len", 256),
        config.get("max_image_seq_len", 4096),
        config.get("base_shift", 0.5),
        config.get("max_shift", 1.16),
    )
