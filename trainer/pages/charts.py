"""Small line and bar charts as SVG text: no script, no dependency, colours from the page's style sheet."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 12, 28


@dataclass(frozen=True, slots=True)
class Series:
    """One line: `points` are (x, y), in order of x. `colour` is a CSS class (c1, c2, ...)."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    markers: bool = False  # large dots and a dashed line, for few points


def line_chart(
    series: Sequence[Series],
    *,
    width: int,
    height: int,
    y_format: str = ".3g",
    x_label: str = "step",
) -> str:
    """An `<svg>` of all `series` on shared axes; empty text when there is no finite point.

    `width` and `height` are in CSS pixels at which text has its natural size; the image scales.
    """
    drawn = [
        Series(
            s.name, [(x, y) for x, y in s.points if y is not None and math.isfinite(y)], s.colour, s.markers
        )
        for s in series
    ]
    points = [point for s in drawn for point in s.points]
    if not points:
        return ""
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    ticks = nice_ticks(min(0.0, *(y for _, y in points)), max(y for _, y in points))
    y_low, y_high = ticks[0], ticks[-1]

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / (x_high - x_low) if x_high > x_low else 0.5
        up = (y - y_low) / (y_high - y_low)
        return _LEFT + across * (width - _LEFT - _RIGHT), height - _BOTTOM - up * (height - _TOP - _BOTTOM)

    parts = [f'<svg viewBox="0 0 {width} {height}" role="img">']
    for tick in ticks:
        _, y = at(x_low, tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        label = format(tick, y_format) if tick else "0"
        if math.isclose(float(label), tick):  # a rounded label would stand at the wrong height
            parts.append(
                f'<text class="tick" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
            )
    for tick in sorted({round(x_low), round((x_low + x_high) / 2), round(x_high)}):
        x, _ = at(tick, y_low)
        parts.append(f'<text class="tick" x="{x:.1f}" y="{height - 8}" text-anchor="middle">{tick:g}</text>')
    for s in drawn:
        places = [at(x, y) for x, y in s.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        dashed = ' stroke-dasharray="4 4"' if s.markers else ""
        parts.append(f'<polyline class="line {s.colour}" points="{path}"{dashed}/>')
        radius = 4.5 if s.markers or len(places) == 1 else 2.2
        for (x, y), (step, value) in zip(places, s.points, strict=True):
            tip = escape(f"{s.name}: {value:{y_format}} at {x_label} {step:g}")
            parts.append(
                f'<circle class="dot {s.colour}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}">'
                f"<title>{tip}</title></circle>"
            )
    parts.append("</svg>")
    return "".join(parts)


def bar_chart(labels: Sequence[str], values: Sequence[float], *, width: int, height: int) -> str:
    """An `<svg>` of one bar per label, the tallest as high as the chart; empty text without any value."""
    if not any(values):
        return ""
    tallest, slot = max(values), (width - 2 * _RIGHT) / len(values)
    parts = [f'<svg viewBox="0 0 {width} {height}" role="img">']
    for number, (label, value) in enumerate(zip(labels, values, strict=True)):
        tall = value / tallest * (height - _TOP - _BOTTOM)
        left, bottom = _RIGHT + number * slot, height - _BOTTOM
        parts.append(
            f'<rect class="bar" x="{left + 2:.1f}" y="{bottom - tall:.1f}" width="{slot - 4:.1f}" '
            f'height="{tall:.1f}"><title>{escape(label)}: {value:.0f}</title></rect>'
            f'<text class="tick" x="{left + slot / 2:.1f}" y="{height - 8 - 11 * (number % 2)}" '
            f'text-anchor="middle">{escape(label)}</text>'
        )
    parts.append("</svg>")
    return "".join(parts)


def nice_ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """About `wanted` round numbers whose first and last enclose `low` and `high`."""
    if high - low <= max(1e-10, 1e-9 * max(abs(low), abs(high))):  # flat, as far as one could see
        high = low + 1.0
    rough = (high - low) / wanted
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(f * magnitude for f in (1, 2, 2.5, 5, 10) if f * magnitude >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]
