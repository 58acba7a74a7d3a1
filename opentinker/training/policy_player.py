"""A policy on a server as a player of games."""

from collections.abc import Mapping, Sequence

from opentinker.client.messages import Chunk, ImageChunk, IntArray, Sample, SamplingParams
from opentinker.config.rollout import SamplingConfig
from opentinker.errors import ConfigError
from opentinker.images import Image
from opentinker.multiagent.players import PolicyPlayer
from opentinker.rendering.renderer import ConversationRenderer
from opentinker.training.rl import TrainablePolicy


def policy_player(
    policy: TrainablePolicy,
    renderer: ConversationRenderer,
    max_model_len: int,
    sampling: SamplingConfig,
    *,
    deadline_s: float,
    temperature: float | None = None,
    trains: bool = False,
) -> PolicyPlayer:
    """Plays by what the policy says; `renderer` and `max_model_len` are those of its server, `temperature` replaces that of its
    sampling, and `deadline_s` is for one answer."""
    if temperature is not None:
        sampling = sampling.model_copy(update={"temperature": temperature})
    params = SamplingParams(**sampling.model_dump(), stop_token_ids=renderer.stop_token_ids)

    async def generate(prompt: IntArray | tuple[Chunk, ...], params: SamplingParams, request_id: str) -> Sample:
        return (await policy.sample(prompt, params, request_id=request_id, deadline_s=deadline_s)).samples[0]

    async def upload(images: Sequence[Image]) -> Mapping[str, ImageChunk]:
        if not renderer.takes_images:
            raise ConfigError(
                "the environment shows images, but the base model takes none",
                hint="use a vision-language model as base_model",
            )
        return await policy.upload([image.data for image in images])

    return PolicyPlayer(renderer, generate, params, max_model_len, upload, trains)
