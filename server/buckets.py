"""Weights on their way from trainer ranks to engine ranks, in buckets: their headers, and the proof that every rank got each
one once, whole and in order. No I/O: what carries the bytes is in `carriers.py`."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from opentinker.errors import WeightSyncError
from opentinker.server.engine.base import WeightAck

BUCKET_BYTES = 64 * 2**20
"""Size of a bucket, unless a single tensor is larger."""
ALIGNMENT = 64
"""Tensors begin at multiples of it, so that a view of any dtype can be had."""


@dataclass(frozen=True)
class Entry:
    """A full tensor in a bucket."""

    name: str
    """Hugging Face's."""
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    digest: str
    """As it left the trainer."""


@dataclass(frozen=True)
class Bucket:
    """The header of a bucket."""

    update: int
    """Which update of the engine's weights it belongs to."""
    sender: int
    """The trainer rank that sends it."""
    number: int
    """Of this sender's buckets in this update, from 0."""
    entries: tuple[Entry, ...]

    def __str__(self) -> str:
        names = f"{self.entries[0].name} to {self.entries[-1].name}" if self.entries else "empty"
        return f"bucket {self.number} of trainer rank {self.sender} ({len(self.entries)} tensors, {names})"

    @property
    def nbytes(self) -> int:
        return max((entry.offset + entry.nbytes for entry in self.entries), default=0)

    def tensors(self, memory: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors as views of the bucket's bytes, uint8[n].

        Raises:
            WeightSyncError: there are fewer bytes than the header says, or a dtype is none of torch's.
        """
        if memory.numel() < self.nbytes:
            raise WeightSyncError(f"{self} has {memory.numel()} bytes, not {self.nbytes}")
        for entry in self.entries:
            dtype = getattr(torch, entry.dtype, None)
            if not isinstance(dtype, torch.dtype):
                raise WeightSyncError(f"{self}: '{entry.name}' has the unknown dtype {entry.dtype}")
            yield entry.name, typed(memory[entry.offset : entry.offset + entry.nbytes], dtype, entry.shape)


@dataclass(frozen=True)
class BucketAck:
    """What an engine rank says of a bucket that it has taken."""

    rank: int
    update: int
    sender: int
    number: int
    digests: dict[str, str]
    """As it computed them of what it received."""


def typed(memory: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """The bytes, uint8[n], as a tensor that shares their memory."""
    if not memory.numel():
        return torch.empty(tuple(shape), dtype=dtype)  # torch refuses another view of nothing
    return memory.view(dtype).view(tuple(shape))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def aligned(offset: int) -> int:
    """The next place where a tensor may begin."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


@dataclass
class Arrivals:
    """What one engine rank has received in one update."""

    rank: int
    update: int
    digests: dict[str, str] = field(default_factory=dict)
    _next: Counter[int] = field(default_factory=Counter)

    def admit(self, bucket: Bucket) -> None:
        """Whether the bucket is the next of its sender; to be asked before anything of it is written.

        Raises:
            WeightSyncError: it is of another update, was there before, or one before it is missing; or it has a tensor that was
                there before.
        """
        if bucket.update != self.update:
            raise WeightSyncError(f"engine rank {self.rank} takes update {self.update}; {bucket} is of update {bucket.update}")
        due = self._next[bucket.sender]
        if bucket.number < due:
            raise WeightSyncError(f"engine rank {self.rank} got {bucket} twice")
        if bucket.number > due:
            raise WeightSyncError(
                f"engine rank {self.rank} misses bucket {due} of trainer rank {bucket.sender}: {bucket} came in its place"
            )
        names = Counter(entry.name for entry in bucket.entries)
        twice = [name for name, count in names.items() if count > 1 or name in self.digests]
        if twice:
            raise WeightSyncError(f"engine rank {self.rank} got '{twice[0]}' twice, again in {bucket}")

    def note(self, bucket: Bucket, digests: Mapping[str, str]) -> BucketAck:
        """Account for a bucket that was taken, with the digests of what was received.

        Raises:
            WeightSyncError: a tensor is not what was sent.
        """
        for entry in bucket.entries:
            if digests.get(entry.name) != entry.digest:
                raise WeightSyncError(f"engine rank {self.rank} got '{entry.name}' changed, in {bucket}")
        self._next[bucket.sender] += 1
        self.digests.update(digests)
        return BucketAck(self.rank, bucket.update, bucket.sender, bucket.number, dict(digests))

    def close(self, counts: Mapping[int, int]) -> None:
        """The update is at its end; `counts` is how many buckets each sender has sent.

        Raises:
            WeightSyncError: one of them did not arrive, or one did that nobody sent.
        """
        for sender in sorted(counts.keys() | self._next.keys()):
            got, sent = self._next[sender], counts.get(sender, 0)
            if got != sent:
                what = f"misses bucket {got}" if got < sent else f"has {got - sent} buckets too many"
                raise WeightSyncError(f"engine rank {self.rank} {what} of trainer rank {sender}, which sent {sent}")


@dataclass
class Ledger:
    """The sender's book of one update: every bucket has to be acknowledged once by every engine rank."""

    update: int
    ranks: int
    _sent: dict[tuple[int, int], Bucket] = field(default_factory=dict)
    _acknowledged: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    _names: dict[str, Bucket] = field(default_factory=dict)

    @property
    def counts(self) -> dict[int, int]:
        """How many buckets each trainer rank has sent."""
        return dict(Counter(sender for sender, _ in self._sent))

    def send(self, bucket: Bucket) -> None:
        """Note that a bucket leaves.

        Raises:
            WeightSyncError: there was a bucket of this number, or a tensor of this name.
        """
        key = (bucket.sender, bucket.number)
        if key in self._sent:
            raise WeightSyncError(f"{bucket} was sent already")
        for entry in bucket.entries:
            if (before := self._names.setdefault(entry.name, bucket)) is not bucket:
                raise WeightSyncError(f"'{entry.name}' is in {before} and in {bucket}")
        self._sent[key] = bucket
        self._acknowledged[key] = set()

    def acknowledge(self, bucket: Bucket, acks: Sequence[BucketAck]) -> None:
        """Note the answers to a bucket, one of every engine rank.

        Raises:
            WeightSyncError: a rank is missing, answered twice or to another bucket, or received something else than was sent.
        """
        key = (bucket.sender, bucket.number)
        if self._sent.get(key) != bucket:
            raise WeightSyncError(f"{bucket} was acknowledged, but never sent")
        sent = {entry.name: entry.digest for entry in bucket.entries}
        for ack in acks:
            if (ack.update, ack.sender, ack.number) != (self.update, *key):
                raise WeightSyncError(
                    f"engine rank {ack.rank} acknowledged bucket {ack.number} of trainer rank {ack.sender} in update "
                    f"{ack.update} in place of {bucket}"
                )
            if ack.rank in self._acknowledged[key] or not 0 <= ack.rank < self.ranks:
                raise WeightSyncError(f"engine rank {ack.rank} of {self.ranks} acknowledged {bucket} once too often")
            wrong = sorted(name for name in sent.keys() | ack.digests.keys() if sent.get(name) != ack.digests.get(name))
            if wrong:
                raise WeightSyncError(f"engine rank {ack.rank} acknowledged '{wrong[0]}' changed, in {bucket}")
            self._acknowledged[key].add(ack.rank)
        self._require_all(bucket)

    def close(self, acks: Sequence[WeightAck]) -> WeightAck:
        """The end of the update, from what each engine rank says of all of it.

        Raises:
            WeightSyncError: a bucket was not acknowledged by all ranks, or a rank has other tensors than were sent.
        """
        for bucket in self._sent.values():
            self._require_all(bucket)
        if len(acks) != self.ranks:
            raise WeightSyncError(f"{len(acks)} engine ranks ended the update, not {self.ranks}")
        sent = {entry.name: entry.digest for bucket in self._sent.values() for entry in bucket.entries}
        for rank, ack in enumerate(acks):
            # A rank may have more: it writes a tied head with the embedding.
            wrong = sorted(name for name, digest in sent.items() if ack.digests.get(name) != digest)
            if wrong:
                bucket = self._names[wrong[0]]
                raise WeightSyncError(f"engine rank {rank} ended the update with '{wrong[0]}' changed, of {bucket}")
        return merged(acks)

    def _require_all(self, bucket: Bucket) -> None:
        missing = set(range(self.ranks)) - self._acknowledged[bucket.sender, bucket.number]
        if missing:
            raise WeightSyncError(f"engine rank {min(missing)} did not acknowledge {bucket}")


def merged(acks: Sequence[WeightAck]) -> WeightAck:
    """What all ranks together have taken: a parameter is written where each rank that has it has written it.

    Raises:
        WeightSyncError: two ranks received different tensors.
    """
    digests: dict[str, str] = {}
    missing: set[str] = set()
    for rank, ack in enumerate(acks):
        for name, digest in ack.digests.items():
            if digests.setdefault(name, digest) != digest:
                raise WeightSyncError(f"engine rank {rank} received another '{name}' than the ranks before it")
        missing |= ack.missing
    expected = frozenset().union(*(ack.expected for ack in acks))
    return WeightAck(digests, expected - missing, expected)
