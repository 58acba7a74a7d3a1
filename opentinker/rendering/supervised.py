"""Conversations as training data: which tokens an assistant would have sampled, derived from the rendering."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from opentinker.client.messages import Datum, FloatArray, IntArray, TokenChunk
from opentinker.env.environment import Message, Tool
from opentinker.errors import RenderingError
from opentinker.rendering.renderer import ConversationRenderer

LossOn = Literal["assistant", "last", "all"]


@dataclass(frozen=True)
class Supervised:
    """One sequence: `tokens` int32[T], and `mask` float32[T], 1 for tokens to be learnt."""

    tokens: IntArray
    mask: FloatArray

    @property
    def learnt(self) -> int:
        """Tokens that are learnt; the first of a sequence is predicted by nothing."""
        return int(np.count_nonzero(self.mask[1:]))

    def to_datum(self) -> Datum:
        """Pre-shifted; the first token is never a target."""
        return Datum((TokenChunk(self.tokens[:-1]),), self.tokens[1:], {"weights": self.mask[1:]})


class SupervisedRenderer:
    """Renders conversations as a policy would see and say them: prompts are encoded as in a rollout, an assistant's turn
    apart."""

    def __init__(self, renderer: ConversationRenderer) -> None:
        self._renderer = renderer

    def render(
        self, messages: Sequence[Message], *, loss_on: LossOn = "assistant", tools: Sequence[Tool] = (), prompt: int = 0
    ) -> list[Supervised]:
        """One sequence, or one per assistant turn where the chat template changes earlier turns. The first `prompt` messages
        are not learnt.

        Raises:
            RenderingError: there is no assistant turn to learn, the template refuses the messages, or it cannot be told what of
                its text the assistant says.
        """
        turns = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= prompt]
        if not turns:
            raise RenderingError("the conversation has no assistant turn to learn", hint="its messages need role 'assistant'")
        learnt = turns[-1:] if loss_on == "last" else turns
        whole = self._text(messages[: turns[-1] + 1], tools, opened=False)
        spans = [self._span(messages, turn, tools) for turn in turns]
        if all(whole.startswith(before + said) for before, said in spans):
            all_after = loss_on == "all"
            return [self._sequence(whole, messages, dict(zip(turns, spans, strict=True)), learnt, all_after, bool(prompt))]
        # Everything of a conversation that is rendered several times is learnt where it comes first.
        return [
            self._sequence(
                before + said, messages, {turn: (before, said)}, [turn], loss_on == "all" and turn == turns[0], bool(prompt)
            )
            for turn, (before, said) in zip(turns, spans, strict=True)
            if turn in learnt
        ]

    def _span(self, messages: Sequence[Message], turn: int, tools: Sequence[Tool]) -> tuple[str, str]:
        """(what comes before an assistant's turn, its header included; what the template shows of the turn)."""
        before = self._text(messages[:turn], tools, opened=True)
        after = self._text(messages[: turn + 1], tools, opened=False)
        if not after.startswith(before):
            raise RenderingError(
                "the chat template cannot mark assistant tokens: it renders an assistant's turn otherwise than it opens one",
                hint="train on another template, or with `prompt` and `completion` of one turn",
            )
        return before, after[len(before) :]

    def _sequence(
        self,
        whole: str,
        messages: Sequence[Message],
        spans: dict[int, tuple[str, str]],
        learnt: Sequence[int],
        everything: bool,
        prompted: bool,
    ) -> Supervised:
        """With `everything` all tokens are learnt, but if the conversation has a prompt only those behind the first turn's
        header."""
        encode = self._renderer.tokenizer.encode
        tokens: list[int] = []
        mask: list[float] = []
        at = 0
        for turn, (before, said) in sorted(spans.items()):
            rendered = encode(whole[at : len(before)])
            action, rest = self._action(messages[turn], encode(said))
            tokens += [*rendered, *action, *rest]
            around = float(everything and not (prompted and at == 0))
            mask += [around] * len(rendered) + [float(turn in learnt)] * len(action) + [float(everything)] * len(rest)
            at = len(before) + len(said)
        return Supervised(np.asarray(tokens, np.int32), np.asarray(mask, np.float32))

    def _action(self, message: Message, said: list[int]) -> tuple[list[int], list[int]]:
        """The tokens that the assistant would sample, with the one that ends its turn, and what the template puts behind
        them."""
        ends = [i for i, token in enumerate(said) if token in self._renderer.stop_token_ids]
        if not ends:
            raise RenderingError(
                "the chat template cannot mark assistant tokens: it does not end an assistant's turn with a stop token",
                hint="the model's generation config names its stop tokens",
            )
        action, rest = said[: ends[-1] + 1], said[ends[-1] + 1 :]
        expected, shown = str(message["content"]).strip(), self._renderer.tokenizer.decode(action)
        if expected not in shown:
            raise RenderingError(
                f"the chat template changes what the assistant says: {expected[:80]!r} became {shown[:80]!r}",
                hint="tokens that nobody would sample are not trained on",
            )
        return action, rest

    def _text(self, messages: Sequence[Message], tools: Sequence[Tool], *, opened: bool) -> str:
        return self._renderer.text(messages, tools, opened=opened)
