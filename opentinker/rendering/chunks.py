"""Images in rendered conversations: where the chat template shows them, and what stands there in a prompt."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from opentinker.client.messages import Chunk, ImageChunk, TokenChunk
from opentinker.env.environment import Message, images_of
from opentinker.errors import RenderingError

Images = Mapping[str, ImageChunk]
"""What stands for each image in a prompt, by the image's hash."""
NO_IMAGES: Images = MappingProxyType({})
Rendered = list[int] | tuple[Chunk, ...]
"""Token ids, or, where messages show images, chunks."""
Encode = Callable[[str], list[int]]


def template_content(message: Message, parts_only: bool) -> dict[str, Any]:
    """The message as chat templates take it: an image is the part {"type": "image"}; texts without images are one string, or
    also a list of parts where the template takes nothing else."""
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else [_part(part) for part in content]
    if parts_only or any(part["type"] == "image" for part in parts):
        return {**message, "content": parts}
    return {**message, "content": "".join(part["text"] for part in parts)}


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "image"} if part["type"] == "image" else dict(part)


def shape_of(message: Message) -> str:
    """What a message's content consists of: 't' for text, 'i' for an image, in order, neighbours of one kind counted once."""
    content = message["content"]
    if isinstance(content, str):
        return ""
    kinds = [part["type"][0] for part in content]
    return "".join(kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before)


def check_texts(messages: Sequence[Message], placeholder: str) -> None:
    """Raises: RenderingError: a text spells out what stands for an image, and would be taken for one."""
    for message in messages:
        content = message["content"]
        texts = [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]
        if any(placeholder in text for text in texts):
            raise RenderingError(
                f"a text of role '{message['role']}' contains '{placeholder}', which stands for an image to this model",
                hint="take it out of the text; an image is a part {'type': 'image', 'image': ...}",
            )


def expanded(text: str, encode: Encode, placeholder: str | None, shown: Sequence[Message], images: Images) -> Rendered:
    """The tokens of a rendered text, with a chunk for each image that `shown` shows.

    Raises:
        RenderingError: the text does not show each of them once, or one is not in `images`.
    """
    wanted = images_of(shown)
    if placeholder is None:
        if wanted:
            raise RenderingError("this model takes no images", hint="use a vision-language model as base_model")
        return encode(text)
    parts = _split(text, encode, placeholder)
    if len(parts) != len(wanted) + 1:
        raise RenderingError(
            f"the chat template shows {len(parts) - 1} images of {len(wanted)}: it has to put '{placeholder}' for each"
        )
    if not wanted:
        return parts[0]
    chunks: list[Chunk] = [TokenChunk(np.asarray(parts[0], np.int32))] if parts[0] else []
    for image, after in zip(wanted, parts[1:], strict=True):
        if image.sha256 not in images:
            raise RenderingError(f"image {image.sha256[:12]} was not given to the server before it was rendered")
        chunks.append(images[image.sha256])
        if after:
            chunks.append(TokenChunk(np.asarray(after, np.int32)))
    return tuple(chunks)


def _split(text: str, encode: Encode, placeholder: str) -> list[list[int]]:
    """The tokens before, between and after the placeholders."""
    marks = encode(placeholder)
    if len(marks) != 1:
        return [encode(part) for part in text.split(placeholder)]
    # Encoded as a whole: some tokenizers begin every text with a space of their own.
    parts: list[list[int]] = [[]]
    for token in encode(text):
        if token == marks[0]:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts
