"""The trainer's own logprobs before an update, for the losses whose ratio is against them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from opentinker.client.messages import Datum, FloatArray, TokenScore
from opentinker.training.batch import Batch


class Scores(Protocol):
    async def forward(
        self, data: Sequence[Datum], *, compute: Sequence[TokenScore], temperature: float
    ) -> Mapping[TokenScore, Sequence[FloatArray]]: ...


async def with_proximal_logprobs(policy: Scores, batch: Batch, temperature: float) -> Batch:
    """The batch whose data have `proximal_logprobs`.

    They are computed minibatch by minibatch, so that the first one is packed as it will be when it trains, and its ratios are
    exactly 1: the last bits of a logprob depend on what else is in the pass.
    """
    data = list(batch.data)
    for indices in dict.fromkeys(minibatch.indices for minibatch in batch.minibatches):
        part = [data[index] for index in indices]
        scores = await policy.forward(part, compute=("logprobs",), temperature=temperature)
        for index, logprobs in zip(indices, scores["logprobs"], strict=True):
            data[index] = replace(data[index], arrays={**data[index].arrays, "proximal_logprobs": logprobs})
    return replace(batch, data=data)
