import asyncio

import numpy as np
import pytest

from opentinker.errors import ConflictError, NotFoundError, ServerLostError
from opentinker.server.operations import OperationTable


def test_a_retry_finds_the_first_attempt_and_another_body_is_a_conflict() -> None:
    table = OperationTable()
    first, is_new = table.open("p:s:1", "p", b"a")
    again, is_new_again = table.open("p:s:1", "p", b"a")
    assert (is_new, is_new_again) == (True, False)
    assert again is first
    with pytest.raises(ConflictError):
        table.open("p:s:1", "p", b"b")


def test_an_operation_is_found_by_its_own_policy_only() -> None:
    table = OperationTable()
    table.open("p:s:1", "p", b"a")
    assert table.get("p:s:1", "p").status == "pending"
    with pytest.raises(NotFoundError):
        table.get("p:s:1", "q")
    with pytest.raises(NotFoundError):
        table.get("p:s:2", "p")


async def test_waiters_wake_when_it_finishes_and_give_up_at_their_timeout() -> None:
    table = OperationTable()
    operation, _ = table.open("p:s:1", "p", b"a")
    await operation.wait(0.01)
    assert operation.status == "pending"
    waiters = [asyncio.create_task(operation.wait(30.0)) for _ in range(3)]
    await asyncio.sleep(0)
    table.finish("p:s:1", {"x": 1})
    await asyncio.gather(*waiters)
    assert operation.to_wire() == {"operation_id": "p:s:1", "status": "done", "result": {"x": 1}, "problem": None}


def test_the_first_end_of_an_operation_counts() -> None:
    table = OperationTable()
    table.open("p:s:1", "p", b"a")
    table.finish("p:s:1", 1)
    assert table.finish("p:s:1", 2) is None
    assert table.get("p:s:1", "p").result == 1


def test_the_oldest_answers_are_dropped_by_number_but_never_a_pending_one_or_the_last_of_a_policy() -> None:
    table = OperationTable(max_finished=3)
    table.open("q:s:0", "q", b"")
    table.finish("q:s:0", 0)
    table.open("p:s:pending", "p", b"")
    for number in range(5):
        table.open(f"p:s:{number}", "p", b"")
        table.finish(f"p:s:{number}", number)
    assert table.get("q:s:0", "q").result == 0
    assert table.get("p:s:pending", "p").status == "pending"
    assert [table.get(f"p:s:{n}", "p").result for n in (3, 4)] == [3, 4]
    for number in range(3):
        with pytest.raises(NotFoundError):
            table.get(f"p:s:{number}", "p")


def test_the_oldest_answers_are_dropped_by_size() -> None:
    table = OperationTable(max_bytes=1_000_000)
    for number in range(4):
        table.open(f"p:s:{number}", "p", b"")
        table.finish(f"p:s:{number}", {"logprobs": [np.zeros(100_000, np.float32)]})
    assert [n for n in range(4) if _kept(table, f"p:s:{n}")] == [2, 3]


def _kept(table: OperationTable, operation_id: str) -> bool:
    try:
        table.get(operation_id, "p")
    except NotFoundError:
        return False
    return True


def test_losing_the_server_fails_what_is_pending_and_keeps_what_is_done() -> None:
    table = OperationTable()
    for name in ("a", "b"):
        table.open(name, "p", b"")
    table.finish("a", 1)
    table.fail_pending(ServerLostError("gone"))
    assert table.get("a", "p").status == "done"
    failed = table.get("b", "p")
    assert failed.status == "failed"
    assert failed.problem is not None
    assert failed.problem["code"] == "server_lost"
