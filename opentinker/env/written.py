"""Tool calls that OpenAI's messages hold apart, written out as a policy would have said them: the form that `parsing` reads."""

import json
from collections.abc import Mapping, Sequence
from typing import Any


def with_calls(content: str, calls: Sequence[Any]) -> str:
    """A message's text with its `tool_calls` behind it, in the Hermes form. A text that has calls in it stays as it is.

    Raises:
        ValueError: a call has no name, or its arguments are no JSON object.
    """
    if "<tool_call>" in content:
        return content
    return "\n".join([*([content] if content else []), *(_written(call) for call in calls)])


def _written(call: Any) -> str:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"a tool call has no name: {call!r}"[:200])
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = None
    else:
        # Datasets give every call the keys of all calls.
        arguments = {k: v for k, v in arguments.items() if v is not None} if isinstance(arguments, Mapping) else None
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of a call of {function['name']} are no JSON object: {function['arguments']!r}"[:200])
    said = {"name": function["name"], "arguments": arguments}
    return f"<tool_call>\n{json.dumps(said, ensure_ascii=False)}\n</tool_call>"
