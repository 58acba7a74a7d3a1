"""The ranks of a vLLM engine that are processes of their own: how they start, how they are called, how their end is noticed."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from signal import SIGTERM, Signals
from typing import Any, Generic, TypeVar

import torch

from opentinker.errors import EngineError, OpenTinkerError, ServerLostError, WeightSyncError

CALL_S = 600.0
"""Ranks that have not answered a call for which vLLM has no limit of its own after this long count as stuck."""
LOOK_S = 1.0
"""How long the end of a process may come after the error that it causes elsewhere."""

T = TypeVar("T")
log = logging.getLogger(__name__)


class EngineRanksLostError(EngineError, ServerLostError):
    """A rank's process is gone, or failed in what ranks do together: for clients the server is lost."""

    code = ServerLostError.code
    status = ServerLostError.status


@contextmanager
def starting(ranks: int, *, on_cpu: bool, compiles: bool) -> Iterator[None]:
    """While the ranks start, this process has what they inherit of it: their share of its threads, and of the environment what
    vLLM and torch read there. After it, it has what it had."""
    threads = torch.get_num_threads()
    share = max(1, threads // ranks)
    inherited = {"OMP_NUM_THREADS": str(share)}
    if on_cpu:
        # vLLM would give each rank a NUMA node of its own, and refuse to start where there are fewer.
        inherited["VLLM_CPU_OMP_THREADS_BIND"] = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        if not compiles:
            inherited["TORCHDYNAMO_DISABLE"] = "1"
    before = {name: os.environ.get(name) for name in inherited}
    os.environ.update(inherited)
    torch.set_num_threads(share)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        torch.set_num_threads(threads)


def limit_calls(executor: Any) -> None:
    """Let no call of the ranks wait for ever: vLLM limits steps (5 minutes), and nothing else.

    The executor then raises:
        TimeoutError: a rank has not answered in time. Its answer would be taken for that to the next call.
    """
    call = executor.collective_rpc

    def limited(method: "str | Callable[..., Any]", timeout: float | None = None, *args: Any, **kwargs: Any) -> Any:
        limit_s = CALL_S if timeout is None else timeout
        try:
            return call(method, limit_s, *args, **kwargs)
        except TimeoutError as error:
            raise TimeoutError(f"no answer to '{_name(method)}' within {limit_s:g} s") from error

    executor.collective_rpc = limited


def _name(method: "str | Callable[..., Any]") -> str:
    """Of a method, of a function, or of one that is attempted."""
    called = method.args[0] if isinstance(method, partial) else method
    return called if isinstance(called, str) else str(called.__name__)


def lost(executor: Any, error: Exception) -> EngineRanksLostError:
    """A call failed otherwise than by an answer (`attempt`): which rank's process has ended, if one has. The others may wait in
    an exchange, or have answers to give that nobody asks for any more, so none is of any use."""
    workers = {worker.proc.sentinel: worker for worker in executor.workers}
    if not connection.wait(list(workers), LOOK_S):
        return EngineRanksLostError(f"the {len(workers)} ranks of the engine failed: {error}", hint=_HINT)
    ended = [worker for worker in workers.values() if not worker.proc.is_alive()]
    # vLLM ends the others when one has died: with 0, or SIGTERM.
    first = min(ended, key=lambda worker: (worker.proc.exitcode in (None, 0, -SIGTERM), worker.rank))
    code = first.proc.exitcode
    how = "died" if code is None else f"exited with code {code}" if code >= 0 else f"was killed by {Signals(-code).name}"
    return EngineRanksLostError(f"rank {first.rank} of {len(workers)} of the engine (pid {first.proc.pid}) {how}", hint=_HINT)


_HINT = "the last checkpoint holds; the server's log has the traceback: `opentinker logs JOB --server`"


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What a function gave on one rank."""

    value: T | None
    error: OpenTinkerError | None = None


def attempt(function: Callable[..., T], worker: Any, *arguments: Any) -> Outcome[T]:
    """Runs on a rank. An error is an answer like any other: of those that vLLM raises, it leaves the other ranks' answers for
    the next call to find, and keeps no more than the words."""
    try:
        return Outcome(function(worker, *arguments))
    except OpenTinkerError as error:
        return Outcome(None, error)
    except Exception as error:
        log.exception("rank %d of the engine failed", worker.rank)
        return Outcome(None, WeightSyncError(f"vLLM does not take these tensors: {error!r}"))


def values(outcomes: Sequence[Outcome[T]]) -> list[T]:
    """What the ranks gave.

    Raises:
        OpenTinkerError: the error of the first that failed.
    """
    given: list[T] = []
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
        given.append(outcome.value)  # type: ignore[arg-type]
    return given


class Beside:
    """Calls an engine's methods one after the other, beside the thread that asks: its ranks take a bucket while the next one is
    filled. Nobody else uses the engine meanwhile."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine-updates")

    def start(self, method: str, *args: Any) -> "Future[Any]":
        return self._thread.submit(getattr(self._engine, method), *args)

    def call(self, method: str, *args: Any) -> Any:
        """What the method returns, or raises: it does so in time, see `limit_calls`."""
        return self.start(method, *args).result()

    def close(self) -> None:
        """Give up what waits; what runs ends with the ranks."""
        self._thread.shutdown(wait=False, cancel_futures=True)
