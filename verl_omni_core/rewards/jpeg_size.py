"""How small or how large a picture is as JPEG.

``compressibility`` is the negative size in kB over 500 (below 0, higher is smaller), ``incompressibility`` the size in
kB (above 0, higher is larger); a kB is 1000 bytes. Sizes depend on the resolution and, by a few per cent, on the
encoder.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from verl_omni_core.rewards._contract import Score, Scorer, ScoringItem
from verl_omni_core.rewards._media import pixels_hwc


@dataclass(frozen=True)
class Options:
    """Options of the scorer."""

    reward: Annotated[
        Literal["compressibility", "incompressibility"], Field(description="Which direction is rewarded.")
    ] = "compressibility"
    quality: Annotated[int, Field(ge=1, le=100, description="JPEG quality.")] = 95


class JpegSizeScorer:
    """Encodes each picture in memory and measures it."""

    def __init__(self, options: Options) -> None:
        import PIL

        self._options = options
        self._compress = options.reward == "compressibility"
        self.RANGE = (float("-inf"), 0.0) if self._compress else (0.0, float("inf"))
        self.VERSION = f"1+pillow-{PIL.__version__}"

    def score(self, items: Sequence[ScoringItem]) -> list[Score]:
        """Measure each picture.

        Returns: a score an item, in order; extra ``bytes`` is the encoded size.
        Raises: ContractError for a picture that is not uint8 [3, H, W].
        Source: DDPO, Black et al. 2023 (arXiv:2305.13301), (in)compressibility; divisor as in the Flow-GRPO code.
        """
        sizes = [_jpeg_bytes(item, self._options.quality) for item in items]
        return [Score(-n / 500_000 if self._compress else n / 1000, extra={"bytes": float(n)}) for n in sizes]


def build(options: Options) -> Scorer:
    """Return the scorer."""
    return JpegSizeScorer(options)


def _jpeg_bytes(item: ScoringItem, quality: int) -> int:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels_hwc(item.image)).save(buffer, format="JPEG", quality=quality)
    return buffer.tell()
