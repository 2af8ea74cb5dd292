"""Guidance formulas, and the one rule for when guidance is on."""

from torch import Tensor


def is_guided(guidance_scale: float) -> bool:
    """Return whether a scale switches guidance on: above 1, as in diffusers' pipelines."""
    return guidance_scale > 1


def negative_prompt_for(negative_prompt: str | None, guidance_scale: float) -> str | None:
    """Return the prompt of the unconditional branch: none without guidance, empty where guidance has none given."""
    if not is_guided(guidance_scale):
        return None
    return "" if negative_prompt is None else negative_prompt


def classifier_free_guidance(positive: Tensor, negative: Tensor, guidance_scale: float) -> Tensor:
    """Return ``negative + guidance_scale * (positive - negative)``.

    Args:
        positive, negative: [B, X] fp32 outputs of the conditional and the unconditional branch.
        guidance_scale: unitless; 1 gives the conditional branch.
    Source: Ho and Salimans 2022 (arXiv:2207.12598), in the form of diffusers' pipelines.
    """
    return negative + guidance_scale * (positive - negative)
