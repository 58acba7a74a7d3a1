"""Rows of a chat dataset as data to train on."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opentinker.client.messages import Datum
from opentinker.config.sft import ChatDataConfig
from opentinker.config.tasks import TasksConfig
from opentinker.env.datasets import load_tasks
from opentinker.env.environment import Message, Tool
from opentinker.env.tasks import ListTasks
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
        ConfigError: the rows cannot be read, or have neither `messages` nor `prompt` and `completion`.
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
        self.rows = read_rows(source, base_dir) if rows is None else _shaped(ListTasks(rows), source.name)
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
                text = json.dumps(row, default=str, ensure_ascii=False)[:200]
                raise ConfigError(f"a row of {self._source.name} cannot be trained on: {error}; it is {text}") from error
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
    """The rows of a chat dataset.

    Raises:
        ConfigError: they cannot be read, or have neither shape.
    """
    rows = load_tasks(
        source.name,
        split=source.split,
        subset=source.subset,
        columns=source.columns,
        limit=source.limit,
        shuffle=source.shuffle,
        base_dir=base_dir,
    )
    return _shaped(rows, source.name)


def _shaped(rows: ListTasks, name: str) -> ListTasks:
    first = rows.first(1)
    if not first:
        raise ConfigError(f"{name} are empty", hint="there must be at least one conversation")
    there = set(first[0])
    if not any(there >= set(shape) for shape in SHAPES):
        raise ConfigError(
            f"the rows of {name} have {', '.join(sorted(there))}: neither 'messages' nor 'prompt' and 'completion'",
            hint="`columns` takes a key from another column, such as columns={messages: conversations}",
        )
    return rows


def conversation(row: Mapping[str, Any]) -> tuple[list[Message], int, list[Tool]]:
    """(messages, how many of them are the prompt, tools) of a row.

    Raises:
        ValueError: something is not what it should be.
    """
    tools = row.get("tools") or []
    tools = json.loads(tools) if isinstance(tools, str) else list(tools)
    if row.get("messages") is not None:
        return _messages(row["messages"], "messages", "user"), 0, tools
    prompt = _messages(row["prompt"], "prompt", "user")
    return [*prompt, *_messages(row["completion"], "completion", "assistant")], len(prompt), tools


def _messages(value: Any, what: str, role: str) -> list[Message]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, Sequence) or not value:
        raise ValueError(f"{what} is empty or neither a text nor a list of messages")
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"{what} holds {message!r}, which is no message: it needs 'role' and 'content'")
        if not isinstance(message.get("content"), str):
            raise ValueError(f"{what} holds a message whose content is not a text: {message!r}"[:200])
    return [_clean(message) for message in value]


def _clean(message: Mapping[str, Any]) -> Message:
    clean: Message = {"role": message["role"], "content": message["content"]}
    if message.get("reasoning_content"):
        clean["reasoning_content"] = message["reasoning_content"]
    return clean
