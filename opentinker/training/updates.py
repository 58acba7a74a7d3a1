"""The updates of a step, side by side, and what becomes of them when one fails or does not end.

A server runs the updates of its agents one after another, so it is servers that wait for each other: one waits when all of its
agents have published, and holds up the others until then.
"""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic

from opentinker.errors import AgentStuckError
from opentinker.multiagent.phases import Moment
from opentinker.training.learner import Learned

LAST_LOOK_S = 1.0
"""How long what has arrived may take to be read, before a server is said to be late: this process may have stood still."""


@dataclass(frozen=True)
class Straggler:
    """A server that holds up the others, and the agents whose updates are awaited from it."""

    server: str
    agents: tuple[str, ...]

    def __str__(self) -> str:
        names = " and ".join(f"'{name}'" for name in self.agents)
        return f"{names} on " + (f"server '{self.server}'" if self.server else "the job's own server")


class Stragglers:
    """Which servers hold up the others in one step's updates. No I/O, no clock.

    A server is late when it has finished no update for `timeout_s`, counted from when the first of the others waits.
    """

    def __init__(self, servers: Mapping[str, str], timeout_s: float) -> None:
        """`servers` has the server of each agent that is updated."""
        self.waited_since: float | None = None
        """When the first server had published for all of its agents; None until then."""
        self._timeout_s = timeout_s
        self._servers = dict(servers)
        self._awaited: dict[str, list[str]] = {}
        for agent, server in servers.items():
            self._awaited.setdefault(server, []).append(agent)
        self._heard_at: dict[str, float] = {}
        """When each server last finished an update."""
        self._trained: set[str] = set()

    def finish(self, agent: str, now: float, *, trained: bool = True) -> None:
        """An agent's update is over. Where no agent of a server had anything to train, that is at once, and says nothing of how
        long an update takes: such a server does not count as one that waits."""
        server = self._servers[agent]
        self._awaited[server].remove(agent)
        self._heard_at[server] = now
        if trained:
            self._trained.add(server)
        if self.waited_since is None and not self._awaited[server] and server in self._trained:
            self.waited_since = now

    def next_late_at(self) -> float | None:
        """When a server will be late if no update ends before; None if none will."""
        return min(self._late_at().values(), default=None)

    def late(self, now: float) -> list[Straggler]:
        """Who holds up the others for too long."""
        return [Straggler(server, tuple(self._awaited[server])) for server, at in self._late_at().items() if now >= at]

    def _late_at(self) -> dict[str, float]:
        """By server of those that are awaited while another waits."""
        if (since := self.waited_since) is None:
            return {}
        awaited = [server for server, agents in self._awaited.items() if agents]
        return {server: max(since, self._heard_at.get(server, since)) + self._timeout_s for server in awaited}


async def together(
    updates: Mapping[str, Awaitable[Learned]], servers: Mapping[str, str], moment: Moment, timeout_s: float
) -> dict[str, Learned]:
    """All results, by agent. When one fails, or a server holds up the others for `timeout_s`, those under way are ended first.
    `servers` has each agent's.

    Raises:
        AgentStuckError: a server holds up the others for too long; the detail names the agents that are awaited.
        Exception: that of the update that failed.
    """
    stragglers = Stragglers(servers, timeout_s)

    async def finished(name: str, update: Awaitable[Learned]) -> Learned:
        learned = await update
        stragglers.finish(name, monotonic(), trained=learned.trained is not None)
        return learned

    tasks = {name: asyncio.ensure_future(finished(name, update)) for name, update in updates.items()}
    running, last_look = set(tasks.values()), False
    try:
        while running:
            at = stragglers.next_late_at()
            left_s = None if at is None else LAST_LOOK_S if last_look else max(0.0, at - monotonic())
            _, running = await asyncio.wait(running, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks.values():
                if task.done():
                    task.result()
            late = stragglers.late(now := monotonic())
            if late and last_look:
                raise _stuck(late, moment, now - (stragglers.waited_since or now), timeout_s)
            last_look = bool(late)
        return {name: task.result() for name, task in tasks.items()}
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


def _stuck(late: Sequence[Straggler], moment: Moment, waited_s: float, timeout_s: float) -> AgentStuckError:
    return AgentStuckError(
        f"{' and '.join(map(str, late))} held up the others in {moment} for {waited_s:.3g} s",
        hint=f"turns.barrier_timeout_s ({timeout_s:g}) is how long a server may go without finishing an update",
    )
