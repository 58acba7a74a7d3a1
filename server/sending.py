"""The trainer's end of a weight update: tensors go into buckets as they come, and a bucket is sent while the next one fills."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

from opentinker.errors import DeadlineError
from opentinker.server.buckets import BUCKET_BYTES, Bucket, BucketAck, Entry, Ledger, aligned, dtype_name, typed
from opentinker.server.carriers import Carrier, Payload
from opentinker.server.digest import tensor_digest
from opentinker.server.engine.base import NamedTensors

ACK_S = 300.0
"""An engine that has not taken a bucket after this long counts as stuck."""
CAUSE_S = 1.0
"""So long, once a bucket has failed, answers of those before it are waited for."""

Take = Callable[[Bucket, Payload], "Future[Sequence[BucketAck]]"]
"""Gives a bucket to all engine ranks; their acknowledgements come later."""


@dataclass
class _Sent:
    bucket: Bucket
    answer: "Future[Sequence[BucketAck]]"
    carrier: Carrier


class BucketSender:
    """Sends what one trainer rank has to send. With two carriers, one bucket is on its way while the next is filled."""

    def __init__(
        self,
        ledger: Ledger,
        carriers: Sequence[Carrier],
        take: Take,
        *,
        sender: int = 0,
        bucket_bytes: int = BUCKET_BYTES,
        ack_s: float = ACK_S,
    ) -> None:
        self._ledger = ledger
        self._free = deque(carriers)
        self._take = take
        self._sender = sender
        self._bucket_bytes = bucket_bytes
        self._ack_s = ack_s
        self._under_way: deque[_Sent] = deque()
        self._number = 0

    def send(self, weights: NamedTensors, digests: dict[str, str] | None = None) -> None:
        """Send all tensors, and return when every engine rank has acknowledged every bucket. A tensor is copied as soon as it
        comes, so its memory may be used for the next one. `digests` is filled with name -> digest.

        Raises:
            WeightSyncError: a bucket was lost, changed, or acknowledged otherwise than it was sent.
            DeadlineError: a bucket is not taken or acknowledged in time.
        """
        entries: list[Entry] = []
        end = 0
        for name, tensor in weights:
            digest = tensor_digest(tensor)
            if digests is not None:
                digests[name] = digest
            start, nbytes = aligned(end), tensor.numel() * tensor.element_size()
            if entries and start + nbytes > self._bucket_bytes:
                self._ship(entries)
                entries, start = [], 0
            end = start + nbytes
            room = self._carrier().room(max(end, self._bucket_bytes))
            typed(room[start:end], tensor.dtype, tensor.shape).copy_(tensor.detach())
            entries.append(Entry(name, dtype_name(tensor.dtype), tuple(tensor.shape), start, nbytes, digest))
        if entries:
            self._ship(entries)
        while self._under_way:
            self._settle()

    def _carrier(self) -> Carrier:
        """The one that is being filled."""
        while not self._free:
            self._settle()
        return self._free[0]

    def _ship(self, entries: list[Entry]) -> None:
        bucket = Bucket(self._ledger.update, self._sender, self._number, tuple(entries))
        self._number += 1
        carrier = self._free.popleft()
        self._ledger.send(bucket)
        try:
            answer = self._take(bucket, carrier.payload(bucket.nbytes))
            self._under_way.append(_Sent(bucket, answer, carrier))
            carrier.deliver(bucket.nbytes, answer, self._ack_s)
        except Exception:
            self._account_for([sent for sent in self._under_way if sent.bucket is not bucket])
            raise

    def _account_for(self, earlier: Sequence[_Sent]) -> None:
        """Where one of those before went wrong, that is why the next one did. Its answer may come a moment later."""
        answered, _ = wait([sent.answer for sent in earlier], CAUSE_S)
        for sent in earlier:
            if sent.answer in answered:
                self._ledger.acknowledge(sent.bucket, sent.answer.result())

    def _settle(self) -> None:
        """Wait for the oldest bucket under way."""
        sent = self._under_way.popleft()
        try:
            acks = sent.answer.result(self._ack_s)
        except TimeoutError:
            raise DeadlineError(f"the engine did not acknowledge {sent.bucket} within {self._ack_s:g} s") from None
        self._ledger.acknowledge(sent.bucket, acks)
        self._free.append(sent.carrier)
