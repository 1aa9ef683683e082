"""Charts as SVG, for pages that need nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 420, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 30, 44
_COLOURS = ("#2563eb", "#dc2626", "#059669", "#9333ea", "#d97706", "#475569")


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    points: list[tuple[float, float]]
    """(x, y), in the order of x."""


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    x: str
    y: str
    lines: list[Line]


def svg(chart: Chart) -> str:
    """The chart as one SVG element, for a page or a file."""
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    xs = ticks(max((x for line in chart.lines for x, _ in line.points), default=1.0))
    ys = ticks(max((y for line in chart.lines for _, y in line.points), default=1.0))

    def at(x: float, y: float) -> tuple[str, str]:
        return f"{_LEFT + width * x / xs[-1]:.1f}", f"{_TOP + height * (1 - y / ys[-1]):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" role="img" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="system-ui,sans-serif" font-size="11">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        f'<text x="{_WIDTH / 2:g}" y="18" text-anchor="middle" font-size="13">{escape(chart.title)}</text>',
    ]
    for y in ys:
        left, level = at(0, y)
        parts.append(f'<path d="M{left} {level}h{width}" stroke="#e2e8f0"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{level}" dy="4" text-anchor="end">{y:g}</text>')
    for x in xs:
        place, bottom = at(x, 0)
        parts.append(f'<text x="{place}" y="{bottom}" dy="14" text-anchor="middle">{x:g}</text>')
    turned = f"translate(12 {_TOP + height / 2:g}) rotate(-90)"
    parts += [
        f'<text x="{_LEFT + width / 2:g}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(chart.x)}</text>',
        f'<text transform="{turned}" text-anchor="middle">{escape(chart.y)}</text>',
    ]
    for index, line in enumerate(chart.lines):
        parts += _line(line, index, [at(x, y) for x, y in line.points])
    return "\n".join([*parts, "</svg>"])


def _line(line: Line, index: int, places: Sequence[tuple[str, str]]) -> list[str]:
    colour = _COLOURS[index % len(_COLOURS)]
    path = " ".join(f"{x},{y}" for x, y in places)
    parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>']
    for (x, y), (load, value) in zip(places, line.points, strict=True):
        label = escape(f"{line.name}: {value:.1f} at {load:g}")
        parts.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"><title>{label}</title></circle>')
    level = _TOP + 12 + 14 * index
    parts.append(f'<path d="M{_LEFT + 8} {level - 4}h14" stroke="{colour}" stroke-width="2"/>')
    parts.append(f'<text x="{_LEFT + 26}" y="{level}">{escape(line.name)}</text>')
    return parts


def ticks(most: float) -> list[float]:
    """Numbers from 0 to at least `most`, in four to eight steps of 1, 2 or 5 times a power of ten."""
    if most <= 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(most / 4))
    step = next(power * factor for factor in (1, 2, 5, 10) if most / (power * factor) <= 8)
    return [round(step * i, 10) for i in range(math.ceil(most / step - 1e-9) + 1)]
