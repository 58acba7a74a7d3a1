"""The token record of an episode. Loss masks are derived from who produced a token, never written by hand."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from opentinker.client.messages import Datum, FloatArray, IntArray, Sample, TokenChunk, chunk_tokens


class RunKind(StrEnum):
    """Who produced the tokens of a run."""

    PROMPT = "prompt"
    ACTION = "action"
    OBSERVATION = "observation"


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of one kind. `sample` is there for ACTION runs and only for them."""

    kind: RunKind
    chunks: tuple[TokenChunk, ...]
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

    def append_rendered(self, kind: RunKind, tokens: Sequence[int]) -> None:
        """Add rendered tokens (PROMPT or OBSERVATION)."""
        self.runs.append(Run(kind, (TokenChunk(np.asarray(tokens, np.int32)),)))

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
        tokens, mask = self.tokens, self.loss_mask
        weights = mask[1:]
        return Datum(
            chunks=(TokenChunk(tokens[:-1]),),
            targets=tokens[1:],
            arrays={
                "weights": weights,
                "behaviour_logprobs": self.behaviour_logprobs[1:],
            },
        )
