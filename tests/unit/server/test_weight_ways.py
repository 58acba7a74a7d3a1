"""How weights reach an engine in another process: the best way that is proved to reach every rank, acknowledged as any other.
The GPU is faked where torch and NCCL would be called; all of ours is real."""

import inspect
import logging
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
from split_tools import START_S, PickledLink
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from opentinker.config.base import parse_config
from opentinker.config.server import EngineConfig
from opentinker.errors import ConfigError, DeadlineError, OpenTinkerError, ServerLostError, WeightSyncError
from opentinker.server import device_carriers, ways
from opentinker.server.buckets import Arrivals, Bucket, BucketAck, Entry
from opentinker.server.carriers import Payload
from opentinker.server.device_carriers import BroadcastPayload, IpcCarrier, IpcPayload, Joined, read_device_probe
from opentinker.server.device_groups import Group, Invitation, NcclGroup, in_thread, within
from opentinker.server.digest import tensor_digest
from opentinker.server.engine.base import WeightAck
from opentinker.server.engine.host import BucketEngine, EngineHost, HostedEngine
from opentinker.server.engine.model_weights import ModelWeights
from opentinker.server.engine.remote import RemoteEngine
from opentinker.server.engine.vllm_ranks import Beside
from opentinker.server.updates import Updates
from opentinker.server.ways import Wish, kinds_to_try

RANKS = 2
WEIGHTS = {f"layers.{number}": torch.randn(7, 5) for number in range(12)} | {"head": torch.randn(100, 9)}


@dataclass
class Gpu:
    """What torch's CUDA IPC and NCCL do, of which a test may break a part."""

    exported: dict[bytes, torch.Tensor] = field(default_factory=dict)
    opened: list[bytes] = field(default_factory=list)
    shares: bool = True
    connects: bool = True
    sent: "queue.Queue[torch.Tensor]" = field(default_factory=queue.Queue)
    broken: bool = False
    groups: int = 0
    closed: int = 0

    def export(self, memory: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
        handle = b"handle %d" % len(self.exported)
        self.exported[handle] = memory
        return None, (*range(7), handle, *range(7))

    def open(self, *arguments: Any) -> torch.Tensor:
        if not self.shares:
            raise RuntimeError("peer access is not supported between these two devices")
        self.opened.append(arguments[7])
        return self.exported[arguments[7]]

    def join(self, invitation: Invitation, rank: int, device: Any, answer: Any = None) -> Group:
        if not self.connects:
            raise WeightSyncError(f"rank {rank} waited for the others in vain")
        self.groups += rank == 0
        return FakeGroup(self, rank)


@dataclass
class FakeGroup:
    gpu: Gpu
    rank: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def broadcast(self, memory: torch.Tensor) -> None:
        if self.rank == 0:
            for _ in range(RANKS):
                self.gpu.sent.put(memory.clone())
            return
        memory.copy_(self.gpu.sent.get(timeout=START_S))
        if self.gpu.broken:
            memory[0] ^= 1

    def close(self) -> None:
        self.gpu.closed += self.rank == 0


class TwoRanks:
    """An engine of two ranks that only keeps weights."""

    ranks = RANKS
    max_model_len = 64
    version = 0

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.updates = 0
        self.tensors: list[dict[str, torch.Tensor]] = []

    def read_probes(self, payload: Payload) -> Sequence[bytes]:
        return [read_device_probe(payload, rank) for rank in range(RANKS)]

    def join_group(self, invitation: Invitation) -> None:
        assert invitation.ranks == RANKS
        Joined.replace(self.gpu.join(invitation, 1, None))

    def begin_update(self, update: int) -> None:
        self.updates += 1
        self.arrivals = [Arrivals(rank, update) for rank in range(RANKS)]
        self.tensors = [{} for _ in range(RANKS)]

    def take_bucket(self, bucket: Bucket, payload: Payload) -> Sequence[BucketAck]:
        return [self._take(rank, bucket, memory) for rank, memory in enumerate([payload.open(rank) for rank in range(RANKS)])]

    def _take(self, rank: int, bucket: Bucket, memory: torch.Tensor) -> BucketAck:
        self.arrivals[rank].admit(bucket)
        received = {name: tensor.clone() for name, tensor in bucket.tensors(memory)}
        self.tensors[rank] |= received
        return self.arrivals[rank].note(bucket, {name: tensor_digest(tensor) for name, tensor in received.items()})

    def finish_update(self, version: int, counts: Mapping[int, int]) -> Sequence[WeightAck]:
        IpcPayload.let_go()
        for arrivals in self.arrivals:
            arrivals.close(counts)
        return [WeightAck(dict(a.digests), frozenset(a.digests), frozenset(a.digests)) for a in self.arrivals]

    def has_unfinished(self) -> bool:
        return False

    def close(self) -> None:
        """It has nothing."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    faked = Gpu()
    monkeypatch.setattr(device_carriers, "reduce_tensor", faked.export)
    monkeypatch.setattr(device_carriers, "rebuild_cuda_tensor", faked.open)
    monkeypatch.setattr(ways, "invite", lambda ranks: Invitation(b"id", ranks))
    monkeypatch.setattr(ways, "join", faked.join)
    yield faked
    IpcPayload.let_go()
    Joined.replace(None)


@contextmanager
def connected(gpu: Gpu, wish: Wish = "auto") -> Iterator[tuple[RemoteEngine, TwoRanks]]:
    engine = TwoRanks(gpu)
    host = EngineHost(lambda: HostedEngine(cast(BucketEngine, engine)))
    info = replace(host.start(START_S), device="cuda")
    remote = RemoteEngine(PickledLink(host), info, bucket_bytes=300, device="cuda", weight_carrier=wish)
    remote._updates._device = torch.device("cpu")
    try:
        yield remote, engine
    finally:
        remote.close()
        host.stop()


def kind_of(remote: RemoteEngine) -> str:
    way = remote._updates.way
    assert way is not None
    return way.kind


def assert_arrived(engine: TwoRanks) -> None:
    for received in engine.tensors:
        assert received.keys() == WEIGHTS.keys()
        assert all(torch.equal(received[name], tensor) for name, tensor in WEIGHTS.items())


@pytest.mark.parametrize(
    ("wish", "trainer", "engine", "kinds"),
    [
        ("auto", "cuda", "cuda", ("ipc", "nccl", "host")),
        ("auto", "cpu", "cuda", ("host",)),
        ("auto", "cuda", "cpu", ("host",)),
        ("auto", "cpu", "cpu", ("host",)),
        ("host", "cuda", "cuda", ("host",)),
        ("ipc", "cuda", "cuda", ("ipc",)),
        ("nccl", "cuda", "cuda", ("nccl",)),
    ],
)
def test_weights_stay_on_gpus_where_both_ends_are_unless_the_config_says_otherwise(
    wish: Wish, trainer: str, engine: str, kinds: tuple[str, ...]
) -> None:
    assert kinds_to_try(wish, trainer, engine) == kinds


@pytest.mark.parametrize(
    ("wish", "device", "kinds"),
    [("auto", "cuda", ("ipc", "host")), ("ipc", "cuda", ("ipc",)), ("host", "cuda", ("host",)), ("auto", "cpu", ("host",))],
)
def test_nothing_is_broadcast_to_an_engine_on_the_trainers_own_gpus(wish: Wish, device: str, kinds: tuple[str, ...]) -> None:
    assert kinds_to_try(wish, device, device, shared=True) == kinds
    with pytest.raises(ConfigError, match="nccl is between different GPUs; this trainer and its engine share theirs"):
        kinds_to_try("nccl", device, device, shared=True)


def test_a_way_between_gpus_is_refused_where_an_end_has_none() -> None:
    with pytest.raises(ConfigError, match="weight_carrier=nccl is between GPUs; the trainer is on cuda, the engine on cpu"):
        kinds_to_try("nccl", "cuda", "cpu")
    with pytest.raises(ConfigError, match="weight_carrier"):
        parse_config(EngineConfig, {"weight_carrier": "carrier pigeon"})


def test_memory_that_every_rank_reads_carries_the_weights_and_each_export_is_opened_once(gpu: Gpu) -> None:
    with connected(gpu) as (remote, engine):
        for version in (1, 2):
            ack = remote.update_weights(WEIGHTS.items(), version)
            assert remote.version == version
            assert ack.digests == {name: tensor_digest(tensor) for name, tensor in WEIGHTS.items()}
            assert_arrived(engine)
            assert not IpcPayload._opened, "a mapping would keep the trainer's memory taken"
        assert kind_of(remote) == "ipc"
        assert len(gpu.opened) == len(set(gpu.opened)), "torch counts one opening for each export"
        assert gpu.groups == 0


@contextmanager
def in_this_process(gpu: Gpu, wish: Wish = "auto") -> Iterator[tuple[Updates, TwoRanks]]:
    """An engine that only its ranks' processes are apart from, as the colocated layout has it."""
    engine = TwoRanks(gpu)
    beside = Beside(engine)
    updates = Updates(beside, RANKS, torch.device("cpu"), kinds_to_try(wish, "cuda", "cuda", shared=True), bucket_bytes=300)
    yield updates, engine
    updates.close()
    beside.close()


@pytest.mark.parametrize("shares", [True, False])
def test_weights_reach_ranks_beside_the_trainer_by_its_gpus_memory_or_the_hosts(
    shares: bool, gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.shares = shares
    with caplog.at_level(logging.INFO), in_this_process(gpu) as (updates, engine):
        for version in (1, 2):
            ack = updates.send(WEIGHTS.items(), version)
            assert ack.digests == {name: tensor_digest(tensor) for name, tensor in WEIGHTS.items()}
            assert_arrived(engine)
        assert updates.way is not None
        assert updates.way.kind == ("ipc" if shares else "host")
        assert len(gpu.opened) == len(set(gpu.opened))
        assert gpu.groups == 0
    assert ("cannot read the trainer's GPU memory" in caplog.text) is not shares


def test_a_rank_beside_the_trainer_that_takes_no_bucket_ends_the_update_in_time(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = threading.Event()
    with in_this_process(gpu) as (updates, engine):
        updates._ack_s = 0.05
        monkeypatch.setattr(engine, "take_bucket", lambda *_: free.wait())
        with pytest.raises(DeadlineError, match=r"did not acknowledge bucket 0 of trainer rank 0 .* within 0\.05 s"):
            updates.send(WEIGHTS.items(), 1)
        assert updates.way is None, "a rank may still be reading there"
        free.set()


def test_an_update_without_way_or_end_is_none_for_ranks_beside_the_trainer(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.shares = False
    with in_this_process(gpu, "ipc") as (updates, engine):
        with pytest.raises(WeightSyncError, match="do not reach the engine, ipc"):
            updates.send(WEIGHTS.items(), 1)
        assert engine.updates == 0, "nothing was begun"
        gpu.shares = True
        finish = engine.finish_update
        monkeypatch.setattr(engine, "finish_update", lambda version, counts: finish(version, counts)[:1])
        with pytest.raises(WeightSyncError, match="1 engine ranks ended the update, not 2"):
            updates.send(WEIGHTS.items(), 1)


def test_a_broadcast_carries_them_where_memory_cannot_be_mapped_and_its_group_is_made_once(gpu: Gpu) -> None:
    gpu.shares = False
    with connected(gpu) as (remote, engine):
        for version in (1, 2):
            remote.update_weights(WEIGHTS.items(), version)
            assert_arrived(engine)
        assert kind_of(remote) == "nccl"
        assert gpu.groups == 1
        assert gpu.closed == 0
    assert gpu.closed == 1


def test_the_hosts_memory_carries_them_where_neither_works_and_the_log_says_why(
    gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.shares = gpu.connects = False
    with caplog.at_level(logging.WARNING), connected(gpu) as (remote, engine):
        remote.update_weights(WEIGHTS.items(), 1)
        assert_arrived(engine)
        assert kind_of(remote) == "host"
    assert "event=weight_carrier kind=host" in caplog.text
    assert "cannot read the trainer's GPU memory" in caplog.text
    assert "waited for the others in vain" in caplog.text


def test_no_memory_for_a_probe_is_a_reason_for_the_next_way(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(carrier: IpcCarrier, nbytes: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    gpu.connects = False
    monkeypatch.setattr(IpcCarrier, "room", full)
    with caplog.at_level(logging.WARNING), connected(gpu) as (remote, engine):
        remote.update_weights(WEIGHTS.items(), 1)
        assert_arrived(engine)
        assert kind_of(remote) == "host"
    assert "no memory for a probe: CUDA out of memory" in caplog.text


@pytest.mark.parametrize("wish", ["ipc", "nccl"])
def test_a_way_that_is_asked_for_and_does_not_reach_the_engine_fails_before_anything_is_written(gpu: Gpu, wish: Wish) -> None:
    gpu.shares = gpu.connects = False
    with connected(gpu, wish) as (remote, engine):
        with pytest.raises(WeightSyncError, match=f"do not reach the engine, {wish}") as caught:
            remote.update_weights(WEIGHTS.items(), 1)
        assert "engine.weight_carrier=host" in caught.value.hint
        assert remote.version == 0
        assert engine.updates == 0
        gpu.shares = gpu.connects = True  # it works again without a new server
        remote.update_weights(WEIGHTS.items(), 2)
        assert kind_of(remote) == wish


def test_bytes_that_change_on_the_way_are_an_error_and_the_next_update_has_a_new_group(gpu: Gpu) -> None:
    gpu.broken = True
    with connected(gpu, "nccl") as (remote, engine):
        with pytest.raises(WeightSyncError, match="changed, in bucket 0 of trainer rank 0"):
            remote.update_weights(WEIGHTS.items(), 1)
        assert remote.version == 0
        assert gpu.closed == 1
        gpu.broken = False
        remote.call("read_probes", ways.Probe().payload)  # behind all buckets of the update that failed
        assert gpu.sent.empty(), "a bucket that was refused was not received, and its broadcast would wait for ever"
        remote.update_weights(WEIGHTS.items(), 2)
        assert_arrived(engine)
        assert gpu.groups == 2


def test_memory_that_cannot_be_opened_any_more_is_an_error_of_the_publish(gpu: Gpu) -> None:
    with connected(gpu, "ipc") as (remote, _):
        remote.update_weights(WEIGHTS.items(), 1)
        gpu.shares = False
        with pytest.raises(WeightSyncError, match="GPU memory cannot be opened here: peer access is not supported"):
            remote.update_weights(WEIGHTS.items(), 2)
        assert remote.version == 1


class Queued(torch.nn.Parameter):
    """A parameter on a GPU, as far as copies into it are concerned: they run when somebody waits for the stream."""

    waiting: ClassVar[list[tuple[torch.Tensor, torch.Tensor]]] = []

    def copy_(self, other: torch.Tensor, non_blocking: bool = False) -> "Queued":
        self.waiting.append((self.data, other))
        return self

    @classmethod
    def run(cls) -> None:
        for target, source in cls.waiting:
            target.copy_(source)
        cls.waiting.clear()


def test_the_transformers_engine_acknowledges_a_bucket_when_all_of_it_was_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=Queued.run))
    parameters: dict[str, torch.nn.Parameter] = {"a": Queued(torch.zeros(64)), "b": Queued(torch.zeros(64))}
    weights = ModelWeights(parameters.items(), torch.device("cuda"))
    weights.begin(1)
    sent = torch.arange(128, dtype=torch.float32)
    memory = sent.view(torch.uint8).clone()
    halves = [
        Entry(name, "float32", (64,), start, 256, tensor_digest(sent[start // 4 :][:64]))
        for name, start in (("a", 0), ("b", 256))
    ]
    weights.take(Bucket(1, 0, 0, tuple(halves)), cast(Payload, SimpleNamespace(open=lambda: memory)))
    memory.zero_()  # it was acknowledged, so it is the sender's again
    Queued.run()
    assert torch.equal(torch.cat([parameters["a"].data, parameters["b"].data]), sent)


def test_the_device_is_where_torch_takes_it_from() -> None:
    """Of what an export holds, which is torch's own business, one number is replaced."""
    assert list(inspect.signature(rebuild_cuda_tensor).parameters)[device_carriers._DEVICE] == "storage_device"


def test_a_peer_that_does_not_come_is_waited_for_so_long_and_no_longer() -> None:
    answers: queue.Queue[Group] = queue.Queue()
    with pytest.raises(WeightSyncError, match=r"rank 0 of 3 of the weights' NCCL group waited 0\.01 s for the others"):
        within(answers.get, 0.01, "rank 0 of 3")
    answers.put(cast(Group, SimpleNamespace(close=lambda: None)))  # frees the thread that was left behind
    with pytest.raises(WeightSyncError, match="rank 1 of 3 of the weights' NCCL group cannot join: no such device"):
        within(lambda: (_ for _ in ()).throw(RuntimeError("no such device")), 60, "rank 1 of 3")


def test_a_refusal_of_the_engine_to_join_ends_the_wait_for_it_and_is_the_cause(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = threading.Event()

    def join(invitation: Invitation, rank: int, device: Any, answer: Any = None) -> Group:
        return within(lambda: cast(Group, never.wait()), START_S, f"rank {rank}", answer)

    def refuse(invitation: Invitation) -> None:
        raise WeightSyncError("this engine joins no group", hint="set engine.kind=vllm")

    monkeypatch.setattr(ways, "join", join)
    with connected(gpu, "nccl") as (remote, engine):
        monkeypatch.setattr(engine, "join_group", refuse)
        with pytest.raises(WeightSyncError, match="nccl: this engine joins no group"):
            remote.update_weights(WEIGHTS.items(), 1)
    never.set()


def test_a_group_that_is_connected_when_nobody_waits_for_it_any_more_is_left() -> None:
    connected_late, left = threading.Event(), threading.Event()

    def connect() -> Group:
        connected_late.wait(START_S)
        return cast(Group, SimpleNamespace(close=left.set))

    with pytest.raises(WeightSyncError, match="in vain"):
        within(connect, 0.01, "rank 0 of 3")
    connected_late.set()
    assert left.wait(START_S)


@dataclass
class Waiting(FakeGroup):
    """A broadcast that waits, as NCCL's do, for ranks that do not come, until its group is closed."""

    closing: threading.Event = field(default_factory=threading.Event)

    def broadcast(self, memory: torch.Tensor) -> None:
        self.closing.wait()
        raise WeightSyncError("the group was closed")

    def close(self) -> None:
        super().close()
        self.closing.set()


@contextmanager
def broadcasting(gpu: Gpu, group: Group, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RemoteEngine, TwoRanks]]:
    """The trainer's end of the group is this one; the engine's is not there."""
    monkeypatch.setattr(ways, "join", lambda *_, answer: group)
    with connected(gpu, "nccl") as (remote, engine):
        monkeypatch.setattr(engine, "join_group", lambda invitation: None)
        yield remote, engine


@pytest.mark.parametrize("lost", [False, True])
def test_an_error_of_a_rank_ends_a_broadcast_that_it_does_not_come_to(
    lost: bool, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Waiting(gpu, 0)
    with broadcasting(gpu, group, monkeypatch) as (remote, engine):

        def fail(bucket: Bucket, payload: Payload) -> Sequence[BucketAck]:
            if lost:
                remote._lose(ServerLostError("the engine's process died"))
            raise torch.OutOfMemoryError("no memory for a bucket")

        monkeypatch.setattr(engine, "take_bucket", fail)
        with pytest.raises(OpenTinkerError, match="process died" if lost else "no memory for a bucket"):
            remote.update_weights(WEIGHTS.items(), 1)
        assert group.closing.is_set(), "its thread would stay"
        assert remote.version == 0


def test_a_broadcast_that_a_rank_does_not_come_to_ends_in_time_though_the_rank_says_nothing(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, free = Waiting(gpu, 0), threading.Event()
    with broadcasting(gpu, group, monkeypatch) as (remote, engine):
        remote._updates._ack_s = 0.05
        monkeypatch.setattr(engine, "take_bucket", lambda *_: free.wait())
        with pytest.raises(DeadlineError, match=r"did not come for a bucket within 0\.05 s"):
            remote.update_weights(WEIGHTS.items(), 1)
        free.set()
    assert group.closing.is_set()


def test_an_engine_rank_does_not_wait_without_end_for_a_trainer_that_failed(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_carriers, "RECEIVE_S", 0.05)
    group = Waiting(gpu, 1)
    Joined.replace(group)
    with pytest.raises(WeightSyncError, match=r"engine rank 1 did not receive a bucket: it did not come within 0\.05 s"):
        BroadcastPayload(8).open(1)
    assert group.closing.is_set()
    with pytest.raises(WeightSyncError, match="has not joined"):
        BroadcastPayload(8).open(1)  # that of the next bucket, which was announced as well


def test_a_rank_without_memory_for_a_bucket_says_so_and_leaves(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    Joined.replace(Waiting(gpu, 1))
    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(WeightSyncError, match="engine rank 1 did not receive a bucket: out of memory"):
        BroadcastPayload(8).open(1)
    assert Joined.group is None


class Communicator:
    """vLLM's, whose broadcasts pass unnoticed once it was destroyed."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.entered, self.destroyed = threading.Event(), threading.Event()

    def broadcast(self, memory: torch.Tensor, src: int, stream: Any) -> None:
        self.entered.set()

    def destroy(self) -> None:
        self.destroyed.set()


def test_a_broadcast_that_is_cut_off_by_a_close_is_an_error_and_so_is_one_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    communicator = Communicator()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(synchronize=communicator.destroyed.wait))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    group = NcclGroup(communicator)
    brought = in_thread(lambda: group.broadcast(torch.zeros(1)), "broadcast")
    assert communicator.entered.wait(START_S)
    group.close()
    with pytest.raises(WeightSyncError, match="was closed"):
        brought.result(START_S)
    with pytest.raises(WeightSyncError, match="was closed"):
        group.broadcast(torch.zeros(1))
    group.close()
