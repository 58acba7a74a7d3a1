"""OpenAI's form of messages, tools and tool calls, as other libraries use it, and ours."""

from collections.abc import Mapping
from typing import Any

from opentinker.env.environment import Message
from opentinker.env.parsing import tool_calls
from opentinker.env.written import with_calls
from opentinker.errors import EnvironmentFailedError
from opentinker.images import Image


def calls_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The tool calls in a policy's text, as names and arguments; malformed ones are left out."""
    return [(call.name, call.arguments) for call in tool_calls(text).calls]


def dumped(value: Any) -> dict[str, Any]:
    """A message or tool as a dict, whether it is one or a pydantic model."""
    plain = value.model_dump(exclude_none=True) if hasattr(value, "model_dump") else dict(value)
    return without_none(plain)  # type: ignore[no-any-return]


def without_none(value: Any) -> Any:
    """Without the keys that hold None: datasets give every row the keys of all rows."""
    if isinstance(value, Mapping):
        return {key: without_none(part) for key, part in value.items() if part is not None}
    return [without_none(part) for part in value] if isinstance(value, list) else value


def message_of(message: Mapping[str, Any]) -> Message:
    """A message for the policy; tool calls of earlier turns are written out.

    Raises:
        EnvironmentFailedError: it has a part that is neither text nor image, or a malformed tool call.
    """
    content: Any = message.get("content") or ""
    if not isinstance(content, str):
        content = [_part(part) for part in content]
    calls = message.get("tool_calls")
    if calls and isinstance(content, str):
        try:
            content = with_calls(content, calls)
        except ValueError as error:
            raise EnvironmentFailedError(str(error)) from error
    result: Message = {"role": str(message.get("role")), "content": content}
    if message.get("reasoning_content"):
        result["reasoning_content"] = str(message["reasoning_content"])
    return result


def _part(part: Any) -> Any:
    kind = part.get("type")
    if kind == "text":
        return {"type": "text", "text": part["text"]}
    if kind == "image_url":
        return {"type": "image", "image": Image.of(part["image_url"]["url"])}
    raise EnvironmentFailedError(f"a message has a part of type '{kind}'", hint="texts and images can be shown to the policy")


def function_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's schema of a tool, which may be wrapped in one already."""
    if "function" in tool:
        return dict(tool)
    function = {"name": tool["name"], "description": tool.get("description", ""), "parameters": tool.get("parameters", {})}
    return {"type": "function", "function": function}
