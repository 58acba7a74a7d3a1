"""State in the host's memory is stepped as on the device, bit for bit, in whatever order copies and computations happen."""

import random
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from opentinker.client.messages import AdamParams
from opentinker.errors import TooLargeError, TrainerError
from opentinker.server.trainer import host_memory, state_stream
from opentinker.server.trainer.eight_bit import EightBitOptimizer
from opentinker.server.trainer.host_memory import BLOCK_BYTES, HostMemory
from opentinker.server.trainer.lanes import Lanes
from opentinker.server.trainer.optimizer import MasterOptimizer, TornError
from opentinker.server.trainer.peak import peak_bytes
from opentinker.server.trainer.ranks import Ranks
from opentinker.server.trainer.row_optimizer import RowOptimizer
from opentinker.server.trainer.state_plan import BUCKET, GRAIN, device_bytes, state_plan
from opentinker.server.trainer.state_stream import Host

CPU = torch.device("cpu")
PARAMS = AdamParams(learning_rate=0.01, weight_decay=0.1, max_grad_norm=1.0)
KINDS = [MasterOptimizer, EightBitOptimizer]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = {"embeddings": (2 * GRAIN + 4321,), "norm": (7,), "layer": (300, 301), "bias": (1,), "small": (70, 80)}


class AnyOrder:
    """Lanes whose work is done late, in any order that their marks allow: in that in which streams of a GPU may do it."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._queues: list[list[Any]] = [[], [], []]
        self._done = [0, 0, 0]
        self.fails_after: int | None = None
        """Pieces of work after which one fails."""

    def lanes(self) -> Lanes:
        return Lanes(CPU, *(SimpleNamespace(**self._lane(index)) for index in range(3)), self.finish)  # type: ignore[arg-type]

    def _lane(self, index: int) -> dict[str, Callable[..., Any]]:
        queue = self._queues[index]

        def put(item: Any) -> None:
            queue.append(item)
            for _ in range(self._random.randrange(3)):
                self._progress()

        return {"run": put, "mark": lambda: (index, self._done[index] + len(queue)), "wait": lambda mark: put(mark)}

    def _progress(self) -> bool:
        """One piece of work of some lane that waits for none; whether there was any."""
        for index in self._random.sample(range(3), 3):
            queue = self._queues[index]
            if not queue or (isinstance(queue[0], tuple) and self._done[queue[0][0]] < queue[0][1]):
                continue
            item = queue.pop(0)
            self._done[index] += 1
            if not isinstance(item, tuple):
                if self.fails_after is not None:
                    self.fails_after -= 1
                    if self.fails_after < 0:
                        for each in self._queues:
                            each.clear()
                        raise torch.OutOfMemoryError("out of memory")
                item()
            return True
        assert not any(self._queues), "the lanes wait for each other"
        return False

    def finish(self) -> None:
        while self._progress():
            pass


def no_room(*_: Any) -> None:
    raise torch.OutOfMemoryError("out of memory")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small operations, which threads make no faster where others use the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_stream, "state_plan", partial(state_plan, limit=GRAIN))


def parameters(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype), requires_grad=False)
        for name, shape in SHAPES.items()
    }


def host(seed: int = 0) -> tuple[Host, AnyOrder]:
    order = AnyOrder(seed)
    return Host(HostMemory(lambda block: lambda: None), order.lanes()), order


def add_gradients(optimizer: MasterOptimizer, seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in optimizer.parameters.values():
        gradient = torch.randn(parameter.shape, generator=generator) * scale
        (parameter * gradient.to(parameter.dtype)).sum().backward()  # type: ignore[no-untyped-call]


def everything(optimizer: MasterOptimizer) -> dict[str, torch.Tensor]:
    weights = {f"weight/{name}": parameter.detach() for name, parameter in optimizer.parameters.items()}
    return {key: tensor.clone() for key, tensor in {**optimizer.state(), **weights}.items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for key, tensor in one.items():
        assert tensor.dtype == other[key].dtype
        assert torch.equal(tensor.view(-1).view(torch.uint8), other[key].view(-1).view(torch.uint8)), key


@given(st.lists(st.integers(0, 5 * GRAIN), max_size=8), st.sets(st.integers(0, 7)), st.integers(1, 3))
def test_a_plan_has_every_number_once_in_buckets_of_a_bounded_size(sizes: list[int], uncut: set[int], grains: int) -> None:
    names = {f"{index}": size for index, size in enumerate(sizes)}
    whole = {f"{index}" for index in uncut}
    buckets = state_plan(names, whole, grains * GRAIN)
    pieces = [piece for bucket in buckets for piece in bucket]
    for name, size in names.items():
        own = [piece for piece in pieces if piece.name == name]
        assert [piece.start for piece in own] == [0, *(piece.stop for piece in own[:-1])][: len(own)]
        assert sum(map(len, own)) == size
        assert len(own) == 1 or name not in whole
        assert all(piece.start % GRAIN == 0 and len(piece) for piece in own) or name in whole
    assert [piece.name for piece in pieces] == sorted((piece.name for piece in pieces), key=int)
    for bucket in buckets:
        assert sum(map(len, bucket)) <= grains * GRAIN or sum(map(bool, map(len, bucket))) == 1
        assert sum(map(len, bucket)) <= grains * GRAIN or max(bucket, key=len).name in whole


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_are_those_of_state_on_the_device_bit_for_bit(kind: type[MasterOptimizer], dtype: torch.dtype) -> None:
    for seed in range(2):
        streamed, plain = kind(parameters(dtype), host(seed)[0]), kind(parameters(dtype))
        for step in range(3):
            for optimizer in (streamed, plain):
                add_gradients(optimizer, step, 0.1)
            assert streamed.step(PARAMS) == plain.step(PARAMS) > 0
            assert_same(everything(streamed), everything(plain))
        assert streamed.report_step(PARAMS) == plain.report_step(PARAMS)  # without gradients
        assert_same(everything(streamed), everything(plain))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_with_learning_rate_zero_no_bit_of_a_weight_moves(kind: type[MasterOptimizer], dtype: torch.dtype) -> None:
    streamed, plain = kind(parameters(dtype), host()[0]), kind(parameters(dtype))
    for optimizer in (streamed, plain):
        for parameter in optimizer.parameters.values():
            parameter.data.view(-1)[:1] = -0.0
        optimizer.load_state(
            {**optimizer.state(), **{f"master/{n}": p.detach().float() for n, p in optimizer.parameters.items()}}, 0
        )
        add_gradients(optimizer, 0)
        optimizer.step(AdamParams(learning_rate=0.0, weight_decay=0.1))
    assert_same(everything(streamed), everything(plain))
    assert streamed.parameters["bias"].view(torch.uint8).any()


@pytest.mark.parametrize("kind", KINDS)
def test_what_one_saves_the_other_continues_bit_for_bit(kind: type[MasterOptimizer]) -> None:
    streamed, plain = kind(parameters(torch.bfloat16), host()[0]), kind(parameters(torch.bfloat16))
    for source, target in ((streamed, plain), (plain, streamed)):
        add_gradients(source, 5)
        source.step(PARAMS)
        target.load_state(source.state(), source.step_count)
        assert_same(everything(source), everything(target))
    for optimizer in (streamed, plain):
        add_gradients(optimizer, 6)
        optimizer.step(PARAMS)
    assert_same(everything(streamed), everything(plain))
    for optimizer in (streamed, plain):
        optimizer.start_from({key: tensor.clone() for key, tensor in plain.weights().items()})
        add_gradients(optimizer, 7)
        optimizer.step(PARAMS)
    assert_same(everything(streamed), everything(plain))


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_is_refused_changes_nothing(kind: type[MasterOptimizer]) -> None:
    optimizer = kind(parameters(torch.bfloat16), host()[0])
    add_gradients(optimizer, 0)
    optimizer.step(PARAMS)
    before = everything(optimizer)
    add_gradients(optimizer, 1, float("inf"))
    with pytest.raises(TrainerError, match="gradient norm"):
        optimizer.step(PARAMS)
    assert_same(everything(optimizer), before)


def test_a_step_of_float16_gradients_that_do_not_fit_is_skipped() -> None:
    optimizer = MasterOptimizer(parameters(torch.float16), host()[0])
    before = everything(optimizer)
    add_gradients(optimizer, 0, float("inf"))
    assert optimizer.step(PARAMS) == 0.0
    assert optimizer.loss_scale is not None
    assert optimizer.loss_scale.skipped == 1
    assert_same(everything(optimizer), before)


@pytest.mark.parametrize("kind", KINDS)
def test_without_room_on_the_device_nothing_changes_and_the_gradients_stay(
    kind: type[MasterOptimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer, plain = kind(parameters(torch.bfloat16), host()[0]), kind(parameters(torch.bfloat16))
    for each in (optimizer, plain):
        add_gradients(each, 0)
    before = everything(optimizer)

    with monkeypatch.context() as patch:  # in the rehearsal, which is the last that a step takes memory for
        patch.setattr(optimizer, "_adamw", no_room)
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step(PARAMS)
    assert_same(everything(optimizer), before)
    assert optimizer.step(PARAMS) == plain.step(PARAMS)
    assert_same(everything(optimizer), everything(plain))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("after", [0, 1, 4, 8])
def test_a_step_that_fails_amid_the_parameters_says_so_until_a_state_is_loaded(kind: type[MasterOptimizer], after: int) -> None:
    where, order = host()
    optimizer, plain = kind(parameters(torch.bfloat16), where), kind(parameters(torch.bfloat16))
    for each in (optimizer, plain):
        add_gradients(each, 0)
        each.step(PARAMS)
        add_gradients(each, 1)
    order.fails_after = after
    with pytest.raises(TornError, match="failed amid the parameters: out of memory"):
        optimizer.step(PARAMS)
    order.fails_after = None
    for _ in range(2):
        with pytest.raises(TornError, match="some parameters had made it and others not: out of memory"):
            optimizer.step(PARAMS)
    optimizer.load_state(plain.state(), plain.step_count)
    add_gradients(optimizer, 1)
    assert optimizer.step(PARAMS) == plain.step(PARAMS)
    assert_same(everything(optimizer), everything(plain))


def test_a_device_that_is_broken_says_what_broke_it_though_no_lane_can_be_waited_for() -> None:
    where, order = host()
    freed: list[int] = []

    def broken() -> None:
        order.finish()
        freed.append(1)
        raise RuntimeError("no lane answers")

    optimizer = MasterOptimizer(parameters(torch.bfloat16), Host(where.memory, replace(where.lanes, finish=broken)))
    order.fails_after = 2
    with pytest.raises(TornError, match="failed amid the parameters: out of memory"):
        optimizer.step(PARAMS)
    assert freed, "it was waited for all the same"


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_of_a_step_on_the_device_says_so_too(kind: type[MasterOptimizer], monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = kind(parameters(torch.bfloat16))
    add_gradients(optimizer, 0)
    with monkeypatch.context() as patch:
        patch.setattr(optimizer, "_publish_own", lambda: 1 / 0)
        with pytest.raises(TornError, match="division by zero"):
            optimizer.step(PARAMS)
    with pytest.raises(TornError):
        optimizer.step(PARAMS)
    optimizer.start_from({key: tensor.clone() for key, tensor in optimizer.weights().items()})
    optimizer.step(PARAMS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_takes_no_more_of_the_device_than_is_foreseen_and_all_of_it_before_it_begins(
    kind: type[MasterOptimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_stream, "state_plan", state_plan)
    weight = nn.Parameter(torch.zeros(2 * BUCKET + GRAIN, dtype=torch.bfloat16), requires_grad=False)
    optimizer = kind({"w": weight}, Host.of(CPU))
    for _ in range(2):  # the first makes what stays
        optimizer.gradient("w").fill_(1.0)
        taken = peak_bytes(CPU, lambda: optimizer.step(AdamParams(learning_rate=1.0, max_grad_norm=None)))

    def rehearsal() -> None:
        with optimizer._room(PARAMS):
            pass

    rehearsed = peak_bytes(CPU, rehearsal)
    assert rehearsed >= taken - 2**10
    assert taken <= device_bytes(weight.numel()) == device_bytes(1e12)
    assert float(weight.detach()[-1]) < 0


def test_memory_of_the_host_is_zero_disjoint_and_locked_block_by_block_until_it_is_closed() -> None:
    locked: list[int] = []

    def lock(block: torch.Tensor) -> Callable[[], None]:
        locked.append(block.data_ptr())
        return partial(locked.remove, block.data_ptr())

    memory = HostMemory(lock)
    shapes: list[tuple[tuple[int, ...], torch.dtype]] = [
        ((3, 5), torch.float32),
        ((7,), torch.uint8),
        ((BLOCK_BYTES,), torch.float32),
        ((0, 4), torch.float32),
        ((BLOCK_BYTES // 4,), torch.float32),
    ]
    tensors = [memory.zeros(*each) for each in shapes]
    assert len(locked) == 3
    for number, (tensor, (shape, dtype)) in enumerate(zip(tensors, shapes, strict=True)):
        assert (tensor.shape, tensor.dtype) == (torch.Size(shape), dtype)
        assert not tensor.any()
        tensor.fill_(number + 1)
    assert all((tensor == number + 1).all() for number, tensor in enumerate(tensors))
    memory.close()
    memory.close()
    assert locked == []
    assert (tensors[0] == 1).all()


def test_a_host_without_memory_refuses_and_leaves_the_parameters_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: Any, **__: Any) -> Any:
        raise OSError("Cannot allocate memory")

    unlocked: list[int] = []
    memory = HostMemory(lambda block: lambda: unlocked.append(len(block)))
    memory.zeros((BLOCK_BYTES,), torch.uint8)
    weights = parameters(torch.bfloat16)
    monkeypatch.setattr(host_memory.mmap, "mmap", exhausted)
    with pytest.raises(TooLargeError, match=r"no \d+ bytes for optimizer state.*trainer.optimizer_state=device"):
        MasterOptimizer(weights, Host(memory, host()[0].lanes))
    assert unlocked == [BLOCK_BYTES]
    assert not any(weight.requires_grad for weight in weights.values())


def test_a_parameter_that_is_not_contiguous_is_refused() -> None:
    with pytest.raises(TrainerError, match=r"\[5, 3\] is not contiguous.*trainer.optimizer_state=device"):
        MasterOptimizer({"w": nn.Parameter(torch.zeros(3, 5).T)}, host()[0])


class Votes:
    """The first of two ranks; the other one's vote is known."""

    count, device = 2, CPU

    def __init__(self, other: bool) -> None:
        self.other = other
        self.asked: list[bool] = []

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[: -(-len(tensor) // 2)]

    def agree(self, fine: bool) -> bool:
        self.asked.append(fine)
        return fine and self.other


@pytest.mark.parametrize("other", [True, False])
def test_ranks_step_only_if_all_have_room(other: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Votes(other)
    optimizer = RowOptimizer(parameters(torch.bfloat16), cast(Ranks, ranks), host=host()[0])
    held: list[Any] = []

    def exhausted(pieces: Any, masters: Any, gradients: list[torch.Tensor], *_: Any) -> None:
        held.extend(map(weakref.ref, gradients))
        raise torch.OutOfMemoryError("out of memory")

    if other:
        monkeypatch.setattr(optimizer, "_move", exhausted)
    with pytest.raises(TrainerError, match=r"no room on some rank's device.*nothing was trained"):
        optimizer.step(PARAMS)
    assert ranks.asked == [not other]
    assert bool(held) is other
    assert not [each for each in held if each() is not None], "an error that is kept keeps no tensors"
    assert optimizer.step_count == 0
    optimizer.check_whole()
