"""The routes below /coordinator: drivers in different processes train the agents of this server's environment together.

Bodies are msgpack (`opentinker.env.frames`); what they hold is in `opentinker.multiagent.coordination`.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from opentinker.env.environment import Environment
from opentinker.env.frames import pack, unpack
from opentinker.env.processes import SessionFactory
from opentinker.env.remote import remote_environment
from opentinker.environments.hosting.hub import Hub
from opentinker.errors import ConflictError, InvalidRequestError, NotFoundError
from opentinker.multiagent.coordination.coordinator import Coordinator
from opentinker.multiagent.seats import Seats, seats_told

PREFIX = "/coordinator"
MAX_BODY_BYTES = 64 * 2**20


class Coordination:
    """Coordinates runs of the class that a hub hosts. Its sessions are the hub's own, in its workers, as any client's."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._url, self._token = "", ""
        self._made: type[Environment] | None = None
        self.coordinator = Coordinator(self._describe, self._sessions, lease_s=hub.settings.lease_s)

    def begin(self, url: str, token: str) -> None:
        """The server listens there, and opens to this token."""
        self._url, self._token = url, token

    async def answer(self, path: str, body: bytes) -> bytes:
        """What a POST is answered with.

        Raises:
            NotFoundError: there is no such route, or the hosted class is for one agent.
            OpenTinkerError: what the coordinator says.
        """
        asked = unpack(body)
        if not isinstance(asked, dict):
            raise InvalidRequestError("a driver sends a map")
        match path.removeprefix(PREFIX):
            case "/join":
                return pack(await self.coordinator.join(asked))
            case "/talk":
                return pack(await self.coordinator.talk(asked))
            case "/alive":
                return pack(self.coordinator.alive(asked))
        raise NotFoundError(f"there is no {path} here", hint=f"there are {PREFIX}/join, /talk, /alive, and GET {PREFIX}/runs")

    def _describe(self) -> tuple[Mapping[str, Any], Seats]:
        info = self._hub.info
        seats = seats_told(info)
        if seats is None:
            raise ConflictError(
                f"{info.get('name')} is an environment for one agent, and there is nothing to coordinate",
                hint="host a class that derives from opentinker.MultiAgentEnvironment",
            )
        return {"name": info["name"], "version": info["version"], "agents": list(seats.agents)}, seats

    def _sessions(self, args: Mapping[str, Any]) -> SessionFactory:
        if self._made is None:
            self._made = remote_environment(self._url, token=self._token)
        return SessionFactory(partial(self._made, **args))
