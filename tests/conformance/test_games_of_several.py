"""Environments of several agents play the same games wherever they run, built in or adapted."""

from collections.abc import Mapping
from typing import Any

import pytest
from places import MakeSession

from opentinker.env.environment import Action
from opentinker.env.execution import EnvironmentSession
from opentinker.env.load import load_environment
from opentinker.env.threads import UserThreads
from opentinker.errors import EnvironmentLoadError
from opentinker.multiagent.shared import News, SharedEnvironment, acted, news_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

SCRIPTS: dict[str, list[Mapping[str, str]]] = {
    "gomoku_duel": [{"black": "a1"}, {"white": "nothing"}, {"black": "b1"}],
    "pettingzoo_aec:classic.tictactoe_v3": [{"player_1": "5"}, {"player_2": "nothing"}, {"player_1": "no"}, {"player_2": "1"}],
    "pettingzoo_parallel:classic.rps_v2": [{"player_0": "rock", "player_1": "paper"}, {"player_0": "?", "player_1": "rock"}],
}


async def played(session: Any, name: str, task: Any) -> list[News]:
    """What the environment told at its reset and after each of the script's actions."""
    told = [news_of(await session.reset(task, 60))]
    for words in SCRIPTS[name]:
        action = acted({agent: Action(text) for agent, text in words.items()}, together=len(words) > 1)
        result = await session.step(action, 60)
        told.append(news_of(result.observation, done=result.done))
    return told


@pytest.mark.parametrize("name", SCRIPTS)
async def test_games_of_several_agents_are_the_same_as_in_a_thread_here(session: MakeSession, name: str) -> None:
    try:
        made = load_environment(name)
    except EnvironmentLoadError as error:
        if ":" not in name:
            raise
        pytest.skip(f"{name} lacks something here: {error}")
    assert issubclass(made, SharedEnvironment)
    task = made.make_task(11)
    here = await _here(made, name, task)
    there = await played(session(name), name, task)
    assert there == here
    assert all(news.shown or news.done for news in here)


async def _here(made: type[SharedEnvironment], name: str, task: Any) -> list[News]:
    with UserThreads() as threads:
        session = EnvironmentSession(made, threads)
        try:
            return await played(session, name, task)
        finally:
            await session.close(60)
