"""Geometry problems from a seed: a question without numbers, a figure that holds them, and the exact answer."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from hashlib import blake2b
from itertools import zip_longest
from random import Random
from typing import Any

from opentinker.config.base import nearest
from opentinker.environments.geo3k.exact import Exact
from opentinker.environments.geo3k.figure import Figure, Label, Point, between, centroid, minus
from opentinker.errors import ConfigError

ANGLE = "Find the value of x, in degrees."
LENGTH = "Find the value of x."
_SEEDS_TRIED = 3000
"""For held-out problems of a family."""


@dataclass(frozen=True)
class Problem:
    """`numbers` are what the figure shows: two problems with the same family and numbers are the same problem."""

    family: str
    numbers: tuple[Any, ...]
    question: str
    answer: Exact
    figure: Figure

    @property
    def held_out(self) -> bool:
        """One in eight, by family and numbers: what is evaluated was not trained on under another seed either."""
        return blake2b(repr((self.family, self.numbers)).encode(), digest_size=1).digest()[0] % 8 == 0


Drawn = tuple[tuple[Any, ...], str, Exact, Figure]


def _polar(angle: float, radius: float = 1.0, center: Point = (0.0, 0.0)) -> Point:
    return center[0] + radius * math.cos(math.radians(angle)), center[1] + radius * math.sin(math.radians(angle))


def _angles(random: Random, count: int, total: int, least: int) -> list[int]:
    """Whole degrees that add up, each at least `least`."""
    cuts = sorted(random.randint(0, total - count * least) for _ in range(count - 1))
    return [b - a + least for a, b in zip([0, *cuts], [*cuts, total - count * least], strict=True)]


def _triangle(a: float, b: float) -> tuple[Point, Point, Point]:
    """With these angles, in degrees, at the first two corners."""
    side = math.sin(math.radians(b)) / math.sin(math.radians(a + b))
    return (0.0, 0.0), (1.0, 0.0), _polar(a, side)


def _right_triangle(across: float, up: float) -> tuple[Figure, Point, Point, Point]:
    """With the right angle at the first corner."""
    corner, right, top = (0.0, 0.0), (float(across), 0.0), (0.0, float(up))
    figure = Figure()
    figure.polygon(corner, right, top)
    figure.squares.append((corner, right, top))
    return figure, corner, right, top


def _two(random: Random, low: int, high: int, ratio: float) -> tuple[int, int]:
    """Two different lengths, neither of them much the longer one."""
    while True:
        a, b = random.randint(low, high), random.randint(low, high)
        if a != b and max(a, b) <= ratio * min(a, b):
            return a, b


def triangle_angle(random: Random) -> Drawn:
    a, b, c = _angles(random, 3, 180, 32)
    p, q, r = _triangle(a, b)
    figure = Figure()
    figure.polygon(p, q, r)
    figure.angle(p, q, r, f"{a}°")
    figure.angle(q, r, p, f"{b}°")
    figure.angle(r, p, q, "x")
    return (a, b), ANGLE, Exact.number(c), figure


def exterior_angle(random: Random) -> Drawn:
    a, b, c = _angles(random, 3, 180, 36)
    p, q, r = _triangle(a, b)
    beyond = (q[0] + 0.55, 0.0)
    figure = Figure()
    figure.polygon(p, q, r)
    figure.segments.append((q, beyond))
    figure.angle(q, beyond, r, f"{180 - b}°")
    figure.angle(p, q, r, f"{a}°")
    figure.angle(r, p, q, "x")
    return (a, 180 - b), ANGLE, Exact.number(c), figure


def isosceles_angle(random: Random) -> Drawn:
    apex = random.randint(32, 110)
    base = Fraction(180 - apex, 2)
    p, q, r = _triangle(float(base), float(base))
    figure = Figure(ticks=[(p, r, 1), (q, r, 1)])
    figure.polygon(p, q, r)
    if random.random() < 0.5:
        figure.angle(r, p, q, f"{apex}°")
        figure.angle(q, r, p, "x")
        return ("apex", apex), ANGLE, Exact.number(base), figure
    if base.denominator > 1:
        return isosceles_angle(random)
    figure.angle(p, q, r, f"{base}°")
    figure.angle(r, p, q, "x")
    return ("base", int(base)), ANGLE, Exact.number(apex), figure


def quadrilateral_angle(random: Random) -> Drawn:
    # Corners on a circle, moved a little: the angles come out whole by construction of the last two sides' directions.
    a, b, c, d = _angles(random, 4, 360, 62)
    if max(a, b, c, d) > 132:
        return quadrilateral_angle(random)
    p, q = (0.0, 0.0), (1.0, 0.0)
    s = _polar(a, random.uniform(0.75, 1.1))
    towards = 180.0 - b
    # r lies on the ray from q and on the ray from s whose angle at s is d.
    leaving = a + 180.0 + d
    u, v = _polar(towards), _polar(leaving)
    cross = u[0] * v[1] - u[1] * v[0]
    if abs(cross) < 0.2:
        return quadrilateral_angle(random)
    offset = minus(s, q)
    along = (offset[0] * v[1] - offset[1] * v[0]) / cross
    r = (q[0] + u[0] * along, q[1] + u[1] * along)
    sides = [math.dist(*pair) for pair in ((q, r), (r, s))]
    if along < 0.5 or min(sides) < 0.5 or max(sides) > 1.7:
        return quadrilateral_angle(random)
    figure = Figure()
    figure.polygon(p, q, r, s)
    for corner, x, y, text in ((p, q, s, f"{a}°"), (q, r, p, f"{b}°"), (r, s, q, f"{c}°"), (s, p, r, "x")):
        figure.angle(corner, x, y, text)
    return (a, b, c), ANGLE, Exact.number(d), figure


def parallel_lines(random: Random) -> Drawn:
    theta = random.choice([n for n in range(38, 143) if abs(n - 90) > 5])
    upper, lower = random.randrange(4), random.randrange(4)
    top, bottom = (0.0, 0.6), (-1.2 * math.cos(math.radians(theta)) / math.sin(math.radians(theta)), -0.6)
    figure = Figure()
    for point in (top, bottom):
        figure.segments.append(((point[0] - 1.0, point[1]), (point[0] + 1.0, point[1])))
        figure.arrows.append(((point[0] + 0.35, point[1]), (point[0] + 1.0, point[1])))
    along = _polar(theta)
    figure.segments.append(
        ((bottom[0] - 0.75 * along[0], bottom[1] - 0.75 * along[1]), (top[0] + 0.75 * along[0], top[1] + 0.75 * along[1]))
    )
    # Sector i lies between two directions that follow each other: right, up along the crossing line, left, down along it.
    directions = (0.0, float(theta), 180.0, theta + 180.0)

    def mark(point: Point, sector: int, text: str) -> None:
        figure.angle(point, _polar(directions[sector], 1, point), _polar(directions[(sector + 1) % 4], 1, point), text)

    given = theta if upper % 2 == 0 else 180 - theta
    asked = theta if lower % 2 == 0 else 180 - theta
    mark(top, upper, f"{given}°")
    mark(bottom, lower, "x")
    return (given, upper, lower), ANGLE, Exact.number(asked), figure


def pythagoras(random: Random) -> Drawn:
    a, b = _two(random, 3, 20, 2.2)
    figure, corner, right, top = _right_triangle(a, b)
    inside = centroid(corner, right, top)
    if random.random() < 0.5:
        figure.length(corner, right, str(a), inside)
        figure.length(corner, top, str(b), inside)
        figure.length(right, top, "x", inside)
        return ("hypotenuse", *sorted((a, b))), LENGTH, Exact.root(a * a + b * b), figure
    a, c = min(a, b), max(a, b)
    if c / a < 1.12:
        return pythagoras(random)
    other = math.sqrt(c * c - a * a)
    figure, corner, right, top = _right_triangle(a, other)
    inside = centroid(corner, right, top)
    figure.length(corner, right, str(a), inside)
    figure.length(right, top, str(c), inside)
    figure.length(corner, top, "x", inside)
    return ("leg", a, c), LENGTH, Exact.root(c * c - a * a), figure


def special_triangle(random: Random) -> Drawn:
    """Half a square, or half an equilateral triangle: one side and an angle are given, another side is asked."""
    angle = random.choice((30, 45, 60))
    half, root = Fraction(1, 2), Exact.root
    sine = {30: Exact.number(half), 45: root(half), 60: root(Fraction(3, 4))}
    sides = {"opposite": sine[angle], "adjacent": sine[90 - angle], "hypotenuse": Exact.number(1)}
    given, asked = random.sample(list(sides), 2)
    length = random.randint(2, 24)
    figure, corner, right, top = _right_triangle(float(sides["adjacent"]), float(sides["opposite"]))
    inside = centroid(corner, right, top)
    figure.angle(right, corner, top, f"{angle}°")
    for name, a, b in (("adjacent", corner, right), ("opposite", corner, top), ("hypotenuse", right, top)):
        if name in (given, asked):
            figure.length(a, b, str(length) if name == given else "x", inside)
    return (angle, given, asked, length), LENGTH, Exact.number(length) * sides[asked] / sides[given], figure


def rectangle(random: Random) -> Drawn:
    a, b = _two(random, 3, 24, 2.5)
    p, q, r, s = (0.0, 0.0), (float(a), 0.0), (float(a), float(b)), (0.0, float(b))
    figure = Figure()
    figure.polygon(p, q, r, s)
    figure.squares += [(p, q, s), (r, q, s)]
    inside = centroid(p, r)
    figure.length(p, q, str(a), inside)
    figure.length(q, r, str(b), inside)
    asked = random.choice(("area", "perimeter", "diagonal"))
    if asked == "diagonal":
        figure.segments.append((q, s))
        figure.squares.pop(0)
        figure.labels.append(Label("x", between(q, s, 0.5), (1.0, a / b)))
    answer = {"area": Exact.number(a * b), "perimeter": Exact.number(2 * a + 2 * b), "diagonal": Exact.root(a * a + b * b)}[
        asked
    ]
    question = LENGTH if asked == "diagonal" else f"Find the {asked} of the rectangle."
    return (asked, *sorted((a, b))), question, answer, figure


def triangle_area(random: Random) -> Drawn:
    base, height = _two(random, 4, 24, 1.6)
    foot = random.uniform(0.3, 0.7) * base
    p, q, r, f = (0.0, 0.0), (float(base), 0.0), (foot, float(height)), (foot, 0.0)
    figure = Figure(dashed=[(f, r)], squares=[(f, q, r)])
    figure.polygon(p, q, r)
    figure.length(p, q, str(base), r)
    figure.labels.append(Label(str(height), between(f, r, 0.4), (-1.0 if foot > base / 2 else 1.0, 0.0)))
    return (base, height), "Find the area of the triangle.", Exact.number(Fraction(base * height, 2)), figure


def trapezoid_area(random: Random) -> Drawn:
    short, long = sorted(_two(random, 4, 24, 2.2))
    height = random.randint(math.ceil(long * 0.45), long)
    start = random.uniform(0.15, 0.85) * (long - short)
    p, q, r, s = (0.0, 0.0), (float(long), 0.0), (start + short, float(height)), (start, float(height))
    foot = start + short * random.uniform(0.35, 0.65)
    top, bottom = (foot, float(height)), (foot, 0.0)
    figure = Figure(dashed=[(bottom, top)], squares=[(bottom, q, top)], arrows=[(p, (foot, 0.0)), (s, (foot, float(height)))])
    figure.polygon(p, q, r, s)
    inside = centroid(p, q, r, s)
    figure.length(p, q, str(long), inside)
    figure.length(r, s, str(short), inside)
    figure.labels.append(Label(str(height), between(bottom, top, 0.5), (1.0, 0.0)))
    return (short, long, height), "Find the area of the trapezoid.", Exact.number(Fraction((short + long) * height, 2)), figure


def circle(random: Random) -> Drawn:
    given, asked = random.choice(("radius", "diameter")), random.choice(("area", "circumference"))
    length = random.randint(2, 40)
    radius = Exact.number(length if given == "radius" else Fraction(length, 2))
    center, edge = (0.0, 0.0), (1.0, 0.0)
    start = center if given == "radius" else (-1.0, 0.0)
    figure = Figure(segments=[(start, edge)], circles=[(center, 1.0)], dots=[center])
    # Named, because a bare number beside a diameter with its centre could be either.
    figure.labels.append(Label(f"{given[0]} = {length}", between(center, edge, 0.5), (0.0, 1.0)))
    answer = Exact.pi() * radius * (radius if asked == "area" else Exact.number(2))
    return (given, asked, length), f"Find the {asked} of the circle. Leave pi in the answer.", answer, figure


def sector_area(random: Random) -> Drawn:
    angle, radius = random.choice([n for n in range(40, 165, 5) if n != 90]), random.randint(2, 20)
    center, a, b = (0.0, 0.0), _polar(0), _polar(angle)
    figure = Figure(segments=[(center, a), (center, b)], circles=[(center, 1.0)], dots=[center])
    figure.angle(center, a, b, f"{angle}°")
    figure.labels.append(Label(str(radius), between(center, a, 0.55), (0.0, -1.0)))
    answer = Exact.pi() * Exact.number(Fraction(radius * radius * angle, 360))
    return (angle, radius), "Find the area of the sector with the marked angle. Leave pi in the answer.", answer, figure


def inscribed_angle(random: Random) -> Drawn:
    central = random.randint(60, 150)
    center, a, b = (0.0, 0.0), _polar(-90 - central / 2), _polar(-90 + central / 2)
    # Well between the points opposite to a and b, where a side would lie on a radius.
    aside = min(25.0, central / 2 - 18)
    corner = _polar(90 + random.uniform(-aside, aside))
    figure = Figure([(center, a), (center, b), (corner, a), (corner, b)], circles=[(center, 1.0)], dots=[center])
    if random.random() < 0.5:
        figure.angle(center, a, b, f"{central}°")
        figure.angle(corner, a, b, "x")
        return ("central", central), ANGLE, Exact.number(Fraction(central, 2)), figure
    if central % 2:
        return inscribed_angle(random)
    figure.angle(center, a, b, "x")
    figure.angle(corner, a, b, f"{central // 2}°")
    return ("inscribed", central // 2), ANGLE, Exact.number(central), figure


def similar_triangles(random: Random) -> Drawn:
    """A triangle cut by a line parallel to its base."""
    upper, lower = random.randint(3, 15), random.randint(3, 15)
    known = random.randint(3, 15)
    part = upper / (upper + lower)
    if not 0.4 <= part <= 0.7:
        return similar_triangles(random)
    asked = random.choice(("base", "side"))
    apex = (0.0, 0.0)
    left = _polar(250, upper + lower)
    if asked == "base":
        base = Fraction(known * (upper + lower), upper)
        right = (left[0] + float(base), left[1])
    else:
        rest = Fraction(known * lower, upper)
        drop = -left[1]
        length = known + float(rest)
        if length < drop * 1.02:
            return similar_triangles(random)
        right = (math.sqrt(length * length - drop * drop), left[1])
    if not 0.6 <= math.dist(left, right) / (upper + lower) <= 1.6:
        return similar_triangles(random)
    d, e = between(apex, left, part), between(apex, right, part)
    figure = Figure(segments=[(d, e)], arrows=[(d, e), (left, right)])
    figure.polygon(apex, d, left, right, e)
    inside = centroid(apex, left, right)
    figure.length(apex, d, str(upper), inside)
    figure.length(d, left, str(lower), inside)
    if asked == "base":
        figure.labels.append(Label(str(known), between(d, e, 0.5), (0.0, 1.0)))
        figure.length(left, right, "x", inside)
        return ("base", upper, lower, known), LENGTH, Exact.number(base), figure
    figure.length(apex, e, str(known), inside)
    figure.length(e, right, "x", inside)
    return ("side", upper, lower, known), LENGTH, Exact.number(rest), figure


FAMILIES: dict[str, Callable[[Random], Drawn]] = {
    family.__name__: family
    for family in (
        triangle_angle,
        exterior_angle,
        isosceles_angle,
        quadrilateral_angle,
        parallel_lines,
        inscribed_angle,
        pythagoras,
        special_triangle,
        similar_triangles,
        rectangle,
        triangle_area,
        trapezoid_area,
        circle,
        sector_area,
    )
}


def check_families(names: Sequence[str]) -> tuple[str, ...]:
    """The names, if there are such families; all of them for none.

    Raises:
        ConfigError: there is no such family.
    """
    for name in names:
        if name not in FAMILIES:
            raise ConfigError(f"there is no family of problems '{name}'", hint=nearest(str(name), FAMILIES))
    return tuple(names) or tuple(FAMILIES)


@lru_cache(1024)
def make_problem(family: str, seed: int) -> Problem:
    """Determined by family and seed."""
    numbers, question, answer, figure = FAMILIES[family](Random(f"{family} {seed}"))
    return Problem(family, numbers, question, answer, figure)


def training_task(seed: int, families: Sequence[str]) -> dict[str, Any]:
    """A problem that is not held out."""
    random = Random(seed)
    family = random.choice(list(families))
    while True:
        task = {"family": family, "seed": random.getrandbits(32)}
        if not make_problem(**task).held_out:
            return task


def held_out_tasks(families: Sequence[str], count: int) -> list[dict[str, Any]]:
    """Different held-out problems, at most `count`, the families in turn."""
    found: list[list[dict[str, Any]]] = []
    for family in families:
        different: dict[tuple[Any, ...], dict[str, Any]] = {}
        for seed in range(_SEEDS_TRIED):
            problem = make_problem(family, seed)
            if problem.held_out:
                different.setdefault(problem.numbers, {"family": family, "seed": seed})
            if len(different) * len(families) >= count:
                break
        found.append(list(different.values()))
    turns = zip_longest(*found)
    return [task for turn in turns for task in turn if task is not None][:count]
