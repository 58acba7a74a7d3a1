"""Which agents an environment has, and their order of play: of a class that is here, or of one that a server hosts."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from opentinker.env.environment import Environment
from opentinker.errors import ConfigError
from opentinker.multiagent.protocol import BUILT_IN, AgentProtocol, check_seats, make_protocol
from opentinker.multiagent.shared import SharedEnvironment


@dataclass(frozen=True)
class Seats:
    """The environment's agents and their order of play."""

    agents: tuple[str, ...]
    protocol: AgentProtocol


def seats_of(environment: type[Environment], args: Mapping[str, Any]) -> Seats | None:
    """The seats of an environment for several agents; None if it is for one. A server is asked for those of its class.

    Raises:
        ConfigError: the hosted class has an order of play of its own, which only code can say.
        OpenTinkerError: what the server reports; UnavailableError when it does not answer.
    """
    if issubclass(environment, SharedEnvironment):
        return Seats(environment.played.agents, environment.played.protocol)
    servers = getattr(environment, "servers", None)
    if servers is None:
        return None
    return seats_told(servers.with_file(args.get("token_file")).info())


def seats_told(info: Mapping[str, Any]) -> Seats | None:
    """The seats of a class of which a server says `info`; None if it is for one agent.

    Raises:
        ConfigError: the class has an order of play of its own, which only code can say.
    """
    if not info.get("agents"):
        return None
    if info.get("protocol") is None:
        raise ConfigError(
            f"the hosted {info['name']} has an order of play of its own, which its server cannot tell",
            hint="name its class instead of its server, or give it one of opentinker's protocols",
        )
    seats = Seats(tuple(info["agents"]), make_protocol(**info["protocol"]))
    check_seats(seats.protocol, seats.agents)
    return seats


def identity_of(environment: type[Environment], args: Mapping[str, Any]) -> dict[str, Any]:
    """What the drivers of one run must agree on: the `name` and `version` of the class, and its `agents`. A server is asked for
    those of its class."""
    if issubclass(environment, SharedEnvironment):
        told: Mapping[str, Any] = {"name": environment.__name__, **described(environment)}
    else:
        told = environment.servers.with_file(args.get("token_file")).info()  # type: ignore[attr-defined]
    return {key: told.get(key) for key in ("name", "version", "agents")}


def described(environment: type[Environment]) -> dict[str, Any]:
    """What a server says of the seats of its class; nothing for a class of one agent. `protocol` is None where it is not built
    in."""
    if not issubclass(environment, SharedEnvironment):
        return {}
    protocol = environment.played.protocol
    names = [name for name, kind in BUILT_IN.items() if type(protocol) is kind]
    told = {"name": names[0], **_fields(protocol)} if names else None
    return {"agents": list(environment.played.agents), "protocol": told, "version": environment.played.version}


def _fields(protocol: Any) -> dict[str, Any]:
    return {item.name: getattr(protocol, item.name) for item in fields(protocol)} if is_dataclass(protocol) else {}
