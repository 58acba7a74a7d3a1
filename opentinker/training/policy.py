"""The policy as the driver loops see it."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from opentinker.client.messages import AdamParams, CriticStep, Datum, FloatArray, LossConfig, Minibatch, TokenScore


class TrainedPolicy(Protocol):
    """What every driver loop needs of a `PolicyClient`."""

    async def info(self) -> dict[str, Any]: ...

    async def tokenizer_files(self) -> dict[str, bytes]: ...

    async def forward(
        self, data: Sequence[Datum], *, compute: Sequence[TokenScore], temperature: float
    ) -> dict[TokenScore, list[FloatArray]]: ...

    async def train_step(
        self,
        data: Sequence[Datum],
        minibatches: Sequence[Minibatch],
        loss: LossConfig,
        optimizer: AdamParams,
        *,
        critic: CriticStep | None = None,
        publish: bool = True,
    ) -> dict[str, Any]: ...

    async def save(
        self, name: str, *, driver: Mapping[str, Any] | None = None, keep_last: int | None = None
    ) -> dict[str, Any]: ...

    async def load(self, name: str) -> dict[str, Any]: ...
