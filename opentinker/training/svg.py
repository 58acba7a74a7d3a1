"""Line charts as inline SVG. Colours come from the page's CSS classes, so that light and dark both work."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 12, 34


@dataclass(frozen=True)
class Series:
    """Points (x, y) in order of x. With `half_widths` (one per point) they are drawn as markers with error bars."""

    label: str
    css: str
    points: Sequence[tuple[float, float]]
    half_widths: Sequence[float] = field(default_factory=tuple)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) from at or below `low` to at or above `high`."""
    span = (high - low) or abs(high) or 1.0
    raw = span / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * next(m for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    last = max(math.ceil(high / step - 1e-9), first + 1)
    return [round(i * step, 12) for i in range(first, last + 1)]


def number(value: float) -> str:
    """A number for people: three significant digits, thousands kept whole."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def line_chart(
    series: Sequence[Series], *, width: int = 760, height: int = 300, low: float | None = None, high: float | None = None
) -> str:
    """An SVG element; x is the training step, from 0. `low` and `high` widen the y axis to at least these values."""
    drawn = [s for s in series if s.points]
    if not drawn:
        return '<p class="empty">no data</p>'
    xs = [x for s in drawn for x, _ in s.points]
    bounds = [b for s in drawn for b in _bounds(s)] + [v for v in (low, high) if v is not None]
    y_ticks = ticks(min(bounds), max(bounds), 5 if height > 200 else 3)
    x_high = max(*xs, 1.0)
    x_ticks = [t for t in ticks(0.0, x_high, 8 if width > 500 else 4) if t <= x_high and t == int(t)]

    def px(x: float) -> float:
        return _LEFT + x / x_high * (width - _LEFT - _RIGHT)

    def py(y: float) -> float:
        return _TOP + (y_ticks[-1] - y) / (y_ticks[-1] - y_ticks[0]) * (height - _TOP - _BOTTOM)

    parts = [
        f'<line class="grid" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{py(t):.1f}" y2="{py(t):.1f}"/>'
        f'<text class="tick" x="{_LEFT - 8}" y="{py(t) + 4:.1f}" text-anchor="end">{number(t)}</text>'
        for t in y_ticks
    ]
    parts += [
        f'<text class="tick" x="{px(t):.1f}" y="{height - _BOTTOM + 18}" text-anchor="middle">{t:.0f}</text>' for t in x_ticks
    ]
    for s in drawn:
        where = [(px(x), py(y)) for x, y in s.points]
        parts.append(_markers(s, where, py) if s.half_widths else _line(s, where))
    label = escape(", ".join(s.label for s in drawn) + " by training step")
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _bounds(series: Series) -> list[float]:
    if not series.half_widths:
        return [y for _, y in series.points]
    return [y + sign * e for (_, y), e in zip(series.points, series.half_widths, strict=True) for sign in (-1, 1)]


def _line(series: Series, where: Sequence[tuple[float, float]]) -> str:
    if len(where) == 1:
        return f'<circle class="{series.css} dot" cx="{where[0][0]:.1f}" cy="{where[0][1]:.1f}" r="3"/>'
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in where)
    title = escape(f"{series.label}: {number(series.points[0][1])} to {number(series.points[-1][1])}")
    return f'<polyline class="{series.css}" points="{path}"><title>{title}</title></polyline>'


def _markers(series: Series, where: Sequence[tuple[float, float]], py: object) -> str:
    assert callable(py)
    marks = []
    for (x, y), (step, value), half in zip(where, series.points, series.half_widths, strict=True):
        title = escape(f"{series.label} after {step:.0f} steps: {number(value)} ±{number(half)}")
        marks.append(
            f'<g class="{series.css}"><line x1="{x:.1f}" x2="{x:.1f}" y1="{py(value - half):.1f}" y2="{py(value + half):.1f}"/>'
            f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="5"><title>{title}</title></circle></g>'
        )
    return "".join(marks)
