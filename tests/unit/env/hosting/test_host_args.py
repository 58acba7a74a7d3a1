"""What decides over the server's machine is set by whoever hosts, whatever a client asks for."""

import asyncio
import importlib
import inspect
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from hosted_environments import Doer
from hosting_tools import TOKEN, Serve, command
from typer.testing import CliRunner

from opentinker.cli.main import app
from opentinker.env.environment import Action, Environment
from opentinker.env.load import load_environment
from opentinker.env.processes import SessionFactory
from opentinker.env.tasks import ListTasks, Split, TaskSource
from opentinker.env.threads import UserThreads
from opentinker.environments.registry import BUILT_IN
from opentinker.errors import EnvironmentFailedError, EnvironmentLoadError, InvalidRequestError

WALLS = ("sandbox", "packages", "memory_mib", "codec", "opponent", "dataset", "token_file", "xml_file")
"""Names of arguments that no client may set, in whatever class they turn up."""


class Walled(Doer):
    """One argument is the host's."""

    host_args = ("wall",)

    def __init__(self, wall: str = "high", **rest: Any) -> None:
        super().__init__(**rest)
        self._wall = wall

    @classmethod
    def task_source(cls, split: Split, args: Mapping[str, Any]) -> TaskSource:
        return ListTasks([{"name": f"{args.get('wall', 'high')} {args.get('opening')}"}], shuffle=False)

    def reset(self, task: Any) -> str:
        return f"{self._wall} {self._opening}"


class Inherits(Walled):
    """Names of its own do not open what the base class keeps."""

    host_args = ("log",)


class Closed(Walled):
    """Everything is the host's."""

    host_args = ("*",)


async def first_words(environment: Environment) -> Any:
    messages: Any = await environment.reset({})  # type: ignore[misc]
    await environment.close()  # type: ignore[func-returns-value, misc]
    return messages[0]["content"]


async def test_what_the_host_set_holds_and_a_client_changes_only_the_rest(serve: Serve) -> None:
    there = await serve(Walled, args={"wall": "thick", "opening": "hi"})
    assert await first_words(there.remote()) == "thick hi"
    assert await first_words(there.remote(opening="hello")) == "thick hello"
    source = there.remote.task_source("train", {"opening": "x"})
    assert await asyncio.to_thread(source.first, 1) == [{"name": "thick x"}]


@pytest.mark.parametrize(
    ("kind", "args"), [(Walled, {"wall": "none"}), (Inherits, {"wall": "none"}), (Closed, {"opening": "x"})]
)
async def test_a_client_that_sets_what_is_the_hosts_is_refused(serve: Serve, kind: type[Walled], args: dict[str, Any]) -> None:
    there = await serve(kind)
    refused = rf"only whoever hosts {kind.__name__} may set {next(iter(args))} .*env serve .* --args"
    with pytest.raises(EnvironmentFailedError, match=refused):
        await there.remote(**args).reset({})
    for ask in ("first", "draw"):
        source = there.remote.task_source("train", args)
        numbers = [1] if ask == "first" else [0, 0, 1]
        with pytest.raises(InvalidRequestError, match=refused):
            await asyncio.to_thread(getattr(source, ask), *numbers)
    async with httpx.AsyncClient(base_url=there.url, headers={"Authorization": f"Bearer {TOKEN}"}) as plain:
        for body in ({"task": {}, "args": args}, {"items": [{"task": {}, "args": args}]}):
            answer = await plain.post("/reset/batch" if "items" in body else "/reset", json=body)
            assert "only whoever hosts" in answer.text
    assert there.server.hub.sessions == 0


class ProcessWalled(Walled):
    """The same in a process of its own."""

    execution = "process"


async def test_in_a_run_of_ones_own_nothing_is_kept() -> None:
    factory = SessionFactory(partial(ProcessWalled, wall="none"))
    with UserThreads() as threads:
        session = factory.session(threads)
        try:
            assert (await session.reset({}, 30))[0]["content"] == "none hello"
        finally:
            await session.close(10)
            await factory.close()


def _classes() -> Sequence[type[Environment]]:
    adapters = {
        "gymnasium": "GymnasiumEnvironment",
        "openenv": "OpenEnvEnvironment",
        "pettingzoo": "PettingZooEnvironment",
        "textarena": "TextArenaEnvironment",
        "verifiers": "VerifiersEnvironment",
        "verifiers_v1": "TasksetEnvironment",
    }
    modules = "opentinker.env.adapters"
    adapted = [getattr(importlib.import_module(f"{modules}.{name}"), attribute) for name, attribute in adapters.items()]
    remote = importlib.import_module("opentinker.env.remote").RemoteEnvironment
    return [*(load_environment(name) for name in BUILT_IN), *adapted, remote]


@pytest.mark.parametrize("kind", _classes(), ids=lambda kind: kind.__name__)
def test_no_class_of_ours_leaves_its_walls_or_files_to_clients(kind: type[Environment]) -> None:
    own_opponents = kind.__module__.startswith("opentinker.environments.gomoku")  # a choice of two words
    wanted = {
        name for name in inspect.signature(kind).parameters if name in WALLS and not (own_opponents and name == "opponent")
    }
    kept = {name for base in kind.__mro__ for name in vars(base).get("host_args", ())}
    assert "*" in kept or wanted <= kept


def test_host_args_that_are_a_text_are_refused_when_the_class_is_loaded() -> None:
    with pytest.raises(EnvironmentLoadError, match=r"host_args is a text .it is a tuple: .'wall',.."):
        load_environment(type("Wrong", (Walled,), {"host_args": "wall"}))


async def test_the_command_takes_arguments_a_body_limit_and_the_names_that_the_other_commands_take(tmp_path: Path) -> None:
    folder = tmp_path / "game"
    folder.mkdir()
    (folder / "game.py").write_text(
        "import opentinker as ot\n\nclass Game(ot.Environment):\n    host_args = ('n',)\n\n"
        "    def __init__(self, n=1, word='a'):\n        self.said = f'{n + 1} {word}'\n\n"
        "    def reset(self, task):\n        return self.said\n\n    def step(self, action):\n        return ot.StepResult()\n"
    )
    from opentinker.env.remote import remote_environment

    options = ("--args", "n=41", "--args", "word=b", "--max-body", "1000")
    with command(*options, name=str(folder)) as (_, url, token):
        remote = remote_environment(url, token=token)
        assert await first_words(remote()) == "42 b"
        environment = remote(word="c")
        assert (await environment.reset({}))[0]["content"] == "42 c"
        with pytest.raises(EnvironmentFailedError, match=r"the limit is 1,000 .*--max-body"):
            await environment.step(Action("x" * 2000))
        await environment.close()


def test_arguments_that_the_class_does_not_take_are_refused_before_anything_is_served() -> None:
    result = CliRunner().invoke(app, ["env", "serve", "guess_number", "--port", "0", "--args", "colour=red"])
    assert result.exit_code == 1
    assert re.search(r"--args: GuessNumber does not take them: .*'colour'", result.output)
