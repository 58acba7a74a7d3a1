"""A policy on a server as a player of games."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from opentinker.client.messages import Chunk, ImageChunk, IntArray, Sample, SamplingParams
from opentinker.config.rollout import SamplingConfig
from opentinker.errors import ConfigError
from opentinker.images import Image
from opentinker.multiagent.players import PolicyPlayer
from opentinker.training.homes import Home
from opentinker.training.rl import TrainablePolicy


def policy_player(
    policy: TrainablePolicy,
    home: Home,
    sampling: SamplingConfig,
    *,
    deadline_s: float,
    temperature: float | None = None,
    trains: bool = False,
    within: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> PolicyPlayer:
    """Plays by what the policy says. `temperature` replaces that of its sampling, `deadline_s` is for one answer, and `within`
    gives what each is asked for in, such as what names the agent in an error."""
    if temperature is not None:
        sampling = sampling.model_copy(update={"temperature": temperature})
    params = SamplingParams(**sampling.model_dump(), stop_token_ids=home.renderer.stop_token_ids)

    async def generate(prompt: IntArray | tuple[Chunk, ...], params: SamplingParams, request_id: str) -> Sample:
        with within():
            return (await policy.sample(prompt, params, request_id=request_id, deadline_s=deadline_s)).samples[0]

    async def upload(images: Sequence[Image]) -> Mapping[str, ImageChunk]:
        if not home.renderer.takes_images:
            raise ConfigError(
                "the environment shows images, but the base model takes none",
                hint="use a vision-language model as base_model",
            )
        return await policy.upload([image.data for image in images])

    return PolicyPlayer(home.renderer, generate, params, home.max_model_len, upload, trains)
