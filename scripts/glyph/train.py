"""Trains the autoencoder, then the transformer and the text encoders by flow matching.

Axes: B batch, C channels, H and W rows and columns of a picture or its latents.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from scripts.glyph.loop import Budget, train
from scripts.glyph.networks import Glyph
from scripts.glyph.render import Renderer, StyleMixture, StyleSampler
from scripts.glyph.text import TokenTable, clip_tokenizer, random_ids


@dataclass(frozen=True)
class Stage:
    """One stretch of flow matching on one mixture of styles."""

    name: str
    mixture: StyleMixture
    budget: Budget


@dataclass(frozen=True)
class Recipe:
    """Every choice, besides the seed, that the trained weights depend on."""

    vae_batch: int
    vae_mixture: StyleMixture
    vae: Budget
    batch: int
    stages: tuple[Stage, ...]


class Trainer:
    """Holds the model and draws its training batches."""

    def __init__(self, glyph: Glyph, recipe: Recipe, device: torch.device):
        self.glyph = glyph
        self.recipe = recipe
        self.device = device
        self.render = Renderer(device)
        self.tokens = TokenTable(clip_tokenizer(), device)
        self.styles = StyleSampler(StyleMixture(), self.render.fonts, device)
        self.velocity = glyph.transformer
        if device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = True
            torch.backends.cudnn.allow_tf32 = True
            self.velocity = torch.compile(glyph.transformer, dynamic=False)

    def train_vae(self) -> None:
        """Fit the autoencoder to pictures of its mixture of styles, then set the latents' shift and scale."""
        vae = self.glyph.vae.train()
        batch = self.recipe.vae_batch
        self.styles.mixture = self.recipe.vae_mixture

        def loss_of_batch() -> torch.Tensor:
            pictures = self.render(random_ids(batch, device=self.device), self.styles(batch))
            posterior = vae.encode(pictures).latent_dist
            decoded = vae.decode(posterior.sample()).sample
            kl = posterior.kl().mean() / posterior.mean[0].numel()
            return F.mse_loss(decoded, pictures) + 0.2 * F.l1_loss(decoded, pictures) + 1e-3 * kl

        train("autoencoder", loss_of_batch, list(vae.parameters()), self.recipe.vae)
        vae.eval().requires_grad_(False)
        with torch.no_grad():
            pictures = self.render(random_ids(2048, device=self.device), self.styles(2048))
            latents = vae.encode(pictures).latent_dist.sample()
            error = F.l1_loss(vae.decode(latents).sample, pictures)
        vae.register_to_config(shift_factor=latents.mean().item(), scaling_factor=1 / latents.std().item())
        print(f"autoencoder mean error {error.item():.4f} of a range of 2", flush=True)

    def train_stage(self, stage: Stage) -> None:
        """Flow matching of the transformer and the text encoders on the stage's mixture of styles."""
        self.styles.mixture = stage.mixture
        self.glyph.vae.eval().requires_grad_(False)

        def loss_of_batch() -> torch.Tensor:
            ids_BN = random_ids(self.recipe.batch, device=self.device)
            latents, noise = self._latents_and_noise(ids_BN)
            return self._flow_loss(ids_BN, latents, noise)

        self.glyph.transformer.train()
        train(stage.name, loss_of_batch, self.glyph.generator_parameters(), stage.budget)
        self.glyph.transformer.eval()

    @torch.no_grad()
    def _latents_and_noise(self, ids_BN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        vae = self.glyph.vae
        pictures = self.render(ids_BN, self.styles(ids_BN.shape[0]))
        latents = vae.encode(pictures).latent_dist.sample()
        latents = (latents - vae.config.shift_factor) * vae.config.scaling_factor
        return latents, torch.randn_like(latents)

    def _flow_loss(self, ids_BN: torch.Tensor, latents: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Mean squared error of the velocity at logit-normal times."""
        sigma_B = torch.sigmoid(torch.randn(latents.shape[0], device=self.device))
        sigma = sigma_B[:, None, None, None]
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda", cache_enabled=False):
            embeds, pooled = self.glyph.conditions(self.tokens(ids_BN))
            velocity = self.velocity(
                hidden_states=(1 - sigma) * latents + sigma * noise,
                encoder_hidden_states=embeds,
                pooled_projections=pooled,
                timestep=sigma_B * 1000,
                return_dict=False,
            )[0]
        return F.mse_loss(velocity.float(), noise - latents)
