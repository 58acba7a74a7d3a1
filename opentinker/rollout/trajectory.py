"""The token record of an episode. Loss masks are derived from who produced a token, never written by hand."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from opentinker.client.messages import (
    Chunk,
    Datum,
    FloatArray,
    ImageChunk,
    IntArray,
    Sample,
    TokenChunk,
    as_chunks,
    chunk_tokens,
)


class RunKind(StrEnum):
    """Who produced the tokens of a run."""

    PROMPT = "prompt"
    ACTION = "action"
    OBSERVATION = "observation"


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of one kind. `sample` is there for ACTION runs and only for them."""

    kind: RunKind
    chunks: tuple[Chunk, ...]
    sample: Sample | None = None

    def __post_init__(self) -> None:
        if (self.kind is RunKind.ACTION) != (self.sample is not None):
            raise ValueError("exactly the ACTION runs carry a sample")
        if self.sample is not None:
            if not np.array_equal(self.sample.tokens, self.tokens) or len(self.sample.logprobs) != len(self.tokens):
                raise ValueError("an ACTION run holds exactly the sampled tokens, with one logprob each")
            if sum(n for _, n in self.sample.versions) != len(self.tokens):
                raise ValueError("every sampled token has a policy version")

    @property
    def tokens(self) -> IntArray:
        return chunk_tokens(self.chunks)

    def __len__(self) -> int:
        return sum(len(c.tokens) for c in self.chunks)


@dataclass
class Trajectory:
    """Runs in the order in which the policy saw or produced them."""

    runs: list[Run] = field(default_factory=list)

    def append_rendered(self, kind: RunKind, rendered: Sequence[int] | Sequence[Chunk]) -> None:
        """Add what was rendered (PROMPT or OBSERVATION)."""
        self.runs.append(Run(kind, as_chunks(rendered)))

    def append_sample(self, sample: Sample) -> None:
        """Add an action exactly as it was sampled."""
        self.runs.append(Run(RunKind.ACTION, (TokenChunk(sample.tokens),), sample))

    @property
    def tokens(self) -> IntArray:
        """All tokens, int32[T]."""
        return np.concatenate([r.tokens for r in self.runs]) if self.runs else np.zeros(0, np.int32)

    def __len__(self) -> int:
        return sum(len(r) for r in self.runs)

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """All tokens and images in order, neighbouring tokens in one chunk."""
        joined: list[Chunk] = []
        tokens: list[IntArray] = []
        for chunk in (chunk for run in self.runs for chunk in run.chunks):
            if isinstance(chunk, TokenChunk):
                tokens.append(chunk.tokens)
                continue
            if tokens:
                joined.append(TokenChunk(np.concatenate(tokens)))
                tokens = []
            joined.append(chunk)
        return (*joined, TokenChunk(np.concatenate(tokens))) if tokens else tuple(joined)

    @property
    def loss_mask(self) -> FloatArray:
        """1 for sampled tokens, 0 for rendered ones; float32[T]."""
        parts = [np.full(len(r), float(r.kind is RunKind.ACTION), np.float32) for r in self.runs]
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    @property
    def behaviour_logprobs(self) -> FloatArray:
        """Logprobs of sampled tokens under the distribution that sampled them, 0 elsewhere; float32[T]."""
        parts = [np.zeros(len(r), np.float32) if r.sample is None else r.sample.logprobs for r in self.runs]
        return np.concatenate(parts).astype(np.float32) if parts else np.zeros(0, np.float32)

    @property
    def versions(self) -> list[tuple[int, int]]:
        """(policy version, tokens) of all actions in order."""
        return [v for r in self.runs if r.sample is not None for v in r.sample.versions]

    @property
    def action_tokens(self) -> int:
        return sum(len(r) for r in self.runs if r.kind is RunKind.ACTION)

    @property
    def actions(self) -> int:
        return sum(r.kind is RunKind.ACTION for r in self.runs)

    def to_datum(self) -> Datum:
        """The trajectory as pre-shifted training data; advantages are still to come."""
        chunks = self.chunks
        while isinstance(chunks[-1], ImageChunk):
            chunks = chunks[:-1]  # nobody acted on it, and an image is never cut
        tokens = chunk_tokens(chunks)
        weights = self.loss_mask[1 : len(tokens)]
        last = TokenChunk(chunks[-1].tokens[:-1])
        return Datum(
            chunks=(*chunks[:-1], last) if len(last.tokens) or len(chunks) == 1 else chunks[:-1],
            targets=tokens[1:],
            arrays={
                "weights": weights,
                "behaviour_logprobs": self.behaviour_logprobs[1 : len(tokens)],
            },
        )
