"""Line charts as SVG text, for pages that must stand alone."""

import math
from collections.abc import Mapping, Sequence
from html import escape

Point = tuple[float, float]

_WIDTH, _HEIGHT = 720, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 16, 48
_COLOURS = ("#2a6fbb", "#c2571a", "#1a6f3c", "#7a3fa0")


def line_chart(series: Mapping[str, Sequence[Point]], *, x_label: str, y_label: str) -> str:
    """Return an SVG element with one line and its points a series.

    Args:
        series: by name, points (x, y) in any order; points that are not finite are left out.
        x_label, y_label: of the axes.
    Returns: SVG text; it says so if there is nothing to draw.
    """
    drawn = {name: sorted(p for p in points if all(map(math.isfinite, p))) for name, points in series.items()}
    drawn = {name: points for name, points in drawn.items() if points}
    parts = [
        (
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" xmlns="http://www.w3.org/2000/svg" '
            f'aria-label="{escape(y_label)} over {escape(x_label)}">'
        )
    ]
    if not drawn:
        parts.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT / 2}" text-anchor="middle">no values yet</text></svg>')
        return "".join(parts)
    xs = _ticks(*_extent([x for points in drawn.values() for x, _ in points]))
    ys = _ticks(*_extent([y for points in drawn.values() for _, y in points]))
    parts += _axes(xs, ys, x_label, y_label)
    for index, (name, points) in enumerate(drawn.items()):
        parts.append(_line(index, name, [(_place_x(x, xs), _place_y(y, ys), x, y) for x, y in points]))
    return "".join([*parts, "</svg>"])


def _extent(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high > low:
        return low, high
    pad = abs(low) * 0.1 or 1.0
    return low - pad, high + pad


def _ticks(low: float, high: float) -> list[float]:
    """Return evenly spaced round numbers from at most ``low`` to at least ``high``."""
    rough = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def _place_x(x: float, ticks: Sequence[float]) -> float:
    return _LEFT + (x - ticks[0]) / (ticks[-1] - ticks[0]) * (_WIDTH - _LEFT - _RIGHT)


def _place_y(y: float, ticks: Sequence[float]) -> float:
    return _HEIGHT - _BOTTOM - (y - ticks[0]) / (ticks[-1] - ticks[0]) * (_HEIGHT - _TOP - _BOTTOM)


def _axes(xs: Sequence[float], ys: Sequence[float], x_label: str, y_label: str) -> list[str]:
    parts = []
    for y in ys:
        place = _place_y(y, ys)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{place:.1f}" y2="{place:.1f}" stroke="#e2e2e2"/>'
            f'<text x="{_LEFT - 8}" y="{place + 4:.1f}" text-anchor="end" font-size="12">{y:g}</text>'.replace(
                "-0<", "0<"
            )
        )
    parts += [
        f'<text x="{_place_x(x, xs):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle" font-size="12">{x:g}</text>'
        for x in xs
    ]
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    parts.append(
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 8}" text-anchor="middle" font-size="13">'
        f"{escape(x_label)}</text>"
        f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle" font-size="13">'
        f"{escape(y_label)}</text>"
    )
    return parts


def _line(index: int, name: str, places: Sequence[tuple[float, float, float, float]]) -> str:
    colour = _COLOURS[index % len(_COLOURS)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _, _ in places)
    # the fewer the points, the more each of them says
    radius = 2 if len(places) > 60 else 3 if len(places) > 12 else 5
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}">'
        f"<title>{escape(name)}: {at:g}, {value:.4f}</title></circle>"
        for x, y, at, value in places
    )
    legend = f'<text x="{_LEFT + 8}" y="{_TOP + 14 + 16 * index}" font-size="12" fill="{colour}">{escape(name)}</text>'
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>{dots}{legend}'
