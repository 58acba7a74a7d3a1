"""What a policy is compared with in preference training: its answers' logprobs as the run began."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from opentinker.client.messages import Datum, FloatArray
from opentinker.errors import CheckpointError
from opentinker.training.policy import TrainedPolicy

FILE = "reference_logprobs.npz"
BATCH = 128
"""Data of one forward pass: pairs are not torn apart."""
PROBED = 4
"""Data on which policy and base model are compared."""


class References:
    """Reference logprobs, either the base model's, asked of the server whenever they are needed, or those that were computed at
    the start and are kept, by what a datum is, in memory and in the run's folder."""

    def __init__(self, policy: TrainedPolicy, folder: Path) -> None:
        self._policy = policy
        self._file = folder / FILE
        self._kept: dict[bytes, FloatArray] | None = None

    @property
    def kept(self) -> bool:
        return self._kept is not None

    async def is_base(self, data: Sequence[Datum]) -> bool:
        """Whether the policy says of these data exactly what the base model says: nothing has been trained yet."""
        some = data[:PROBED]
        scores = await self._policy.forward(some, compute=("logprobs", "reference_logprobs"), temperature=1.0)
        pairs = zip(scores["logprobs"], scores["reference_logprobs"], strict=True)
        return all(np.array_equal(mine, base) for mine, base in pairs)

    async def compute(self, batches: Iterable[Sequence[Datum]]) -> int:
        """Keep what the policy says now of these data; of how many different ones."""
        kept: dict[bytes, FloatArray] = {}
        for batch in batches:
            new = {key: datum for datum in batch if (key := _key(datum)) not in kept}
            for start in range(0, len(new), BATCH):
                part = dict(list(new.items())[start : start + BATCH])
                data = list(part.values())
                scores = (await self._policy.forward(data, compute=("logprobs",), temperature=1.0))["logprobs"]
                kept |= {key: score[datum.weights != 0] for (key, datum), score in zip(part.items(), scores, strict=True)}
        self._kept = kept
        self._write(kept)
        return len(kept)

    def load(self) -> None:
        """Take up again what `compute` kept in the run's folder.

        Raises:
            CheckpointError: it is gone or damaged.
        """
        try:
            with np.load(self._file) as file:
                keys, lengths, values = file["keys"], file["lengths"], file["values"]
            if len(keys) != len(lengths) or int(lengths.sum()) != len(values) or not np.isfinite(values).all():
                raise ValueError("its parts do not fit together")
        except Exception as error:  # numpy and zipfile raise what they like on a file that is cut short
            raise CheckpointError(
                f"the reference logprobs of this run cannot be read from {self._file}: {error}",
                hint="a run cannot go on without what it is compared with; start it anew",
            ) from error
        parts = np.split(values.astype(np.float32), np.cumsum(lengths)[:-1])
        self._kept = {key.tobytes(): part for key, part in zip(keys, parts, strict=True)}

    async def attach(self, data: Sequence[Datum]) -> list[Datum]:
        """The data with `reference_logprobs`.

        Raises:
            CheckpointError: a datum is not among those that were kept, because the examples have changed since.
        """
        if self._kept is None:
            scores = await self._policy.forward(data, compute=("reference_logprobs",), temperature=1.0)
            return [_with(datum, s) for datum, s in zip(data, scores["reference_logprobs"], strict=True)]
        return [_with(datum, self._spread(datum)) for datum in data]

    def _spread(self, datum: Datum) -> FloatArray:
        assert self._kept is not None
        found = self._kept.get(_key(datum))
        if found is None:
            raise CheckpointError(
                "an example is not among those whose reference logprobs were computed at the start of the run",
                hint="the examples must stay as they were; start the run anew with the new ones",
            )
        spread = np.zeros(len(datum), np.float32)
        spread[datum.weights != 0] = found
        return spread

    def _write(self, kept: dict[bytes, FloatArray]) -> None:
        """Whole or not at all."""
        aside = self._file.with_name(f".{FILE}.tmp")
        keys = np.frombuffer(b"".join(kept), np.uint8).reshape(len(kept), -1)
        lengths = np.array([len(values) for values in kept.values()], np.int64)
        values = np.concatenate([np.zeros(0, np.float32), *kept.values()])
        with aside.open("wb") as file:
            np.savez(file, keys=keys, lengths=lengths, values=values)
        os.replace(aside, self._file)


def _with(datum: Datum, reference: FloatArray) -> Datum:
    return replace(datum, arrays={**datum.arrays, "reference_logprobs": reference})


def _key(datum: Datum) -> bytes:
    parts = (datum.tokens.tobytes(), datum.targets.tobytes(), datum.weights.tobytes())
    return hashlib.blake2b(b"|".join(parts), digest_size=16).digest()
