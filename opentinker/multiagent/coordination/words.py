"""How what happens in a game travels between the coordinator and the drivers: events of a seat's machine, and answers to its
turns. Floats, texts and images arrive as they were sent, so that a machine that hears of an event is where it would be if the
game were played beside it."""

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from opentinker.env.environment import Action
from opentinker.errors import InvalidRequestError
from opentinker.rollout.machine import (
    Cancelled,
    DeadlinePassed,
    EpisodeEnded,
    Event,
    Failed,
    Finalized,
    ResetDone,
    StepDone,
    TurnGranted,
    TurnLost,
)
from opentinker.rollout.types import Termination


@dataclass(frozen=True)
class Taken:
    """The seat's action has arrived in time: it stands."""


@dataclass(frozen=True)
class Answer:
    """What a driver says for its seat's turn. 'act': its action; 'cut': its context is full; 'failed' and 'late': there is
    none. With `ended` its episode has failed, and no other turn can follow."""

    kind: Literal["act", "cut", "failed", "late"]
    action: Action = field(default_factory=lambda: Action(""))
    error: str = ""
    ended: bool = False

    def to_wire(self) -> list[Any]:
        action = self.action
        return [self.kind, [action.text, action.truncated, action.reasoning], self.error, self.ended]

    @classmethod
    def from_wire(cls, given: Any) -> "Answer":
        """Raises: InvalidRequestError when it is none."""
        try:
            kind, [text, truncated, reasoning], error, ended = given
        except (TypeError, ValueError) as cause:
            raise InvalidRequestError(f"that is no answer to a turn: {given!r}"[:200]) from cause
        if kind not in ("act", "cut", "failed", "late") or not isinstance(text, str) or not isinstance(error, str):
            raise InvalidRequestError(f"that is no answer to a turn: {given!r}"[:200])
        return cls(kind, Action(text, bool(truncated), str(reasoning)), error, bool(ended))


_EVENTS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        ResetDone,
        TurnGranted,
        TurnLost,
        EpisodeEnded,
        StepDone,
        Finalized,
        Failed,
        DeadlinePassed,
        Cancelled,
        Taken,
    )
}
_TUPLES = ("observation", "tools")
_ELSEWHERE = ("images",)
"""What each driver asks its own server for."""


def event_to_wire(event: Event | Taken) -> list[Any]:
    """An event without the images' places in a prompt."""
    told = {item.name: getattr(event, item.name) for item in fields(event) if item.name not in _ELSEWHERE}
    return [type(event).__name__, told]


def event_from_wire(given: Any) -> Event | Taken:
    """Raises: InvalidRequestError when it is none."""
    try:
        name, told = given
        made: dict[str, Any] = {key: tuple(value) if key in _TUPLES else value for key, value in told.items()}
        if "termination" in made:
            made["termination"] = Termination(made["termination"])
        event: Event | Taken = _EVENTS[name](**made)
    except (TypeError, ValueError, KeyError) as cause:
        raise InvalidRequestError(f"that is no event of an episode: {given!r}"[:200]) from cause
    return event
