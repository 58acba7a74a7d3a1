"""The picture of a figure: fits it into a square, finds a free place for every label, and draws it with Pillow."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from random import Random
from typing import Any

from opentinker.environments.geo3k.figure import ARC_RADIUS, Figure, Label, Point, between, minus, unit
from opentinker.errors import ConfigError
from opentinker.images import Image

_MARGIN = 0.15
_LINE = 0.006
_SQUARE = 0.045
_TICK = 0.018
_FONT = 0.068
_FINER = 4
"""Drawn this many times larger, then scaled down, for smooth lines."""


@dataclass(frozen=True)
class Box:
    """Of a label, in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def grown(self, by: float) -> "Box":
        return Box(self.left - by, self.top - by, self.right + by, self.bottom + by)

    def meets(self, other: "Box") -> bool:
        return self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom

    def meets_segment(self, a: Point, b: Point) -> bool:
        """Liang and Barsky's clipping: whether a part of the segment is left inside of the box."""
        enter, leave = 0.0, 1.0
        for start, delta, low, high in ((a[0], b[0] - a[0], self.left, self.right), (a[1], b[1] - a[1], self.top, self.bottom)):
            if abs(delta) < 1e-9:
                if not low <= start <= high:
                    return False
                continue
            first, second = sorted(((low - start) / delta, (high - start) / delta))
            enter, leave = max(enter, first), min(leave, second)
        return enter <= leave


@dataclass(frozen=True)
class Layout:
    """A figure in pixels: what is drawn as lines (curves as short ones), and where each label lies."""

    size: int
    lines: tuple[tuple[Point, Point], ...]
    dashes: tuple[tuple[Point, Point], ...]
    dots: tuple[Point, ...]
    labels: tuple[tuple[str, Box], ...]
    font_pixels: int

    @property
    def clear(self) -> bool:
        """Whether no label touches a line, another label or the picture's edge."""
        boxes = [box for _, box in self.labels]
        return (
            all(min(b.left, b.top) >= 0 and max(b.right, b.bottom) <= self.size for b in boxes)
            and not any(box.meets(other) for i, box in enumerate(boxes) for other in boxes[:i])
            and not any(box.meets_segment(*line) for box in boxes for line in (*self.lines, *self.dashes))
        )


def lay_out(figure: Figure, size: int) -> Layout:
    """Fits the figure into a square of `size` pixels and finds a place for each label."""
    points = list(figure.points())
    low = min(p[0] for p in points), min(p[1] for p in points)
    high = max(p[0] for p in points), max(p[1] for p in points)
    scale = size * (1 - 2 * _MARGIN) / max(high[0] - low[0], high[1] - low[1])
    middle = between(low, high, 0.5)

    def place(p: Point) -> Point:
        return size / 2 + (p[0] - middle[0]) * scale, size / 2 - (p[1] - middle[1]) * scale

    lines = [(place(a), place(b)) for a, b in figure.segments]
    for center, radius in figure.circles:
        lines += _arc(place(center), radius * scale, 0.0, 2 * math.pi)
    for corner, a, b in figure.squares:
        lines += _right_angle(place(corner), place(a), place(b), _SQUARE * size)
    for corner, a, b in figure.arcs:
        lines += _angle_mark(place(corner), place(a), place(b), ARC_RADIUS * size)
    for a, b, count in figure.ticks:
        lines += _ticks(place(a), place(b), count, _TICK * size)
    for a, b in figure.arrows:
        lines += _arrow(place(a), place(b), _TICK * size)
    dashes = [(place(a), place(b)) for a, b in figure.dashed]
    dots = [place(p) for p in figure.dots]
    font_pixels = round(_FONT * size)
    placed: list[tuple[str, Box]] = []
    for label in figure.labels:
        toward = unit((label.toward[0], -label.toward[1]))
        placed.append(
            (
                label.text,
                _free_place(label, place(label.at), toward, font_pixels, size, [*lines, *dashes], dots, [b for _, b in placed]),
            )
        )
    return Layout(size, tuple(lines), tuple(dashes), tuple(dots), tuple(placed), font_pixels)


_ORIENTATIONS = 12


def lay_out_turned(figure: Figure, size: int, random: Random) -> Layout:
    """Turned and mirrored at random, in a way that leaves a free place for every label.

    Raises:
        ValueError: there is no such way.
    """
    for attempt in range(_ORIENTATIONS):
        turn, mirror = math.radians(random.randrange(0, 360, 15)), random.choice((1, -1))
        cos, sin = math.cos(turn), math.sin(turn)

        def move(p: Point, mirror: int = mirror, cos: float = cos, sin: float = sin) -> Point:
            return mirror * p[0] * cos - p[1] * sin, mirror * p[0] * sin + p[1] * cos

        try:
            return lay_out(figure.mapped(move), size)
        except ValueError:
            if attempt == _ORIENTATIONS - 1:
                raise
    raise AssertionError("the loop returns or raises")


def _free_place(
    label: Label,
    at: Point,
    toward: Point,
    font_pixels: int,
    size: int,
    lines: Sequence[tuple[Point, Point]],
    dots: Sequence[Point],
    others: Sequence[Box],
) -> Box:
    """The nearest place in the label's direction, or turned from it, that touches nothing and has nothing in between."""
    left, top, right, bottom = font(font_pixels).getbbox(label.text)
    width, height = right - left, bottom - top
    gap = 0.012 * size
    best: tuple[float, Box] | None = None
    for further in range(24):
        for turn in (0, 12, -12, 25, -25, 40, -40, 60, -60, 80, -80):
            angle = math.radians(turn)
            direction = (
                toward[0] * math.cos(angle) - toward[1] * math.sin(angle),
                toward[0] * math.sin(angle) + toward[1] * math.cos(angle),
            )
            # The box's half extent in this direction, so that its edge and not its middle keeps the distance.
            reach = min((width / 2 + gap) / max(abs(direction[0]), 1e-6), (height / 2 + gap) / max(abs(direction[1]), 1e-6))
            distance = label.start * size + reach + further * gap
            x, y = at[0] + direction[0] * distance, at[1] + direction[1] * distance
            box = Box(x - width / 2, y - height / 2, x + width / 2, y + height / 2)
            roomy = box.grown(gap)
            free = (
                min(roomy.left, roomy.top) >= 0
                and max(roomy.right, roomy.bottom) <= size
                and not any(roomy.meets(other) for other in others)
                and not any(roomy.meets_segment(*line) for line in lines)
                and not any(roomy.grown(gap).meets_segment(dot, dot) for dot in dots)
            )
            start = label.start * size + gap / 2
            beside = at[0] + direction[0] * start, at[1] + direction[1] * start
            free = free and not any(_cross(beside, (x, y), *line) for line in lines)
            cost = further + abs(turn) / 4
            if free and (best is None or cost < best[0]):
                best = cost, box
        if best is not None and best[0] <= further:
            break
    if best is None:
        raise ValueError(f"there is no room for the label {label.text!r}")
    return best[1]


def _cross(a: Point, b: Point, c: Point, d: Point) -> bool:
    """Whether the segments from a to b and from c to d meet within both."""

    def side(p: Point, q: Point, r: Point) -> float:
        return (q[0] - p[0]) * (r[1] - p[1]) - (q[1] - p[1]) * (r[0] - p[0])

    return side(a, b, c) * side(a, b, d) < 0 and side(c, d, a) * side(c, d, b) < 0


def _arc(center: Point, radius: float, start: float, end: float) -> list[tuple[Point, Point]]:
    steps = max(8, int(abs(end - start) * radius / 4))
    angles = [start + (end - start) * i / steps for i in range(steps + 1)]
    points = [(center[0] + radius * math.cos(a), center[1] + radius * math.sin(a)) for a in angles]
    return list(pairwise(points))


def _angle_mark(corner: Point, a: Point, b: Point, radius: float) -> list[tuple[Point, Point]]:
    start = math.atan2(a[1] - corner[1], a[0] - corner[0])
    turn = math.atan2(b[1] - corner[1], b[0] - corner[0]) - start
    turn = (turn + math.pi) % (2 * math.pi) - math.pi
    return _arc(corner, radius, start, start + turn)


def _right_angle(corner: Point, a: Point, b: Point, side: float) -> list[tuple[Point, Point]]:
    u, v = unit(minus(a, corner)), unit(minus(b, corner))
    p = corner[0] + u[0] * side, corner[1] + u[1] * side
    q = corner[0] + v[0] * side, corner[1] + v[1] * side
    far = p[0] + v[0] * side, p[1] + v[1] * side
    return [(p, far), (far, q)]


def _ticks(a: Point, b: Point, count: int, length: float) -> list[tuple[Point, Point]]:
    along = unit(minus(b, a))
    middle = between(a, b, 0.5)
    marks = []
    for i in range(count):
        shift = (i - (count - 1) / 2) * length * 0.8
        x, y = middle[0] + along[0] * shift, middle[1] + along[1] * shift
        marks.append(((x - along[1] * length, y + along[0] * length), (x + along[1] * length, y - along[0] * length)))
    return marks


def _arrow(a: Point, b: Point, length: float) -> list[tuple[Point, Point]]:
    along = unit(minus(b, a))
    tip = between(a, b, 0.5)
    back = tip[0] - along[0] * length * 1.4, tip[1] - along[1] * length * 1.4
    return [
        (tip, (back[0] - along[1] * length, back[1] + along[0] * length)),
        (tip, (back[0] + along[1] * length, back[1] - along[0] * length)),
    ]


def pillow() -> Any:
    """Pillow, with the modules used here.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import PIL.Image
        import PIL.ImageDraw
        import PIL.ImageFont
    except ImportError as error:
        raise ConfigError(
            "the pictures of geometry problems need Pillow", hint="pip install 'opentinker[environments]'"
        ) from error
    return PIL


@lru_cache
def font(pixels: int) -> Any:
    """Pillow's own font, so that pictures do not depend on a machine's.

    Raises:
        ConfigError: Pillow is missing, or was built without FreeType.
    """
    found = pillow().ImageFont.load_default(pixels)
    if not hasattr(found, "getbbox"):
        raise ConfigError("drawing geometry problems needs a Pillow with FreeType", hint="pip install --force-reinstall pillow")
    return found


def draw(layout: Layout) -> Image:
    """The picture, black on white, as a PNG.

    Raises:
        ConfigError: Pillow is missing.
    """
    library = pillow()
    fine = layout.size * _FINER
    picture = library.Image.new("L", (fine, fine), 255)
    pen = library.ImageDraw.Draw(picture)
    width = max(1.3, _LINE * layout.size) * _FINER
    for a, b in layout.lines:
        _stroke(pen, a, b, width)
    for a, b in layout.dashes:
        length = math.hypot(*minus(b, a))
        pieces = max(3, round(length / (0.025 * layout.size)) | 1)
        for i in range(0, pieces, 2):
            _stroke(pen, between(a, b, i / pieces), between(a, b, (i + 1) / pieces), width)
    for x, y in layout.dots:
        radius = 0.009 * layout.size * _FINER
        pen.ellipse([x * _FINER - radius, y * _FINER - radius, x * _FINER + radius, y * _FINER + radius], fill=0)
    picture = picture.resize((layout.size, layout.size), library.Image.Resampling.LANCZOS)
    pen = library.ImageDraw.Draw(picture)
    for text, box in layout.labels:
        left, top, _, _ = font(layout.font_pixels).getbbox(text)
        pen.text((round(box.left) - left, round(box.top) - top), text, fill=0, font=font(layout.font_pixels))
    return Image.of(picture.convert("RGB"))


def _stroke(pen: Any, a: Point, b: Point, width: float) -> None:
    """A line with round ends, so that corners close."""
    pen.line([a[0] * _FINER, a[1] * _FINER, b[0] * _FINER, b[1] * _FINER], fill=0, width=round(width))
    radius = width / 2
    for x, y in (a, b):
        pen.ellipse([x * _FINER - radius, y * _FINER - radius, x * _FINER + radius, y * _FINER + radius], fill=0)
