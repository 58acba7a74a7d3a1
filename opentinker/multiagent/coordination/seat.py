"""A seat of a game that the coordinator plays, whose policy is in another process: a machine that knows what happens but no
tokens, and the wait for the driver's answers."""

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from opentinker.client.messages import ImageChunk, Sample
from opentinker.config.rollout import RolloutConfig
from opentinker.env.environment import Action, Message, Tool
from opentinker.multiagent.coordination.words import Answer, Taken
from opentinker.rendering.chunks import NO_IMAGES, Images
from opentinker.rollout.machine import ActionSampled, DeadlinePassed, EpisodeMachine, Event, Failed, Generate, Request
from opentinker.rollout.types import Termination

Tell = Callable[[Event | Taken], None]
"""Sends an event of the seat's episode to its driver."""
Ask = Callable[[int, Sequence[Message]], None]
"""(turn, what the agent was shown and said) -> asks the driver's script."""

_TOKEN = 0
_SAMPLE = Sample(np.array([_TOKEN], np.int32), np.zeros(1, np.float32), "stop", ((0, 1),))


class _Unseen:
    """Renders every observation as one token, and reads every action as the one that was put there."""

    action = Action("")

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = (), images: Images = NO_IMAGES) -> list[int]:
        return [_TOKEN]

    def parse(self, action_tokens: Sequence[int], finished: bool = False) -> Action:
        return self.action

    def observation_delta(
        self,
        action_tokens: Sequence[int],
        observation: Sequence[Message],
        tools: Sequence[Tool] = (),
        images: Images = NO_IMAGES,
    ) -> list[int]:
        return [_TOKEN]


@dataclass(frozen=True)
class Answered:
    """The driver's answer, as an event for the seat's machine."""

    answer: Answer


class SeatMachine(EpisodeMachine):
    """The machine of a seat whose tokens are in its driver's process: there another one is told of the same events, and stands
    where this one does."""

    def __init__(self, task: Any, max_turns: int, tell: Tell) -> None:
        self._unseen, self._tell = _Unseen(), tell
        super().__init__(
            self._unseen,
            task,
            max_turns=max_turns,
            max_action_tokens=1,
            max_model_len=sys.maxsize,
            waits_for_turn=True,
        )

    def handle(self, event: Event | Answered) -> Request:
        """Advance, and tell the driver; what it says itself it knows already."""
        if not isinstance(event, Answered):
            request = super().handle(event)
            self._tell(event)
            return request
        answer = event.answer
        if answer.kind == "act":
            self._unseen.action = answer.action
            request = super().handle(ActionSampled(_SAMPLE))
            self._tell(Taken())
            return request
        if answer.kind == "cut":
            self.error = answer.error
            self.pending = self._end(Termination.TRUNCATED_CONTEXT)
            return self.pending
        return super().handle(Failed(answer.error))


@dataclass
class RemoteSeat:
    """What a game asks in place of a sampler or a script: the driver's answers, by turn."""

    seconds: float = 0.0
    _answers: dict[int, "asyncio.Future[Answer]"] = field(default_factory=dict)
    _gone: str = ""
    ask: Ask | None = None
    """Of a script, which waits to be asked; a policy's driver hears of its turn as an event."""

    async def images(self, shown: Sequence[Message], left_s: float) -> dict[str, ImageChunk]:
        """None: the driver hands them to its own server."""
        return {}

    async def sample(self, request: Generate, turn: int, timeout_s: float) -> Any:
        """The answer to a turn, as what the machine or the game makes of it."""
        answer = await self._answer(turn, timeout_s)
        if answer.kind == "late":
            return DeadlinePassed(answer.error)
        if answer.kind == "failed" and not answer.ended:
            return Failed(answer.error)
        return Answered(answer)

    async def act(self, seen: Sequence[Message], turn: int, timeout_s: float) -> Action | DeadlinePassed | Failed:
        """A script's action."""
        assert self.ask is not None
        self.ask(turn, seen)
        answer = await self._answer(turn, timeout_s)
        if answer.kind == "act":
            return answer.action
        return DeadlinePassed(answer.error) if answer.kind == "late" else Failed(answer.error)

    def answered(self, turn: int, answer: Answer) -> None:
        """An answer has arrived; the first one for a turn counts."""
        future = self._future(turn)
        if not future.done():
            future.set_result(answer)

    def gone(self, cause: str) -> None:
        """There will be no more answers."""
        self._gone = cause
        for turn in self._answers:
            self.answered(turn, Answer("failed", error=cause))

    async def _answer(self, turn: int, timeout_s: float) -> Answer:
        if self._gone:
            return Answer("failed", error=self._gone)
        started = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self._future(turn))
        except TimeoutError:
            return Answer("late", error=f"its driver did not answer within {timeout_s:.3g} s")
        finally:
            self.seconds += asyncio.get_running_loop().time() - started

    def _future(self, turn: int) -> "asyncio.Future[Answer]":
        if turn not in self._answers:
            self._answers[turn] = asyncio.get_running_loop().create_future()
        return self._answers[turn]


@dataclass(frozen=True)
class RemotePlayer:
    """Who plays a seat from another process."""

    kind: Literal["policy", "script"]
    seat: RemoteSeat
    tell: Tell

    def machine(self, task: Any, config: RolloutConfig) -> SeatMachine | None:
        """The seat's machine; a script has none."""
        return SeatMachine(task, config.max_turns, self.tell) if self.kind == "policy" else None
