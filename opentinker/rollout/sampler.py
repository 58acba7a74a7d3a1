"""Asks a policy for actions: retries what may succeed, gives up at a deadline, and hands images over first."""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence

from opentinker.client.messages import ImageChunk, Sample, SamplingParams
from opentinker.config.rollout import RolloutConfig
from opentinker.env.environment import Message, images_of
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
from opentinker.rollout.machine import ActionSampled, DeadlinePassed, Event, Failed, Generate
from opentinker.rollout.types import GenerateFn, UploadFn

FIRST_BACKOFF_S = 0.25
LONGEST_BACKOFF_S = 5.0


class Sampler:
    """The samples of one agent in one episode. `seed_of_turn` gives each turn's sampling seed; `request_id` is its own."""

    def __init__(
        self,
        generate: GenerateFn,
        config: RolloutConfig,
        sampling: SamplingParams,
        request_id: str,
        seed_of_turn: Callable[[int], int],
        upload: UploadFn | None = None,
    ) -> None:
        self._generate = generate
        self._config = config
        self._sampling = sampling
        self._request_id = request_id
        self._seed_of_turn = seed_of_turn
        self._upload = upload
        self._clock = asyncio.get_running_loop().time
        self.seconds = 0.0
        """Time spent waiting for samples so far."""

    async def images(self, observation: Sequence[Message], left_s: float) -> Mapping[str, ImageChunk]:
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
        timeout_s = min(left_s, self._config.generation_timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._upload(images)
        except TimeoutError:
            raise DeadlineError(f"the server did not take the observation's images within {timeout_s:.3g} s") from None
        except InvalidRequestError as error:
            raise EnvironmentFailedError(f"the server refuses an image of the observation: {error}") from error

    async def sample(self, request: Generate, turn: int, timeout_s: float) -> Event:
        """The action of a turn, or why there is none.

        Raises:
            OpenTinkerError: the policy's server refuses or is lost, which no other episode would survive either.
        """
        start = self._clock()
        try:
            async with asyncio.timeout(timeout_s):
                return ActionSampled(await self._sample_with_retries(request, turn))
        except TimeoutError:
            return DeadlinePassed(f"the policy did not answer within {timeout_s:.3g} s")
        except (UnavailableError, EngineError, ContextOverflowError, ImageMissingError) as error:
            return Failed(str(error))
        finally:
            self.seconds += self._clock() - start

    async def _sample_with_retries(self, request: Generate, turn: int) -> Sample:
        """A request that got no answer is sent again under its id, so that nothing is sampled twice. One that failed gets a new
        id, because the old one would only find the failure again."""
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
