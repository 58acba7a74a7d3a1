"""Built-in and adapted environments play the same episodes wherever they run, and keep the contract of authors."""

import asyncio
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
from places import MakeSession

from opentinker.env.checks import CheckOptions, check_environment
from opentinker.env.checks.playing import Player, Transcript, difference, play
from opentinker.env.checks.subject import Subject
from opentinker.env.environment import Environment
from opentinker.env.load import load_environment
from opentinker.env.processes import SessionFactory
from opentinker.env.threads import UserThreads
from opentinker.environments.registry import BUILT_IN
from opentinker.errors import ConfigError, EnvironmentLoadError

pytestmark = pytest.mark.asyncio(loop_scope="session")

ARGS: dict[str, dict[str, Any]] = {}
"""Constructor arguments of those that need some to run here, by name."""
OPTIONS = CheckOptions(episodes=0, tasks=2, max_turns=4, timeout_s=30.0)
STYLES = ("good", "hostile")
ADAPTED = (
    "gymnasium:FrozenLake-v1",
    "pettingzoo:classic.tictactoe_v3",
    "reasoning_gym:countdown",
    "textarena:TicTacToe-v0",
)
names = pytest.mark.parametrize("name", [*sorted(BUILT_IN), *ADAPTED])


@lru_cache
def loaded(name: str) -> type[Environment]:
    try:
        environment = load_environment(name)
        environment.task_source("train", ARGS.get(name, {})).draw(0, 0, 1)
    except (ConfigError, EnvironmentLoadError) as error:
        if ":" not in name:  # a built-in one has to load; an adapter's package may be missing
            raise
        pytest.skip(f"{name} lacks something here: {error}")
    return environment


async def subject_of(name: str, threads: UserThreads) -> Subject:
    """Tasks and actions; both are determined by the options."""
    environment = loaded(name)
    args = ARGS.get(name, {})
    subject = Subject(environment, args, OPTIONS, threads, SessionFactory(lambda: environment(**args)))
    subject.tasks = await asyncio.to_thread(
        lambda: environment.task_source("train", subject.args).draw(OPTIONS.seed, 0, OPTIONS.tasks)
    )
    subject.suggestions = [subject.scripts.suggested(task) for task in subject.tasks]
    return subject


async def played(subject: Subject, make: MakeSession, name: str) -> list[Transcript]:
    transcripts = []
    for index, task in enumerate(subject.tasks):
        for style in STYLES:
            player = Player(subject.environment, make(name, **subject.args), task, OPTIONS.timeout_s)
            transcripts.append(await play(player, subject.script(index, style), OPTIONS.max_turns))
    return transcripts


@names
async def test_episodes_are_the_same_as_in_a_thread_here(
    session: MakeSession, environment_class: Callable[[str], type[Environment]], name: str
) -> None:
    with UserThreads() as threads:
        subject = await subject_of(name, threads)
        here = [await subject.episode(index, style) for index in range(len(subject.tasks)) for style in STYLES]
        there = await played(subject, session, name)
    for one, other in zip(here, there, strict=True):
        if other.last == {"reward": 0.0, "components": {}} and one.last is None:
            other.last = None  # a client asks for a last reward without knowing whether there is one
        assert one.problem is None, one.problem
        assert difference(one, other) == ("", "")
        assert one.turns, "it came as far as a turn"


@names
async def test_tasks_are_the_same_as_here(where: str, environment_class: Callable[[str], type[Environment]], name: str) -> None:
    args = ARGS.get(name, {})
    local, there = loaded(name), environment_class(name)

    def asked(environment: type[Environment]) -> list[Any]:
        train, held_out = environment.task_source("train", args), environment.task_source("held_out", args)
        return [train.draw(7, 3, 4), held_out.first(3), held_out.size]

    assert await asyncio.to_thread(asked, there) == await asyncio.to_thread(asked, local)


@names
async def test_the_contract_is_kept(name: str) -> None:
    loaded(name)
    report = await asyncio.to_thread(check_environment, name, ARGS.get(name, {}), OPTIONS)
    assert report.ok, str(report)
