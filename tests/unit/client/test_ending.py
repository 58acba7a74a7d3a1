"""Work that is ended with what it is done on."""

import asyncio
import threading

import pytest

from opentinker.client.ending import Ending
from opentinker.errors import EngineError, ServerLostError


async def forever(seen: list[object]) -> None:
    try:
        await asyncio.sleep(600)
    except asyncio.CancelledError as cancelled:
        await asyncio.sleep(0)  # a clean-up that waits
        seen.append(cancelled.args)
        raise


async def test_work_has_its_own_result_or_error_where_nothing_ends() -> None:
    async def fails() -> None:
        raise EngineError("no")

    assert await Ending().during(asyncio.sleep(0, "done")) == "done"
    with pytest.raises(EngineError, match="no"):
        await Ending().during(fails())


@pytest.mark.parametrize("before", [True, False], ids=["before the work", "meanwhile"])
async def test_the_end_cancels_work_that_waits(before: bool) -> None:
    ending, seen = Ending(own_words_s=0.05), list[object]()
    if before:
        ending.tell("the server died")
    else:
        threading.Timer(0.05, ending.tell, ["the server died"]).start()
    with pytest.raises(ServerLostError, match="the server died"):
        await ending.during(forever(seen))
    assert seen == [("the server died",)], "it hears why, and cleans up first"
    ending.tell("something else")
    with pytest.raises(ServerLostError, match="the server died"):
        await ending.during(forever(seen))


async def test_what_the_work_finds_out_itself_counts_more() -> None:
    ending = Ending(own_words_s=60.0)

    async def work() -> None:
        ending.tell("the job has failed")
        await asyncio.sleep(0.05)
        raise EngineError("the engine said why")

    with pytest.raises(EngineError, match="said why"):
        await ending.during(work())


async def test_who_is_cancelled_ends_the_work_and_waits_for_its_clean_up() -> None:
    seen: list[object] = []
    task = asyncio.create_task(Ending().during(forever(seen)))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == [()]
