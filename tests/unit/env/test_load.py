"""An environment is found by its name, and a mistake in the name or the file is explained."""

import sys
from pathlib import Path

import pytest

from opentinker.env.environment import Environment
from opentinker.env.load import load_environment
from opentinker.errors import EnvironmentLoadError

GOOD = """
import opentinker as ot
import helper_of_this_test

class Guess(ot.Environment):
    def reset(self, task):
        return helper_of_this_test.TEXT
    def step(self, action):
        return ot.StepResult(done=True)

class HalfDone(ot.Environment):
    def reset(self, task):
        return ""

class Unrelated:
    pass
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "game.py").write_text(GOOD)
    (tmp_path / "helper_of_this_test.py").write_text("TEXT = 'hello'")
    return tmp_path


@pytest.mark.parametrize("name", ["arithmetic", "guess_number"])
def test_built_in_environments_load_by_name(name: str) -> None:
    assert issubclass(load_environment(name), Environment)


def test_a_class_is_found_in_a_file_next_to_what_it_imports(folder: Path) -> None:
    for name, base in ((f"{folder}/game.py:Guess", None), ("game.py:Guess", folder)):
        found = load_environment(name, base)
        assert found.__name__ == "Guess"
        assert found().reset(None) == "hello"


def test_a_changed_file_is_read_again(folder: Path) -> None:
    load_environment("game.py:Guess", folder)
    (folder / "game.py").write_text(GOOD.replace("helper_of_this_test.TEXT", "'bye, in a longer text'"))
    assert load_environment("game.py:Guess", folder)().reset(None) == "bye, in a longer text"


def test_a_class_stands_for_itself() -> None:
    known = load_environment("arithmetic")
    assert load_environment(known) is known


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("arithmetik", "no built-in environment 'arithmetik' .*did you mean 'arithmetic'"),
        ("chess", "known here: arithmetic, .*; your own is named path/to/file.py:Class"),
        ("nowhere.py:Guess", "nowhere.py does not exist"),
        ("game.py:Gues", "has no class 'Gues' .*did you mean 'Guess'"),
        ("game.py:Unrelated", "'game.py:Unrelated' is not an environment"),
        ("game.py:HalfDone", "HalfDone defines no step"),
        ("notes.txt:Guess", "names no environment .*path/to/file.py:Class; adapters are gymnasium:NAME"),
        ("syntax.py:Guess", r"importing .*syntax.py failed: SyntaxError.*syntax.py, line 2"),
        ("missing.py:Guess", r"ModuleNotFoundError: No module named 'no_such_module' \(.*missing.py:2\)"),
        ("exits.py:Guess", r"importing .*exits.py failed: SystemExit: 1 \(.*exits.py:2\)"),
        ("empty.py:Guess", "it defines no subclass of opentinker.Environment"),
    ],
)
def test_a_mistake_is_explained(folder: Path, name: str, message: str) -> None:
    for file, text in {
        "notes.txt": "hello",
        "syntax.py": "\nclass Guess(\n",
        "missing.py": "\nimport no_such_module\n",
        "exits.py": "\nraise SystemExit(1)\n",
        "empty.py": "",
    }.items():
        (folder / file).write_text(text)
    with pytest.raises(EnvironmentLoadError, match=message):
        load_environment(name, folder)


def test_an_object_that_is_no_environment_is_refused() -> None:
    with pytest.raises(EnvironmentLoadError, match="is not an environment"):
        load_environment(dict)  # type: ignore[arg-type]
