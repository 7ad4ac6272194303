"""Line charts as SVG text, so that the same numbers always give the same bytes.

Charts follow the reader's colour scheme and fit the width of a phone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

WIDTH, HEIGHT = 380, 250
LEFT, RIGHT, TOP, BOTTOM = 58, 18, 26, 38
LEGEND_ROW = 17
CHARACTER = 6.3  # average width in the legend's font
MARKERS = ("circle", "square", "triangle", "diamond")

# Colours on light and on dark backgrounds; a method has the same colour in every figure.
COLOURS: Mapping[str, tuple[str, str]] = {
    "ink": ("#222222", "#e8e8e8"),
    "blue": ("#0b63a8", "#6db3f2"),
    "green": ("#00805a", "#3fcf9f"),
    "red": ("#c8401a", "#ff8a5c"),
    "purple": ("#7a3fb0", "#c79af2"),
    "pink": ("#b8327a", "#ff8fc4"),
    "amber": ("#946200", "#f0c14b"),
    "olive": ("#5f6b00", "#c5d14a"),
    "grey": ("#6b6b6b", "#a8a8a8"),
}

Scale = Literal["linear", "log", "signed"]


@dataclass(frozen=True)
class Line:
    """A line of a chart.

    Args:
        points: x and y, in the order in which they are joined; without `joined` only marks.
        band: x, low and high of an area around the line.
    """

    name: str
    points: Sequence[tuple[float, float]]
    colour: str = "ink"
    band: Sequence[tuple[float, float, float]] = ()
    dashed: bool = False
    marker: str = ""
    joined: bool = True


@dataclass(frozen=True)
class Axis:
    """An axis of a chart.

    Args:
        scale: "signed" is linear up to 1 and logarithmic beyond, on both sides of 0.
        names: labels of the places 0, 1, ... in place of numbers.
    """

    label: str
    scale: Scale = "linear"
    names: Sequence[str] = ()


@dataclass(frozen=True)
class Chart:
    """A picture of lines over two axes.

    Args:
        shade: lower and upper end of a shaded band on y, and the band's name.
        verticals, horizontals: place and name of each thin line.
    """

    title: str
    x: Axis
    y: Axis
    lines: Sequence[Line]
    shade: tuple[float, float, str] | None = None
    verticals: Sequence[tuple[float, str]] = ()
    horizontals: Sequence[tuple[float, str]] = ()


def style() -> str:
    """Returns the CSS that all charts share."""
    light = "".join(f"--{name}:{pair[0]};" for name, pair in COLOURS.items())
    dark = "".join(f"--{name}:{pair[1]};" for name, pair in COLOURS.items())
    return (
        f".chart{{{light}--line:#d5d5d5;font:11px system-ui,sans-serif}}"
        f"@media(prefers-color-scheme:dark){{.chart{{{dark}--line:#444}}}}"
        ".chart text{fill:var(--ink)}.chart .title{font-weight:600;font-size:12px}"
        ".chart .grid{stroke:var(--line);stroke-width:1}"
    )


def svg(chart: Chart, *, alone: bool) -> str:
    """Returns the chart as SVG.

    Args:
        alone: the SVG is a file with its own style; otherwise its page has the style.
    """
    to_x = _Mapping(chart.x, _values(chart, 0), LEFT, WIDTH - RIGHT)
    to_y = _Mapping(chart.y, _values(chart, 1), HEIGHT - BOTTOM, TOP)
    legend, legend_height = _legend(chart)
    height = HEIGHT + legend_height
    head = (
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'role="img" aria-label="{escape(chart.title)}">'
    )
    parts = [head]
    if alone:
        parts.append(f"<style>{style()}</style>")
    parts.append(f'<text class="title" x="8" y="15">{escape(chart.title)}</text>')
    parts += _frame(chart, to_x, to_y)
    for line in chart.lines:
        parts += _drawn(line, to_x, to_y)
    return "\n".join([*parts, *legend, "</svg>"]) + "\n"


class _Mapping:
    """A function from an axis's values to the picture's units."""

    def __init__(self, axis: Axis, values: Sequence[float], low: float, high: float) -> None:
        self.axis = axis
        transforms: dict[Scale, Callable[[float], float]] = {
            "linear": float,
            "log": math.log10,
            "signed": _signed_log,
        }
        self.transform = transforms[axis.scale]
        transformed = [self.transform(value) for value in values] or [0.0, 1.0]
        margin = 0.04 * (max(transformed) - min(transformed)) or 0.5
        self.first, self.last = min(transformed) - margin, max(transformed) + margin
        self.low, self.high = low, high

    def __call__(self, value: float) -> float:
        share = (self.transform(value) - self.first) / (self.last - self.first)
        return self.low + share * (self.high - self.low)

    def ticks(self) -> list[tuple[float, str]]:
        """Returns place (in the picture) and label of each tick."""
        if self.axis.names:
            return [(self(place), name) for place, name in enumerate(self.axis.names)]
        if self.axis.scale == "linear":
            values = _round_values(self.first, self.last)
        else:
            values = self._powers()
        return [(self(value), _number(value)) for value in values]

    def _powers(self) -> list[float]:
        if self.axis.scale == "log":
            first, last = math.ceil(self.first), math.floor(self.last)
            every = max(1, round((last - first) / 5))
            powers = [10.0**power for power in range(first, last + 1, every)]
            # An axis of less than two decades has ticks at twos and fives too.
            if len(powers) < 3:
                span = range(math.floor(self.first), math.ceil(self.last) + 1)
                powers = [factor * 10.0**power for power in span for factor in (1, 2, 5)]
        else:
            largest = math.ceil(max(abs(self.first), abs(self.last)))
            factors = (1, 2, 5) if largest <= 2 else (1,)
            sides = [factor * 10.0**power for power in range(largest) for factor in factors]
            powers = [-value for value in reversed(sides)] + [0.0, *sides]
        return [x for x in powers if self.first <= self.transform(x) <= self.last]


def _signed_log(value: float) -> float:
    if abs(value) <= 1:
        return float(value)
    return math.copysign(1 + math.log10(abs(value)), value)


def _round_values(first: float, last: float) -> list[float]:
    rough = (last - first) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    lowest, highest = math.ceil(first / step), math.floor(last / step)
    return [number * step for number in range(lowest, highest + 1)]


def _number(value: float) -> str:
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:.6g}"
    mantissa, exponent = f"{value:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _values(chart: Chart, place: int) -> list[float]:
    coordinates = [point[place] for line in chart.lines for point in line.points]
    bands = [area for line in chart.lines for area in line.band]
    if place == 0:
        named = list(range(len(chart.x.names)))
        return [
            *coordinates,
            *(area[0] for area in bands),
            *(x for x, _ in chart.verticals),
            *named,
        ]
    shade = chart.shade[:2] if chart.shade is not None else ()
    areas = (edge for area in bands for edge in area[1:])
    return [*coordinates, *areas, *shade, *(y for y, _ in chart.horizontals)]


def _frame(chart: Chart, to_x: _Mapping, to_y: _Mapping) -> list[str]:
    parts = []
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    if chart.shade is not None:
        low, high = to_y(chart.shade[0]), to_y(chart.shade[1])
        parts.append(
            f'<rect x="{LEFT}" y="{high:.1f}" width="{right - LEFT}" height="{low - high:.1f}" '
            'fill="var(--grey)" fill-opacity="0.22"/>'
        )
    for y, text in to_y.ticks():
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{right}"/>')
        parts.append(f'<text x="{LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    for x, text in to_x.ticks():
        parts.append(f'<path class="grid" d="M{x:.1f} {bottom}v4"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{escape(text)}</text>'
        )
    for value, name in chart.verticals:
        x = to_x(value)
        parts.append(
            f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="var(--grey)" stroke-dasharray="2 3"/>'
            f'<text x="{x + 3:.1f}" y="{TOP + 10}">{escape(name)}</text>'
        )
    for value, name in chart.horizontals:
        y = to_y(value)
        parts.append(
            f'<path d="M{LEFT} {y:.1f}H{right}" stroke="var(--grey)" stroke-dasharray="2 3"/>'
            f'<text x="{right}" y="{y - 3:.1f}" text-anchor="end">{escape(name)}</text>'
        )
    middle = (LEFT + right) / 2
    parts.append(
        f'<text x="{middle:.1f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(chart.x.label)}'
        f'</text><text x="12" y="{(TOP + bottom) / 2:.1f}" text-anchor="middle" '
        f'transform="rotate(-90 12 {(TOP + bottom) / 2:.1f})">{escape(chart.y.label)}</text>'
    )
    return parts


def _drawn(line: Line, to_x: _Mapping, to_y: _Mapping) -> list[str]:
    parts = []
    colour = f"var(--{line.colour})"
    if line.band:
        upper = [f"{to_x(x):.1f} {to_y(high):.1f}" for x, _, high in line.band]
        lower = [f"{to_x(x):.1f} {to_y(low):.1f}" for x, low, _ in reversed(line.band)]
        path = "L".join([*upper, *lower])
        parts.append(f'<path d="M{path}Z" fill="{colour}" fill-opacity="0.15"/>')
    places = [(to_x(x), to_y(y)) for x, y in line.points]
    if line.joined and len(places) > 1:
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        dashes = ' stroke-dasharray="5 3"' if line.dashed else ""
        parts.append(
            f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.8"{dashes}/>'
        )
    if line.marker or len(places) == 1 or not line.joined:
        for (x, y), point in zip(places, line.points, strict=True):
            title = f"{line.name}: {_number(point[0])}, {_number(point[1])}"
            mark = _marker(line.marker or MARKERS[0], x, y, colour)
            parts.append(f"<g><title>{escape(title)}</title>{mark}</g>")
    return parts


def _marker(shape: str, x: float, y: float, colour: str) -> str:
    paths = {
        "square": f"M{x - 3:.1f} {y - 3:.1f}h6v6h-6Z",
        "triangle": f"M{x:.1f} {y - 4:.1f}l4 7h-8Z",
        "diamond": f"M{x:.1f} {y - 4:.1f}l4 4l-4 4l-4 -4Z",
    }
    if shape in paths:
        return f'<path d="{paths[shape]}" fill="{colour}"/>'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'


def _legend(chart: Chart) -> tuple[list[str], int]:
    """Returns the legend's parts, which stand below the picture, and the legend's height."""
    named = [line for line in chart.lines if line.name and line.points]
    entries = list({line.name: line for line in named}.values())
    parts, x, row = [], 8.0, 0
    shade = [(chart.shade[2], None)] if chart.shade is not None else []
    for name, line in [*shade, *((line.name, line) for line in entries)]:
        wide = 26 + CHARACTER * len(name)
        if x > 8 and x + wide > WIDTH:
            x, row = 8.0, row + 1
        y = HEIGHT + 10 + LEGEND_ROW * row
        if line is None:
            key = (
                f'<rect x="{x:.1f}" y="{y - 9}" width="16" height="10" fill="var(--grey)" '
                'fill-opacity="0.22"/>'
            )
        else:
            key = "".join(_key(line, x, y - 4))
        parts.append(f'{key}<text x="{x + 20:.1f}" y="{y}">{escape(name)}</text>')
        x += wide
    return parts, LEGEND_ROW * (row + 1) if parts else 0


def _key(line: Line, x: float, y: float) -> list[str]:
    colour = f"var(--{line.colour})"
    parts = []
    if line.joined:
        dashes = ' stroke-dasharray="5 3"' if line.dashed else ""
        parts.append(f'<path d="M{x:.1f} {y}h16" stroke="{colour}" stroke-width="1.8"{dashes}/>')
    if line.marker or not line.joined:
        parts.append(_marker(line.marker or MARKERS[0], x + 8, y, colour))
    return parts
