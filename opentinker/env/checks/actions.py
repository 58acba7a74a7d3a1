"""What the checks say to an environment: sensible answers, tool calls, and everything that a policy should not say but will."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from random import Random
from typing import Any

from opentinker.env.environment import Action, Environment, Tool

LONG = 1_000_000
"""Characters of the longest text."""
PLAIN = (
    *("0", "1", "7", "10", "42", "-3", "3.14", "1/2", "1,000", "x = 5", "A", "B", "yes", "no", "I do not know."),
    *("\\boxed{7}", "The answer is \\boxed{\\frac{1}{2}}.", "<answer>7</answer>", "#### 7", "(3, 4)", "up", "left"),
    *("```python\nprint(7)\n```", "Let me think.\n\nThe answer is 7."),
)
HOSTILE = (
    *(
        "",
        " ",
        "\n",
        "\x00",
        "\ufffd",
        "é" * 50,
        "🙂",
        "ｱ",
        "'; DROP TABLE tasks; --",
        "{",
        "[]",
        "null",
        "NaN",
        "inf",
        "1e999",
    ),
    *(
        "9" * 5_000,
        "-" * 200,
        "\\boxed{",
        "\\boxed{\\boxed{\\boxed{}}}",
        "<answer>",
        "</answer>7<answer>",
        "1/0",
        "```",
        "```python\n",
    ),
    "<tool_call>",
    '<tool_call>\n{"name": \n</tool_call>',
    '<tool_call>\n{"name": "no_such_tool", "arguments": {}}\n</tool_call>',
    '<tool_call>\n{"name": 7, "arguments": "none"}\n</tool_call>',
    '<tool_call>\n["name"]\n</tool_call>',
    "<tool_call>\n<function=no_such_tool>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
)
_VALUES: dict[str, tuple[Any, ...]] = {
    "string": ("7", "1 + 1", "", "print(7)"),
    "integer": (1, 0, -1, 10**12),
    "number": (0.5, 1, -2.0),
    "boolean": (True, False),
    "null": (None,),
    "array": ([],),
    "object": ({},),
}


class ActionScripts:
    """Actions for episodes of one environment. The same task, seed and tools always give the same ones.

    An environment class may have a class method `sample_actions(task)`: what a good policy would say, turn by turn.
    """

    def __init__(self, environment: type[Environment]) -> None:
        self._suggest = getattr(environment, "sample_actions", None)
        self.suggests = self._suggest is not None

    def suggested(self, task: Any) -> list[str]:
        """What the environment's author suggests for a task.

        Raises:
            Exception: whatever `sample_actions` raises; TypeError if it gives something else than texts.
        """
        if self._suggest is None:
            return []
        texts = list(islice(self._suggest(task), 10_000))
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("sample_actions must give texts")
        return texts

    def good(self, suggested: Sequence[str], seed: int, tools: Sequence[Tool]) -> Iterator[Action]:
        """The suggested ones in order, then plausible ones."""
        yield from map(Action, suggested)
        yield from self.plausible(seed, tools)

    def plausible(self, seed: int, tools: Sequence[Tool]) -> Iterator[Action]:
        """Short answers and well-formed tool calls."""
        random = Random(seed)
        while True:
            yield Action(tool_call(random.choice(tools), random) if tools and random.random() < 0.6 else random.choice(PLAIN))

    def hostile(self, seed: int, tools: Sequence[Tool]) -> Iterator[Action]:
        """All kinds of nonsense, each once, then again; calls of real tools with broken arguments among them."""
        random = Random(seed)
        names = [tool["function"]["name"] for tool in tools]
        broken = [
            f"<tool_call>\n{json.dumps({'name': name, 'arguments': value})}\n</tool_call>" for name in names for value in BROKEN
        ]
        texts = [*HOSTILE, *broken, "x" * LONG, "7 " * (LONG // 2)]
        while True:
            random.shuffle(texts)
            for text in texts:
                yield Action(text, truncated=random.random() < 0.2)


BROKEN: tuple[Any, ...] = ({}, {"no_such_argument": 1}, None, [1, 2], "text", {"": {"": [None]}})
"""Arguments that hardly any tool takes."""


def tool_call(tool: Tool, random: Random) -> str:
    """A call of a tool as its schema asks for it, in the form that Hermes and Qwen models write."""
    schema = tool["function"].get("parameters") or {}
    properties = schema.get("properties") or {}
    required = set(schema.get("required") or properties)
    arguments = {name: _value(sub, random) for name, sub in properties.items() if name in required or random.random() < 0.5}
    return f"<tool_call>\n{json.dumps({'name': tool['function']['name'], 'arguments': arguments})}\n</tool_call>"


def _value(schema: Any, random: Random) -> Any:
    if not isinstance(schema, Mapping):
        return None
    if enum := schema.get("enum"):
        return random.choice(list(enum))
    kind = schema.get("type", "string")
    if isinstance(kind, list):
        kind = kind[0] if kind else "string"
    if kind == "array" and isinstance(schema.get("items"), Mapping):
        return [_value(schema["items"], random) for _ in range(max(int(schema.get("minItems", 1)), 1))]
    if kind == "object" and isinstance(schema.get("properties"), Mapping):
        return {name: _value(sub, random) for name, sub in schema["properties"].items()}
    if kind in ("integer", "number") and ("minimum" in schema or "maximum" in schema):
        low = schema.get("minimum", 0)
        return random.randint(int(low), max(int(low), int(schema.get("maximum", int(low) + 10))))
    return random.choice(_VALUES.get(kind, ("",)))
