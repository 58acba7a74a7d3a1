"""Tools for models whose chat template does not know any: described in the system message, in the Hermes format."""

import json
from collections.abc import Sequence

from opentinker.env.environment import Message, TextPart, Tool

_TEXT = """You may call functions. These are their signatures, one JSON schema a line, within <tools></tools>:
<tools>
{tools}
</tools>
To call a function, write a JSON object with its name and arguments within <tool_call></tool_call>:
<tool_call>
{{"name": "<function>", "arguments": {{"<argument>": "<value>"}}}}
</tool_call>"""


def with_described_tools(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """The conversation with the tools in its system message, which is added if there is none."""
    text = _TEXT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if not messages or messages[0]["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    system, *rest = messages
    content = system["content"]
    if isinstance(content, str):
        return [{**system, "content": f"{content}\n\n{text}"}, *rest]
    return [{**system, "content": [*content, TextPart(type="text", text=f"\n\n{text}")]}, *rest]
