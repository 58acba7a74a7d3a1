"""The seam between a server and its trainer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from opentinker.client.messages import AdamParams, Datum, FloatArray, LossConfig, PolicySpec, TokenScore
from opentinker.server.engine.base import LoraTensors, NamedTensors


@dataclass(frozen=True)
class ForwardBackwardResult:
    """What a pass over some data gives.

    `logprobs`: per datum float32[T], the logprob of each weighted target (0 elsewhere), as the loss saw them; of a loss of
    scalars these are the values.
    `metrics`: sums over weighted tokens (keys end in `_sum`), counts (`tokens`) and maxima (keys end in `_max`); and what it
    took: `sequence_tokens` of the data, of which `computed_tokens` were computed, in so many `passes` of at most
    `pass_tokens_max`.
    """

    loss: float
    logprobs: list[FloatArray]
    metrics: dict[str, float]


class Trainer(Protocol):
    """Holds the weights of one full-parameter policy or of any number of LoRA policies on one frozen base model.

    Not thread-safe: a server calls it from its compute thread only. A method that raises leaves the policy unchanged,
    but for a `TornError`.
    """

    def create_policy(self, policy: str, spec: PolicySpec) -> None: ...

    def delete_policy(self, policy: str) -> None: ...

    def forward(
        self,
        policy: str,
        data: Sequence[Datum],
        *,
        compute: Sequence[TokenScore] = ("logprobs",),
        temperature: float = 1.0,
    ) -> dict[TokenScore, list[FloatArray]]:
        """What is asked for of every weighted target (0 elsewhere), float32[T] per datum; no gradient.

        Raises:
            InvalidRequestError: the policy has not the head for it, or the data hold a token outside the vocabulary.
        """
        ...

    def check(self, policy: str, data: Sequence[Datum], loss: LossConfig) -> None:
        """Whether `forward_backward` would take the data and the loss, without computing anything.

        Raises:
            InvalidRequestError: the data lack an array the loss needs, or hold a token outside the vocabulary; or it is a loss
                of a head that the policy has not.
        """
        ...

    def forward_backward(self, policy: str, data: Sequence[Datum], loss: LossConfig, factor: float) -> ForwardBackwardResult:
        """Adds the gradient of factor * (sum of the loss over the data) to the policy's gradients, or, of the loss `value` of a
        policy with a critic, to the critic's.

        Raises:
            InvalidRequestError: the data lack an array the loss needs, or hold a token outside the vocabulary; or it is a loss
                of a head that the policy has not.
        """
        ...

    def optim_step(self, policy: str, params: AdamParams, *, critic: bool = False) -> dict[str, float]:
        """One AdamW step on the policy's, or its critic's, accumulated gradients, which are cleared: {"grad_norm": ...} (before
        clipping). In float16 also the `loss_scale` from now on and the `steps_skipped` in all, because gradients were too large
        for float16; a skipped step has norm 0.

        Raises:
            TrainerError: the gradient is not finite; the gradients are cleared and the weights stay.
            TornError: it failed amid the parameters; until a checkpoint is loaded, the policy can only be deleted.
        """
        ...

    def full_weights(self, policy: str) -> NamedTensors:
        """Every Hugging Face parameter of the policy (an adapter merged in, tied heads sent explicitly), from pristine
        base weights; tensors are valid until the next one is asked for. What can be refused is refused at once, before whoever
        is to get them has begun to take them."""
        ...

    def adapter(self, policy: str) -> LoraTensors:
        """The policy's adapter."""
        ...

    def is_lora(self, policy: str) -> bool: ...

    def samples(self, policy: str) -> bool:
        """Whether it can be published and sampled from: it has no scalar head."""
        ...

    def close(self) -> None:
        """End what it started; idempotent. Nothing else is called after it."""
        ...

    def save(
        self,
        policy: str,
        folder: Path,
        about: Mapping[str, Any] | None = None,
        beside: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Write weights (safetensors; PEFT format for an adapter), optimizer state and step into an empty folder, with what
        `about` says of the checkpoint (name, version, ...) and the files `beside` (name -> text); the manifest of what was
        written."""
        ...

    def load(self, policy: str, folder: Path, *, weights_only: bool = False) -> None:
        """Restore what `save` wrote; with `weights_only`, start from its weights with a new optimizer.

        Raises:
            CheckpointError: a part is missing, corrupt, or of another architecture.
        """
        ...
