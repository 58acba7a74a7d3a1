"""Images of observations: uploaded before they are rendered, in the prompt as chunks, in the record as they were shown."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from opentinker.client.messages import Chunk, ImageChunk, IntArray, Sample, SamplingParams, TokenChunk, chunk_tokens
from opentinker.config.rollout import RolloutConfig, SamplingConfig
from opentinker.env.environment import Action, Environment, Message, StepResult, Tool
from opentinker.errors import ConfigError, InvalidRequestError, OpenTinkerError, RenderingError, UnavailableError
from opentinker.images import Image
from opentinker.rendering.chunks import NO_IMAGES, Images, Rendered
from opentinker.rollout.runner import RolloutRunner
from opentinker.rollout.types import Group, Termination

FIRST, LATER, LAST = (Image(b"\x89PNG\r\n\x1a\n" + bytes([number])) for number in range(3))
STOP = 1
WIDE = 10
"""Tokens of an image."""


class PictureRenderer:
    """Text as its characters' codes, an image as its chunk; STOP ends a turn."""

    stop_token_ids = (STOP,)

    def __init__(self, keeps_prefix: bool = True) -> None:
        self._keeps_prefix = keeps_prefix

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = (), images: Images = NO_IMAGES) -> Rendered:
        chunks: list[Chunk] = []
        for message in messages:
            content = message["content"]
            for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
                text = [ord(c) for c in part.get("text", "")]  # type: ignore[union-attr]
                chunks.append(images[part["image"].sha256] if part["type"] == "image" else TokenChunk(np.array(text, np.int32)))  # type: ignore[index,typeddict-item]
        return (*chunks, TokenChunk(np.array([STOP], np.int32)))

    def parse(self, action_tokens: Sequence[int], finished: bool = False) -> Action:
        return Action("".join(chr(t) for t in action_tokens if t != STOP))

    def observation_delta(
        self,
        action_tokens: Sequence[int],
        observation: Sequence[Message],
        tools: Sequence[Tool] = (),
        images: Images = NO_IMAGES,
    ) -> Rendered:
        if not self._keeps_prefix:
            raise RenderingError("changes earlier turns")
        return self.render_prompt(observation, tools, images)


class Album(Environment):
    """Shows a picture at first, one later, and one when nobody looks any more."""

    def reset(self, task: Any) -> Any:
        self._turns = 0
        return [{"type": "text", "text": "see "}, {"type": "image", "image": FIRST}] if task == "at once" else "wait"

    def step(self, action: Action) -> StepResult:
        self._turns += 1
        if self._turns == 2:
            return StepResult(1.0, True, LAST)
        return StepResult(0.0, False, [{"type": "image", "image": LATER}, {"type": "text", "text": "?"}])  # type: ignore[list-item]


class Server:
    """Takes images and answers; remembers both."""

    def __init__(self, error: OpenTinkerError | None = None) -> None:
        self.uploads: list[str] = []
        self.prompts: list[tuple[Chunk, ...]] = []
        self._error = error

    async def upload(self, images: Sequence[Image]) -> Mapping[str, ImageChunk]:
        self.uploads += [image.sha256 for image in images]
        if self._error is not None:
            raise self._error
        return {image.sha256: ImageChunk(image.sha256, np.full(WIDE, 500, np.int32)) for image in images}

    async def generate(self, prompt: IntArray | tuple[Chunk, ...], params: SamplingParams, request_id: str) -> Sample:
        self.prompts.append(prompt if isinstance(prompt, tuple) else (TokenChunk(prompt),))
        return Sample(np.array([65, STOP], np.int32), np.full(2, -1, np.float32), "stop", ((0, 2),))


async def play(server: Server, task: str, renderer: Any = None, upload: bool = True, room: int = 64) -> Group:
    runner = RolloutRunner(
        renderer or PictureRenderer(),
        server.generate,
        Album,
        RolloutConfig(member_retries=0),
        SamplingConfig(max_tokens=4),
        room,
        0,
        server.upload if upload else None,
    )
    (group,) = await runner.run([task], 1, 0)
    return group


def kinds(chunks: Sequence[Chunk]) -> list[str | int]:
    """An image by its hash, tokens by their number."""
    return [chunk.sha256 if isinstance(chunk, ImageChunk) else len(chunk.tokens) for chunk in chunks]


async def test_images_of_any_turn_are_uploaded_first_and_seen_at_their_places() -> None:
    server = Server()
    (episode,) = (await play(server, "at once")).episodes
    assert episode.termination is Termination.DONE
    assert server.uploads == [FIRST.sha256, LATER.sha256], "the last one is shown to nobody"
    assert [kinds(prompt) for prompt in server.prompts] == [[4, FIRST.sha256, 1], [4, FIRST.sha256, 3, LATER.sha256, 2]]
    (trajectory,) = episode.trajectories
    datum = trajectory.to_datum()
    assert kinds(datum.chunks) == [4, FIRST.sha256, 3, LATER.sha256, 3]
    assert datum.weights.sum() == 4
    np.testing.assert_array_equal(chunk_tokens(server.prompts[1]), trajectory.tokens[: len(chunk_tokens(server.prompts[1]))])


async def test_an_image_may_come_in_a_later_turn_only() -> None:
    server = Server()
    await play(server, "later")
    assert [kinds(prompt) for prompt in server.prompts] == [[5], [7, LATER.sha256, 2]]


async def test_where_the_template_keeps_no_prefix_each_turn_shows_all_images_anew() -> None:
    server = Server()
    (episode,) = (await play(server, "at once", PictureRenderer(keeps_prefix=False))).episodes
    assert [kinds(t.chunks)[1] for t in episode.trajectories] == [FIRST.sha256, FIRST.sha256]
    assert LATER.sha256 in kinds(server.prompts[1])


async def test_an_image_takes_its_tokens_of_the_context() -> None:
    (episode,) = (await play(Server(), "at once", room=4 + WIDE + 1 + 2 + WIDE)).episodes
    assert episode.termination is Termination.TRUNCATED_CONTEXT
    assert "29 tokens" in episode.error


@pytest.mark.parametrize("error", [InvalidRequestError("it is broken"), UnavailableError("nobody is there")])
async def test_an_image_that_the_server_does_not_take_ends_its_episode_only(error: OpenTinkerError) -> None:
    group = await play(Server(error), "at once")
    assert (group.dropped, group.failures[0].termination) == (1, Termination.ERROR_ENV)
    assert error.detail in group.failures[0].error


async def test_images_that_nothing_takes_end_the_run() -> None:
    with pytest.raises(ConfigError, match="nothing was given that takes them"):
        await play(Server(), "at once", upload=False)
    with pytest.raises(ConfigError, match="takes none"):
        await play(Server(ConfigError("the base model takes none")), "at once")
