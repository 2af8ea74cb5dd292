"""Draws training pictures: a text in a random style, on any device, a batch at a time.

A style has ten independent parts (:class:`Style`). Some of what they can do makes a picture hard to read, and none of
it depends on the text: a model trained on these pictures learns the letters from the prompt and leaves the style to
chance.

Axes: B batch, N characters, C colour channels, H and W rows and columns of the picture.
"""

from dataclasses import asdict, dataclass

import torch
from torch.nn import functional as F

from scripts.glyph.atlas import CAP_HEIGHT, CELL_HEIGHT, CELL_WIDTH, distance_fields
from scripts.glyph.text import TEXT_LENGTH

HEIGHT, WIDTH = 32, 96
BLUR_LEVELS = (0.0, 0.7, 1.5, 3.0, 5.0, 8.0)  # standard deviations in pixels; between two of them, a blend
CLUTTER_LINES = 16
_OUTSIDE = 4.0  # added to distances so that the zero padding of a lookup means far outside


@dataclass(frozen=True)
class Style:
    """What a picture looks like apart from its text; every field has shape (B,) unless it says otherwise."""

    font: torch.Tensor
    cap_height: torch.Tensor  # pixels
    aspect: torch.Tensor  # horizontal stretch
    slant: torch.Tensor  # horizontal shift per pixel of height
    stroke: torch.Tensor  # pixels added to (or taken from) every edge
    blur: torch.Tensor  # index into BLUR_LEVELS, fractional
    contrast: torch.Tensor  # of the ink, 0 (none) to 1
    clutter: torch.Tensor  # opacity of the lines across the picture, 0 to 1
    place: torch.Tensor  # of the text's centre within the room it has, -1 to 1, shape (B, 2)
    paper: torch.Tensor  # colour, 0 to 1, shape (B, 3)
    ink: torch.Tensor  # likewise


@dataclass(frozen=True)
class StyleMixture:
    """How often each part of a style is drawn from its hard range instead of its easy one."""

    contrast: float = 0.0
    blur: float = 0.0
    stroke: float = 0.0
    slant: float = 0.0
    clutter: float = 0.0
    size: float = 0.0

    def scaled(self, factor: float) -> "StyleMixture":
        """The mixture with every share multiplied by ``factor``."""
        return StyleMixture(**{name: share * factor for name, share in asdict(self).items()})


class StyleSampler:
    """Draws styles; with all shares of the mixture 0 they are all easy to read."""

    def __init__(self, mixture: StyleMixture, fonts: int, device: torch.device | str = "cpu"):
        self.mixture = mixture
        self.fonts = fonts
        self.device = device

    def __call__(self, batch: int) -> Style:
        mixture = self.mixture
        uniform = self._uniform
        contrast = self._mix(batch, mixture.contrast, uniform(batch, 0.45, 1.0), self._log_uniform(batch, 0.004, 0.4))
        blur = self._mix(batch, mixture.blur, uniform(batch, 0.0, 0.8), uniform(batch, 1.5, 5.0))
        stroke = self._mix(batch, mixture.stroke, uniform(batch, -0.2, 0.3), self._signed(batch, 0.3, 1.6))
        slant = self._mix(batch, mixture.slant, uniform(batch, -0.15, 0.15), self._signed(batch, 0.3, 2.4))
        clutter = self._mix(batch, mixture.clutter, torch.zeros(batch, device=self.device), uniform(batch, 0.3, 1.0))
        cap_height = self._mix(batch, mixture.size, uniform(batch, 15.0, 20.0), uniform(batch, 3.0, 13.0))
        paper_BC = torch.rand(batch, 3, device=self.device) * 0.4 + 0.6
        return Style(
            font=torch.randint(self.fonts, (batch,), device=self.device),
            cap_height=cap_height,
            aspect=uniform(batch, 0.95, 1.15),
            slant=slant,
            stroke=stroke,
            blur=blur,
            contrast=contrast,
            clutter=clutter,
            place=torch.rand(batch, 2, device=self.device) * 2 - 1,
            paper=paper_BC,
            ink=paper_BC * torch.rand(batch, 3, device=self.device) * 0.4,
        )

    def _uniform(self, batch: int, low: float, high: float) -> torch.Tensor:
        return torch.rand(batch, device=self.device) * (high - low) + low

    def _log_uniform(self, batch: int, low: float, high: float) -> torch.Tensor:
        return low * (high / low) ** torch.rand(batch, device=self.device)

    def _signed(self, batch: int, low: float, high: float) -> torch.Tensor:
        sign = torch.where(self._uniform(batch, 0, 1) < 0.5, -1.0, 1.0)
        return sign * self._uniform(batch, low, high)

    def _mix(self, batch: int, share: float, easy: torch.Tensor, hard: torch.Tensor) -> torch.Tensor:
        return torch.where(self._uniform(batch, 0, 1) < share, hard, easy)


class Renderer:
    """Draws texts in given styles."""

    def __init__(self, device: torch.device | str = "cpu"):
        self.device = device
        self.fields_FAVU = distance_fields().to(device)
        rows = torch.arange(HEIGHT, device=device) + 0.5
        columns = torch.arange(WIDTH, device=device) + 0.5
        self.rows_HW, self.columns_HW = torch.meshgrid(rows, columns, indexing="ij")
        self.blur_kernels = [_gaussian(sigma).to(device) for sigma in BLUR_LEVELS[1:]]

    @property
    def fonts(self) -> int:
        """How many fonts there are to choose from."""
        return self.fields_FAVU.shape[0]

    def __call__(self, ids_BN: torch.Tensor, style: Style) -> torch.Tensor:
        """Pictures in -1..1, shape (B, 3, HEIGHT, WIDTH)."""
        cover_BHW = self._letters(ids_BN, style)
        cover_BHW = torch.maximum(cover_BHW, self._clutter(style))
        cover_BHW = self._blurred(cover_BHW, style.blur) * style.contrast[:, None, None]
        cover_B1HW = cover_BHW[:, None]
        paper, ink = style.paper[:, :, None, None], style.ink[:, :, None, None]
        return (paper + (ink - paper) * cover_B1HW) * 2 - 1

    def _letters(self, ids_BN: torch.Tensor, style: Style) -> torch.Tensor:
        """How much of each pixel the letters cover, shape (B, H, W)."""
        fields_BNVU = self.fields_FAVU[style.font[:, None], ids_BN]
        strip_BVW = fields_BNVU.permute(0, 2, 1, 3).flatten(2) + _OUTSIDE
        cap = style.cap_height
        text_width = TEXT_LENGTH * cap * style.aspect * (CELL_WIDTH / CAP_HEIGHT)
        room_x = ((WIDTH - 2 - text_width - style.slant.abs() * cap) / 2).clamp(min=0)
        room_y = ((HEIGHT - 3 - cap) / 2).clamp(min=0)
        dx = self.columns_HW - (WIDTH / 2 + style.place[:, 0] * room_x)[:, None, None]
        dy = self.rows_HW - (HEIGHT / 2 + style.place[:, 1] * room_y)[:, None, None]
        u = (dx + style.slant[:, None, None] * dy) / (text_width / 2)[:, None, None]
        v = dy / (cap * (CELL_HEIGHT / CAP_HEIGHT) / 2)[:, None, None]
        lookup_BHW2 = torch.stack([u, v], dim=-1)
        distance_BHW = F.grid_sample(strip_BVW[:, None], lookup_BHW2, align_corners=False)[:, 0] - _OUTSIDE
        pixels = distance_BHW * cap[:, None, None] + style.stroke[:, None, None]
        return (0.5 + pixels).clamp(0, 1)

    def _clutter(self, style: Style) -> torch.Tensor:
        """Straight lines across the picture, as thick as a stroke, shape (B, H, W)."""
        batch = style.clutter.shape[0]
        angle, offset = torch.rand(2, batch, CLUTTER_LINES, 1, 1, device=self.device).unbind(0)
        angle = (angle - 0.5) * torch.pi
        through_x = torch.rand(batch, CLUTTER_LINES, 1, 1, device=self.device) * WIDTH
        distance = (self.columns_HW - through_x) * angle.sin() + (self.rows_HW - offset * HEIGHT) * angle.cos()
        lines_BHW = (1.4 - distance.abs()).clamp(0, 1).amax(1)
        return lines_BHW * style.clutter[:, None, None]

    def _blurred(self, cover_BHW: torch.Tensor, level_B: torch.Tensor) -> torch.Tensor:
        levels = [cover_BHW]
        for kernel in self.blur_kernels:
            reach = kernel.shape[0] // 2
            rows = F.conv2d(cover_BHW[:, None], kernel[None, None, :, None], padding=(reach, 0))
            levels.append(F.conv2d(rows, kernel[None, None, None, :], padding=(0, reach))[:, 0])
        stack_KBHW = torch.stack(levels)
        lower = level_B.floor().long().clamp(0, len(levels) - 2)
        share = (level_B - lower)[:, None, None]
        batch = torch.arange(level_B.shape[0], device=self.device)
        return stack_KBHW[lower, batch] * (1 - share) + stack_KBHW[lower + 1, batch] * share


def _gaussian(sigma: float) -> torch.Tensor:
    reach = int(3 * sigma + 0.999)
    weights = torch.exp(-(torch.arange(-reach, reach + 1, dtype=torch.float32) ** 2) / (2 * sigma**2))
    return weights / weights.sum()
