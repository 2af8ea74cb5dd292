"""Distance fields of the letters, from which the renderer draws any size, slant and stroke weight.

Axes: F fonts, A letters of the alphabet, V and U rows and columns of one letter's cell.
"""

from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont

from scripts.glyph.text import ALPHABET

FONT_FOLDER = Path(__file__).parent / "fonts"
FONTS = ("DejaVuSans-Bold.ttf", "DejaVuSansMono-Bold.ttf", "DejaVuSans.ttf", "DejaVuSerif-Bold.ttf")

CAP_HEIGHT = 64  # of a capital, in cell pixels; the unit of length in this module
CELL_HEIGHT, CELL_WIDTH = 96, 60
INK_WIDTH = 52  # wider letters are squeezed to this
STRIDE = 2  # the field is kept at every second cell pixel


def distance_fields() -> torch.Tensor:
    """Signed distance to the outline (positive inside) in units of the cap height, shape (F, A, V, U)."""
    masks = torch.stack([torch.stack([_mask(font, char) for char in ALPHABET]) for font in FONTS])
    inside = _distance_to(~masks)
    outside = _distance_to(masks)
    field = torch.where(masks, inside - 0.5, 0.5 - outside) / CAP_HEIGHT
    return field[..., STRIDE // 2 :: STRIDE, STRIDE // 2 :: STRIDE].contiguous()


def _mask(font_file: str, char: str) -> torch.Tensor:
    """Which pixels of the cell the letter covers, shape (CELL_HEIGHT, CELL_WIDTH)."""
    probe = ImageFont.truetype(FONT_FOLDER / font_file, 100)
    _, top, _, bottom = probe.getbbox("H")
    font = ImageFont.truetype(FONT_FOLDER / font_file, round(100 * CAP_HEIGHT / (bottom - top)))
    left, _, right, _ = font.getbbox(char)
    cap_top = font.getbbox("H")[1]
    letter = Image.new("L", (right - left, CELL_HEIGHT))
    ImageDraw.Draw(letter).text((-left, (CELL_HEIGHT - CAP_HEIGHT) // 2 - cap_top), char, fill=255, font=font)
    if letter.width > INK_WIDTH:
        letter = letter.resize((INK_WIDTH, CELL_HEIGHT), Image.Resampling.BICUBIC)
    cell = Image.new("L", (CELL_WIDTH, CELL_HEIGHT))
    cell.paste(letter, ((CELL_WIDTH - letter.width) // 2, 0))
    return torch.frombuffer(bytearray(cell.tobytes()), dtype=torch.uint8).reshape(CELL_HEIGHT, CELL_WIDTH) > 127


def _distance_to(mask: torch.Tensor) -> torch.Tensor:
    """Euclidean distance of every pixel to the nearest pixel of ``mask`` within the cell, axis by axis."""
    squared = torch.where(mask, 0.0, 1e6)
    for _ in range(2):
        squared = _lower_envelope(squared).transpose(-1, -2)
    return squared.sqrt()


def _lower_envelope(squared: torch.Tensor) -> torch.Tensor:
    """min over j of squared[..., j] + (i - j)^2 for every i of the last axis."""
    index = torch.arange(squared.shape[-1], dtype=torch.float32)
    result = torch.full_like(squared, torch.inf)
    for j in range(squared.shape[-1]):
        torch.minimum(result, squared[..., j : j + 1] + (index - index[j]) ** 2, out=result)
    return result
