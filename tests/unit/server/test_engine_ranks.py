"""The ranks of an engine that are processes of their own: what they inherit, what their errors say, how their end is seen."""

import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from opentinker.errors import EngineError, ServerLostError, WeightSyncError
from opentinker.server.engine import vllm_ranks
from opentinker.server.engine.vllm_ranks import Beside, attempt, limit_calls, lost, starting, values

THREADS = 6


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


def test_ranks_inherit_their_share_of_the_threads_and_this_process_keeps_its_own(
    threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(THREADS))
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-1|2-3")
    before = dict(os.environ)

    def start(ranks: int, share: int) -> None:
        with starting(ranks, on_cpu=True, compiles=False):
            assert torch.get_num_threads() == share
            assert os.environ["OMP_NUM_THREADS"] == str(share)
            assert os.environ["TORCHDYNAMO_DISABLE"] == "1"
            assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "0-1|2-3", "who sets it knows the machine"
            raise EngineError("vLLM cannot start")

    for ranks, share in ((2, 3), (4, 1), (8, 1)):
        with pytest.raises(EngineError):
            start(ranks, share)
        assert dict(os.environ) == before, "the trainer in this process may compile"
        assert torch.get_num_threads() == THREADS
    with starting(2, on_cpu=False, compiles=False):
        assert os.environ.keys() == before.keys(), "on GPUs they get nothing but threads"


def working(worker: Any, number: int) -> int:
    return 10 * worker.rank + number


def refusing(worker: Any) -> None:
    raise WeightSyncError(f"engine rank {worker.rank} got 'a' changed", hint="send it again")


def failing(worker: Any) -> None:
    raise KeyError("model.layers.7")


def test_the_answers_of_the_ranks_cross_processes_and_errors_keep_their_kind_and_words() -> None:
    workers = [SimpleNamespace(rank=rank) for rank in range(2)]
    assert values([pickle.loads(pickle.dumps(attempt(working, worker, 3))) for worker in workers]) == [3, 13]
    with pytest.raises(WeightSyncError, match="rank 1 got 'a' changed") as caught:
        values([attempt(working, workers[0], 1), pickle.loads(pickle.dumps(attempt(refusing, workers[1])))])  # type: ignore[list-item]
    assert caught.value.hint == "send it again"
    with pytest.raises(WeightSyncError, match=r"does not take these tensors: KeyError\('model.layers.7'\)"):
        values([attempt(failing, workers[0])])


class Executor:
    """What vLLM has of its ranks: processes."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        procs = [context.Process(target=time.sleep, args=(600,), daemon=True) for _ in range(2)]
        self.workers = [SimpleNamespace(rank=rank, proc=proc) for rank, proc in enumerate(procs)]
        for proc in procs:
            proc.start()

    def end(self, rank: int, number: int) -> int:
        proc = self.workers[rank].proc
        os.kill(proc.pid, number)
        proc.join()
        return int(proc.pid)


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Executor]:
    monkeypatch.setattr(vllm_ranks, "LOOK_S", 0.05)
    started = Executor()
    yield started
    for worker in started.workers:
        worker.proc.kill()


def test_a_rank_that_was_killed_is_named_though_others_were_ended_after_it(executor: Executor) -> None:
    stuck = lost(executor, TimeoutError("RPC call to execute_model timed out."))
    assert "the 2 ranks of the engine failed: RPC call to execute_model timed out." in str(stuck)
    killed = executor.end(1, signal.SIGKILL)
    executor.end(0, signal.SIGTERM)  # as vLLM does then
    error = lost(executor, RuntimeError("cancelled"))
    assert isinstance(error, ServerLostError)
    assert isinstance(error, EngineError)
    assert f"rank 1 of 2 of the engine (pid {killed}) was killed by SIGKILL" in str(error)
    assert error.to_problem()["code"] == "server_lost"


def test_no_call_of_the_ranks_waits_for_ever_and_one_that_takes_too_long_is_named(executor: Executor) -> None:
    limits: list[float | None] = []

    def collective_rpc(
        method: Any, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> tuple[Any, ...]:
        limits.append(timeout)
        if args == ("stuck",):
            raise TimeoutError(f"RPC call to {method} timed out.")
        return args

    ranks: Any = executor
    ranks.collective_rpc = collective_rpc
    limit_calls(ranks)
    assert ranks.collective_rpc("sleep", kwargs={"level": 1}) == ()
    assert ranks.collective_rpc("execute_model", args=(1,), timeout=300) == (1,)
    assert limits == [vllm_ranks.CALL_S, 300]
    for method, name in (("wake_up", "wake_up"), (working, "working"), (partial(attempt, refusing), "refusing")):
        with pytest.raises(TimeoutError) as caught:
            ranks.collective_rpc(method, None, ("stuck",))
        error = lost(ranks, caught.value)
        assert f"the 2 ranks of the engine failed: no answer to '{name}' within 600 s" in str(error)


class Slow:
    """An engine whose calls wait."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.done: list[int] = []

    def take(self, number: int) -> int:
        assert self.go.wait(60)
        self.done.append(number)
        return number

    def fail(self) -> None:
        raise WeightSyncError("a rank failed")


def test_calls_beside_this_thread_run_in_their_order_and_say_what_went_wrong() -> None:
    engine = Slow()
    beside = Beside(engine)
    answers = [beside.start("take", number) for number in range(3)]
    assert not any(answer.done() for answer in answers), "this thread goes on meanwhile"
    engine.go.set()
    assert beside.call("take", 3) == 3
    with pytest.raises(WeightSyncError, match="a rank failed"):
        beside.call("fail")
    assert [answer.result(60) for answer in answers] == [0, 1, 2]
    assert engine.done == [0, 1, 2, 3]
    beside.close()
    beside.close()
