"""Sample episodes for people to read: rows of transcripts.jsonl."""

from collections.abc import Sequence
from typing import Any, Literal

from opentinker.env.environment import Message
from opentinker.images import Image
from opentinker.rollout.types import Episode, Group

Phase = Literal["train", "evaluation"]


def transcript_row(episode: Episode, *, step: int, phase: Phase) -> dict[str, Any]:
    """One episode as JSON values."""
    return {
        "phase": phase,
        "step": step,
        "task": episode.task,
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


def images_of(episode: Episode) -> list[Image]:
    """The images of its transcript, each once."""
    contents = [m["content"] for m in episode.messages if not isinstance(m["content"], str)]
    found = {p["image"].sha256: p["image"] for content in contents for p in content if p["type"] == "image"}
    return list(found.values())


def image_file(image: Image) -> str:
    """Where a run's folder has it."""
    return f"images/{image.sha256[:32]}.{image.media_type.removeprefix('image/')}"


def pick_transcripts(groups: Sequence[Group], count: int) -> list[Episode]:
    """The first episode of up to `count` groups spread evenly over the batch, and the first failure if there is one."""
    candidates = [g.episodes[0] for g in groups if g.episodes]
    count = min(count, len(candidates))
    chosen = [candidates[i * len(candidates) // count] for i in range(count)]
    failures = [e for g in groups for e in g.failures]
    return chosen + failures[:1]
