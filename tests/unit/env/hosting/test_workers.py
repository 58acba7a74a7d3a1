"""A worker process: fast calls share a thread, a hanging one harms nobody else, and no process outlives its parent."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hosted_environments import AsyncDoer, Doer
from hosting_tools import alive, until

from opentinker.env import worker_process
from opentinker.env.environment import Environment
from opentinker.env.frames import CLOSE, DONE, ERROR, OK, RESET, STEP, error_of, pack, unpack
from opentinker.env.reference import reference_of
from opentinker.env.worker_process import WorkerProcess
from opentinker.environments.hosting.pool import WorkerPool
from opentinker.environments.hosting.settings import HostSettings
from opentinker.errors import ConfigError, DeadlineError, EnvironmentFailedError, EnvironmentLoadError

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "GRACE_S", 1.0)


class Talker:
    """One session of a worker."""

    def __init__(self, worker: WorkerProcess, timeout_s: float = 5.0) -> None:
        self.worker = worker
        self.timeout_s = timeout_s
        self.id = os.urandom(16)
        self.turn = 0

    async def reset(self, task: Any = None) -> Any:
        return self.answered(await self.worker.request(RESET, self.id, 0, self.timeout_s, pack([{}, task])))

    async def step(self, text: str, timeout_s: float | None = None) -> Any:
        body = pack([text, False, ""])
        answer = await self.worker.request(STEP, self.id, self.turn, timeout_s or self.timeout_s, body)
        self.turn += 1
        return self.answered(answer)

    async def close(self) -> None:
        self.answered(await self.worker.request(CLOSE, self.id, 0, self.timeout_s, b""))

    def answered(self, answer: tuple[int, bytes]) -> Any:
        if answer[0] == ERROR:
            raise error_of(answer[1])
        return unpack(answer[1]) if answer[1] else None


@asynccontextmanager
async def working(environment: type[Environment] = Doer, *, exclusive: bool = False) -> AsyncIterator[WorkerProcess]:
    worker = WorkerProcess(reference_of(environment), exclusive=exclusive, on_end=lambda _: None)

    async def sweep() -> None:
        while True:
            await asyncio.sleep(0.02)
            worker.sweep(time.monotonic())

    await worker.start()
    sweeping = asyncio.create_task(sweep())
    try:
        yield worker
    finally:
        sweeping.cancel()
        await worker.stop()
        assert not alive(worker.pid)


async def many(worker: WorkerProcess, count: int) -> list[Talker]:
    talkers = [Talker(worker) for _ in range(count)]
    await asyncio.gather(*(talker.reset() for talker in talkers))
    return talkers


@pytest.mark.parametrize("kind", [Doer, AsyncDoer])
async def test_many_sessions_run_beside_each_other(kind: type[Doer]) -> None:
    async with working(kind) as worker:
        talkers = await many(worker, 100)
        for turn in range(3):
            results = await asyncio.gather(*(talker.step(f"say {i}") for i, talker in enumerate(talkers)))
            assert [r[2][0]["content"] for r in results] == [f"{turn}: say {i}" for i in range(100)]
        await asyncio.gather(*(talker.close() for talker in talkers))


@pytest.mark.parametrize("how", ["sleep 30", "spin"])
async def test_a_hanging_step_ends_at_its_deadline_and_delays_nobody(how: str) -> None:
    async with working() as worker:
        talkers = await many(worker, 20)
        hung = [asyncio.ensure_future(talker.step(how, 0.5)) for talker in talkers[:3]]
        start = time.monotonic()
        for _ in range(5):
            await asyncio.gather(*(talker.step("say") for talker in talkers[3:]))
        assert time.monotonic() - start < 25
        for one in hung:
            with pytest.raises(DeadlineError, match=r"Doer\.step did not return within 0\.5 s"):
                await one
        await asyncio.gather(*(talker.step("say") for talker in talkers[3:]))
        assert not worker.ended


async def test_a_loop_of_python_code_is_ended_in_its_thread_so_that_the_worker_stays_fast() -> None:
    async with working() as worker:
        spinning, other = await many(worker, 2)
        with pytest.raises(DeadlineError):
            await spinning.step("spin", 0.1)
        await asyncio.sleep(0.1)
        start = time.monotonic()
        for _ in range(200):
            await other.step("say")
        assert time.monotonic() - start < 15
        assert not worker.retiring


async def test_slow_steps_run_beside_each_other() -> None:
    async with working() as worker:
        talkers = await many(worker, 40)
        start = time.monotonic()
        await asyncio.gather(*(talker.step("sleep 0.3") for talker in talkers))
        first = time.monotonic() - start
        await asyncio.gather(*(talker.step("sleep 0.3") for talker in talkers))
        assert first < 8, "one after the other they take 12"
        assert time.monotonic() - start - first < 8


@pytest.mark.parametrize("how", ["hold 30", "regex"])
async def test_a_worker_whose_interpreter_is_held_is_ended_with_its_sessions(how: str) -> None:
    async with working() as worker:
        holding, other = await many(worker, 2)
        held = asyncio.ensure_future(holding.step(how, 0.3))
        await asyncio.sleep(0.1)
        waiting = asyncio.ensure_future(other.step("say", 30))
        with pytest.raises(DeadlineError):
            await held
        with pytest.raises(EnvironmentFailedError, match="the session was lost: its worker process did not answer any more"):
            await waiting
        assert worker.ended


async def test_an_async_step_that_blocks_the_loop_ends_at_its_deadline_and_a_spin_of_it_is_ended() -> None:
    async with working(AsyncDoer) as worker:
        spinning, other = await many(worker, 2)
        with pytest.raises(DeadlineError):
            await spinning.step("spin", 0.2)
        assert (await other.step("say", 10))[2][0]["content"] == "0: say"
        with pytest.raises(DeadlineError):
            await other.step("wait 30", 0.2)


async def test_a_worker_whose_event_loop_is_blocked_for_good_says_so_and_ends() -> None:
    async with working(AsyncDoer) as worker:
        sleeping, other = await many(worker, 2)
        with pytest.raises(DeadlineError):
            await sleeping.step("sleep 60", 0.2)
        with pytest.raises(EnvironmentFailedError, match="an async method blocked its event loop beyond its deadline"):
            await other.step("say", 30)


@pytest.mark.parametrize(
    ("how", "text"),
    [("die 7", "exited with code 7"), ("killed", "was killed by SIGKILL")],
)
async def test_a_worker_that_dies_loses_its_sessions_with_the_reason(how: str, text: str) -> None:
    async with working() as worker:
        dying, other = await many(worker, 2)
        waiting = asyncio.ensure_future(other.step("sleep 20", 30))
        await asyncio.sleep(0.05)
        for one in (dying.step(how), waiting, other.step("say")):
            with pytest.raises(EnvironmentFailedError, match=f"the session was lost: its worker process {text}"):
                await one


async def test_a_call_of_an_exclusive_worker_that_is_late_ends_the_process() -> None:
    async with working(exclusive=True) as worker:
        (talker,) = await many(worker, 1)
        start = time.monotonic()
        with pytest.raises(DeadlineError):
            await talker.step("hold 30", 0.3)
        assert time.monotonic() - start < 15
        assert not alive(worker.pid)


async def test_a_repeated_step_is_answered_and_not_applied_and_one_that_runs_is_joined() -> None:
    async with working() as worker:
        (talker,) = await many(worker, 1)
        body = pack(["sleep 0.2", False, ""])
        first = asyncio.ensure_future(worker.request(STEP, talker.id, 0, 5, body))
        await asyncio.sleep(0.05)
        answers = [await first, *await asyncio.gather(*(worker.request(STEP, talker.id, 0, 5, body) for _ in range(3)))]
        assert len(set(answers)) == 1
        assert answers[0][0] == OK
        talker.turn = 1
        assert unpack((await worker.request(STEP, talker.id, 1, 5, pack(["a", False, ""])))[1])[2][0]["content"] == "1: a"
        kind, body = await worker.request(STEP, talker.id, 0, 5, body)
        assert (kind, error_of(body).detail) == (ERROR, "step 0 came where step 2 is next")


async def test_nothing_follows_the_end_of_an_episode() -> None:
    async with working() as worker:
        (talker,) = await many(worker, 1)
        kind, _ = await worker.request(STEP, talker.id, 0, 5, pack(["done", False, ""]))
        assert kind == DONE
        kind, body = await worker.request(STEP, talker.id, 1, 5, pack(["x", False, ""]))
        assert (kind, str(error_of(body))) == (
            ERROR,
            "step: the episode is done (an environment is used once: reset a new session)",
        )
        await talker.close()
        await talker.close()
        kind, body = await worker.request(STEP, talker.id, 1, 5, pack(["x", False, ""]))
        assert error_of(body).code == "not_found"


async def test_a_class_that_does_not_load_says_where(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import opentinker\n\ndef f(:\n")
    worker = WorkerProcess({"name": f"{tmp_path}/broken.py:X"}, exclusive=False, on_end=lambda _: None)
    with pytest.raises(EnvironmentLoadError, match=r"broken\.py, line 3"):
        await worker.start()
    await until(lambda: not alive(worker.pid))


async def test_a_class_whose_import_ends_the_process_says_so(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("import os\nos._exit(9)\n")
    worker = WorkerProcess({"name": f"{tmp_path}/ends.py:X"}, exclusive=False, on_end=lambda _: None)
    with pytest.raises(
        EnvironmentLoadError, match="loading the environment's class failed: its worker process exited with code 9"
    ):
        await worker.start()


def test_a_class_of_a_notebook_or_a_function_is_refused_with_what_to_do() -> None:
    class Inner(Doer):
        pass

    with pytest.raises(ConfigError, match="defined inside a function"):
        reference_of(Inner)
    main = type("Cell", (Doer,), {"__module__": "__main__", "__qualname__": "Cell"})
    with pytest.raises(ConfigError, match=r"a notebook or script.*put Cell into a file of its own"):
        reference_of(main)


PARENT = """
import asyncio, os, sys
sys.path.insert(0, {here!r})
from opentinker.env.frames import RESET, STEP, pack
from opentinker.env.worker_process import WorkerProcess
from opentinker.environments.hosting.pool import WorkerPool
from opentinker.environments.hosting.settings import HostSettings
async def main():
    worker = WorkerProcess({{"module": "hosted_environments", "qualname": "Doer"}}, exclusive=False, on_end=print)
    await worker.start()
    session = os.urandom(16)
    await worker.request(RESET, session, 0, 5, pack([{{}}, None]))
    worker.call(STEP, session, 0, 60, pack([{step!r}, False, ""]), print)
    await asyncio.sleep(0.3)
    print(worker.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's death")
@pytest.mark.parametrize("step", ["say", "spin", "hold 60"])
async def test_a_worker_dies_with_its_parent_whatever_it_is_doing(step: str) -> None:
    parent = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", PARENT.format(here=str(HERE), step=step)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    lines: list[str] = []
    while not lines:
        line = parent.stdout.readline()
        assert line, "the parent ended"
        lines = [line] if line.strip().isdigit() else []
    pid = int(lines[0])
    assert alive(pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait(10)
    await until(lambda: not alive(pid))


async def test_a_request_to_a_worker_that_is_just_ending_learns_why_too() -> None:
    async with working() as worker:
        (talker,) = await many(worker, 1)
        worker.kill("of a test")
        with pytest.raises(EnvironmentFailedError, match="the session was lost: of a test"):
            await talker.step("say")
        await until(lambda: not alive(worker.pid))
        with pytest.raises(EnvironmentFailedError, match="the session was lost: of a test"):
            await talker.step("say")


async def test_a_request_sent_between_a_death_and_its_reason_waits_for_the_reason() -> None:
    async with working() as worker:
        (talker,) = await many(worker, 1)
        os.kill(worker.pid, signal.SIGKILL)
        await until(lambda: worker.ended)
        with pytest.raises(EnvironmentFailedError, match="was killed by SIGKILL"):
            await talker.step("say")


async def test_what_is_missing_is_started_once_however_often_it_is_missed() -> None:
    settings = HostSettings(workers=3, isolation="thread")
    pool = WorkerPool({"name": "nothing"}, settings, lambda worker: None)
    for _ in range(4):  # workers that end in one turn of the loop, and the sweep
        pool._fill()
    assert len(pool._tasks) == pool._starting == 3
    await pool.stop()
    assert pool.pids == []
