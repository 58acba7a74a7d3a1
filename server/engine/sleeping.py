"""When an engine that shares a GPU with a trainer gives its memory up, and how it comes back: a pure state machine, and the
shell that has an engine do what it says."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from opentinker.errors import ConflictError, EngineError, ServerLostError


class Sleep(StrEnum):
    AWAKE = "awake"
    KEPT = "asleep, its weights kept in the host's memory"
    DISCARDED = "asleep, its weights discarded"
    WRITING = "taking new weights, without its cache"
    UNDEFINED = "left with weights that were written in part"
    CLOSED = "closed"


class Event(StrEnum):
    SLEEP_KEEPING = "sleep and keep the weights"
    SLEEP_DISCARDING = "sleep and discard the weights"
    WAKE = "wake up"
    BEGIN_UPDATE = "take new weights"
    UPDATED = "have all of its new weights"
    UPDATE_FAILED = "give an update up"
    CLOSE = "close"


@dataclass(frozen=True)
class Action:
    """What an engine has to do: fall asleep at one of vLLM's levels, or get the memory of these kinds back."""

    level: int = 0
    tags: tuple[str, ...] = ()


KEEP, DISCARD = Action(level=1), Action(level=2)
WEIGHTS, CACHE, ALL = Action(tags=("weights",)), Action(tags=("kv_cache",)), Action(tags=("weights", "kv_cache"))

_TRANSITIONS: dict[tuple[Sleep, Event], tuple[Sleep, Action | None]] = {
    (Sleep.AWAKE, Event.SLEEP_KEEPING): (Sleep.KEPT, KEEP),
    (Sleep.AWAKE, Event.SLEEP_DISCARDING): (Sleep.DISCARDED, DISCARD),
    (Sleep.AWAKE, Event.WAKE): (Sleep.AWAKE, None),
    (Sleep.AWAKE, Event.BEGIN_UPDATE): (Sleep.AWAKE, None),
    (Sleep.AWAKE, Event.UPDATED): (Sleep.AWAKE, None),
    # It has its memory; whether its weights can be trusted is for the engine itself to say.
    (Sleep.AWAKE, Event.UPDATE_FAILED): (Sleep.AWAKE, None),
    (Sleep.KEPT, Event.SLEEP_KEEPING): (Sleep.KEPT, None),
    (Sleep.KEPT, Event.WAKE): (Sleep.AWAKE, ALL),
    (Sleep.KEPT, Event.BEGIN_UPDATE): (Sleep.WRITING, WEIGHTS),
    (Sleep.DISCARDED, Event.SLEEP_DISCARDING): (Sleep.DISCARDED, None),
    (Sleep.DISCARDED, Event.BEGIN_UPDATE): (Sleep.WRITING, WEIGHTS),
    (Sleep.WRITING, Event.UPDATED): (Sleep.AWAKE, CACHE),
    (Sleep.WRITING, Event.UPDATE_FAILED): (Sleep.UNDEFINED, None),
    (Sleep.UNDEFINED, Event.BEGIN_UPDATE): (Sleep.WRITING, None),
}
"""What is not here is refused."""

_HINTS = {
    Sleep.DISCARDED: "a publish gives it new ones, and wakes it",
    Sleep.UNDEFINED: "publish again, or start a new server",
}


def after(state: Sleep, event: Event) -> tuple[Sleep, Action | None]:
    """The state that the event leads to, and what the engine has to do for it.

    Raises:
        ConflictError: it cannot happen in this state.
    """
    if event is Event.CLOSE:
        return Sleep.CLOSED, None
    if (state, event) not in _TRANSITIONS:
        raise ConflictError(f"the engine cannot {event}: it is {state}", hint=_HINTS.get(state, ""))
    return _TRANSITIONS[state, event]


class Sleeping(Protocol):
    """An engine that can give its memory up."""

    def suspend(self, level: int) -> None: ...

    def resume(self, tags: tuple[str, ...]) -> None: ...

    def has_unfinished(self) -> bool: ...


class Sleeper:
    """Keeps the state of one engine. A state is left only when the engine has done what that takes."""

    def __init__(self, engine: Sleeping, make_room: Callable[[], None] = lambda: None) -> None:
        """`make_room` gives back what the trainer holds of the GPUs' memory and does not use; it is called before a wake."""
        self._engine = engine
        self.make_room = make_room
        self.state = Sleep.AWAKE

    def tell(self, event: Event) -> None:
        """Have the event happen.

        Raises:
            ConflictError: it cannot, in this state; or the engine would fall asleep over requests that are running.
            EngineError: the engine failed to do what it takes; the state is as before.
            ServerLostError: a process that it takes is gone.
        """
        state, action = after(self.state, event)
        if action is not None and action.level and self._engine.has_unfinished():
            raise ConflictError(f"the engine cannot {event}: requests are running, whose cache would be lost")
        try:
            if action is not None and action.level:
                self._engine.suspend(action.level)
            elif action is not None:
                self.make_room()
                self._engine.resume(action.tags)
        except ServerLostError:
            raise  # nobody sleeps or wakes any more
        except Exception as error:
            raise EngineError(f"the engine failed to {event}: {error}", hint="lower engine.memory_fraction") from error
        self.state = state

    @contextmanager
    def asleep(self) -> Iterator[None]:
        """While the trainer computes. An engine with running requests stays awake, for they will go on; and it is awake after,
        however the trainer's work ends.

        Raises:
            EngineError: it does not fall asleep (nothing was done then), or does not wake up.
        """
        if self._engine.has_unfinished():
            yield
            return
        self.tell(Event.SLEEP_KEEPING)
        try:
            yield
        finally:
            self.tell(Event.WAKE)

    def require_awake(self) -> None:
        """Raises: ConflictError when the engine cannot compute now."""
        if self.state is not Sleep.AWAKE:
            raise ConflictError(f"the engine cannot compute: it is {self.state}", hint=_HINTS.get(self.state, ""))
