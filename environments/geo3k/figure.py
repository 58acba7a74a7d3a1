"""Figures as plain data: lines, circles, angle marks and labels, in units of the figure's own."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

Point = tuple[float, float]
"""Right and up, in units of the figure's own."""


ARC_RADIUS = 0.085
"""Of an angle mark, in parts of the picture's size."""


@dataclass(frozen=True)
class Label:
    """A text that belongs to a point, and the direction in which it should lie from there."""

    text: str
    at: Point
    toward: Point
    start: float = 0.0
    """Least distance from `at`, in parts of the picture's size."""


@dataclass
class Figure:
    """What a picture shows. The figure is scaled to fill the picture; angles stay as they are."""

    segments: list[tuple[Point, Point]] = field(default_factory=list)
    dashed: list[tuple[Point, Point]] = field(default_factory=list)
    circles: list[tuple[Point, float]] = field(default_factory=list)
    dots: list[Point] = field(default_factory=list)
    squares: list[tuple[Point, Point, Point]] = field(default_factory=list)
    """Right angles: the corner, and a point on each side."""
    arcs: list[tuple[Point, Point, Point]] = field(default_factory=list)
    """Angle marks: the corner, and a point on each side; the angle below 180 degrees is marked."""
    ticks: list[tuple[Point, Point, int]] = field(default_factory=list)
    """Sides of equal length bear the same number of ticks."""
    arrows: list[tuple[Point, Point]] = field(default_factory=list)
    """Parallel lines bear an arrow, at the middle."""
    labels: list[Label] = field(default_factory=list)

    def polygon(self, *points: Point) -> None:
        self.segments += zip(points, [*points[1:], points[0]], strict=True)

    def name(self, point: Point, text: str, center: Point) -> None:
        """The name of a corner, outside of the figure."""
        self.labels.append(Label(text, point, minus(point, center)))

    def length(self, a: Point, b: Point, text: str, inside: Point) -> None:
        """The length of a side, on the side's outer side."""
        middle = between(a, b, 0.5)
        normal = (a[1] - b[1], b[0] - a[0])
        away = minus(middle, inside)
        if normal[0] * away[0] + normal[1] * away[1] < 0:
            normal = (-normal[0], -normal[1])
        self.labels.append(Label(text, middle, normal))

    def angle(self, corner: Point, a: Point, b: Point, text: str) -> None:
        """A marked angle with its size or name."""
        self.arcs.append((corner, a, b))
        u, v = unit(minus(a, corner)), unit(minus(b, corner))
        self.labels.append(Label(text, corner, (u[0] + v[0], u[1] + v[1]), ARC_RADIUS))

    def points(self) -> Iterable[Point]:
        for a, b in [*self.segments, *self.dashed]:
            yield from (a, b)
        for (x, y), radius in self.circles:
            yield from ((x - radius, y - radius), (x + radius, y + radius))
        yield from self.dots

    def mapped(self, move: Callable[[Point], Point]) -> "Figure":
        """The figure with every point moved (turned, mirrored); directions are moved as differences of points."""
        zero = move((0.0, 0.0))

        def pairs(lines: Sequence[tuple[Point, Point]]) -> list[tuple[Point, Point]]:
            return [(move(a), move(b)) for a, b in lines]

        return Figure(
            pairs(self.segments),
            pairs(self.dashed),
            [(move(center), radius) for center, radius in self.circles],
            [move(p) for p in self.dots],
            [(move(a), move(b), move(c)) for a, b, c in self.squares],
            [(move(a), move(b), move(c)) for a, b, c in self.arcs],
            [(move(a), move(b), n) for a, b, n in self.ticks],
            pairs(self.arrows),
            [Label(label.text, move(label.at), minus(move(label.toward), zero), label.start) for label in self.labels],
        )


def minus(a: Point, b: Point) -> Point:
    return a[0] - b[0], a[1] - b[1]


def between(a: Point, b: Point, part: float) -> Point:
    return a[0] + (b[0] - a[0]) * part, a[1] + (b[1] - a[1]) * part


def unit(vector: Point) -> Point:
    length = math.hypot(*vector) or 1.0
    return vector[0] / length, vector[1] / length


def centroid(*points: Point) -> Point:
    return sum(p[0] for p in points) / len(points), sum(p[1] for p in points) / len(points)
