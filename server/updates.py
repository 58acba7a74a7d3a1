"""Updates of an engine's base weights: from the trainer to every rank of an engine in other processes, in buckets."""

from collections.abc import Sequence
from concurrent.futures import Future
from itertools import count

import torch

from opentinker.server.buckets import BUCKET_BYTES, Bucket, BucketAck, Ledger
from opentinker.server.carriers import Payload
from opentinker.server.engine.base import NamedTensors, WeightAck
from opentinker.server.sending import ACK_S, BucketSender
from opentinker.server.ways import Caller, Kind, Way, open_way


class Updates:
    """One update after the other, to one engine. What carries them is found out at the first."""

    def __init__(
        self,
        engine: Caller,
        ranks: int,
        device: torch.device,
        kinds: Sequence[Kind],
        *,
        bucket_bytes: int = BUCKET_BYTES,
        ack_s: float = ACK_S,
    ) -> None:
        """`device` is where the weights are; `kinds` are the ways to try, the best first."""
        self._engine, self._ranks, self._device = engine, ranks, device
        self._kinds = tuple(kinds)
        self._bucket_bytes, self._ack_s = bucket_bytes, ack_s
        self._numbers = count(1)
        self._way: Way | None = None

    @property
    def way(self) -> Way | None:
        """What carries the bytes, once it is known."""
        return self._way

    def send(self, weights: NamedTensors, version: int) -> WeightAck:
        """Write the weights into the engine, as `version`: what all of its ranks say that they have received.

        Raises:
            WeightSyncError: a bucket was lost or changed, a rank's model does not take it, or no carrier reaches all ranks.
            DeadlineError: the engine does not take a bucket in time.
            ServerLostError: its process is gone.
        """
        update = next(self._numbers)
        ledger = Ledger(update, self._ranks)
        if self._way is None:  # before anything is begun, which an engine may not survive when it is not brought to its end
            self._way = open_way(self._kinds, self._engine, self._ranks, self._device)
        self._engine.call("begin_update", update)
        try:
            carriers = self._way.carriers()
            BucketSender(ledger, carriers, self._take, bucket_bytes=self._bucket_bytes, ack_s=self._ack_s).send(weights)
            ack = ledger.close(self._engine.call("finish_update", version, ledger.counts))
            self._way.rest()
        except BaseException:
            self.close()  # the engine may still be reading in its memory
            raise
        return ack

    def close(self) -> None:
        """Let go of what carries them; another update finds out anew. Idempotent."""
        way, self._way = self._way, None
        if way is not None:
            way.close()

    def _take(self, bucket: Bucket, payload: Payload) -> "Future[Sequence[BucketAck]]":
        return self._engine.start("take_bucket", bucket, payload)
