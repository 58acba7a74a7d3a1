"""Drives one episode: does what its machine asks for, each with a deadline, and feeds back what came of it."""

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from opentinker.client.messages import ImageChunk, Sample, SamplingParams
from opentinker.config.job import RolloutConfig
from opentinker.env.environment import Message, images_of
from opentinker.env.processes import Session
from opentinker.errors import (
    ConfigError,
    ContextOverflowError,
    DeadlineError,
    EngineError,
    EnvironmentFailedError,
    ImageMissingError,
    InvalidRequestError,
    OpenTinkerError,
    UnavailableError,
)
from opentinker.rollout.machine import (
    ActionSampled,
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
from opentinker.rollout.types import Episode, GenerateFn, UploadFn

CLOSE_TIMEOUT_S = 5.0
FIRST_BACKOFF_S = 0.25
LONGEST_BACKOFF_S = 5.0

log = logging.getLogger(__name__)


class EpisodeDriver:
    """One episode of a single agent. `seed_of_turn` gives each turn's sampling seed; `request_id` is unique to this episode."""

    def __init__(
        self,
        machine: EpisodeMachine,
        session: Session,
        generate: GenerateFn,
        config: RolloutConfig,
        sampling: SamplingParams,
        request_id: str,
        seed_of_turn: Callable[[int], int],
        upload: UploadFn | None = None,
    ) -> None:
        self._machine = machine
        self._session = session
        self._generate = generate
        self._config = config
        self._sampling = sampling
        self._request_id = request_id
        self._seed_of_turn = seed_of_turn
        self._upload = upload
        self._clock = asyncio.get_running_loop().time
        self._deadline = self._clock() + config.episode_timeout_s
        self._generation_s = 0.0

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
        return Episode(
            task=task,
            member=member,
            termination=machine.pending.termination,
            trajectories=machine.trajectories,
            messages=machine.messages,
            rewards=machine.rewards,
            metrics=machine.metrics,
            components=machine.components,
            tools=machine.tools,
            error=machine.error,
            prefix_breaks=machine.prefix_breaks,
            generation_s=self._generation_s,
            environment_s=self._session.seconds,
        )

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
                    return await self._sample(request, min(left, self._config.generation_timeout_s))
        except DeadlineError as error:
            return DeadlinePassed(error.detail)
        except (EnvironmentFailedError, UnavailableError) as error:
            return Failed(str(error))
        raise ValueError(f"a single agent's episode does not ask for {type(request).__name__}")

    async def _images(self, observation: Sequence[Message]) -> Mapping[str, ImageChunk]:
        """What stands for the observation's images in a prompt, when the server has them.

        Raises:
            EnvironmentFailedError: the server refuses an image.
            ConfigError: this driver has no server for images.
            DeadlineError, UnavailableError: the server does not answer.
        """
        images = images_of(observation)
        if not images:
            return {}
        if self._upload is None:
            raise ConfigError("the environment shows images, and nothing was given that takes them")
        timeout_s = min(self._deadline - self._clock(), self._config.generation_timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._upload(images)
        except TimeoutError:
            raise DeadlineError(f"the server did not take the observation's images within {timeout_s:.3g} s") from None
        except InvalidRequestError as error:
            raise EnvironmentFailedError(f"the server refuses an image of the observation: {error}") from error

    async def _sample(self, request: Generate, timeout_s: float) -> Event:
        start = self._clock()
        try:
            async with asyncio.timeout(timeout_s):
                return ActionSampled(await self._sample_with_retries(request))
        except TimeoutError:
            return DeadlinePassed(f"the policy did not answer within {timeout_s:.3g} s")
        except (UnavailableError, EngineError, ContextOverflowError, ImageMissingError) as error:
            return Failed(str(error))
        finally:
            self._generation_s += self._clock() - start

    async def _sample_with_retries(self, request: Generate) -> Sample:
        """A request that got no answer is sent again under its id, so that nothing is sampled twice. One that failed gets a new
        id, because the old one would only find the failure again."""
        turn = len(self._machine.rewards)
        params = self._sampling.model_copy(update={"max_tokens": request.max_tokens, "seed": self._seed_of_turn(turn)})
        failures = 0
        for attempt in range(self._config.generation_retries + 1):
            if attempt:
                await asyncio.sleep(min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0))
            try:
                sample = await self._generate(request.chunks or request.tokens, params, f"{self._request_id}-{turn}.{failures}")
                if sample.finish_reason != "abort":
                    return sample
                error: OpenTinkerError = EngineError("the engine aborted the request")
                failures += 1
            except UnavailableError as unavailable:
                error = unavailable
            except EngineError as failed:
                error = failed
                failures += 1
        raise error

    async def _close(self) -> None:
        try:
            await self._session.close(CLOSE_TIMEOUT_S)
        except (EnvironmentFailedError, DeadlineError) as error:
            log.warning("environment_not_closed episode=%s error=%r", self._request_id, str(error))
