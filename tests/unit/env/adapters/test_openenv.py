"""Servers made with OpenEnv are played over their own protocol."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("websockets", reason="pip install websockets")
pytest.importorskip("openenv.core", reason="pip install openenv-core: the tests run its server")

from opentinker.env.load import load_environment
from opentinker.errors import ConfigError, EnvironmentFailedError, EnvironmentLoadError

SERVER = Path(__file__).parent / "openenv_server.py"


@contextmanager
def server(kind: str, sessions: int = 16) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    process = subprocess.Popen([sys.executable, SERVER, kind, str(sessions)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"openenv:http://127.0.0.1:{int(process.stdout.readline())}", process
    finally:
        process.kill()
        process.wait(10)


@pytest.fixture(scope="module")
def guess() -> Iterator[str]:
    with server("guess") as (name, _):
        yield name


@pytest.fixture(scope="module")
def grid() -> Iterator[str]:
    with server("grid") as (name, _):
        yield name


async def test_an_episode_is_a_session(play: Any, guess: str) -> None:
    played = await play(guess, ["1", "It must be <answer>7</answer>"], {"prompt": "Play."}, {"seed": 27})
    assert played.first == ["Play.", "Guess a digit. It is odd."]
    assert [(step.reward, step.done) for step in played.steps] == [(0, False), (1, True)]
    assert (played.said(0), played.said(1)) == ("No.", "Yes.")


async def test_the_seed_of_the_task_reaches_the_server(play: Any, guess: str) -> None:
    source = load_environment(guess).task_source("train", {})
    for task in source.draw(3, 0, 4):
        played = await play(guess, [str(task["seed"] % 10)], task=task)
        assert played.last.reward == 1


async def test_many_sessions_do_not_mix(play: Any, guess: str) -> None:
    games = await asyncio.gather(*(play(guess, ["x", str(digit)], task={"seed": digit}) for digit in range(10)))
    assert [game.last.reward for game in games] == [1] * 10


async def test_a_full_server_is_asked_again(play: Any) -> None:
    with server("guess", sessions=1) as (name, _):
        games = await asyncio.gather(*(play(name, ["x", str(digit)], task={"seed": digit}) for digit in range(3)))
        assert [game.last.reward for game in games] == [1] * 3


async def test_an_action_of_several_fields_is_json(play: Any, grid: str) -> None:
    actions = ['<answer>{"row": 0, "column": 0}</answer>', "up", "[1]", '{"row": 77, "column": 0}', '{"row": 1, "column": 0}']
    played = await play(grid, actions, {"reset": {"size": 2}})
    assert played.first == ["board: [[0, 0], [0, 0]]\nlegal: [any]"]
    assert played.said(0) == "board: [[1, 0], [0, 0]]"
    assert played.said(1) == played.said(2) == "Answer with a JSON object that has the fields row, column."
    assert "row: Input should be less than or equal to 9" in played.said(3)
    assert [step.reward for step in played.steps] == [0.5, 0, 0, 0, 0.5]
    assert [step.metrics.get("malformed_actions", 0) for step in played.steps] == [0, 1, 1, 1, 0]


async def test_one_field_of_the_observation_can_be_shown(play: Any, grid: str) -> None:
    assert (await play(grid, [], {"observation_field": "board"})).first == ["[[0, 0], [0, 0]]"]
    with pytest.raises(EnvironmentFailedError, match=r"no field 'bord'.*board, legal"):
        await play(grid, [], {"observation_field": "bord"})


async def test_the_environments_own_error_fails_the_episode(play: Any, guess: str) -> None:
    with pytest.raises(EnvironmentFailedError, match="the environment's own fault"):
        await play(guess, ["crash"])


async def test_a_server_that_dies_fails_the_episode(play: Any) -> None:
    with server("guess") as (name, process):

        def actions() -> Iterator[str]:
            yield "x"
            process.kill()
            process.wait(10)
            yield "x"

        with pytest.raises(EnvironmentFailedError, match=r"the session at .* ended"):
            await play(name, actions())
    with pytest.raises(EnvironmentFailedError, match="no session at"):
        await play(name, [])


async def test_tools_are_declared_and_called(play: Any) -> None:
    call = '<tool_call>{"name": "NAME", "arguments": {"a": 2, "b": 3}}</tool_call>'
    with server("tools") as (name, _):
        actions = [call.replace("NAME", "add"), call.replace("NAME", "sub"), "<tool_call>{add</tool_call>", "It is 5."]
        played = await play(name, actions, {"prompt": "What is 2 + 3?"})
    assert [tool["function"]["name"] for tool in played.tools] == ["add"]
    assert played.tools[0]["function"]["parameters"]["required"] == ["a", "b"]
    assert played.said(0) == "5"
    assert "there is no tool 'sub'" in played.said(1)
    assert played.said(2).startswith("Error: ")
    assert [step.done for step in played.steps] == [False, False, False, True]


def test_wrong_arguments_and_a_dead_server_show_before_any_episode(grid: str) -> None:
    with pytest.raises(ConfigError, match=r"no field 'rwo'.*row, column"):
        load_environment(grid).task_source("train", {"action_field": "rwo"})
    with pytest.raises(EnvironmentLoadError, match="is an OpenEnv server running there"):
        load_environment("openenv:http://127.0.0.1:1").task_source("train", {})


@pytest.mark.parametrize("name", ["openenv:", "openenv:localhost:8000", "openenv:ftp://host"])
def test_a_name_without_a_url_is_refused(name: str) -> None:
    with pytest.raises(EnvironmentLoadError, match="openenv:http://host:port"):
        load_environment(name)
