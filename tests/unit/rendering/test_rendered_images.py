"""Images in any turn: the template says where they are, and a text never passes for one."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from opentinker.client.messages import Chunk, ImageChunk, TokenChunk
from opentinker.env.environment import Message
from opentinker.errors import RenderingError
from opentinker.images import Image
from opentinker.rendering.renderer import ConversationRenderer
from opentinker.rendering.tokenizer import ChatTokenizer

PICTURES = [Image(b"\x89PNG\r\n\x1a\n" + bytes([number])) for number in range(3)]
IMAGES = {p.sha256: ImageChunk(p.sha256, np.arange(900, 905 + n, dtype=np.int32)) for n, p in enumerate(PICTURES)}
VLM = ["chatml_vlm", "parts_only"]
MakeRenderer = Callable[..., ConversationRenderer]


@pytest.fixture
def make_renderer(make_tokenizer: Callable[[str], ChatTokenizer]) -> MakeRenderer:
    def make(family: str, placeholder: str | None = "<image>") -> ConversationRenderer:
        tokenizer = make_tokenizer(family)
        stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
        assert stop is not None
        return ConversationRenderer(tokenizer, [stop], image_placeholder=placeholder)

    return make


def says(role: str, *parts: str | int) -> Message:
    """A message; a number is a picture."""
    content: list[Any] = [
        {"type": "image", "image": PICTURES[p]} if isinstance(p, int) else {"type": "text", "text": p} for p in parts
    ]
    return {"role": role, "content": content}


def shown(renderer: ConversationRenderer, rendered: Any) -> str:
    """The text with a picture's number in braces where its chunk is."""
    if isinstance(rendered, list):
        return renderer.tokenizer.decode(rendered)
    numbers = {picture.sha256: number for number, picture in enumerate(PICTURES)}
    return "".join(
        f"{{{numbers[chunk.sha256]}}}" if isinstance(chunk, ImageChunk) else renderer.tokenizer.decode(chunk.tokens.tolist())
        for chunk in rendered
    )


@pytest.mark.parametrize("family", VLM)
def test_each_image_is_a_chunk_where_the_template_shows_it(make_renderer: MakeRenderer, family: str) -> None:
    renderer = make_renderer(family)
    messages = [says("system", "Look."), says("user", 0, "What is it? ", 1), says("user", "And this: ", 0, 2)]
    text = shown(renderer, renderer.render_prompt(messages, (), IMAGES))
    assert "{0}What is it? {1}" in text
    assert "And this: {0}{2}" in text
    assert "Look." in text
    rendered = renderer.render_prompt(messages, (), IMAGES)
    assert [c.tokens.tolist() for c in rendered if isinstance(c, ImageChunk)] == [  # type: ignore[union-attr]
        IMAGES[PICTURES[n].sha256].tokens.tolist() for n in (0, 1, 0, 2)
    ]


@pytest.mark.parametrize("family", VLM)
def test_texts_are_shown_whether_the_template_takes_strings_or_parts(make_renderer: MakeRenderer, family: str) -> None:
    renderer = make_renderer(family)
    as_text = renderer.render_prompt([{"role": "user", "content": "How are you?"}])
    assert isinstance(as_text, list)
    assert "How are you?" in renderer.tokenizer.decode(as_text)
    assert renderer.render_prompt([says("user", "How ", "are you?")]) == as_text or family == "parts_only"
    assert renderer.preserves_prefix


@pytest.mark.parametrize("family", VLM)
@pytest.mark.parametrize("stops", [True, False])
@pytest.mark.parametrize("observation", [(0, "Now?"), ("Now?", 1), (2,), ("Between ", 0, " and ", 1)])
def test_what_turns_append_is_what_the_whole_conversation_shows(
    make_renderer: MakeRenderer, family: str, stops: bool, observation: tuple[str | int, ...]
) -> None:
    renderer = make_renderer(family)
    stop = renderer.tokenizer.encode("<|im_end|>")
    first = [says("user", "Hello. ", 1)]
    answer = renderer.tokenizer.encode("7") + (stop if stops else [])
    later = [says("user", *observation)]
    delta = renderer.observation_delta(answer, later, (), IMAGES)
    assert not isinstance(delta, list)
    assert sum(isinstance(chunk, ImageChunk) for chunk in delta) == sum(isinstance(p, int) for p in observation)
    appended = shown(renderer, renderer.render_prompt(first, (), IMAGES)) + renderer.tokenizer.decode(answer)
    appended += shown(renderer, delta)
    whole = renderer.render_prompt([*first, {"role": "assistant", "content": "7"}, *later], (), IMAGES)
    # One template puts a space before an answer in its history, which is the policy's own.
    assert appended.replace("Assistant: 7", "Assistant:7") == shown(renderer, whole).replace("Assistant: 7", "Assistant:7")


@pytest.mark.parametrize("message", [{"role": "user", "content": "an <image> in words"}, says("user", 0, "and <image>")])
def test_a_text_that_spells_out_the_placeholder_is_refused(make_renderer: MakeRenderer, message: Message) -> None:
    renderer = make_renderer("chatml_vlm")
    with pytest.raises(RenderingError, match="contains '<image>', which stands for an image"):
        renderer.render_prompt([message], (), IMAGES)
    with pytest.raises(RenderingError, match="stands for an image"):
        renderer.observation_delta([5], [message], (), IMAGES)


def test_a_template_that_does_not_show_an_image_is_refused(make_renderer: MakeRenderer) -> None:
    with pytest.raises(RenderingError, match="shows 0 images of 1"):
        make_renderer("chatml_vlm", "<|bos|>").render_prompt([says("user", 0)], (), IMAGES)


def test_a_model_without_images_says_so_and_takes_a_placeholders_text_as_text(make_renderer: MakeRenderer) -> None:
    renderer = make_renderer("chatml_vlm", None)
    with pytest.raises(RenderingError, match="takes no images") as refused:
        renderer.render_prompt([says("user", 0)], (), IMAGES)
    assert "vision-language" in refused.value.hint
    assert isinstance(renderer.render_prompt([{"role": "user", "content": "<image>"}]), list)


def test_an_image_that_the_server_was_not_given_is_refused(make_renderer: MakeRenderer) -> None:
    with pytest.raises(RenderingError, match="was not given to the server"):
        make_renderer("chatml_vlm").render_prompt([says("user", 0)])


def test_a_placeholder_of_several_tokens_splits_the_text(make_renderer: MakeRenderer) -> None:
    renderer = make_renderer("chatml_vlm", "<image><|bos|>")
    with pytest.raises(RenderingError, match="shows 0 images of 1"):
        renderer.render_prompt([says("user", 0)], (), IMAGES)
    chunks: tuple[Chunk, ...] = (TokenChunk(np.array([1], np.int32)),)
    assert shown(renderer, chunks) == renderer.tokenizer.decode([1])
