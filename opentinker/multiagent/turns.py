"""The barrier inside a rollout: who runs, who waits, and when the environment sees their actions. No I/O, no clock.

An agent is PENDING (not its turn), RUNNING (it was granted a turn and has not acted), ACTED (its action waits for the others'
or for the environment) or GONE. Whoever drives the barrier does what `Next` says and reports back:

| call      | when                                         | what follows                                                     |
|-----------|----------------------------------------------|------------------------------------------------------------------|
| `start`   | the environment was reset                    | the first turns                                                  |
| `act`     | an agent's action is there                   | the actions that the environment shall see now, if it is idle    |
| `applied` | the environment has answered to `Next.apply` | turns for those whom the protocol names, or more actions to apply |
| `skip`    | an agent is too late and its turn is lost    | as `act`, without an action                                      |
| `leave`   | an agent is gone for good                    | as `skip`; no turn is granted to it again                        |
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from opentinker.errors import ProtocolError
from opentinker.multiagent.protocol import AgentProtocol, Table, Turn, check_seats, checked_turn

A = TypeVar("A")


class Standing(StrEnum):
    """How an agent stands."""

    PENDING = "pending"
    RUNNING = "running"
    ACTED = "acted"
    GONE = "gone"


@dataclass(frozen=True)
class Next(Generic[A]):
    """What is to be done now: actions that the environment shall see (one call, in the order of the seats), turns to grant."""

    apply: tuple[tuple[str, A], ...] = ()
    grant: tuple[str, ...] = ()
    together: bool = False
    """The actions of `apply` are simultaneous."""
    over: bool = False
    """Nobody will act any more."""


class TurnBarrier(Generic[A]):
    """The turns of one episode. At any time exactly the agents whom the protocol named, and who have not acted, are RUNNING.

    Raises:
        ConfigError: the protocol does not fit the seats.
    """

    def __init__(self, protocol: AgentProtocol, seats: Sequence[str]) -> None:
        check_seats(protocol, seats)
        self._protocol = protocol
        self._seats = tuple(seats)
        self._standing = dict.fromkeys(self._seats, Standing.GONE)
        self._actions: dict[str, A] = {}
        self._queue: list[str] = []
        """Who acted, in the order of arrival, where actions are not simultaneous."""
        self._turn = Turn(())
        self._round: tuple[str, ...] = ()
        """Who had their turn in this round: they acted or were skipped."""
        self._barred: set[str] = set()
        """Who left for good, whatever the environment says."""
        self._applying = False
        self._started = False
        self._over = False

    @property
    def running(self) -> tuple[str, ...]:
        """Whose action is awaited."""
        return self._of(Standing.RUNNING)

    @property
    def present(self) -> tuple[str, ...]:
        return tuple(agent for agent in self._seats if self._standing[agent] is not Standing.GONE)

    @property
    def over(self) -> bool:
        return self._over

    def standing(self, agent: str) -> Standing:
        """Raises: ProtocolError when there is no such agent."""
        if agent not in self._standing:
            raise ProtocolError(f"there is no agent '{agent}'", hint=f"there are {', '.join(self._seats)}")
        return self._standing[agent]

    def start(self, present: Iterable[str], named: Sequence[str] = ()) -> Next[A]:
        """The environment was reset, and these agents take part from the beginning.

        Raises:
            ProtocolError: one is unknown, or the protocol names no one.
        """
        if self._started:
            raise ProtocolError("the episode has begun before")
        self._started = True
        self._enter(present)
        return self._grant(named)

    def act(self, agent: str, action: A) -> Next[A]:
        """An agent's action.

        Raises:
            ProtocolError: the agent is not there, it is not its turn, or it has acted already. Nothing has changed then.
        """
        match self.standing(agent):
            case Standing.GONE:
                raise ProtocolError(f"'{agent}' does not take part{self._who()}")
            case Standing.PENDING:
                raise ProtocolError(f"it is not the turn of '{agent}'{self._who()}", hint="wait until the turn is granted")
            case Standing.ACTED:
                raise ProtocolError(f"'{agent}' has acted already in this turn{self._who()}")
        self._standing[agent] = Standing.ACTED
        self._actions[agent] = action
        self._queue.append(agent)
        return self._ready()

    def applied(self, *, present: Iterable[str], named: Sequence[str] = (), over: bool = False) -> Next[A]:
        """The environment has answered to the last `apply`; `present` are those who take part from now on.

        Raises:
            ProtocolError: nothing was applied; an agent is unknown; the protocol names no one, or takes back a turn.
        """
        if not self._applying:
            raise ProtocolError("the environment was given no action")
        self._applying = False
        if over:
            return self._end()
        stay = set(present)
        for agent in self.present:
            if agent not in stay:
                self._remove(agent)
        self._enter(stay)
        return self._go_on(named)

    def skip(self, agent: str) -> Next[A]:
        """The agent's turn is lost: the round goes on without its action.

        Raises:
            ProtocolError: it is not its turn.
        """
        if self.standing(agent) is not Standing.RUNNING:
            raise ProtocolError(f"it is not the turn of '{agent}'{self._who()}")
        self._standing[agent] = Standing.PENDING
        self._round += (agent,)
        return self._ready()

    def leave(self, agent: str) -> Next[A]:
        """The agent is gone for good; an action of its own that the environment has not seen is dropped.

        Raises:
            ProtocolError: there is no such agent.
        """
        stood = self.standing(agent)
        self._barred.add(agent)
        if stood is Standing.GONE:
            return Next(over=self._over)
        self._remove(agent)
        return self._ready() if stood in (Standing.RUNNING, Standing.ACTED) else Next()

    def _ready(self) -> Next[A]:
        """What can be applied now that somebody has acted, or will not."""
        if self._applying or self._over:
            return Next(over=self._over)
        if self._turn.together and self.running:
            return Next()
        if not self._queue:
            return self._go_on(())
        taken = sorted(self._queue, key=self._seats.index) if self._turn.together else self._queue[:1]
        self._queue = [agent for agent in self._queue if agent not in taken]
        self._applying = True
        self._round += tuple(taken)
        for agent in taken:
            self._standing[agent] = Standing.PENDING
        return Next(apply=tuple((agent, self._actions.pop(agent)) for agent in taken), together=self._turn.together)

    def _go_on(self, named: Sequence[str]) -> Next[A]:
        granted = self._grant(named)
        if granted.over or not self._queue:
            return granted
        more = self._ready()  # somebody else acted while the environment was busy
        return Next(apply=more.apply, grant=granted.grant, together=more.together)

    def _grant(self, named: Sequence[str]) -> Next[A]:
        """Asks the protocol; a new round begins."""
        if not self.present:
            return self._end()
        table = Table(self._seats, self.present, last=self._round, named=tuple(named))
        turn = checked_turn(self._protocol, table)
        started = self._of(Standing.RUNNING) + self._of(Standing.ACTED)
        if lost := [agent for agent in started if agent not in turn.agents]:
            raise ProtocolError(
                f"{type(self._protocol).__name__} takes back the turn of {', '.join(lost)}", hint="name them until they acted"
            )
        grant = tuple(agent for agent in self._seats if agent in turn.agents and agent not in started)
        for agent in grant:
            self._standing[agent] = Standing.RUNNING
        self._turn, self._round = turn, ()
        return Next(grant=grant)

    def _end(self) -> Next[A]:
        self._over = True
        self._queue.clear()
        self._actions.clear()
        self._standing = dict.fromkeys(self._seats, Standing.GONE)
        return Next(over=True)

    def _enter(self, agents: Iterable[str]) -> None:
        for agent in agents:
            if self.standing(agent) is Standing.GONE and agent not in self._barred:
                self._standing[agent] = Standing.PENDING

    def _remove(self, agent: str) -> None:
        self._standing[agent] = Standing.GONE
        self._actions.pop(agent, None)
        self._queue = [other for other in self._queue if other != agent]

    def _of(self, standing: Standing) -> tuple[str, ...]:
        return tuple(agent for agent in self._seats if self._standing[agent] is standing)

    def _who(self) -> str:
        return f"; awaited: {', '.join(self.running) or 'nobody'}"
