"""Measures a trained glyph: the OCR reward on the held-out prompts."""

from dataclasses import dataclass

import torch

from scripts.glyph.networks import Glyph
from scripts.glyph.ocr import Reader
from scripts.glyph.sample import draw, start_noise
from scripts.glyph.text import MAX_SEQUENCE_LENGTH, clip_tokenizer, prompt_of

SEEDS = (0, 1, 2, 3)


@dataclass(frozen=True)
class Score:
    """Means over all prompts and seeds."""

    steps: int
    mean_reward: float
    exact_share: float
    unread_share: float  # reward 0
    best_of_seeds: float  # mean over prompts of the best reward among the seeds


def tokens_of(texts: list[str], device: torch.device | str) -> torch.Tensor:
    """CLIP tokens of the prompts for ``texts``, shape (B, MAX_SEQUENCE_LENGTH)."""
    prompts = [prompt_of(text) for text in texts]
    batch = clip_tokenizer()(prompts, padding="max_length", max_length=MAX_SEQUENCE_LENGTH, return_tensors="pt")
    return batch.input_ids.to(device)


def measure(glyph: Glyph, texts: list[str], steps: int, reader: Reader, device: torch.device | str) -> Score:
    """Draw every text once per seed and let the reader score it."""
    tokens = tokens_of(texts, device)
    rewards_SB = []
    for seed in SEEDS:
        pictures = draw(glyph, tokens, start_noise(len(texts), seed), steps)
        rewards_SB.append(reader.rewards(pictures, texts))
    rewards = torch.tensor(rewards_SB)
    return Score(
        steps=steps,
        mean_reward=rewards.mean().item(),
        exact_share=(rewards == 1).float().mean().item(),
        unread_share=(rewards == 0).float().mean().item(),
        best_of_seeds=rewards.amax(0).mean().item(),
    )
