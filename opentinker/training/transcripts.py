"""Sample episodes for people to read: rows of transcripts.jsonl."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from opentinker.env.environment import Message
from opentinker.env.environment import images_of as images_shown
from opentinker.images import IMAGES_FOLDER, Image
from opentinker.rollout.types import Episode, Group

Phase = Literal["train", "evaluation"]
_DATA_URL = re.compile(r"data:[^,\s]*;base64,")


def transcript_row(episode: Episode, *, step: int, phase: Phase) -> dict[str, Any]:
    """One episode as JSON values."""
    return {
        "phase": phase,
        "step": step,
        "task": _readable_task(episode.task),
        "reward": episode.reward,
        "termination": str(episode.termination),
        "error": episode.error,
        "metrics": episode.metrics,
        "action_tokens": episode.action_tokens,
        "components": episode.components,
        **({"tools": list(episode.tools)} if episode.tools else {}),
        "messages": [_readable(m) for m in episode.messages],
    }


def _readable(message: Message) -> dict[str, Any]:
    """A message as JSON values; an image as the name of its file."""
    content = message["content"]
    if isinstance(content, str):
        return dict(message)
    parts = [dict(p) if p["type"] == "text" else {"type": "image", "file": image_file(p["image"])} for p in content]
    return {**message, "content": parts}


def _readable_task(value: Any) -> Any:
    """A task without the bytes of its images: each is the name of its file, or says what it is."""
    if isinstance(value, Mapping):
        return {key: _readable_task(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_readable_task(part) for part in value]
    if (image := _image(value)) is not None:
        return image_file(image)
    if isinstance(value, str) and _DATA_URL.match(value):
        return f"[{value.partition(',')[0].removeprefix('data:')}, {len(value)} characters]"
    return value


def _image(value: Any) -> Image | None:
    """The image that a value of a task is: one of ours, or a data URL."""
    if isinstance(value, Image):
        return value
    if not (isinstance(value, str) and _DATA_URL.match(value)):
        return None
    try:
        return Image.of(value)
    except ValueError:  # whatever else it is
        return None


def _images_in(value: Any) -> Iterator[Image]:
    if isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _images_in(part)
    elif (image := _image(value)) is not None:
        yield image


def images_of(episode: Episode) -> list[Image]:
    """The images of its transcript, those of its task too, each once."""
    found = [*_images_in(episode.task), *images_shown(episode.messages)]
    return list({image.sha256: image for image in found}.values())


def image_file(image: Image) -> str:
    """Where a run's folder has it."""
    return f"{IMAGES_FOLDER}/{image.sha256[:32]}.{image.media_type.removeprefix('image/')}"


def pick_transcripts(groups: Sequence[Group], count: int) -> list[Episode]:
    """The first episode of up to `count` groups spread evenly over the batch, and the first failure if there is one."""
    candidates = [g.episodes[0] for g in groups if g.episodes]
    count = min(count, len(candidates))
    chosen = [candidates[i * len(candidates) // count] for i in range(count)]
    failures = [e for g in groups for e in g.failures]
    return chosen + failures[:1]
