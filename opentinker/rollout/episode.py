"""Drives one episode: does what its machine asks for, each with a deadline, and feeds back what came of it."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

from opentinker.client.messages import ImageChunk
from opentinker.config.rollout import RolloutConfig
from opentinker.env.environment import Message
from opentinker.env.processes import Session
from opentinker.errors import DeadlineError, EnvironmentFailedError, UnavailableError
from opentinker.rollout.machine import (
    Cancelled,
    DeadlinePassed,
    EpisodeMachine,
    Event,
    Failed,
    Finalize,
    Finalized,
    Finish,
    Generate,
    Request,
    Reset,
    ResetDone,
    Step,
    StepDone,
)
from opentinker.rollout.sampler import Sampler
from opentinker.rollout.types import Episode, Termination

CLOSE_TIMEOUT_S = 5.0

log = logging.getLogger(__name__)


class EpisodeDriver:
    """One episode of a single agent."""

    def __init__(
        self, machine: EpisodeMachine, session: Session, sampler: Sampler, config: RolloutConfig, request_id: str
    ) -> None:
        self._machine = machine
        self._session = session
        self._sampler = sampler
        self._config = config
        self._request_id = request_id
        self._clock = asyncio.get_running_loop().time
        self._deadline = self._clock() + config.episode_timeout_s

    async def run(self, member: int) -> Episode:
        """Play the episode to its end. The environment is closed however it ends.

        Raises:
            OpenTinkerError: the policy's server refuses or is lost, which no other episode would survive either.
        """
        machine, request = self._machine, self._machine.pending
        assert isinstance(request, Reset), "a machine is driven once"
        task = request.task
        try:
            while not isinstance(machine.pending, Finish):
                machine.handle(await self._answer(machine.pending))
        except asyncio.CancelledError:
            machine.handle(Cancelled())
            raise
        finally:
            await self._close()
        return episode_of(machine, task, member, generation_s=self._sampler.seconds, environment_s=self._session.seconds)

    async def _answer(self, request: Request) -> Event:
        left = self._deadline - self._clock()
        if left <= 0:
            return DeadlinePassed(f"the episode took longer than {self._config.episode_timeout_s:.3g} s")
        try:
            match request:
                case Reset(task):
                    observation = await self._session.reset(task, min(left, self._config.reset_timeout_s))
                    images = await self._images(observation)
                    return ResetDone(observation, self._session.tools, self._session.finalizes, images)
                case Step(action):
                    result = await self._session.step(action, min(left, self._config.step_timeout_s))
                    observation = cast(tuple[Message, ...], result.observation)
                    images = {} if result.done else await self._images(observation)
                    return StepDone(
                        cast(float, result.reward), result.done, observation, result.metrics, result.components, images
                    )
                case Finalize():
                    result = await self._session.finalize(min(left, self._config.step_timeout_s))
                    return Finalized(cast(float, result.reward), result.components)
                case Generate():
                    timeout_s = min(left, self._config.generation_timeout_s)
                    return await self._sampler.sample(request, len(self._machine.rewards), timeout_s)
        except DeadlineError as error:
            return DeadlinePassed(error.detail)
        except (EnvironmentFailedError, UnavailableError) as error:
            return Failed(str(error))
        raise ValueError(f"a single agent's episode does not ask for {type(request).__name__}")

    async def _images(self, observation: Sequence[Message]) -> Mapping[str, ImageChunk]:
        return await self._sampler.images(observation, self._deadline - self._clock())

    async def _close(self) -> None:
        try:
            await self._session.close(CLOSE_TIMEOUT_S)
        except (EnvironmentFailedError, DeadlineError) as error:
            log.warning("environment_not_closed episode=%s error=%r", self._request_id, str(error))


def episode_of(
    machine: EpisodeMachine,
    task: Any,
    member: int,
    *,
    generation_s: float,
    environment_s: float,
    aborted: DeadlinePassed | Failed | None = None,
) -> Episode:
    """What a machine that has ended leaves; `aborted` says why a game of several agents is void, if it is."""
    assert isinstance(machine.pending, Finish), "every machine has ended"
    termination, error = machine.pending.termination, machine.error
    if aborted is not None and termination.trains:  # it had left before, and may have earned more
        late = isinstance(aborted, DeadlinePassed)
        termination, error = Termination.ERROR_TIMEOUT if late else Termination.ERROR_ENV, aborted.error
    return Episode(
        task=task,
        member=member,
        termination=termination,
        trajectories=machine.trajectories,
        messages=machine.messages,
        rewards=machine.rewards,
        metrics=machine.metrics,
        components=machine.components,
        tools=machine.tools,
        error=error,
        prefix_breaks=machine.prefix_breaks,
        reward_without_turn=machine.early_reward,
        generation_s=generation_s,
        environment_s=environment_s,
    )
