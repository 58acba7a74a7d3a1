"""Plain user code in threads: reused while it returns, abandoned when it hangs."""

import asyncio
import subprocess
import sys
import threading

import pytest

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
