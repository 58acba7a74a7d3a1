"""Plain user code in threads: reused while it returns, abandoned when it hangs."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from opentinker.env.stopping import Stopper
from opentinker.env.threads import UserThreads


async def test_a_thread_is_reused_by_calls_that_follow_each_other() -> None:
    with UserThreads() as threads:
        names = {await threads.call(threading.get_ident) for _ in range(20)}
    assert len(names) == 1


async def test_what_a_call_raises_reaches_the_caller() -> None:
    def fail() -> None:
        raise LookupError("here")

    with UserThreads() as threads:
        with pytest.raises(LookupError, match="here"):
            await threads.call(fail)
        assert await threads.call(lambda: 7) == 7


async def test_hung_calls_starve_nobody() -> None:
    release = threading.Event()
    with UserThreads() as threads:
        hung = [asyncio.ensure_future(threads.call(release.wait)) for _ in range(50)]
        await asyncio.sleep(0)
        assert await asyncio.wait_for(asyncio.gather(*(threads.call(lambda: 1) for _ in range(50))), 5) == [1] * 50
        for call in hung:
            call.cancel()
        release.set()


async def test_threads_end_when_the_pool_is_left_even_those_that_were_busy() -> None:
    release, before = threading.Event(), threading.active_count()
    with UserThreads() as threads:
        await asyncio.gather(*(threads.call(lambda: 1) for _ in range(5)))
        late = asyncio.ensure_future(threads.call(release.wait))
        await asyncio.sleep(0.01)
        late.cancel()
    release.set()
    for _ in range(500):
        if threading.active_count() <= before:
            return
        await asyncio.sleep(0.01)
    pytest.fail("threads are left")


def test_a_hung_call_does_not_keep_the_process_alive() -> None:
    code = """
import asyncio, threading
from opentinker.env.threads import UserThreads
async def main():
    with UserThreads() as threads:
        try:
            await asyncio.wait_for(threads.call(threading.Event().wait), 0.05)
        except TimeoutError:
            print("late")
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout == "late\n"


async def until(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(0.005)


async def abandon(threads: UserThreads, function: Callable[[], object], after_s: float = 0.1) -> None:
    """Cancel the wait for a call some time after it has begun."""
    begun = threading.Event()

    def begin() -> None:
        begun.set()
        function()

    call = asyncio.ensure_future(threads.call(begin))
    await until(begun.is_set)
    await asyncio.sleep(after_s)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


async def test_a_spinning_call_ends_soon_after_nobody_waits_for_it() -> None:
    begun: list[int] = []
    ended: list[str] = []

    def spin() -> None:
        begun.append(1)
        try:
            while True:
                pass
        finally:
            ended.append("tidied up")

    before = threading.active_count()
    with UserThreads() as threads:
        calls = [asyncio.ensure_future(threads.call(spin)) for _ in range(3)]
        await until(lambda: len(begun) == 3)
        await asyncio.sleep(0.05)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await until(lambda: threads.abandoned == 0)
        assert ended == ["tidied up"] * 3
        await until(lambda: threading.active_count() <= before)


async def test_a_call_that_catches_every_exception_and_goes_on_is_ended_by_another_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caught: list[str] = []

    def stubborn() -> None:
        for _ in range(2):
            try:
                while True:
                    pass
            except BaseException as error:
                caught.append(type(error).__name__)
        while True:
            pass

    with UserThreads(Stopper(repeats_s=(0.05,) * 5)) as threads:
        await abandon(threads, stubborn)
        await until(lambda: threads.abandoned == 0)
    assert caught == ["Abandoned", "Abandoned"]


async def test_tries_are_bounded_and_what_goes_on_is_counted_and_said(caplog: pytest.LogCaptureFixture) -> None:
    release, caught = threading.Event(), []

    def unstoppable() -> None:
        while not release.is_set():
            try:
                while not release.is_set():
                    pass
            except BaseException:
                caught.append(1)

    with UserThreads(Stopper(repeats_s=(0.02, 0.02))) as threads:
        await abandon(threads, unstoppable)
        await until(lambda: "environment_call_goes_on" in caplog.text)
        await asyncio.sleep(0.1)
        assert (len(caught), threads.abandoned) == (3, 1)
        assert "execution = 'process'" in caplog.text
        release.set()
        await until(lambda: threads.abandoned == 0)


async def test_a_blocking_call_is_left_and_counted_until_it_returns() -> None:
    after: list[str] = []

    def block() -> None:
        time.sleep(0.4)
        after.append("went on")

    with UserThreads() as threads:
        await abandon(threads, block)
        assert threads.abandoned == 1
        assert await threads.call(lambda: 7) == 7, "others are served meanwhile"
        await until(lambda: threads.abandoned == 0)
    assert after == [], "it ended where the blocking function returned"


async def test_a_call_that_was_abandoned_before_it_began_never_begins() -> None:
    begun: list[int] = []
    with UserThreads() as threads:
        call = asyncio.ensure_future(threads.call(lambda: begun.append(1)))
        call.cancel()  # before it had its first turn on the loop
        await asyncio.gather(call, return_exceptions=True)
        await threads.call(lambda: None)
    assert begun == []


async def test_a_thread_whose_call_was_abandoned_serves_no_other() -> None:
    seen: list[int] = []

    def spin() -> None:
        seen.append(threading.get_ident())
        while True:
            pass

    with UserThreads() as threads:
        await abandon(threads, spin)
        await until(lambda: threads.abandoned == 0)
        fresh = {await threads.call(threading.get_native_id) for _ in range(5)}
    assert len(fresh) == 1


async def test_calls_that_end_just_when_they_are_abandoned_hurt_nobody() -> None:
    """Deadlines and ends coincide thousands of times; the exception shows up in abandoned calls only, and breaks no thread."""
    crashed: list[object] = []
    hook, threading.excepthook = threading.excepthook, crashed.append
    stop = time.monotonic() + 1.5
    innocent_calls = abandoned_calls = 0

    def work(rounds: int) -> int:
        return sum(range(rounds))

    async def victim(threads: UserThreads, number: int) -> None:
        nonlocal abandoned_calls
        rounds = 100 + number * 400
        while time.monotonic() < stop:
            call = asyncio.ensure_future(threads.call(lambda: work(rounds)))
            for _ in range(number % 5):
                await asyncio.sleep(0)
            abandoned_calls += call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    async def innocent(threads: UserThreads) -> None:
        nonlocal innocent_calls
        while time.monotonic() < stop:
            assert await threads.call(lambda: work(300)) == 44850
            innocent_calls += 1

    before = threading.active_count()
    try:
        with UserThreads() as threads:
            await asyncio.gather(*(victim(threads, n) for n in range(10)), *(innocent(threads) for _ in range(3)))
            await until(lambda: threads.abandoned == 0)
        await until(lambda: threading.active_count() <= before)
    finally:
        threading.excepthook = hook
    assert crashed == []
    assert innocent_calls > 20
    assert abandoned_calls > 20
