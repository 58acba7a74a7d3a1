"""`opentinker env`: what an author of environments types, and what comes of it."""

import json
import re
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from opentinker.cli.main import app
from opentinker.images import Image

PNG = (
    b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x00\x01\x00\x00\x00\x01\x08\x00\x00\x00\x00:~\x9bU"
    b"\x00\x00\x00\nIDATx\x9cc`\x00\x00\x00\x02\x00\x01H\xaf\xa4q\x00\x00\x00\x00IEND\xaeB`\x82"
)
PICTURES = f'''
import opentinker as ot

class Pictures(ot.Environment):
    """Shows a picture, and another one with every answer."""

    def __init__(self, turns: int = 2) -> None:
        self.left = turns

    def reset(self, task):
        print("noise on stdout")
        picture = {{"type": "image", "image": ot.Image({PNG!r})}}
        return [{{"role": "user", "content": [{{"type": "text", "text": f"look, {{task['seed']}}"}}, picture]}}]

    def step(self, action):
        self.left -= 1
        reward = {{"wit": 0.5, "length": len(action.text) / 100}}
        return ot.StepResult(reward, self.left == 0, ot.Image({PNG!r}), {{"lines": 1}})

    def finalize(self):
        return {{"end": 1}}
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "pictures.py").write_text(PICTURES)
    return tmp_path


def run(*arguments: str, typed: str | None = None, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["env", *arguments], input=typed)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def words(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def test_new_then_check_then_play(folder: Path) -> None:
    written = run("new", "my-game", "--template", "multi").stdout
    assert "opentinker env check my_game" in written
    assert "keeps the contract" in run("check", "my_game", "--episodes", "0").stdout
    (folder / "actions").write_text("10\n41\n")
    played = words(run("play", "my_game", "--actions", "actions", "--task", '{"number": 41}').stdout)
    assert 'task: {"number": 41}' in played
    assert "assistant 10 user Higher. reward +0" in played
    assert "assistant 41 reward +1.38 = found 1 + speed 0.375" in played
    assert "done after 2 turns: 1.38 = found 1 + speed 0.375; exact 1, guesses 2" in played
    again = run("new", "my_game", code=1)
    assert "exists already" in again.stderr


def test_new_can_be_told_where(folder: Path) -> None:
    run("new", "other", "--in", "a/b")
    assert (folder / "a/b/other/other.py").exists()


def test_check_says_what_is_broken_and_where_and_ends_with_1(folder: Path) -> None:
    (folder / "bad.py").write_text(
        "import random\nimport opentinker as ot\n\nclass Bad(ot.Environment):\n"
        "    def reset(self, task):\n        return str(random.random())\n"
        "    def step(self, action):\n        return ot.StepResult(float(action.text), True)\n"
    )
    result = run("check", "bad.py", "--episodes", "0", code=1)
    assert "FAILED" in result.stdout
    assert "determinism (bad.py:6): derive all chance from the task" in words(result.stdout)
    assert "actions (bad.py:8)" in words(result.stdout)
    assert "held-out tasks" in result.stdout
    report = json.loads(run("check", "bad.py", "--episodes", "0", "--json", code=1).stdout)
    assert report["ok"] is False
    marks = {finding["check"]: finding["mark"] for finding in report["checks"]}
    assert (marks["determinism"], marks["held-out tasks"], marks["tools"]) == ("failed", "warning", "ok")
    assert {"check", "mark", "seen", "mend", "where"} == set(report["checks"][0])


def test_check_shows_the_line_of_a_syntax_error(folder: Path) -> None:
    (folder / "bad.py").write_text("import opentinker\n\nclass Bad(opentinker.Environment:\n")
    result = run("check", "bad.py", code=1)
    assert "SyntaxError" in result.stdout
    assert re.search(r"bad\.py, line 3", words(result.stdout))


def test_check_passes_arguments_and_prints_only_its_result(folder: Path) -> None:
    report = json.loads(run("check", "pictures.py", "--args", "turns=3", "--episodes", "0", "--json").stdout)
    assert report["environment"] == "pictures.py:Pictures"
    wrong = run("check", "pictures.py:Pictures", "--args", '{"lives": 3}', "--episodes", "0", code=1)
    assert "unexpected keyword argument 'lives'" in words(wrong.stdout)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["check", "pictures.py", "--args", "turns"], "it is no KEY=VALUE"),
        (["check", "pictures.py", "--args", "{turns"], "--args {turns"),
        (["play", "pictures.py", "--task", "{"], "--task is not JSON"),
        (["play", "pictures.py", "--actions", "nowhere"], "cannot be read"),
        (["play", "nowhere.py"], "nowhere.py does not exist"),
        (["play", "arithmetik"], "did you mean 'arithmetic'"),
        (["play", "arithmetic", "--held-out", "30"], "there are 30, from 0"),
        (["play", "two.py"], "choose one: two.py:A, two.py:B"),
        (["play", "none.py"], "defines no subclass"),
    ],
)
def test_a_mistake_is_one_line_and_a_hint(folder: Path, arguments: list[str], complaint: str) -> None:
    (folder / "two.py").write_text("import opentinker as ot\nclass A(ot.Environment): pass\nclass B(ot.Environment): pass\n")
    (folder / "none.py").write_text("x = 1\n")
    result = run(*arguments, code=1)
    assert complaint in words(result.stderr)


def test_play_saves_images_and_says_what_they_are(folder: Path) -> None:
    (folder / "actions").write_text('"two\\nlines"\nplain\n')
    shown = run("play", "pictures.py", "--actions", "actions", "--images", "seen", "--seed", "4").stdout
    (image,) = (folder / "seen").iterdir()
    assert Image(image.read_bytes()).media_type == "image/png"
    assert f"image/png, {len(PNG) / 1024:.1f} KiB: seen/{image.name}]" in shown
    assert "reward +0.59 = wit 0.5 + length 0.09; lines 1" in shown
    assert "last reward +1 = end 1" in shown
    assert "done after 2 turns" in shown


def test_a_person_types_answers_over_several_lines_and_ends_with_ctrl_d(folder: Path) -> None:
    shown = run("play", "pictures.py", "--args", "turns=9", typed="one \\\ntwo\n\n").stdout
    assert "reward +0.58" in shown, "the first answer has eight characters with the end of line"
    assert "reward +0.5 = wit 0.5 + length 0" in shown, "an empty answer is one, too"
    assert "not finished after 2 turns" in shown
    assert "last reward +1" in shown


def test_ctrl_c_closes_the_environment_and_ends_with_130(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closing = "\n    def close(self):\n        open('closed', 'w').close()\n"
    (folder / "pictures.py").write_text(PICTURES + closing)

    def interrupted(prompt: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    result = run("play", "pictures.py", code=130)
    assert "not finished after 0 turns" in result.stdout
    assert (folder / "closed").exists()


def test_the_episode_is_cut_after_max_turns(folder: Path) -> None:
    (folder / "actions").write_text("a\nb\nc\n")
    shown = run("play", "pictures.py", "--args", "turns=9", "--actions", "actions", "--max-turns", "2").stdout
    assert "not finished after 2 turns" in shown


def test_what_a_process_prints_is_not_the_result_of_a_check(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = PICTURES.replace("    def __init__", "    execution = 'process'\n\n    def __init__")
    (folder / "pictures.py").write_text(text)
    result = run("check", "pictures.py", "--tasks", "1", "--episodes", "0", "--json")
    assert json.loads(result.stdout)["ok"]
    printed, noise = capfd.readouterr()
    assert "noise on stdout" not in printed
    assert "noise on stdout" in noise
