"""Draws pictures with a trained glyph: Euler steps on the uniform grid, without guidance."""

import numpy as np
import torch

from scripts.glyph.networks import COMPRESSION, LATENT_CHANNELS, Glyph
from scripts.glyph.render import HEIGHT, WIDTH

LATENT_SHAPE = (LATENT_CHANNELS, HEIGHT // COMPRESSION, WIDTH // COMPRESSION)


def start_noise(batch: int, seed: int) -> torch.Tensor:
    """The latents that a batch starts from, the same on every device."""
    return torch.randn(batch, *LATENT_SHAPE, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def draw(glyph: Glyph, tokens_BL: torch.Tensor, noise: torch.Tensor, steps: int) -> np.ndarray:
    """Pictures as uint8 (B, 3, HEIGHT, WIDTH); the sigmas are 1, 1 - 1/steps, ..., 1/steps, 0."""
    device = tokens_BL.device
    embeds, pooled = glyph.conditions(tokens_BL)
    latents = noise.to(device)
    for step in range(steps):
        sigma = 1 - step / steps
        velocity = glyph.transformer(
            hidden_states=latents,
            encoder_hidden_states=embeds,
            pooled_projections=pooled,
            timestep=torch.full((latents.shape[0],), sigma * 1000, device=device),
            return_dict=False,
        )[0]
        latents = latents - velocity / steps
    return to_uint8(decode(glyph, latents))


@torch.no_grad()
def decode(glyph: Glyph, latents: torch.Tensor) -> torch.Tensor:
    """Pictures in about -1..1, shape (B, 3, HEIGHT, WIDTH)."""
    config = glyph.vae.config
    return glyph.vae.decode(latents / config.scaling_factor + config.shift_factor).sample


def to_uint8(pictures_BCHW: torch.Tensor) -> np.ndarray:
    """Rounded as the pipeline's image processor does, shape (B, 3, HEIGHT, WIDTH)."""
    unit = (pictures_BCHW / 2 + 0.5).clamp(0, 1)
    return (unit * 255).round().byte().cpu().numpy()
