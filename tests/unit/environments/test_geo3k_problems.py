"""Generated problems: the figure is true to scale, so it proves the answer; it is legible, and the text gives nothing away."""

import math
import re
from collections.abc import Iterator
from fractions import Fraction
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opentinker.environments.geo3k.drawing import Box, draw, lay_out, lay_out_turned
from opentinker.environments.geo3k.exact import Exact
from opentinker.environments.geo3k.figure import Figure, Point, between
from opentinker.environments.geo3k.problems import (
    ANGLE,
    FAMILIES,
    LENGTH,
    Problem,
    check_families,
    held_out_tasks,
    make_problem,
    training_task,
)
from opentinker.environments.geo3k.tasks import SIZES
from opentinker.errors import ConfigError

SEEDS = range(25)


def problems(family: str, question: str = "") -> Iterator[Problem]:
    for seed in SEEDS:
        problem = make_problem(family, seed)
        if problem.question == question or not question:
            yield problem


def measured_angles(problem: Problem) -> Iterator[tuple[str, float]]:
    """Each marked angle's label, and what a protractor says. An angle's mark and label are made together."""
    labels = [label for label in problem.figure.labels if label.start]
    for (corner, a, b), label in zip(problem.figure.arcs, labels, strict=True):
        turn = math.atan2(a[1] - corner[1], a[0] - corner[0]) - math.atan2(b[1] - corner[1], b[0] - corner[0])
        yield label.text, abs((math.degrees(turn) + 180) % 360 - 180)


def measured_lengths(problem: Problem) -> Iterator[tuple[str, float]]:
    """Each labelled line's label, and what a ruler says: a label belongs to the line whose middle it is at."""
    for label in problem.figure.labels:
        for a, b in (*problem.figure.segments, *problem.figure.dashed):
            if not label.start and math.dist(between(a, b, 0.5), label.at) < 1e-9:
                yield label.text, math.dist(a, b)


def area(points: list[Point]) -> float:
    pairs = zip(points, [*points[1:], points[0]], strict=True)
    return abs(sum(a[0] * b[1] - b[0] * a[1] for a, b in pairs)) / 2


@pytest.mark.parametrize("family", FAMILIES)
def test_marked_angles_measure_what_their_labels_and_the_answer_say(family: str) -> None:
    for problem in problems(family):
        for text, degrees in measured_angles(problem):
            expected = float(problem.answer) if text == "x" else float(text.rstrip("°"))
            assert degrees == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("family", ["pythagoras", "special_triangle", "similar_triangles", "rectangle"])
def test_labelled_lengths_are_true_to_one_scale_and_so_is_the_answer(family: str) -> None:
    asked = 0
    for problem in problems(family, LENGTH):
        lengths = list(measured_lengths(problem))
        scales = [length / float(problem.answer if text == "x" else Fraction(text)) for text, length in lengths]
        assert len(scales) >= 2
        assert scales == pytest.approx([scales[0]] * len(scales), rel=1e-6)
        asked += sum(text == "x" for text, _ in lengths)
    assert asked >= 5


@pytest.mark.parametrize(("family", "corners"), [("rectangle", 4), ("triangle_area", 3), ("trapezoid_area", 4)])
def test_areas_are_those_of_the_figure(family: str, corners: int) -> None:
    for problem in problems(family):
        if "area" in problem.question:
            assert area([a for a, _ in problem.figure.segments[:corners]]) == pytest.approx(float(problem.answer))


def test_circles_and_sectors_are_computed_from_what_is_shown() -> None:
    for problem in problems("circle"):
        given_, asked, length = problem.numbers
        radius = length if given_ == "radius" else length / 2
        assert float(problem.answer) == pytest.approx(math.pi * (radius**2 if asked == "area" else 2 * radius))
    for problem in problems("sector_area"):
        degrees, radius = problem.numbers
        assert float(problem.answer) == pytest.approx(math.pi * radius**2 * degrees / 360)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_gives_no_number_away_and_every_number_is_in_the_picture(family: str) -> None:
    for problem in problems(family):
        assert not re.search(r"\d", problem.question)
        shown = {number for label in problem.figure.labels for number in re.findall(r"\d+", label.text)}
        needed = {str(n) for n in problem.numbers if isinstance(n, int)}
        if family == "parallel_lines":  # the other numbers are the places of the two angles
            needed = {str(problem.numbers[0])}
        assert needed == shown
    questions = {problem.question for problem in problems(family)}
    assert len(questions) <= 3


@pytest.mark.parametrize("size", [SIZES.start, 224, 336])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_label_touches_a_line_another_label_or_the_edge(family: str, size: int) -> None:
    for seed in range(12):
        layout = lay_out_turned(make_problem(family, seed).figure, size, Random(seed))
        assert layout.clear
        assert len(layout.labels) == len(make_problem(family, seed).figure.labels)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_picture_is_determined_by_its_seed_and_has_its_size(family: str) -> None:
    make_problem.cache_clear()
    pictures = [draw(lay_out_turned(make_problem(family, 5).figure, 224, Random(5))) for _ in range(2)]
    make_problem.cache_clear()
    assert pictures[0].sha256 == pictures[1].sha256
    picture = pictures[0].pil()
    assert (picture.size, picture.mode) == ((224, 224), "RGB")
    dark = sum(picture.convert("L").histogram()[:128])
    assert 300 < dark < 224 * 224 / 5


def test_a_label_that_has_no_room_is_an_error_and_not_a_smudge() -> None:
    figure = Figure()
    figure.polygon((0.0, 0.0), (1.0, 0.0), (0.0, 1.0))
    figure.length((0.0, 0.0), (1.0, 0.0), "1234567890" * 5, (0.3, 0.3))
    with pytest.raises(ValueError, match="no room for the label"):
        lay_out(figure, 224)


coordinates = st.floats(-20, 20)


@given(st.tuples(coordinates, coordinates), st.tuples(coordinates, coordinates))
def test_a_box_meets_a_segment_if_one_of_its_points_lies_inside(a: Point, b: Point) -> None:
    box = Box(-5.0, -3.0, 5.0, 3.0)
    inside = any(abs(x) < 4.9 and abs(y) < 2.9 for x, y in (between(a, b, i / 200) for i in range(201)))
    if inside:
        assert box.meets_segment(a, b)
    far = all(max(abs(x) - 5, abs(y) - 3) > 0.3 for x, y in (between(a, b, i / 200) for i in range(201)))
    if far:
        assert not box.meets_segment(a, b)


def test_held_out_problems_are_different_and_none_is_trained_on_under_any_seed() -> None:
    families = tuple(FAMILIES)
    held_out = [make_problem(**task) for task in held_out_tasks(families, 128)]
    keys = {(p.family, p.numbers) for p in held_out}
    assert len(keys) == 128
    assert {p.family for p in held_out} == set(families)
    drawn = [make_problem(**training_task(seed, families)) for seed in range(1500)]
    assert keys.isdisjoint((p.family, p.numbers) for p in drawn)
    assert {p.family for p in drawn} == set(families)


def test_a_family_with_few_problems_gives_as_many_held_out_ones_as_it_has() -> None:
    few = held_out_tasks(("isosceles_angle",), 128)
    assert 5 <= len(few) < 128


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=20)
def test_a_task_is_determined_by_its_seed(seed: int) -> None:
    assert training_task(seed, ("circle", "pythagoras")) == training_task(seed, ("circle", "pythagoras"))


def test_unknown_families_are_named_with_the_nearest() -> None:
    assert check_families(()) == tuple(FAMILIES)
    with pytest.raises(ConfigError, match=r"no family of problems 'circel'.*circle"):
        check_families(("circel",))


def test_angles_are_asked_in_degrees() -> None:
    assert "degrees" in ANGLE
    assert all(p.answer.rational() is not None for f in FAMILIES for p in problems(f, ANGLE))
    assert any(p.answer != Exact.number(int(float(p.answer))) for p in problems("isosceles_angle"))
