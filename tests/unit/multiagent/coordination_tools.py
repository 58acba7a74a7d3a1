"""A coordinator behind the real HTTP routes, in the test's own event loop, and drivers that reach it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import httpx

from opentinker.config.agents import TurnsConfig
from opentinker.config.rollout import RolloutConfig
from opentinker.env.load import load_environment
from opentinker.env.processes import SessionFactory
from opentinker.environments.hosting.api import Api
from opentinker.environments.hosting.auth import Token
from opentinker.environments.hosting.settings import HostSettings
from opentinker.multiagent.coordination.coordinator import Coordinator
from opentinker.multiagent.coordination.member import Member
from opentinker.multiagent.coordination.seat_runner import SeatRunner
from opentinker.multiagent.environment import MultiAgentEnvironment
from opentinker.multiagent.games import Groups
from opentinker.multiagent.players import Player, PolicyPlayer
from opentinker.multiagent.seats import Seats, described

TOKEN = "a-token-for-tests-only"


class Lossy(httpx.AsyncBaseTransport):
    """Loses requests and answers, and doubles and delays requests, as its random numbers say."""

    def __init__(self, inner: httpx.AsyncBaseTransport, numbers: Random, share: float) -> None:
        self._inner, self._numbers, self._share = inner, numbers, share
        self._late: set[asyncio.Task[Any]] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        chance = self._numbers.random()
        if chance < self._share:
            raise httpx.ConnectError("the request is lost")
        if chance < 2 * self._share:  # it arrives twice, once much later
            again = httpx.Request(request.method, request.url, headers=request.headers, content=request.content)
            self._late.add(asyncio.ensure_future(self._later(again)))
        if chance < 3 * self._share:
            await asyncio.sleep(self._numbers.random() * 0.02)
        response = await self._inner.handle_async_request(request)
        if self._numbers.random() < self._share:
            await response.aread()
            raise httpx.ReadError("the answer is lost")
        return response

    async def _later(self, request: httpx.Request) -> None:
        await asyncio.sleep(self._numbers.random() * 0.05)
        await (await self._inner.handle_async_request(request)).aread()

    async def aclose(self) -> None:
        for task in self._late:
            task.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)


class Place:
    """Where drivers meet."""

    def __init__(self, environment: type[MultiAgentEnvironment], lease_s: float = 60.0, args: Mapping[str, Any] | None = None):
        self.environment = environment
        loaded: Any = load_environment(environment)
        self.about = {"name": environment.__name__, **described(loaded)}
        hub: Any = SimpleNamespace(info=self.about, settings=HostSettings(), draining=False)
        self.app = Api(hub, Token(TOKEN))
        seats = Seats(environment.agents, environment.protocol)

        def sessions(given: Mapping[str, Any]) -> SessionFactory:
            return SessionFactory(partial(loaded, **{**(args or {}), **given}))

        self.coordinator = self.app.coordination.coordinator = Coordinator(
            lambda: (self.about, seats), sessions, lease_s=lease_s
        )
        self._members: list[Member] = []

    def member(self, agents: Mapping[str, str], run: str = "duel", lossy: tuple[Random, float] | None = None) -> Member:
        """A driver that has not joined."""
        transport: httpx.AsyncBaseTransport = httpx.ASGITransport(self.app)  # type: ignore[arg-type]
        if lossy is not None:
            transport = Lossy(transport, *lossy)
        made = Member("http://coordinator", TOKEN, run, agents, transport=transport)  # type: ignore[arg-type]
        self._members.append(made)
        return made

    def terms(self, rollout: RolloutConfig, turns: TurnsConfig, **more: Any) -> dict[str, Any]:
        """What a driver that plays by these rules joins with."""
        found = {f"environment.{key}": self.about[key] for key in ("version", "name", "agents")}
        found |= {f"rollout.{key}": value for key, value in rollout.model_dump(mode="json").items()}
        return found | {f"turns.{key}": value for key, value in turns.model_dump(mode="json").items()} | more

    async def joined(self, agent: str) -> None:
        """Until there is a driver of this agent."""
        while not any(agent in run["agents"] for run in self.coordinator.runs()["runs"]):  # noqa: ASYNC110 - over HTTP it is no event
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        await asyncio.gather(*(member.leave() for member in self._members))
        await self.coordinator.stop()


@contextlib.asynccontextmanager
async def meeting(environment: type[MultiAgentEnvironment], **options: Any) -> AsyncIterator[Place]:
    place = Place(environment, **options)
    try:
        yield place
    finally:
        await place.close()


async def played_apart(
    place: Place,
    drivers: Sequence[Sequence[str]],
    players: Mapping[str, Player],
    rollout: RolloutConfig,
    turns: TurnsConfig,
    play: Callable[[SeatRunner, Mapping[str, Player]], Any],
    *,
    run_seed: int = 0,
    lossy: tuple[Random, float] | None = None,
) -> Groups:
    """The groups of all agents of games that are played by these drivers; `play` runs each one's part."""

    async def drive(agents: Sequence[str]) -> Groups:
        kinds = {name: "policy" if isinstance(players[name], PolicyPlayer) else "script" for name in agents}
        member = place.member(kinds, lossy=lossy)
        await member.join(place.terms(rollout, turns), [0])
        await member.started()
        runner = SeatRunner(member, "train", rollout, turns, run_seed)
        found: Groups = await play(runner, {name: players[name] for name in agents})
        return found

    groups = await asyncio.gather(*(drive(agents) for agents in drivers))
    return {name: of_agent for one in groups for name, of_agent in one.items()}
