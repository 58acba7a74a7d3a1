"""A table of numbers as an inline SVG picture: better ones in one colour, worse ones in another."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from opentinker.training.svg import number

_CELL_W, _CELL_H, _TOP = 74, 40, 78
_LETTER = 7
"""Width of a letter, about."""


@dataclass(frozen=True)
class Shown:
    """A cell: its value, and the half width of its interval."""

    value: float
    half_width: float


def heat_map(
    rows: Sequence[str],
    columns: Sequence[str],
    cells: Mapping[tuple[str, str], Shown],
    *,
    middle: float | None = None,
    reach: float | None = None,
) -> str:
    """An SVG element. Values above `middle` (default: between the extremes) have class `a`, those below `b`, the stronger the
    further away; `reach` (default: the furthest) is full strength. Colours come from the page's CSS."""
    if not cells:
        return '<p class="empty">no data</p>'
    values = [cell.value for cell in cells.values()]
    centre = (min(values) + max(values)) / 2 if middle is None else middle
    furthest = reach or max((abs(value - centre) for value in values), default=0.0) or 1.0
    left = 20 + _LETTER * max(map(len, rows), default=0)
    width, height = left + _CELL_W * len(columns) + 60, _TOP + _CELL_H * len(rows) + 8
    parts = [
        f'<text class="tick" x="{left + _CELL_W * (place + 0.5):.0f}" y="{_TOP - 8}" '
        f'transform="rotate(-30 {left + _CELL_W * (place + 0.5):.0f} {_TOP - 8})">{escape(column)}</text>'
        for place, column in enumerate(columns)
    ]
    for down, row in enumerate(rows):
        y = _TOP + _CELL_H * down
        parts.append(f'<text class="tick" x="{left - 8}" y="{y + 24}" text-anchor="end">{escape(row)}</text>')
        for across, column in enumerate(columns):
            if (cell := cells.get((row, column))) is None:
                continue
            x, strength = left + _CELL_W * across, min(1.0, abs(cell.value - centre) / furthest)
            css = "a" if cell.value >= centre else "b"
            title = escape(f"{row} against {column}: {number(cell.value)} ±{number(cell.half_width)}")
            parts.append(
                f'<g><title>{title}</title><rect class="heat {css}" x="{x + 1}" y="{y + 1}" width="{_CELL_W - 2}" '
                f'height="{_CELL_H - 2}" rx="4" fill-opacity="{0.08 + 0.5 * strength:.2f}"/>'
                f'<text class="cell" x="{x + _CELL_W / 2:.0f}" y="{y + 18}" text-anchor="middle">{cell.value:.2f}</text>'
                f'<text class="tick small" x="{x + _CELL_W / 2:.0f}" y="{y + 32}" text-anchor="middle">'
                f"±{cell.half_width:.2f}</text></g>"
            )
    label = escape(f"rows against columns: {', '.join(rows)}")
    # As wide as it is, so that a small table is not blown up.
    style = f"max-width:{width}px"
    return f'<svg viewBox="0 0 {width} {height}" style="{style}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
