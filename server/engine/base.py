"""The seam between a server and its rollout engine."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from opentinker.client.messages import Chunk, FloatArray, SampleRequest, SampleResult

NamedTensors = Iterable[tuple[str, torch.Tensor]]
"""(Hugging Face parameter name, full tensor) pairs, streamed."""


@dataclass(frozen=True)
class WeightAck:
    """What an engine says after a weight update: the digest of every tensor it received, and which of its own
    parameters it wrote."""

    digests: dict[str, str]
    written: frozenset[str]
    expected: frozenset[str]

    @property
    def missing(self) -> frozenset[str]:
        """Engine parameters that the update left untouched."""
        return self.expected - self.written


@dataclass(frozen=True)
class LoraTensors:
    """An adapter in PEFT's layout, for engines that serve adapters themselves."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    tensors: dict[str, torch.Tensor]
    """PEFT names (`base_model.model....lora_A.weight`)."""


class RolloutEngine(Protocol):
    """Continuous batching of sample requests against one version of one policy. The images of a request have their tokens in
    place, and the store that the engine was made with holds them as long as the request runs.

    Not thread-safe: a server calls it from its compute thread only.
    """

    @property
    def version(self) -> int:
        """The policy version that new tokens are sampled from."""
        ...

    @property
    def max_model_len(self) -> int: ...

    def add(self, request: SampleRequest) -> None:
        """Queue a request. `params.stop_token_ids` always includes the model's own end-of-sequence ids. It is sampled from
        the engine's version: whoever calls has looked at `request.version`.

        Raises:
            ContextOverflowError: prompt plus one token does not fit. `max_tokens` is clipped to what fits.
            InvalidRequestError: the engine refuses it. Whatever is raised, nothing of the request is left in the engine.
        """
        ...

    def step(self) -> list[SampleResult]:
        """Advance all running sequences; the results of requests that are now complete.

        Raises:
            EngineError: it failed, or it has lost a request.
        """
        ...

    def has_unfinished(self) -> bool: ...

    def abort_all(self) -> list[SampleRequest]:
        """Stop every unfinished request and return it, so that it can be added again."""
        ...

    def prompt_logprobs(self, prompts: Sequence[Sequence[Chunk]]) -> list[FloatArray]:
        """Logprobs at temperature 1 of each prompt's tokens given those before; entry 0 is 0. No request is running."""
        ...

    def update_weights(self, weights: NamedTensors, version: int) -> WeightAck:
        """Replace the base weights in place and drop all cached keys and values. No request is running."""
        ...

    def update_adapter(self, adapter: LoraTensors, version: int) -> WeightAck:
        """Serve `adapter` on the base weights from now on, under a name that no earlier version used.

        Raises:
            EngineError: the engine was not started with adapter serving.
        """
        ...

    def close(self) -> None:
        """Release memory and threads; idempotent."""
        ...
