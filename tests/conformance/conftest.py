"""Where an environment runs is a parameter: see places.py."""

import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from opentinker.env.environment import Environment
from opentinker.env.execution import EnvironmentSession
from opentinker.env.load import load_environment
from opentinker.env.threads import UserThreads
from opentinker.errors import DeadlineError, EnvironmentFailedError

sys.path.insert(0, str(Path(__file__).parent))

from places import HERE, PLACES, TOKEN, MakeSession, Servers


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    running = Servers(tmp_path_factory.mktemp("servers"))
    yield running
    running.stop()


@pytest.fixture(params=PLACES)
def where(request: pytest.FixtureRequest) -> str:
    place: str = request.param
    return place


@pytest.fixture
def environment_class(where: str, request: pytest.FixtureRequest) -> Callable[[str], type[Environment]]:
    """What stands for an environment where it runs."""

    def found(name: str) -> type[Environment]:
        path = f"{HERE}/{name}" if ".py:" in name else name
        if where != "hosted":
            return load_environment(path)
        from opentinker.env.remote import remote_environment

        hosted: type[Environment] = remote_environment(request.getfixturevalue("servers").url(path), token=TOKEN)
        return hosted

    return found


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def factories() -> AsyncIterator[dict[tuple[str, str], Any]]:
    """Processes of environments, used again by the tests that follow."""
    made: dict[tuple[str, str], Any] = {}
    yield made
    for factory in made.values():
        await factory.close()


@pytest_asyncio.fixture(loop_scope="session")
async def session(
    where: str, environment_class: Callable[[str], type[Environment]], factories: dict[tuple[str, str], Any]
) -> AsyncIterator[MakeSession]:
    """Makes sessions, which all are closed at the end."""
    made: list[Any] = []
    with UserThreads() as threads:

        def make(name: str, /, **args: Any) -> Any:
            environment = environment_class(name)
            if where == "process":
                key = (name, repr(args))
                factories[key] = factories.get(key) or _in_processes(environment, args)
                made.append(factories[key].session(threads))
            else:
                made.append(EnvironmentSession(lambda: environment(**args), threads))
            return made[-1]

        yield make
        for one in made:
            with suppress(EnvironmentFailedError, DeadlineError):  # tests look at `close` themselves
                await one.close(10)


def _in_processes(environment: type[Environment], args: Mapping[str, Any]) -> Any:
    from opentinker.env.processes import EnvironmentProcesses, SessionFactory

    factory = SessionFactory(partial(environment, **args))
    factory.processes = factory.processes or EnvironmentProcesses(environment, args)  # whatever the class declares
    return factory
