"""Rows of a chat dataset as data to train on."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opentinker.client.messages import Datum
from opentinker.config.sft import ChatDataConfig
from opentinker.config.tasks import TasksConfig
from opentinker.env.datasets import SUFFIXES, load_tasks
from opentinker.env.environment import Message, Tool
from opentinker.env.tasks import ListTasks
from opentinker.env.written import with_calls
from opentinker.errors import ConfigError, RenderingError
from opentinker.rendering.supervised import SupervisedRenderer

SHAPES = (("messages",), ("prompt", "completion"))


@dataclass
class Rendered:
    """Data of a batch of rows, and what was left out of it."""

    data: list[Datum] = field(default_factory=list)
    tokens: int = 0
    learnt: int = 0
    dropped: int = 0
    """Rows that are longer than the context."""


class Conversations:
    """The rows of a file or dataset, rendered when they are needed.

    Raises:
        ConfigError: see `read_rows`.
    """

    def __init__(
        self,
        source: TasksConfig,
        config: ChatDataConfig,
        renderer: SupervisedRenderer,
        max_tokens: int,
        base_dir: Path | None = None,
        rows: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """`rows` are given in Python instead of a file or dataset."""
        if rows is None:
            self.rows = read_rows(source, base_dir)
        else:
            self.rows = shaped(ListTasks(rows), source.name, every=True, check=conversation)
        self._source, self._config, self._renderer, self._max_tokens = source, config, renderer, max_tokens

    def render(self, rows: Sequence[Mapping[str, Any]]) -> Rendered:
        """The data of these rows.

        Raises:
            ConfigError: a row is malformed, has nothing to learn, or is too long where that is an error.
        """
        result = Rendered()
        for row in rows:
            try:
                messages, prompt, tools = conversation(row)
                sequences = self._renderer.render(messages, loss_on=self._config.loss_on, tools=tools, prompt=prompt)
            except (RenderingError, ValueError) as error:
                raise unfit("a row", self._source.name, row, error) from error
            longest = max(len(s.tokens) for s in sequences)
            if longest > self._max_tokens:
                if self._config.overlong == "error":
                    raise ConfigError(
                        f"a row of {self._source.name} has {longest} tokens, engine.max_model_len is {self._max_tokens}",
                        hint="raise engine.max_model_len, or set data.overlong to 'drop'",
                    )
                result.dropped += 1
                continue
            result.data += [s.to_datum() for s in sequences]
            result.tokens += sum(len(s.tokens) for s in sequences)
            result.learnt += sum(s.learnt for s in sequences)
        return result


def read_rows(source: TasksConfig, base_dir: Path | None = None) -> ListTasks:
    """The rows of a chat dataset. Those of a file are all looked at; of a dataset, which may be large, the first one.

    Raises:
        ConfigError: they cannot be read, have neither `messages` nor `prompt` and `completion`, or one is no conversation.
    """
    return shaped(load_rows(source, base_dir), source.name, every=Path(source.name).suffix in SUFFIXES, check=conversation)


def load_rows(source: TasksConfig, base_dir: Path | None = None) -> ListTasks:
    """The rows that a config names, as they are. Raises: ConfigError when they cannot be read."""
    return load_tasks(
        source.name,
        split=source.split,
        subset=source.subset,
        columns=source.columns,
        limit=source.limit,
        shuffle=source.shuffle,
        base_dir=base_dir,
    )


def shaped(
    rows: ListTasks,
    name: str,
    *,
    every: bool,
    shapes: Sequence[Sequence[str]] = SHAPES,
    check: Callable[[Mapping[str, Any]], Any] | None = None,
) -> ListTasks:
    """The rows, after a look at the columns of the first one, and by `check` (which raises ValueError) at all of them or at the
    first one.

    Raises:
        ConfigError: there are none, they have none of the shapes, or one is not what it should be.
    """
    first = rows.first(1)
    if not first:
        raise ConfigError(f"{name} are empty", hint="there must be at least one conversation")
    there = set(first[0])
    if not any(there >= set(shape) for shape in shapes):
        wanted = [" and ".join(f"'{key}'" for key in shape) for shape in shapes]
        lacking = f"{'neither' if len(wanted) > 1 else 'not'} {' nor '.join(wanted)}"
        raise ConfigError(
            f"the rows of {name} have {', '.join(sorted(there))}: {lacking}",
            hint=f"`columns` takes a key from another column, such as columns={{{shapes[0][0]}: conversations}}",
        )
    if check is not None:
        for number, row in enumerate(rows.first(rows.size or 1) if every else first, 1):
            try:
                check(row)
            except ValueError as error:
                raise unfit(f"row {number}", name, row, error) from error
    return rows


def unfit(which: str, name: str, row: Any, error: Exception) -> ConfigError:
    """The error of a row that is not what it should be, which it shows."""
    text = json.dumps(row, default=str, ensure_ascii=False)[:200]
    return ConfigError(f"{which} of {name} cannot be trained on: {error}; it is {text}")


def conversation(row: Mapping[str, Any]) -> tuple[list[Message], int, list[Tool]]:
    """(messages, how many of them are the prompt, tools) of a row. Tool calls are written out into the text of their message.

    Raises:
        ValueError: something is not what it should be, or no assistant says anything.
    """
    tools = row.get("tools") or []
    tools = json.loads(tools) if isinstance(tools, str) else list(tools)
    if row.get("messages") is not None:
        messages, prompt = messages_of(row["messages"], "messages", "user"), 0
    else:
        asked = messages_of(row.get("prompt"), "prompt", "user")
        messages, prompt = [*asked, *messages_of(row.get("completion"), "completion", "assistant")], len(asked)
    if not any(message["role"] == "assistant" for message in messages[prompt:]):
        raise ValueError("the conversation has no assistant turn to learn: its messages need role 'assistant'")
    return messages, prompt, tools


def messages_of(value: Any, what: str, role: str) -> list[Message]:
    """A list of messages, or a text as one of this role. Raises: ValueError."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, Sequence) or not value:
        raise ValueError(f"{what} is empty or neither a text nor a list of messages")
    return [_message(message, what) for message in value]


def _message(message: Any, what: str) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"{what} holds {message!r}, which is no message: it needs 'role' and 'content'")
    content, calls = message.get("content"), message.get("tool_calls")
    if content is None and calls:
        content = ""  # as OpenAI writes a turn that does nothing but call
    if not isinstance(content, str):
        raise ValueError(f"{what} holds a message whose content is not a text: {message!r}"[:200])
    result: Message = {"role": message["role"], "content": with_calls(content, calls) if calls else content}
    if message.get("reasoning_content"):
        result["reasoning_content"] = message["reasoning_content"]
    return result
