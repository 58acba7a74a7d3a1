"""Who may act when, in an environment of several agents: data and a small class for each order of play.

A protocol is pure: it is asked between rounds and remembers nothing, so that it is the same in every process and after a
restart. What it may look at is a `Table`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from opentinker.config.base import nearest
from opentinker.errors import ConfigError, ProtocolError


@dataclass(frozen=True)
class Table:
    """What a protocol knows: who sits there, in the order of their seats, who acted last, and whom the environment named."""

    seats: tuple[str, ...]
    """All agents of the environment, whether they are present or not."""
    present: tuple[str, ...]
    """Those who may be asked, in the order of their seats."""
    last: tuple[str, ...] = ()
    """Who acted in the round before; empty at the start. They may have left since."""
    named: tuple[str, ...] = ()
    """Whom the environment's last result named as next (`MultiStepResult.next_agents`)."""


@dataclass(frozen=True)
class Turn:
    """Who may act now. With `together` the environment sees their actions when all have acted, otherwise each at once: then the
    round goes on with whomever the protocol names after it."""

    agents: tuple[str, ...]
    together: bool = False


class AgentProtocol(Protocol):
    """The order of play of an environment. A user's own needs `next_turn` only."""

    def next_turn(self, table: Table) -> Turn:
        """Who may act now: at least one, and only agents who are present."""
        ...


@dataclass(frozen=True)
class Alternating:
    """Two agents, one after the other, from the first seat. Where one has left, the other goes on."""

    seats_allowed: ClassVar[tuple[int, int | None]] = (2, 2)

    def next_turn(self, table: Table) -> Turn:
        return Turn((_after(table),))


@dataclass(frozen=True)
class RoundRobin:
    """Any number of agents in the order of their seats; those who have left are passed over."""

    seats_allowed: ClassVar[tuple[int, int | None]] = (1, None)

    def next_turn(self, table: Table) -> Turn:
        return Turn((_after(table),))


@dataclass(frozen=True)
class Simultaneous:
    """All agents at once; the environment sees no action before it has all."""

    seats_allowed: ClassVar[tuple[int, int | None]] = (1, None)

    def next_turn(self, table: Table) -> Turn:
        return Turn(table.present, together=True)


@dataclass(frozen=True)
class Free:
    """Whoever wants to; each action is applied as it comes, and whoever has acted may act again."""

    seats_allowed: ClassVar[tuple[int, int | None]] = (1, None)

    def next_turn(self, table: Table) -> Turn:
        return Turn(table.present)


@dataclass(frozen=True)
class ModeratorChooses:
    """The moderator acts, the environment names whom it chose (`MultiStepResult.next_agents`), and then it acts again. Who was
    named and is not present is passed over. Without a moderator the others go on round robin."""

    seats_allowed: ClassVar[tuple[int, int | None]] = (2, None)

    moderator: str = "moderator"

    def next_turn(self, table: Table) -> Turn:
        if self.moderator not in table.present:
            return Turn((_after(table),))
        chosen = tuple(agent for agent in table.present if agent in table.named and agent != self.moderator)
        return Turn(chosen, together=len(chosen) > 1) if table.last == (self.moderator,) and chosen else Turn((self.moderator,))


@dataclass(frozen=True)
class EnvironmentChooses:
    """Whom the environment named, as PettingZoo's AEC games do; where it named nobody who is present, round robin."""

    seats_allowed: ClassVar[tuple[int, int | None]] = (1, None)

    def next_turn(self, table: Table) -> Turn:
        chosen = tuple(agent for agent in table.present if agent in table.named)
        return Turn(chosen, together=len(chosen) > 1) if chosen else Turn((_after(table),))


BUILT_IN: Mapping[str, type[Any]] = {
    "alternating": Alternating,
    "round_robin": RoundRobin,
    "simultaneous": Simultaneous,
    "free": Free,
    "moderator_chooses": ModeratorChooses,
    "environment_chooses": EnvironmentChooses,
}


def make_protocol(name: str, **fields: Any) -> AgentProtocol:
    """A built-in protocol by its name.

    Raises:
        ConfigError: there is none of this name, or it has no such field.
    """
    if name not in BUILT_IN:
        raise ConfigError(f"there is no agent protocol '{name}'", hint=nearest(name, BUILT_IN))
    try:
        made: AgentProtocol = BUILT_IN[name](**fields)
    except TypeError as error:
        raise ConfigError(f"the agent protocol '{name}' does not take these fields: {error}") from error
    return made


def check_seats(protocol: AgentProtocol, seats: Sequence[str]) -> None:
    """Raises: ConfigError when there are no agents, two have one name, or they are not as many as the protocol takes."""
    name = type(protocol).__name__
    if not seats:
        raise ConfigError("the environment names no agents", hint="set agents = ('black', 'white') in its class")
    if len(set(seats)) < len(seats):
        raise ConfigError(f"two agents have the same name: {', '.join(seats)}")
    fewest, most = getattr(protocol, "seats_allowed", (1, None))
    if len(seats) < fewest or (most is not None and len(seats) > most):
        wanted = f"{fewest}" if fewest == most else f"at least {fewest}"
        raise ConfigError(f"{name} takes {wanted} agents, the environment has {len(seats)}", hint="RoundRobin takes any number")
    if isinstance(protocol, ModeratorChooses) and protocol.moderator not in seats:
        hint = f"ModeratorChooses(moderator=...): {nearest(protocol.moderator, seats)}"
        raise ConfigError(f"{name}: no agent is called '{protocol.moderator}'", hint=hint)


def checked_turn(protocol: AgentProtocol, table: Table) -> Turn:
    """What the protocol says, if it can be done.

    Raises:
        ProtocolError: it names no one, somebody twice, or somebody who is not present.
    """
    turn, name = protocol.next_turn(table), type(protocol).__name__
    if not isinstance(turn, Turn):
        raise ProtocolError(f"{name}.next_turn gave {type(turn).__name__}", hint="give a Turn")
    if not turn.agents:
        raise ProtocolError(f"{name} names no one, so nothing can ever happen; {', '.join(table.present)} are present")
    if len(set(turn.agents)) < len(turn.agents):
        raise ProtocolError(f"{name} names an agent twice: {', '.join(turn.agents)}")
    if absent := [agent for agent in turn.agents if agent not in table.present]:
        raise ProtocolError(f"{name} names {', '.join(absent)}; present are {', '.join(table.present)}")
    return turn


def _after(table: Table) -> str:
    """The first present agent after those who acted last, in the order of the seats."""
    places = [table.seats.index(agent) for agent in table.last if agent in table.seats]
    start = max(places) + 1 if places else 0
    count = len(table.seats)
    return next(agent for agent in (table.seats[(start + i) % count] for i in range(count)) if agent in table.present)
