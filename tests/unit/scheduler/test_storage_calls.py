"""Work that waits for a storage that hangs: it is given up, cleaned up after, and holds nobody else up."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from opentinker.errors import ConfigError, UnavailableError
from opentinker.scheduler.storage_calls import StorageCalls


@pytest.fixture
def calls() -> Iterator[StorageCalls]:
    calls = StorageCalls(2)
    yield calls
    calls.close()


@pytest.fixture
def answers() -> Iterator[threading.Event]:
    """The storage hangs until this is set."""
    event = threading.Event()
    yield event
    event.set()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5.0):
        while True:
            if condition():
                return
            await asyncio.sleep(0.005)


async def test_work_is_done_or_fails_with_its_own_error(calls: StorageCalls) -> None:
    undone: list[str] = []
    assert await calls.run(lambda: 3, 5.0, lambda: undone.append("a")) == 3

    def fails(error: Exception) -> None:
        raise error

    for error in (ConfigError("no"), TimeoutError("its own")):
        with pytest.raises(type(error), match=str(error)):
            await calls.run(lambda error=error: fails(error), 5.0, lambda: undone.append("b"))
    assert undone == []


async def test_a_storage_that_hangs_holds_up_its_own_threads_alone(calls: StorageCalls, answers: threading.Event) -> None:
    begun: list[int] = []

    def hang(number: int) -> None:
        begun.append(number)
        answers.wait()

    waiting = (calls.run(lambda number=number: hang(number), 0.1) for number in range(50))
    given_up = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(error) for error in given_up] == [UnavailableError] * 50
    assert str(given_up[0]) == "the storage did not answer within 0.1 s (try again; is it reachable from the scheduler?)"
    assert await asyncio.to_thread(lambda: "free") == "free"
    assert len(begun) == 2
    answers.set()
    assert await calls.run(lambda: "back", 5.0) == "back"
    assert len(begun) == 2  # what nobody waits for any more never began


@pytest.mark.parametrize("cancelled", [False, True])
async def test_what_is_done_after_nobody_waits_is_undone(
    calls: StorageCalls, answers: threading.Event, cancelled: bool
) -> None:
    happened: list[str] = []

    def work() -> None:
        answers.wait()
        happened.append("done")

    task = asyncio.create_task(calls.run(work, 60.0 if cancelled else 0.05, lambda: happened.append("undone")))
    await asyncio.sleep(0.05)
    if cancelled:
        task.cancel()
    with pytest.raises(asyncio.CancelledError if cancelled else UnavailableError):
        await task
    assert happened == []
    answers.set()
    await until(lambda: len(happened) == 2)
    assert happened == ["done", "undone"]


async def test_what_fails_later_is_logged(calls: StorageCalls, caplog: Any) -> None:
    calls.later(lambda: 1 / 0)
    await until(lambda: "storage_call_failed" in caplog.text)
