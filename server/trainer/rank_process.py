"""The processes of ranks 1 to N - 1, and rank 0's side of them: commands go out and answers come back over socket pairs."""

import contextlib
import ctypes
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from opentinker.config.server import TrainerConfig
from opentinker.errors import OpenTinkerError, ServerLostError, TrainerError
from opentinker.server.images import ImageProcessor, ImageStore
from opentinker.server.trainer.rank_trainer import AgreedError, RankTrainer
from opentinker.server.trainer.ranks import Meeting, Ranks
from opentinker.server.vision import takes_images

START_S = 180.0
"""How long a process may take to import what it needs."""
LOAD_S = 1800.0
"""How long a rank may take to load the model."""
REPORT_S = 5.0
"""How long ranks that fail may take to say why."""
STOP_S = 5.0
_SET_PARENT_DEATH_SIGNAL = 1

log = logging.getLogger(__name__)


class RanksLostError(TrainerError, ServerLostError):
    """A rank died, failed alone or did not answer: what the ranks hold of the policies is lost, and for clients the server."""

    code = ServerLostError.code
    status = ServerLostError.status


@dataclass(frozen=True)
class RankSpec:
    """What a rank is started with."""

    rank: int
    meeting: Meeting
    model_dir: str
    config: TrainerConfig
    device: str
    threads: int


class RankProcess:
    """Rank 0's side of one other rank."""

    def __init__(self, spec: RankSpec) -> None:
        self.spec = spec
        ours, theirs = socket.socketpair()
        # A rank that hangs takes no more than a buffer of a message, and may have sent a part of one.
        limit = struct.pack("ll", int(spec.meeting.timeout_s), int(spec.meeting.timeout_s % 1 * 1e6))
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, limit)
        with theirs:
            code = (
                f"import sys; sys.path[:] = {[p or os.getcwd() for p in sys.path]!r}; "
                f"from opentinker.server.trainer.rank_process import main; main({theirs.fileno()}, {os.getpid()})"
            )
            environment = {**os.environ, "OMP_NUM_THREADS": str(spec.threads)}
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), spec.meeting.descriptor],
                env=environment,
            )
        self._connection = Connection(ours.detach())
        self.send(spec)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Any) -> None:
        """Raises: RanksLostError when nobody is there."""
        try:
            self._connection.send(message)
        except BlockingIOError as error:
            raise RanksLostError(f"{self} did not take a command in time", hint=_HINT) from error
        except OSError as error:
            raise self.lost("before it got a command") from error

    def receive(self, deadline: float, doing: str) -> Any:
        """The rank's next answer.

        Raises:
            AgreedError: the command failed on all ranks alike.
            RanksLostError: the rank failed alone, died, or did not answer before the deadline.
        """
        try:
            if not self._connection.poll(max(0.0, deadline - time.monotonic())):
                raise RanksLostError(f"{self} did not answer in time, {doing}", hint=_HINT)
            kind, content = self._connection.recv()
        except BlockingIOError as error:
            raise RanksLostError(f"{self} did not answer in time, {doing}", hint=_HINT) from error
        except (EOFError, OSError) as error:
            raise self.lost(doing) from error
        if kind == "agreed":
            raise AgreedError(content)
        if kind == "failed":
            raise RanksLostError(f"{self} failed {doing}: {content}", hint=_HINT)
        return content

    def lost(self, doing: str) -> RanksLostError:
        """Says how the process ended; it has closed its end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(REPORT_S)
        code = self._process.poll()
        if code is None:
            how = "closed its connection"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"exited with code {code}"
        return RanksLostError(f"{self} {how}, {doing}", hint=_HINT)

    def watch(self, ended: Callable[[], None]) -> None:
        """Call `ended` when the process is gone."""

        def wait() -> None:
            self._process.wait()
            ended()

        threading.Thread(target=wait, name=f"rank-{self.spec.rank}", daemon=True).start()

    def stop(self, *, at_once: bool) -> None:
        """End the process; one that waits for a command ends when its connection is closed."""
        self._connection.close()
        if at_once:
            self._process.kill()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __str__(self) -> str:
        return f"rank {self.spec.rank} of {self.spec.meeting.count} of the trainer (pid {self.pid})"


class RankProcesses:
    """All other ranks. Whatever goes wrong among them once ends them all."""

    def __init__(self, specs: Sequence[RankSpec]) -> None:
        """Start them.

        Raises:
            RanksLostError: one did not start.
        """
        self.lost: RanksLostError | None = None
        self._meeting = specs[0].meeting
        self._processes: list[RankProcess] = []
        try:
            for spec in specs:
                self._processes.append(RankProcess(spec))
            self.collect("while it started", START_S)
        except BaseException:
            self.close(at_once=True)
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes)

    def watch(self, ended: Callable[[], None]) -> None:
        """Call `ended` when one of them is gone."""
        for process in self._processes:
            process.watch(ended)

    def check(self) -> None:
        """Raises: RanksLostError when one was lost before."""
        if self.lost is not None:
            raise RanksLostError(self.lost.detail, hint=self.lost.hint)

    def command(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> None:
        """Let each rank call its trainer's method with arguments of its own.

        Raises:
            RanksLostError: one is gone.
        """
        self.check()
        try:
            for process, mine in zip(self._processes, arguments, strict=True):
                process.send((method, mine))
        except RanksLostError as error:
            raise self.give_up(error) from error

    def collect(self, doing: str, timeout_s: float) -> list[Any]:
        """What each answers; all are heard before anything is raised.

        Raises:
            AgreedError: the command failed on all ranks alike.
            RanksLostError: a rank failed alone, died or did not answer; all are ended.
        """
        answers: list[Any] = []
        agreed: list[AgreedError] = []
        deadline = time.monotonic() + timeout_s
        for process in self._processes:
            try:
                answers.append(process.receive(deadline, doing))
            except AgreedError as error:
                problem = error.problem
                agreed.append(AgreedError(None if problem is None else _of_rank(problem, str(process))))
            except RanksLostError as error:
                raise self.explain(error, doing) from error
        if agreed:
            raise next((error for error in agreed if error.problem is not None), agreed[0])
        return answers

    def explain(self, error: Exception, doing: str) -> RanksLostError:
        """A command failed on rank 0, or a rank was lost: end all, and say whose failure it was. Others saw only its end."""
        found: list[Exception] = [error]
        deadline = time.monotonic() + REPORT_S
        for process in self._processes if _is_echo(error) else ():
            try:
                process.receive(deadline, doing)
            except RanksLostError as lost:
                found.append(lost)
            except Exception:
                continue
        first = min(found, key=lambda each: (_is_echo(each), not isinstance(each, RanksLostError)))
        if isinstance(first, RanksLostError):
            return self.give_up(first)
        count = self._meeting.count
        return self.give_up(RanksLostError(f"rank 0 of {count} of the trainer failed {doing}: {first!r}", hint=_HINT))

    def give_up(self, error: RanksLostError) -> RanksLostError:
        """Refuse every further command with this error."""
        if self.lost is None:
            log.error("event=ranks_lost cause=%r", str(error))
            self.lost = error
        self.close(at_once=True)
        return self.lost

    def close(self, *, at_once: bool = False) -> None:
        """End them; idempotent."""
        processes, self._processes = self._processes, []
        for process in processes:
            process.stop(at_once=at_once)


_HINT = "the last checkpoint holds; the server's log has the traceback: `opentinker logs JOB --server`"


def _of_rank(error: Exception, who: str) -> Exception:
    if isinstance(error, OpenTinkerError):
        error.detail = f"{who}: {error.detail}"
    return error


def _is_echo(error: Exception) -> bool:
    """Whether it only says that another rank is gone."""
    words = ("gloo", "nccl", "connection", "process group", "did not answer in time")
    return any(word in str(error).lower() for word in words)


def main(descriptor: int, parent: int) -> None:
    """Be one rank, until the parent closes the connection or dies."""
    _die_with(parent)
    connection = Connection(descriptor)
    spec: RankSpec = connection.recv()
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format=f"%(asctime)s level=%(levelname)s process=trainer-rank-{spec.rank} logger=%(name)s %(message)s",
        force=True,
    )
    torch.set_num_threads(spec.threads)
    connection.send(("done", None))
    try:
        with contextlib.suppress(EOFError):
            _serve(connection, spec)
    except BaseException as error:
        log.exception("event=rank_failed rank=%s", spec.rank)
        with contextlib.suppress(OSError):
            connection.send(("failed", f"{error!r}" if not isinstance(error, OpenTinkerError) else str(error)))
        # The others may wait for this one in an exchange, and wake up when its connections break.
        os._exit(1)
    os._exit(0)


def _serve(connection: Connection, spec: RankSpec) -> None:
    model_dir, ranks = Path(spec.model_dir), Ranks(spec.meeting, spec.rank, torch.device(spec.device))
    images = ImageStore(ImageProcessor(model_dir)) if takes_images(AutoConfig.from_pretrained(model_dir)) else None
    trainer = RankTrainer(model_dir, spec.config, ranks, images)
    connection.send(("done", None))
    while True:
        method, arguments = connection.recv()
        try:
            answer = ("done", getattr(trainer, method)(*arguments))
        except AgreedError as error:
            answer = ("agreed", _picklable(error.problem))
        if method == "contribute":
            answer = ("done", None)
        connection.send(answer)


def _picklable(error: Exception | None) -> Exception | None:
    """The error as it can be sent; the log has its traceback."""
    if error is None or isinstance(error, OpenTinkerError):
        return error
    log.error("event=command_failed", exc_info=error)
    return TrainerError(f"{error!r}")


def _die_with(parent: int) -> None:
    """End with the parent, also when this process waits in an exchange (Linux)."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
