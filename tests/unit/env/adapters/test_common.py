"""What all adapters promise: tasks that are seeds, errors that say what to install, classes that travel."""

import json
import pickle
import random
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker.env.adapters.__main__ import table
from opentinker.env.adapters.common import (
    ADAPTERS,
    TRAINING_SEEDS,
    Adapter,
    Illegal,
    IllegalMoveError,
    ModuleRandom,
    SeededEnvironment,
    answer_of,
    choose,
    require,
    seed_of,
)
from opentinker.env.adapters.dialogue import new_messages
from opentinker.env.load import ADAPTERS as LOADABLE
from opentinker.env.load import load_environment
from opentinker.errors import ConfigError, EnvironmentFailedError, EnvironmentLoadError

DOCS = Path(__file__).parents[4] / "docs" / "adapters.md"


def test_the_documented_table_is_the_one_of_the_code() -> None:
    missing = [row for row in table(here=False) if row not in DOCS.read_text().splitlines()]
    assert missing == []


def test_every_adapter_that_a_config_can_name_is_listed() -> None:
    assert set(ADAPTERS) == set(LOADABLE)


def test_importing_an_adapter_does_not_import_its_package() -> None:
    modules = [f"opentinker.env.adapters.{name}" for name in ADAPTERS]
    code = f"""
import sys
from importlib import import_module
for module in {modules!r}:
    import_module(module)
print([module for module in {sorted(a.module for a in ADAPTERS.values())!r} if module in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ADAPTERS, "ghost", Adapter("ghost", "no_such_package", "no-such-package", (), ""))
    with pytest.raises(EnvironmentLoadError, match=r"needs the package no-such-package.*pip install no-such-package"):
        require("ghost")


def test_a_package_that_a_module_needs_is_named_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ghost_game.py").write_text("import no_such_drawing_library\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EnvironmentLoadError, match="pip install no_such_drawing_library"):
        require("gymnasium", "ghost_game")


def test_held_out_tasks_are_never_drawn_in_training_and_tasks_are_json() -> None:
    held_out = SeededEnvironment.held_out_tasks()
    assert len(held_out) == 100
    assert all(seed_of(task) >= TRAINING_SEEDS and json.loads(json.dumps(task)) == task for task in held_out)
    assert all(seed_of(SeededEnvironment.make_task(seed)) < TRAINING_SEEDS for seed in (0, 1, 2**40, 2**70))


@pytest.mark.parametrize("task", [None, {}, {"seed": "7"}, {"seed": -1}, {"seed": True}, [1]])
def test_a_task_without_a_seed_says_so(task: object) -> None:
    with pytest.raises(EnvironmentFailedError, match="has no seed"):
        seed_of(task)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("7", "7"),
        ("I think <answer>left</answer>", "left"),
        ("<answer>a</answer> no: <ANSWER> b\n</ANSWER>", "b"),
        ("<answer>open", "<answer>open"),
    ],
)
def test_an_answer_is_what_stands_in_the_last_tag_or_the_whole_text(text: str, answer: str) -> None:
    assert answer_of(text) == answer


@pytest.mark.parametrize(
    ("text", "choice"),
    [("left", 0), ("not left but RIGHT.", 1), ("<answer>left</answer>", 0), ("turn around", 2), ("3", 3), ("-> 1", 3)],
)
def test_the_last_name_in_an_answer_is_the_choice(text: str, choice: int) -> None:
    assert choose(text, {"left": 0, "right": 1, "turn around": 2}, {"3": 3, "1": 3}) == choice


@pytest.mark.parametrize("text", ["", "lefty", "brightest", "1.5", "-1", "x1"])
def test_a_part_of_a_word_or_number_is_no_choice(text: str) -> None:
    with pytest.raises(IllegalMoveError, match="names none of: left, right"):
        choose(text, {"left": 0, "right": 1}, {"1": 1})


@given(st.text(max_size=300))
def test_any_text_is_a_choice_or_an_illegal_move(text: str) -> None:
    with suppress(IllegalMoveError):
        assert choose(text, {"left": 0, "right": 1}) in (0, 1)


def test_an_unknown_rule_for_illegal_moves_is_refused() -> None:
    with pytest.raises(ConfigError, match="continue"):
        Illegal("forgive")  # type: ignore[arg-type]


def test_the_modules_random_numbers_are_an_episodes_own_in_any_thread() -> None:
    def draws(seed: int, found: list[float]) -> None:
        own = ModuleRandom(seed)
        for _ in range(200):
            with own.swapped_in():
                found.append(random.random())

    random.seed(5)
    before = random.getstate()
    found: list[list[float]] = [[], [], []]
    threads = [threading.Thread(target=draws, args=(place % 2, numbers)) for place, numbers in enumerate(found)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[2] != found[1]
    assert random.getstate() == before


@pytest.mark.parametrize("name", ["openenv:http://127.0.0.1:1", "gymnasium:FrozenLake-v1", "reasoning_gym:leg_counting"])
def test_an_adapted_class_travels_by_its_name(name: str) -> None:
    pytest.importorskip(ADAPTERS[name.split(":")[0]].module)
    made = load_environment(name)
    assert made is load_environment(name)
    assert pickle.loads(pickle.dumps(made)) is made
    assert made.__name__ == name


def test_only_what_a_conversation_adds_is_new() -> None:
    before = [{"role": "user", "content": "hi"}]
    said = [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "more"}]
    assert new_messages(before, [*before, *said]) == said[1:]


@pytest.mark.parametrize(
    "now",
    [
        [],
        [{"role": "user", "content": "hi"}],
        [{"role": "user", "content": "HI"}, {"role": "assistant", "content": "yes"}],
        [{"role": "user", "content": "hi"}, {"role": "user", "content": "more"}],
    ],
)
def test_a_conversation_that_is_rewritten_is_refused(now: list[dict[str, str]]) -> None:
    with pytest.raises(EnvironmentFailedError, match="rewrites the conversation"):
        new_messages([{"role": "user", "content": "hi"}], now)
