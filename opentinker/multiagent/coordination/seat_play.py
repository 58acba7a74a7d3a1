"""A driver's seat in a game that the coordinator plays: it has a machine here, which is told of the same events as if the game
were played beside it."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from opentinker.config.agents import TurnsConfig
from opentinker.config.rollout import RolloutConfig
from opentinker.errors import DeadlineError, EnvironmentFailedError, UnavailableError
from opentinker.multiagent.coordination.words import Answer, Taken
from opentinker.multiagent.players import PolicyPlayer, SeedOfTurn
from opentinker.rollout.episode import episode_of
from opentinker.rollout.machine import (
    ActionSampled,
    Cancelled,
    DeadlinePassed,
    EpisodeEnded,
    Event,
    Failed,
    Finalize,
    Finish,
    Generate,
    ResetDone,
    StepDone,
    TurnGranted,
    TurnLost,
)
from opentinker.rollout.types import Episode

AnswerTurn = Callable[[int, Answer], None]


class Over:
    """The game is over; `aborted` says why it is void, if it is."""

    def __init__(self, aborted: DeadlinePassed | Failed | None, environment_s: float) -> None:
        self.aborted = aborted
        self.environment_s = environment_s


class SeatPlay:
    """A policy's seat in one game."""

    def __init__(
        self, name: str, player: PolicyPlayer, task: Any, config: RolloutConfig, turns: TurnsConfig, request_id: str,
        seed_of_turn: SeedOfTurn, answer: AnswerTurn,
    ) -> None:  # fmt: skip
        self.events: asyncio.Queue[Event | Taken | Over] = asyncio.Queue()
        self._config, self._turns_config, self._answer = config, turns, answer
        self._task = task
        self._machine = player.machine(task, config)
        self._sampler = player.sampler(config, request_id, lambda turn: seed_of_turn(name, turn))
        self._turn = 0
        self._sampling: asyncio.Task[ActionSampled | None] | None = None
        self._broken = ""
        """Why no turn can be played, although none was asked for yet."""

    async def run(self, member: int) -> Episode:
        """Play to the end.

        Raises:
            OpenTinkerError: the policy's server refuses or is lost.
        """
        try:
            while not isinstance(event := await self._next(), Over):
                await self._hear(event)
        finally:
            await self._stop_sampling()
        if not isinstance(self._machine.pending, Finish):
            self._machine.handle(Cancelled())
        return episode_of(
            self._machine,
            self._task,
            member,
            generation_s=self._sampler.seconds,
            environment_s=event.environment_s,
            aborted=event.aborted,
        )

    async def _next(self) -> Event | Taken | Over:
        """The next event; what goes wrong in sampling meanwhile is raised."""
        if self._sampling is None:
            return await self.events.get()
        if self._sampling.done():
            self._sampling.result()
            return await self.events.get()
        coming = asyncio.ensure_future(self.events.get())
        try:
            await asyncio.wait([coming, self._sampling], return_when=asyncio.FIRST_COMPLETED)
            if self._sampling.done():
                self._sampling.result()
            return await coming
        finally:
            coming.cancel()

    async def _hear(self, event: Event | Taken) -> None:
        machine = self._machine
        if isinstance(event, Taken):
            assert self._sampling is not None, "an action was taken that was never given"
            sampled = await self._sampling
            assert sampled is not None
            machine.handle(sampled)
            self._turn += 1
            return
        if isinstance(event, EpisodeEnded | TurnLost | DeadlinePassed | Failed | Cancelled):
            await self._stop_sampling()
        if isinstance(event, TurnLost):
            self._turn += 1
        if isinstance(machine.pending, Finish) and not isinstance(event, EpisodeEnded):
            return  # it ended here first, and said so
        if isinstance(machine.pending, Finish) and not machine.pending.termination.trains:
            return
        request = machine.handle(await self._with_images(event))
        if not isinstance(event, TurnGranted):
            return
        if self._broken:
            machine.handle(Failed(self._broken))
            self._answer(self._turn, Answer("failed", error=self._broken, ended=True))
        elif isinstance(request, Generate):
            self._sampling = asyncio.ensure_future(self._sample(request))
        elif isinstance(request, Finish | Finalize) and str(request.termination).startswith("truncated"):
            self._answer(self._turn, Answer("cut", error=machine.error))
        else:
            self._answer(self._turn, Answer("failed", error=machine.error, ended=True))

    async def _sample(self, request: Generate) -> ActionSampled | None:
        """Sample and answer. The action is the machine's only when the coordinator has taken it."""
        timeout_s = min(self._turns_config.turn_timeout_s, self._config.generation_timeout_s)
        said = await self._sampler.sample(request, self._turn, timeout_s)
        if isinstance(said, DeadlinePassed):
            self._answer(self._turn, Answer("late", error=said.error))
        elif isinstance(said, Failed):
            self._answer(self._turn, Answer("failed", error=said.error))
        else:
            assert isinstance(said, ActionSampled)
            try:
                action = self._machine.action_of(said.sample)
            except ValueError:  # the machine says what is wrong with it, and ends
                self._machine.handle(said)
                self._answer(self._turn, Answer("failed", error=self._machine.error, ended=True))
                return None
            self._answer(self._turn, Answer("act", action))
            return said
        return None

    async def _with_images(self, event: Event) -> Event:
        """The event with what stands for its images in a prompt, once this driver's server has them."""
        if not isinstance(event, ResetDone | TurnGranted | StepDone) or (isinstance(event, StepDone) and event.done):
            return event
        shown = event.observation
        try:
            images = await self._sampler.images(shown, self._config.generation_timeout_s)
        except (EnvironmentFailedError, UnavailableError, DeadlineError) as error:
            self._broken = self._broken or str(error)
            return event
        return replace(event, images=images) if images else event

    async def _stop_sampling(self) -> None:
        sampling, self._sampling = self._sampling, None
        if sampling is not None:
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)
