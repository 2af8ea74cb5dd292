"""Pictures of samples: a grid with captions, and the same seeds before and after training.

Axes: ``N`` samples, ``C H W`` pixels.
"""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from verl_omni_core.errors import ContractError

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFont import FreeTypeFont, ImageFont

_CELL_WIDTH = 192
_MARGIN = 8
_FONT_SIZE = 12
_LINE = 16
_PAPER, _INK, _GOOD, _MISSING = "#ffffff", "#1c1c1c", "#1a6f3c", "#8a5a00"


@dataclass(frozen=True)
class PicturePair:
    """One prompt and seed, drawn by two policies."""

    prompt: str
    seed: int
    before: np.ndarray
    """uint8 [3, H, W]."""
    after: np.ndarray
    """uint8 [3, H, W]."""
    reward_before: float | None = None
    reward_after: float | None = None


def image_grid(
    pixels_NCHW: np.ndarray,
    prompts: Sequence[str],
    rewards: Sequence[float | None] | None = None,
    *,
    columns: int = 4,
) -> bytes:
    """Return a PNG of samples in rows, each above its prompt and reward.

    Args:
        pixels_NCHW: uint8 [N, 3, H, W].
        prompts: N texts; what does not fit under a picture is cut with an ellipsis.
        rewards: N numbers, none where a sample has no score; not given, no line of rewards.
        columns: pictures a row, at most.
    Raises: ContractError for no pictures, other pixels, or other numbers of prompts and rewards.
    """
    counts = {len(pixels_NCHW), len(prompts)} | ({len(rewards)} if rewards is not None else set())
    if len(counts) != 1 or not len(pixels_NCHW):
        raise ContractError(
            f"got {len(pixels_NCHW)} pictures, {len(prompts)} prompts and "
            f"{'no' if rewards is None else len(rewards)} rewards; give one of each a picture, and at least one"
        )
    cells = [
        _captioned(_enlarged(pixels), [(prompt, _INK)] + ([] if rewards is None else [_reward_line(rewards[i])]))
        for i, (pixels, prompt) in enumerate(zip(pixels_NCHW, prompts, strict=True))
    ]
    return _png(_tiled(cells, min(columns, len(cells))))


def before_after(pairs: Sequence[PicturePair]) -> bytes:
    """Return a PNG with one row a pair: before on the left, after on the right, each with its reward.

    Raises: ContractError for no pairs or other pixels than uint8 [3, H, W].
    """
    if not pairs:
        raise ContractError("got no pairs of pictures to show; give at least one")
    cells = []
    for pair in pairs:
        cells.append(
            _captioned(_enlarged(pair.before), [(pair.prompt, _INK), _reward_line(pair.reward_before, "before: ")])
        )
        cells.append(
            _captioned(_enlarged(pair.after), [(f"seed {pair.seed}", _INK), _reward_line(pair.reward_after, "after: ")])
        )
    return _png(_tiled(cells, 2))


def png(pixels_CHW: np.ndarray) -> bytes:
    """Return one picture as PNG, in its own size.

    Args:
        pixels_CHW: uint8 [3, H, W].
    """
    return _png(_picture(pixels_CHW))


def data_uri(data: bytes, media_type: str = "image/png") -> str:
    """Return bytes as a URI that needs no file."""
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def write_picture(path: str | Path, data: bytes) -> Path:
    """Write a picture, making its folder; return its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def _picture(pixels_CHW: np.ndarray) -> "Image":
    from PIL import Image

    pixels = np.asarray(pixels_CHW)
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[0] != 3:
        raise ContractError(f"expected a picture uint8 [3, H, W], got {pixels.dtype} {list(pixels.shape)}")
    return Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0)))


def _enlarged(pixels_CHW: np.ndarray) -> "Image":
    """Bring small pictures to the width of a caption by a whole factor, so that pixels stay what they are."""
    from PIL import Image

    picture = _picture(pixels_CHW)
    factor = max(1, _CELL_WIDTH // picture.width)
    return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)


def _captioned(picture: "Image", lines: Sequence[tuple[str, str]]) -> "Image":
    from PIL import Image, ImageDraw
    from PIL.ImageFont import load_default

    font = load_default(_FONT_SIZE)
    width = max(picture.width, _CELL_WIDTH)
    cell = Image.new("RGB", (width, picture.height + _LINE * len(lines) + 4), _PAPER)
    cell.paste(picture, ((width - picture.width) // 2, 0))
    draw = ImageDraw.Draw(cell)
    for number, (text, colour) in enumerate(lines):
        draw.text((0, picture.height + 2 + _LINE * number), _fitting(text, font, width), font=font, fill=colour)
    return cell


def _fitting(text: str, font: "FreeTypeFont | ImageFont", width: int) -> str:
    text = " ".join(text.split())
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "...") > width:
        text = text[:-1]
    return text + "..."


def _reward_line(reward: float | None, label: str = "reward ") -> tuple[str, str]:
    return (f"{label}no score", _MISSING) if reward is None else (f"{label}{reward:.3f}", _GOOD)


def _tiled(cells: Sequence["Image"], columns: int) -> "Image":
    from PIL import Image

    width, height = max(cell.width for cell in cells), max(cell.height for cell in cells)
    rows = -(-len(cells) // columns)
    size = (columns * (width + _MARGIN) + _MARGIN, rows * (height + _MARGIN) + _MARGIN)
    sheet = Image.new("RGB", size, _PAPER)
    for index, cell in enumerate(cells):
        row, column = divmod(index, columns)
        sheet.paste(cell, (_MARGIN + column * (width + _MARGIN), _MARGIN + row * (height + _MARGIN)))
    return sheet


def _png(image: "Image") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()
