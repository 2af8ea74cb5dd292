"""A model adapter outside the tree with an option that shows: every picture is of one grey."""

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from verl_omni_core.models.sd3 import SD3Adapter


@dataclass(frozen=True)
class Options:
    """Options of the adapter."""

    level: Annotated[int, Field(ge=0, le=255, description="Value of every pixel.")] = 0


class PaintedAdapter(SD3Adapter):
    """SD3 whose decoder paints."""

    def __init__(self, level: int) -> None:
        self.level = level

    def decode(self, decoder: torch.nn.Module, latents: Tensor) -> Tensor:
        """Return uint8 [B, 3, H, W] pixels of one value."""
        return torch.full_like(super().decode(decoder, latents), self.level)


def build(options: Options) -> PaintedAdapter:
    """Return the adapter."""
    return PaintedAdapter(options.level)
