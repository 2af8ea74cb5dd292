"""The parts of the pipeline before training: sizes, and how prompts become conditions."""

from dataclasses import dataclass

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
)

from scripts.glyph.text import MAX_SEQUENCE_LENGTH, clip_tokenizer, t5_tokenizer

LATENT_CHANNELS = 8
COMPRESSION = 4  # of the autoencoder, per side
TEXT_WIDTH = 64  # of each CLIP encoder
JOINT_WIDTH = 128


def build_vae() -> AutoencoderKL:
    """An autoencoder from 3 x 32 x 96 pixels to 8 x 8 x 24 latents."""
    return AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 3,
        up_block_types=["UpDecoderBlock2D"] * 3,
        block_out_channels=[32, 64, 64],
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=16,
        sample_size=96,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def build_transformer() -> SD3Transformer2DModel:
    """A six-layer SD3 transformer; ``pos_embed_max_size`` admits pictures up to 512 x 512."""
    return SD3Transformer2DModel(
        sample_size=128,
        patch_size=2,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=6,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=JOINT_WIDTH,
        caption_projection_dim=JOINT_WIDTH,
        pooled_projection_dim=2 * TEXT_WIDTH,
        pos_embed_max_size=64,
    )


def build_clip(tokenizer: CLIPTokenizer) -> CLIPTextModelWithProjection:
    """A two-layer CLIP text encoder."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_WIDTH,
        intermediate_size=2 * TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=MAX_SEQUENCE_LENGTH,
        projection_dim=TEXT_WIDTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModelWithProjection(config)


def build_t5(vocabulary: int) -> T5EncoderModel:
    """A one-layer T5 of zeros, so that its output is exactly zero.

    Engines load a third text encoder unconditionally; this one costs nothing and carries nothing.
    """
    config = T5Config(vocab_size=vocabulary, d_model=JOINT_WIDTH, d_kv=8, d_ff=16, num_layers=1, num_heads=1)
    encoder = T5EncoderModel(config)
    for parameter in encoder.requires_grad_(False).parameters():
        nn.init.zeros_(parameter)
    return encoder


@dataclass
class Glyph:
    """Everything that is trained, with the tokenizers."""

    vae: AutoencoderKL
    transformer: SD3Transformer2DModel
    clips: tuple[CLIPTextModelWithProjection, CLIPTextModelWithProjection]

    @classmethod
    def build(cls, device: torch.device | str) -> "Glyph":
        """Untrained parts on ``device``."""
        tokenizer = clip_tokenizer()
        clips = (build_clip(tokenizer).to(device), build_clip(tokenizer).to(device))
        return cls(vae=build_vae().to(device), transformer=build_transformer().to(device), clips=clips)

    @classmethod
    def load(cls, folder: str, device: torch.device | str) -> "Glyph":
        """The trained parts of a saved pipeline in float32."""
        pipeline = load_pipeline(folder).to(device)
        clips = (pipeline.text_encoder, pipeline.text_encoder_2)
        return cls(vae=pipeline.vae, transformer=pipeline.transformer, clips=clips)

    def generator_parameters(self) -> list[nn.Parameter]:
        """Parameters of the transformer and the text encoders, those that flow matching trains."""
        modules = (self.transformer, *self.clips)
        return [parameter for module in modules for parameter in module.parameters()]

    def conditions(self, tokens_BL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What ``StableDiffusion3Pipeline.encode_prompt`` returns for these CLIP tokens.

        Joint embeddings (B, 2 * MAX_SEQUENCE_LENGTH, JOINT_WIDTH), CLIP first and T5's zeros after it, and pooled
        projections (B, 2 * TEXT_WIDTH).
        """
        outputs = [clip(tokens_BL, output_hidden_states=True) for clip in self.clips]
        embeds = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1)
        pooled = torch.cat([output.text_embeds for output in outputs], dim=-1)
        return torch.cat([embeds, torch.zeros_like(embeds)], dim=1), pooled

    def pipeline(self) -> StableDiffusion3Pipeline:
        """A stock pipeline around the trained parts."""
        tokenizer_3 = t5_tokenizer()
        return StableDiffusion3Pipeline(
            transformer=self.transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
            vae=self.vae,
            text_encoder=self.clips[0],
            tokenizer=clip_tokenizer(),
            text_encoder_2=self.clips[1],
            tokenizer_2=clip_tokenizer(),
            text_encoder_3=build_t5(len(tokenizer_3)),
            tokenizer_3=tokenizer_3,
        )

    def save(self, folder: str) -> None:
        """Write the pipeline in float16; this rounds the parts in place."""
        for part in (self.vae, self.transformer):
            part.register_to_config(_name_or_path="glyph")  # else the folder that it was loaded from
        self.pipeline().to(dtype=torch.float16).save_pretrained(folder)
        for part in (self.vae, self.transformer, *self.clips):
            part.float()


def load_pipeline(folder: str) -> StableDiffusion3Pipeline:
    """A saved pipeline in float32 on the CPU."""
    return StableDiffusion3Pipeline.from_pretrained(folder, torch_dtype=torch.float32, local_files_only=True)
