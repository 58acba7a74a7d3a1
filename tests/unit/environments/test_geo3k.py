"""Geometry with pictures: problems generated here, and rows of Geometry3K in the form that the dataset has."""

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from opentinker.env.datasets import load_tasks
from opentinker.env.environment import Action, Message
from opentinker.env.tasks import ListTasks
from opentinker.environments.geo3k import Geo3k
from opentinker.environments.geo3k.problems import FAMILIES, make_problem
from opentinker.environments.geo3k.tasks import HELD_OUT
from opentinker.errors import ConfigError, InvalidRequestError
from opentinker.images import Image

TASK = {"family": "pythagoras", "seed": 0}


def content(messages: Any) -> list[Any]:
    """The parts of the only message."""
    (message,) = messages
    assert message["role"] == "user"
    return list(message["content"])


def texts(message: Message) -> str:
    assert not isinstance(message["content"], str)
    return " ".join(part["text"] for part in message["content"] if part["type"] == "text")


def png(width: int, height: int, color: str = "white") -> bytes:
    import PIL.Image

    encoded = BytesIO()
    PIL.Image.new("RGB", (width, height), color).save(encoded, format="PNG")
    return encoded.getvalue()


@pytest.fixture(scope="module")
def parquet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows in the very form of hiyouga/geometry3k: a list of images, a problem with a placeholder, and a LaTeX answer."""
    datasets = pytest.importorskip("datasets")
    rows = {
        "images": [[{"bytes": png(40 + i, 30), "path": None}] for i in range(6)],
        "problem": [f"<image>Find $x$, problem {i}." for i in range(6)],
        "answer": ["3", "2 \\sqrt { 221 }", "\\frac { 15 } { 7 }", "6.3", "110", "2 x + 3"],
    }
    features = datasets.Features(
        {"images": datasets.List(datasets.Image()), "problem": datasets.Value("string"), "answer": datasets.Value("string")}
    )
    path = tmp_path_factory.mktemp("geometry3k") / "train.parquet"
    datasets.Dataset.from_dict(rows, features=features).to_parquet(str(path))
    return path


def test_the_prompt_is_the_picture_the_question_and_how_to_answer() -> None:
    picture, question, instructions = content(Geo3k().reset(TASK))
    assert picture["image"].pil().size == (336, 336)
    assert question["text"] == make_problem(**TASK).question
    assert "\\boxed{}" in instructions["text"]
    assert "exact" in instructions["text"]


def test_members_of_a_group_see_the_same_picture_and_other_seeds_another() -> None:
    first, second = (content(Geo3k().reset(TASK))[0]["image"] for _ in range(2))
    assert first.sha256 == second.sha256
    assert first.sha256 != content(Geo3k().reset({**TASK, "seed": 1}))[0]["image"].sha256
    assert content(Geo3k(image_size=224).reset(TASK))[0]["image"].pil().size == (224, 224)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_right_answer_earns_one_and_a_wrong_one_its_form(family: str) -> None:
    task = {"family": family, "seed": 7}
    answer = make_problem(**task).answer
    for text, reward, exact, boxed in (
        (f"It is \\boxed{{{answer}}}.", {"answer": 0.9, "format": 0.1}, 1.0, 1.0),
        (str(answer), {"answer": 0.9, "format": 0.0}, 1.0, 0.0),
        (f"\\boxed{{{answer} + 1}}", {"answer": 0.0, "format": 0.1}, 0.0, 1.0),
        ("no idea", {"answer": 0.0, "format": 0.0}, 0.0, 0.0),
    ):
        environment = Geo3k()
        environment.reset(task)
        result = environment.step(Action(text))
        assert result.done
        assert result.reward == pytest.approx(reward)
        assert (result.metrics["exact"], result.metrics["boxed"]) == (exact, boxed)
        assert result.metrics["unreadable"] == (text == "no idea")


def test_a_second_answer_and_one_before_the_problem_are_refused() -> None:
    environment = Geo3k()
    with pytest.raises(InvalidRequestError, match="no problem is posed"):
        environment.step(Action("5"))
    environment.reset(TASK)
    environment.step(Action("5"))
    with pytest.raises(InvalidRequestError, match="no problem is posed"):
        environment.step(Action("5"))


def test_generated_tasks_are_held_out_by_their_numbers_and_keep_to_the_families() -> None:
    args = {"families": ["circle", "rectangle"]}
    drawn = Geo3k.task_source("train", args).draw(0, 0, 200)
    held_out = Geo3k.task_source("held_out", args).first(1000)
    assert {t["family"] for t in drawn} == {t["family"] for t in held_out} == set(args["families"])
    keys = [{(t["family"], make_problem(**t).numbers) for t in tasks} for tasks in (drawn, held_out)]
    assert keys[0].isdisjoint(keys[1])
    assert len(Geo3k.task_source("held_out", {}).first(1000)) == len(Geo3k.held_out_tasks()) == HELD_OUT


def test_rows_of_geometry3k_are_json_tasks_with_their_pictures(parquet: Path) -> None:
    args = {"dataset": str(parquet), "held_out_dataset": str(parquet)}
    source = Geo3k.task_source("train", args)
    assert source.size == 6
    tasks = source.draw(3, 0, 6)
    assert sorted(t["problem"] for t in tasks) == [f"<image>Find $x$, problem {i}." for i in range(6)]
    held_out = Geo3k.task_source("held_out", args).first(2)
    assert [t["answer"] for t in held_out] == ["3", "2 \\sqrt { 221 }"]
    task = json.loads(json.dumps(held_out[1]))
    picture, question, instructions = content(Geo3k(**args).reset(task))
    assert picture["image"].pil().size == (41, 30)
    assert question["text"] == "Find $x$, problem 1."
    assert "exact" not in instructions["text"]


@pytest.mark.parametrize(
    ("row", "text", "exact"),
    [
        (0, "\\boxed{3}", 1),
        (1, "\\boxed{2\\sqrt{221}}", 1),
        (1, "\\boxed{\\sqrt{884}}", 1),
        (2, "\\boxed{15/7}", 1),
        (2, "\\boxed{2.142857}", 0),
        (3, "\\boxed{6.3}", 1),
        (3, "\\boxed{2\\sqrt{10}}", 1),  # 6.3246, of which 6.3 is rounded
        (4, "\\boxed{110^\\circ}", 1),
        (5, "\\boxed{2x+3}", 1),
        (5, "\\boxed{3 + 2x}", 1),
        (5, "\\boxed{5}", 0),
    ],
)
def test_answers_to_rows_are_judged_exactly(parquet: Path, row: int, text: str, exact: int) -> None:
    task = Geo3k.task_source("held_out", {"dataset": "x", "held_out_dataset": str(parquet)}).first(6)[row]
    environment = Geo3k()
    environment.reset(task)
    assert environment.step(Action(text)).metrics["exact"] == exact


def test_tasks_of_a_job_may_come_from_any_rows_with_the_columns(parquet: Path) -> None:
    given = load_tasks(str(parquet), required=Geo3k.task_columns)
    Geo3k.check_tasks(given, {})
    (row,) = given.first(1)
    in_memory = {**row, "images": [Image(png(20, 10))]}
    sizes = [content(Geo3k().reset(task))[0]["image"].pil().size for task in (row, in_memory)]
    assert sizes == [(40, 30), (20, 10)]


def test_given_tasks_without_pictures_are_found_before_the_run() -> None:
    with pytest.raises(ConfigError, match="no picture"):
        Geo3k.check_tasks(ListTasks([{"images": [], "problem": "x", "answer": "1"}]), {})


def test_pictures_stand_where_their_placeholders_are() -> None:
    images = [png(10 + i, 10) for i in range(3)]
    task = {"images": images, "problem": "Compare <image> with <image> please.", "answer": "1"}
    parts = content(Geo3k().reset(task))
    assert [part["type"] for part in parts] == ["image", "text", "image", "text", "image", "text", "text"]
    assert [part["text"] for part in parts if part["type"] == "text"][:3] == ["Compare ", " with ", " please."]
    assert parts[-1]["text"].startswith("\n")
    widths = [part["image"].pil().size[0] for part in parts if part["type"] == "image"]
    assert widths == [10, 11, 12]


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"images": [], "problem": "x", "answer": "1"}, "no picture"),
        ({"images": [b"GIF89a"], "problem": "x", "answer": "1"}, "cannot be read"),
        ({"images": ["/etc/hosts"], "problem": "x", "answer": "1"}, "cannot be read"),
        ({"images": [png(9, 9)], "problem": "<image><image>", "answer": "1"}, "names 2 pictures, but there are 1"),
        ({"question": "x"}, "no images and no problem and no answer: it has question"),
        ({"family": "spheres", "seed": 0}, "no family of problems 'spheres'"),
    ],
)
def test_a_task_that_is_none_is_refused(task: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        Geo3k().reset(task)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"image_size": 100}, "160 to 2048 pixels"),
        ({"format_reward": 2}, "from 0 to 1"),
        ({"families": ["circel"]}, "no family of problems 'circel'"),
    ],
)
def test_arguments_that_make_no_problem_are_named(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Geo3k(**args)
    with pytest.raises(ConfigError, match=message):
        Geo3k.task_source("train", args)


def test_a_file_is_one_split_and_needs_the_columns(parquet: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="held_out_dataset names another file"):
        Geo3k.task_source("held_out", {"dataset": str(parquet)})
    other = tmp_path / "rows.jsonl"
    other.write_text('{"images": [], "question": "x", "answer": "1"}\n')
    with pytest.raises(ConfigError, match=r"no column 'problem'.*images, question, answer"):
        Geo3k.task_source("train", {"dataset": str(other)})
    with pytest.raises(ConfigError, match="no family of problems"):
        Geo3k.task_source("train", {"families": ["circel"]})
