"""Weights in buckets: whatever the tensors, they arrive as they were sent; a bucket that does not is an error that names it."""

import multiprocessing
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opentinker.errors import DeadlineError, WeightSyncError
from opentinker.server.buckets import Arrivals, Bucket, BucketAck, Ledger, merged
from opentinker.server.carriers import Carrier, InlineCarrier, Payload, Probe, SharedCarrier, SharedPayload, read_probe
from opentinker.server.digest import tensor_digest
from opentinker.server.engine.base import WeightAck
from opentinker.server.sending import BucketSender

UPDATE = 7


class Rank:
    """A receiver that only keeps what it gets."""

    def __init__(self, number: int) -> None:
        self.arrivals = Arrivals(number, UPDATE)
        self.tensors: dict[str, torch.Tensor] = {}

    def take(self, bucket: Bucket, payload: Payload) -> BucketAck:
        self.arrivals.admit(bucket)
        received = {name: tensor.clone() for name, tensor in bucket.tensors(payload.open())}
        self.tensors |= received
        return self.arrivals.note(bucket, {name: tensor_digest(tensor) for name, tensor in received.items()})

    def finish(self, counts: dict[int, int]) -> WeightAck:
        self.arrivals.close(counts)
        names = frozenset(self.arrivals.digests)
        return WeightAck(dict(self.arrivals.digests), names, names)


def answered(value: Any) -> Future[Any]:
    answer = Future[Any]()
    answer.set_result(value)
    return answer


def to(ranks: Sequence[Rank]) -> Callable[[Bucket, Payload], Future[Sequence[BucketAck]]]:
    return lambda bucket, payload: answered([rank.take(bucket, payload) for rank in ranks])


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return ours.dtype == theirs.dtype and ours.shape == theirs.shape and torch.equal(ours, theirs)


SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), max_size=12)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.uint8])


@given(SHAPES, st.data(), st.integers(1, 300), st.integers(1, 3), st.booleans())
def test_any_tensors_arrive_whole_at_every_rank_in_buckets_of_any_size(
    shapes: list[tuple[int, ...]], data: st.DataObject, bucket_bytes: int, count: int, shared: bool
) -> None:
    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        memory = torch.empty(0)
        for number, tensor in enumerate(tensors):
            memory = tensor.clone()
            yield f"layers.{number}", memory
            memory.zero_()  # as a sender that uses its memory again

    tensors = [torch.randint(0, 99, shape).to(data.draw(DTYPES)) for shape in shapes]
    ranks, ledger, sent = [Rank(number) for number in range(count)], Ledger(UPDATE, count), dict[str, str]()
    carriers: list[Carrier] = [SharedCarrier() if shared else InlineCarrier() for _ in range(2)]
    BucketSender(ledger, carriers, to(ranks), bucket_bytes=bucket_bytes).send(weights(), sent)
    ack = ledger.close([rank.finish(ledger.counts) for rank in ranks])
    for carrier in carriers:
        carrier.close()
    assert ack.digests == sent == {f"layers.{number}": tensor_digest(tensor) for number, tensor in enumerate(tensors)}
    for rank in ranks:
        assert all(same(rank.tensors[f"layers.{number}"], tensor) for number, tensor in enumerate(tensors))


def test_a_bucket_is_as_large_as_it_may_be_and_no_larger_but_for_a_tensor_that_is() -> None:
    buckets: list[Bucket] = []

    def take(bucket: Bucket, payload: Payload) -> Future[Sequence[BucketAck]]:
        buckets.append(bucket)
        return answered([rank.take(bucket, payload)])

    rank = Rank(0)
    weights = [("a", torch.zeros(16)), ("b", torch.zeros(16)), ("big", torch.zeros(100)), ("c", torch.zeros(16))]
    BucketSender(Ledger(UPDATE, 1), [InlineCarrier(), InlineCarrier()], take, bucket_bytes=128).send(weights)
    assert [[entry.name for entry in bucket.entries] for bucket in buckets] == [["a", "b"], ["big"], ["c"]]


def test_two_trainer_ranks_send_each_what_it_owns() -> None:
    rank, ledger = Rank(0), Ledger(UPDATE, 1)
    for sender in range(2):
        weights = [(f"layers.{sender}.{number}", torch.full((9,), float(number))) for number in range(4)]
        BucketSender(ledger, [InlineCarrier()], to([rank]), sender=sender, bucket_bytes=64).send(weights)
    assert ledger.counts == {0: 4, 1: 4}
    assert len(ledger.close([rank.finish(ledger.counts)]).written) == 8


def test_a_bucket_is_filled_while_another_is_on_its_way_and_its_memory_is_left_alone_until_the_acknowledgement() -> None:
    rank, most = Rank(0), 0
    under_way: deque[tuple[Bucket, Payload, Future[Sequence[BucketAck]]]] = deque()

    class Late(Future[Sequence[BucketAck]]):
        def result(self, timeout: float | None = None) -> Sequence[BucketAck]:
            bucket, payload, answer = under_way.popleft()
            assert answer is self
            return [rank.take(bucket, payload)]  # which finds out if it was written over

    def take(bucket: Bucket, payload: Payload) -> Future[Sequence[BucketAck]]:
        nonlocal most
        under_way.append((bucket, payload, Late()))
        most = max(most, len(under_way))
        return under_way[-1][2]

    weights = [(f"layers.{number}", torch.full((16,), float(number))) for number in range(6)]
    BucketSender(Ledger(UPDATE, 1), [SharedCarrier(), SharedCarrier()], take, bucket_bytes=64).send(weights)
    assert most == 2
    assert len(rank.tensors) == 6


def buckets_of(count: int) -> list[tuple[Bucket, Payload]]:
    made: list[tuple[Bucket, Payload]] = []
    rank = Rank(0)

    def take(bucket: Bucket, payload: Payload) -> Future[Sequence[BucketAck]]:
        made.append((bucket, payload))
        return answered([rank.take(bucket, payload)])

    weights = [(f"layers.{number}", torch.full((16,), float(number))) for number in range(count)]
    BucketSender(Ledger(UPDATE, 1), [InlineCarrier() for _ in range(count)], take, bucket_bytes=64).send(weights)
    return made


def _deliver(made: list[tuple[Bucket, Payload]], count: int) -> None:
    rank = Rank(0)
    for bucket, payload in made:
        rank.take(bucket, payload)
    rank.finish({0: count})


@given(st.integers(1, 6), st.data())
def test_a_lost_a_repeated_a_reordered_and_a_corrupt_bucket_are_errors_that_name_it(count: int, data: st.DataObject) -> None:
    made = buckets_of(count)
    which = data.draw(st.integers(0, count - 1))
    fault = data.draw(st.sampled_from(["lost", "repeated", "swapped", "corrupt", "renumbered", "other update"]))
    bucket, payload = made[which]
    named = f"bucket {which} of trainer rank 0"
    if fault == "lost":
        made.pop(which)
    elif fault == "repeated":
        made.insert(data.draw(st.integers(which + 1, count)), made[which])
    elif fault == "swapped" and count > 1:
        other = data.draw(st.integers(0, count - 1).filter(lambda number: number != which))
        made[which], made[other] = made[other], made[which]
        named = f"bucket {min(which, other)} of trainer rank 0"
    elif fault == "corrupt":
        memory = payload.open()
        memory[data.draw(st.integers(0, 63))] ^= 1
    elif fault == "other update":
        made[which] = (replace(bucket, update=UPDATE + 1), payload)
    else:
        made[which] = (replace(bucket, number=which + 1), payload)
    with pytest.raises(WeightSyncError, match="engine rank 0") as caught:
        _deliver(made, count)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda acks: acks[:1], "engine rank 1 did not acknowledge bucket 0"),
        (lambda acks: [acks[0], acks[0]], "engine rank 0 of 2 acknowledged bucket 0 .* once too often"),
        (lambda acks: [acks[0], replace(acks[1], number=3)], "engine rank 1 acknowledged bucket 3 .* in place of bucket 0"),
        (lambda acks: [acks[0], replace(acks[1], digests={"layers.0": "no"})], "engine rank 1 acknowledged 'layers.0' changed"),
        (lambda acks: [acks[0], replace(acks[1], digests={})], "engine rank 1 acknowledged 'layers.0' changed"),
        (lambda acks: [*acks, replace(acks[1], rank=2)], "engine rank 2 of 2 acknowledged"),
    ],
)
def test_every_rank_has_to_acknowledge_every_bucket_once_and_as_it_was_sent(
    change: Callable[[list[BucketAck]], list[BucketAck]], match: str
) -> None:
    ranks = [Rank(0), Rank(1)]

    def take(bucket: Bucket, payload: Payload) -> Future[Sequence[BucketAck]]:
        return answered(change([rank.take(bucket, payload) for rank in ranks]))

    with pytest.raises(WeightSyncError, match=match):
        BucketSender(Ledger(UPDATE, 2), [InlineCarrier()], take).send([("layers.0", torch.ones(3))])


def test_a_bucket_that_is_never_acknowledged_ends_with_its_name() -> None:
    with pytest.raises(
        DeadlineError, match=r"did not acknowledge bucket 0 of trainer rank 0 \(1 tensors, a to a\) within 0.01 s"
    ):
        BucketSender(Ledger(UPDATE, 1), [InlineCarrier()], lambda *_: Future(), ack_s=0.01).send([("a", torch.ones(1))])


def test_what_went_wrong_first_is_the_error_even_where_a_later_bucket_is_the_one_that_is_looked_at() -> None:
    class Fetched(InlineCarrier):
        """One whose delivery ends with the answer, as a broadcast does."""

        def deliver(self, nbytes: int, answer: Future[Any], timeout_s: float) -> None:
            if answer.done():
                answer.result()

    first = Future[Sequence[BucketAck]]()

    def take(bucket: Bucket, payload: Payload) -> Future[Sequence[BucketAck]]:
        if bucket.number == 0:
            return first
        changed = [BucketAck(0, bucket.update, bucket.sender, 0, {"a": "another"})]
        threading.Timer(0.05, first.set_result, [changed]).start()
        second = Future[Sequence[BucketAck]]()
        second.set_exception(WeightSyncError("rank 0 misses bucket 0: bucket 1 came in its place"))
        return second

    sender = BucketSender(Ledger(UPDATE, 1), [Fetched(), Fetched()], take, bucket_bytes=1)
    with pytest.raises(WeightSyncError, match="changed, in bucket 0"):
        sender.send([("a", torch.ones(1)), ("b", torch.ones(1))])


def test_a_tensor_that_is_sent_twice_is_an_error() -> None:
    with pytest.raises(WeightSyncError, match=r"'a' is in bucket 0 .* and in bucket 1"):
        BucketSender(Ledger(UPDATE, 1), [InlineCarrier()], to([Rank(0)]), bucket_bytes=1).send([("a", torch.ones(1))] * 2)


def test_ranks_that_end_with_other_tensors_or_miss_a_parameter_do_not_agree() -> None:
    whole = WeightAck({"a": "1"}, frozenset("a"), frozenset("a"))
    assert merged([whole, whole]) == whole
    with pytest.raises(WeightSyncError, match="engine rank 1 received another 'a'"):
        merged([whole, WeightAck({"a": "2"}, frozenset("a"), frozenset("a"))])
    assert merged([whole, WeightAck({"a": "1"}, frozenset(), frozenset("a"))]).missing == {"a"}


def test_memory_of_another_machine_is_out_of_reach() -> None:
    probe = Probe()
    assert probe.is_answer(read_probe(probe.payload))
    assert not Probe().is_answer(read_probe(SharedPayload("/proc/1/fd/987654", 32)))
    with pytest.raises(WeightSyncError, match="cannot be reached"):
        SharedPayload("/proc/1/fd/987654", 32).open()


def _receive(number: int, pipe: Connection) -> None:
    """An engine rank in a process of its own."""
    rank = Rank(number)
    while (message := pipe.recv()) is not None:
        try:
            pipe.send(rank.finish(message) if isinstance(message, dict) else rank.take(*message))
        except WeightSyncError as error:
            pipe.send(error)


@pytest.mark.parametrize("carrier", [SharedCarrier, InlineCarrier])
def test_two_processes_receive_every_bucket(carrier: type[Carrier]) -> None:
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for number in range(2):
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=_receive, args=(number, theirs), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)

    def ask(message: Any) -> list[Any]:
        for pipe in pipes:
            pipe.send(message)
        return [pipe.recv() for pipe in pipes]

    weights = {f"layers.{number}": torch.randn(64, 33) for number in range(8)}
    ledger, sent = Ledger(UPDATE, 2), dict[str, str]()
    BucketSender(ledger, [carrier(), carrier()], lambda *b: answered(ask(b)), bucket_bytes=20_000).send(weights.items(), sent)
    assert ledger.counts[0] > 2
    assert ledger.close(ask(ledger.counts)).digests == sent
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join(30)
        assert process.exitcode == 0
