"""Geometry problems with tools, over several turns: a calculator, and a closer look at a part of the picture."""

import re
from collections.abc import Callable, Mapping, Sequence
from json import dumps
from typing import Any, Literal, get_args

from opentinker.env.environment import Action, Message, Part, StepResult, Tool
from opentinker.env.parsing import ToolCall, tool_calls
from opentinker.environments.geo3k import Geo3k, metrics, rewards
from opentinker.environments.geo3k.drawing import pillow
from opentinker.environments.geo3k.judging import Verdict, judge
from opentinker.environments.geo3k_tools.calculator import CalculatorError, calculate
from opentinker.environments.geo3k_tools.pictures import CropError, Pictures
from opentinker.errors import ConfigError

CALCULATOR: Tool = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": (
            "The value of an arithmetic expression. It knows + - * / ^, sqrt, sin, cos, tan (of radians), radians, degrees, pi."
        ),
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "Such as sqrt(5^2 + 12^2)."}},
            "required": ["expression"],
        },
    },
}
CROP: Tool = {
    "type": "function",
    "function": {
        "name": "crop",
        "description": "Cuts a rectangle out of an image and shows it enlarged, as a new image.",
        "parameters": {
            "type": "object",
            "properties": {
                "left": {"type": "number", "description": "Pixels from the image's left edge."},
                "top": {"type": "number", "description": "Pixels from the image's upper edge."},
                "right": {"type": "number", "description": "More than left."},
                "bottom": {"type": "number", "description": "More than top."},
                "image": {"type": "integer", "description": "Which image: 0, the default, is the problem's first one."},
            },
            "required": ["left", "top", "right", "bottom"],
        },
    },
}
TOOLS = {"calculator": CALCULATOR, "crop": CROP}
ImageRole = Literal["tool", "user"]
_LONGEST_ERROR = 500
_MARK = re.compile(r"<(?=[|\w/])(?!/?(?:tool_call|function|parameter)\b)")
_NO_ANSWER = Verdict(False, False)


class Geo3kTools(Geo3k):
    """A problem that may be answered after up to `max_calls` tool calls, whose results come as tool messages.

    A message without a call is the answer, and earns what it earns in `geo3k`. Every failed call costs `error_penalty`. Calls
    beyond the limit are refused once; calling again ends the episode.
    `tools` names the tools there are. `image_role`: 'user' puts a part of a picture into a user message behind the tool's, for
    chat templates whose tool messages hold no images.
    """

    def __init__(
        self,
        dataset: str | None = None,
        held_out_dataset: str | None = None,
        train_split: str = "train",
        held_out_split: str = "test",
        families: Sequence[str] = (),
        image_size: int = 336,
        format_reward: float = 0.1,
        tools: Sequence[str] = tuple(TOOLS),
        max_calls: int = 4,
        error_penalty: float = 0.0,
        image_role: ImageRole = "tool",
    ) -> None:
        super().__init__(dataset, held_out_dataset, train_split, held_out_split, families, image_size, format_reward)
        for name in tools:
            if name not in TOOLS:
                raise ConfigError(f"geo3k_tools has no tool '{name}'", hint=f"tools are {', '.join(TOOLS)}")
        if max_calls < 1 or not tools:
            raise ConfigError("there is no tool to call", hint="max_calls is 1 or more and tools are not empty; else use geo3k")
        if image_role not in get_args(ImageRole):
            raise ConfigError(f"there is no image_role '{image_role}'", hint=f"it is {' or '.join(get_args(ImageRole))}")
        if "crop" in tools:
            pillow()
        self.tools = [TOOLS[name] for name in tools]
        self._max_calls, self._error_penalty, self._image_role = max_calls, error_penalty, image_role
        self._pictures = Pictures((), image_size)
        self._refused = False
        self._counts = {"calls": 0, "crops": 0, "call_errors": 0}

    @classmethod
    def sample_actions(cls, task: Mapping[str, Any]) -> list[str]:
        """What a good policy would say: it looks, calculates and answers."""
        calls = (
            {"name": "crop", "arguments": {"left": 20, "top": 20, "right": 120, "bottom": 120}},
            {"name": "calculator", "arguments": {"expression": "sqrt(5^2 + 12^2)"}},
        )
        return [*(f"<tool_call>{dumps(call)}</tool_call>" for call in calls), *super().sample_actions(task)]

    def reset(self, task: Any) -> Sequence[Message]:
        posed = self._pose(task)
        self._pictures = Pictures(posed.images, self._image_size)
        limit = f"You may call tools, at most {self._max_calls} times, before you answer."
        text: Part = {"type": "text", "text": f"{posed.instructions} {limit}"}
        return [{"role": "user", "content": [*posed.parts, text]}]

    def step(self, action: Action) -> StepResult:
        posed = self._open_problem()
        parsed = tool_calls(action.text, self.tools)
        if not parsed.calls and not parsed.errors:
            return self._answered(judge(action.text, posed.answer))
        if self._refused:
            return self._answered(_NO_ANSWER)
        errors = 0
        messages: list[Message] = []
        # A malformed call counts as well, or a policy could write them for ever.
        asked: list[ToolCall | str] = [*parsed.calls, *parsed.errors]
        for call in asked:
            if self._counts["calls"] == self._max_calls:
                self._refused = True
                break
            said, failed = self._called(call)
            messages += said
            errors += failed
        self._counts["call_errors"] += errors
        if self._refused:
            messages.append(_error_message(f"{self._max_calls} calls are allowed, and they are used up. Give your answer."))
        return StepResult(self._rewards(_NO_ANSWER, errors), observation=messages, metrics=self._metrics(_NO_ANSWER))

    def _answered(self, verdict: Verdict) -> StepResult:
        self._posed = None
        return StepResult(self._rewards(verdict, 0), done=True, metrics=self._metrics(verdict))

    def _rewards(self, verdict: Verdict, errors: int) -> dict[str, float]:
        return rewards(verdict, self._format_reward) | {"call_errors": 0.0 - self._error_penalty * errors}

    def _metrics(self, verdict: Verdict) -> dict[str, float]:
        return metrics(verdict) | {name: float(count) for name, count in self._counts.items()}

    def _called(self, call: ToolCall | str) -> tuple[list[Message], bool]:
        """What a call answers, and whether it failed; a text says why a call could not be read."""
        self._counts["calls"] += 1
        if isinstance(call, str):
            return [_error_message(call)], True
        run: dict[str, Callable[[Mapping[str, Any]], list[Message]]] = {"calculator": self._calculate, "crop": self._crop}
        try:
            return run[call.name](call.arguments), False
        except (CalculatorError, CropError) as error:
            return [_error_message(str(error))], True

    def _calculate(self, arguments: Mapping[str, Any]) -> list[Message]:
        return [_tool_message(calculate(arguments["expression"]))]

    def _crop(self, arguments: Mapping[str, Any]) -> list[Message]:
        image, text = self._pictures.crop(**arguments)
        self._counts["crops"] += 1
        shown: list[Part] = [{"type": "text", "text": f"{text}\n"}, {"type": "image", "image": image}]
        if self._image_role == "tool":
            return [{"role": "tool", "content": shown}]
        return [_tool_message("The part is shown below."), {"role": "user", "content": shown}]


def _tool_message(text: str) -> Message:
    return {"role": "tool", "content": text}


def _error_message(text: str) -> Message:
    """Errors repeat what the policy wrote. It must not open a turn or show an image, as a template's own marks do."""
    return _tool_message(f"Error: {_MARK.sub('(', text[:_LONGEST_ERROR])}")
