"""Rows of a preference dataset as pairs of data to train on."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from opentinker.client.messages import Datum, TokenChunk
from opentinker.config.preference import PreferenceDataConfig
from opentinker.config.tasks import TasksConfig
from opentinker.env.datasets import SUFFIXES
from opentinker.env.environment import Message, Tool
from opentinker.env.tasks import ListTasks
from opentinker.errors import ConfigError, RenderingError
from opentinker.rendering.supervised import Supervised, SupervisedRenderer
from opentinker.training.conversations import load_rows, messages_of, shaped, unfit

SHAPES = (("chosen", "rejected"),)
_TRANSCRIPT = re.compile(r"(?:^|\n\n)(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


@dataclass(frozen=True)
class Comparison:
    """Two answers to one prompt, the first of which was preferred."""

    prompt: list[Message]
    chosen: Message
    rejected: Message
    tools: list[Tool] = field(default_factory=list)
    margin: float = 0.0


@dataclass
class RenderedPairs:
    """Data of a batch of rows, chosen and rejected in turns, and what was left out."""

    data: list[Datum] = field(default_factory=list)
    tokens: int = 0
    learnt: int = 0
    dropped: int = 0
    """Pairs that are longer than the context."""
    unusable: int = 0
    """Rows that are no comparison."""

    @property
    def pairs(self) -> int:
        return len(self.data) // 2


class Preferences:
    """The rows of a file or dataset, rendered when they are needed.

    Raises:
        ConfigError: see `read_comparisons`.
    """

    def __init__(
        self,
        source: TasksConfig,
        config: PreferenceDataConfig,
        renderer: SupervisedRenderer,
        max_tokens: int,
        base_dir: Path | None = None,
        rows: Sequence[Mapping[str, Any]] | None = None,
        *,
        scored: bool = False,
    ) -> None:
        """`rows` are given in Python instead of a file or dataset. `scored` data are for a scalar head, which scores an answer
        at its last token."""
        check_all = config.unusable == "error"
        given = load_rows(source, base_dir) if rows is None else ListTasks(rows)
        self.rows = _shaped(given, source.name, every=check_all and (rows is not None or is_file(source)), any_=check_all)
        self._source, self._config, self._renderer = source, config, renderer
        self._max_tokens, self._scored = max_tokens, scored

    def render(self, rows: Sequence[Mapping[str, Any]]) -> RenderedPairs:
        """The data of these rows.

        Raises:
            ConfigError: a row is no comparison, or is too long, where that is an error.
        """
        result = RenderedPairs()
        for row in rows:
            try:
                comparison = comparison_of(row)
                chosen, rejected = (self._rendered(comparison, said) for said in (comparison.chosen, comparison.rejected))
                if np.array_equal(chosen.tokens, rejected.tokens):
                    raise ValueError("chosen and rejected are the same once the chat template has rendered them")
            except (RenderingError, ValueError) as error:
                if self._config.unusable == "error":
                    raise unfit("a row", self._source.name, row, error) from error
                result.unusable += 1
                continue
            longest = max(len(chosen.tokens), len(rejected.tokens))
            if longest > self._max_tokens:
                if self._config.overlong == "error":
                    raise ConfigError(
                        f"a row of {self._source.name} has {longest} tokens, engine.max_model_len is {self._max_tokens}",
                        hint="raise engine.max_model_len, or set data.overlong to 'drop'",
                    )
                result.dropped += 1
                continue
            for sequence in (chosen, rejected):
                result.data.append(_scored(sequence, comparison.margin) if self._scored else sequence.to_datum())
                result.tokens += len(sequence.tokens)
                result.learnt += sequence.learnt
        return result

    def _rendered(self, comparison: Comparison, said: Message) -> Supervised:
        """One sequence: all but the last turn is the prompt."""
        messages = [*comparison.prompt, said]
        [sequence] = self._renderer.render(messages, loss_on="last", tools=comparison.tools, prompt=len(comparison.prompt))
        return sequence


def is_file(source: TasksConfig) -> bool:
    """Whether all its rows are looked at before anything starts."""
    return Path(source.name).suffix in SUFFIXES


def read_comparisons(source: TasksConfig, base_dir: Path | None = None, *, unusable: str = "error") -> ListTasks:
    """The rows of a preference dataset. Those of a file are all looked at; of a dataset, which may be large, the first one;
    with `unusable` 'drop' only their columns.

    Raises:
        ConfigError: they cannot be read, have no `chosen` and `rejected`, or one is no comparison.
    """
    check_all = unusable == "error"
    return _shaped(load_rows(source, base_dir), source.name, every=check_all and is_file(source), any_=check_all)


def _shaped(rows: ListTasks, name: str, *, every: bool, any_: bool) -> ListTasks:
    return shaped(rows, name, every=every, shapes=SHAPES, check=comparison_of if any_ else None)


def comparison_of(row: Mapping[str, Any]) -> Comparison:
    """The comparison that a row holds.

    Raises:
        ValueError: something is not what it should be, the answers are equal, or they answer different prompts.
    """
    tools = row.get("tools") or []
    tools = json.loads(tools) if isinstance(tools, str) else list(tools)
    asked = [] if row.get("prompt") is None else messages_of(row["prompt"], "prompt", "user")
    chosen, rejected = (_conversation(row.get(name), name, asked) for name in ("chosen", "rejected"))
    if chosen[:-1] != rejected[:-1]:
        raise ValueError("chosen and rejected differ before their last turn: their prompts differ")
    if not chosen[:-1]:
        raise ValueError("there is no prompt before the answers")
    if chosen[-1] == rejected[-1]:
        raise ValueError("chosen and rejected are the same")
    margin = row.get("margin")
    if margin is None:
        margin = 0.0
    if not isinstance(margin, int | float) or isinstance(margin, bool) or not math.isfinite(margin):
        raise ValueError(f"margin is {margin!r}, which is no finite number")
    return Comparison(chosen[:-1], chosen[-1], rejected[-1], tools, float(margin))


def _conversation(value: Any, name: str, asked: list[Message]) -> list[Message]:
    """The whole conversation that ends with an answer."""
    if isinstance(value, str) and not asked:
        said = _transcript(value, name)
    else:
        said = messages_of(value, name, "assistant")
        if said[: len(asked)] != asked:
            if said[0]["role"] != "assistant":
                raise ValueError(f"{name} begins otherwise than the prompt")
            said = [*asked, *said]
    if said[-1]["role"] != "assistant":
        raise ValueError(f"{name} does not end with an assistant's turn: its last message needs role 'assistant'")
    return said


def _transcript(text: str, name: str) -> list[Message]:
    """Of a text as in Anthropic's hh-rlhf: turns that begin with 'Human:' and 'Assistant:' after an empty line."""
    before, *turns = _TRANSCRIPT.split(text)
    if before.strip() or not turns:
        raise ValueError(
            f"{name} is a text without a prompt beside it, and not of the form '\\n\\nHuman: ...\\n\\nAssistant: ...'"
        )
    return [{"role": _ROLES[who], "content": said.strip()} for who, said in zip(turns[::2], turns[1::2], strict=True)]


def _scored(sequence: Supervised, margin: float) -> Datum:
    """For a scalar head: the answer's tokens, of which the last one's own place is a weighted target too. That target is no
    token; a score is read off before it. Weights on the whole answer let both answers share their prompt in a pack."""
    end = int(np.flatnonzero(sequence.mask)[-1]) + 1
    tokens, mask = sequence.tokens[:end], sequence.mask[:end]
    margins = np.zeros(end, np.float32)
    margins[-1] = margin
    arrays = {"weights": np.append(mask[1:], np.float32(1.0)), "margins": margins}
    return Datum((TokenChunk(tokens),), np.append(tokens[1:], tokens[-1:]), arrays)
