"""The seam between a server and its rollout engine."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from opentinker.client.messages import Chunk, FloatArray, SampleRequest, SampleResult
from opentinker.errors import OpenTinkerError

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

    def on_host(self) -> "LoraTensors":
        """As it is sent to another process: copies, for a slice of a larger tensor would be sent with all of that."""
        return replace(self, tensors={name: tensor.detach().to("cpu", copy=True) for name, tensor in self.tensors.items()})


@dataclass(frozen=True)
class AdapterId:
    """One version of one LoRA policy."""

    policy: str
    version: int

    def __str__(self) -> str:
        return f"{self.policy}@{self.version}"


@dataclass(frozen=True)
class SampleRefused:
    """A request that an engine in another process has refused; whoever added it did not wait for the answer."""

    request_id: str
    error: OpenTinkerError


class RolloutEngine(Protocol):
    """Continuous batching of sample requests, each against the base weights or against one of the adapters that the engine
    holds on them. The images of a request have their tokens in place, and the store that the engine was made with holds them as
    long as the request runs.

    Not thread-safe: a server calls it from its compute thread only.
    """

    @property
    def version(self) -> int:
        """The version of the base weights: 0 until an update."""
        ...

    @property
    def max_model_len(self) -> int: ...

    def add(self, request: SampleRequest, adapter: AdapterId | None = None) -> None:
        """Queue a request. `params.stop_token_ids` always includes the model's own end-of-sequence ids. It is sampled under
        `adapter`, or from the base weights: whoever calls has looked at `request.version`.

        Raises:
            ContextOverflowError: prompt plus one token does not fit. `max_tokens` is clipped to what fits.
            InvalidRequestError: the engine refuses it. Whatever is raised, nothing of the request is left in the engine.
            EngineError: it does not hold the adapter.
        """
        ...

    def step(self) -> Sequence[SampleResult | SampleRefused]:
        """Advance all running sequences; the results of requests that are now complete.

        Raises:
            EngineError: it failed, or it has lost a request.
        """
        ...

    def has_unfinished(self) -> bool: ...

    def abort(self, request_ids: Collection[str]) -> list[SampleRequest]:
        """Stop those of the requests that are unfinished and return them, so that they can be added again."""
        ...

    def abort_all(self) -> list[SampleRequest]:
        """Stop every unfinished request and return it, so that it can be added again."""
        ...

    def prompt_logprobs(self, prompts: Sequence[Sequence[Chunk]], adapter: AdapterId | None = None) -> list[FloatArray]:
        """Logprobs at temperature 1 of each prompt's tokens given those before, under `adapter` or the base weights; entry 0 is
        0. Requests may be running: the results of those that end meanwhile come with the next `step`."""
        ...

    def update_weights(self, weights: NamedTensors, version: int) -> WeightAck:
        """Replace the base weights in place and drop all adapters and all cached keys and values. No request is running."""
        ...

    def update_adapter(self, adapter: LoraTensors, at: AdapterId) -> WeightAck:
        """Hold a copy of `adapter`, beside those that are held already, or in place of the one that was `at`. Running requests
        go on.

        Raises:
            EngineError: the engine was not started with adapter serving, or has no room for another.
            ConfigError: the adapter is larger than those it was started for.
        """
        ...

    def drop_adapter(self, at: AdapterId) -> None:
        """Let go of an adapter, if it is held. No running request uses it."""
        ...

    def close(self) -> None:
        """Release memory and threads; idempotent."""
        ...
