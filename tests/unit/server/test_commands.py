import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker.errors import ConflictError
from opentinker.server.commands import Accepted, CommandQueue, Duplicate


def digest(seq: int) -> bytes:
    return f"body {seq}".encode()


def offer(queue: CommandQueue[int], seq: int, now: float = 0.0) -> list[int]:
    outcome = queue.offer(seq, digest(seq), seq, now)
    return list(outcome.ready) if isinstance(outcome, Accepted) else []


@given(
    first=st.integers(0, 3),
    events=st.lists(st.one_of(st.integers(0, 11), st.floats(0.0, 40.0)), max_size=60),
)
def test_each_command_runs_exactly_once_and_in_order_whatever_is_retried_reordered_or_expired(
    first: int, events: list[int | float]
) -> None:
    """An integer is an arrival of that command, a float is time that passes."""
    queue: CommandQueue[int] = CommandQueue(first)
    ran: list[int] = []
    now = 0.0
    for event in events:
        if isinstance(event, float):
            now += event
            queue.expire(now)
        else:
            ran += offer(queue, first + event, now)
        assert ran == list(range(first, queue.next_seq))
    for seq in range(first, first + 12):  # the client at last repeats everything
        ran += offer(queue, seq, now)
    assert ran == list(range(first, first + 12))


def test_a_command_waits_for_its_predecessors() -> None:
    queue: CommandQueue[int] = CommandQueue()
    assert offer(queue, 2) == []
    assert offer(queue, 1) == []
    assert offer(queue, 0) == [0, 1, 2]


@pytest.mark.parametrize("seq", [0, 2])
def test_a_repeat_is_a_duplicate_and_another_body_a_conflict(seq: int) -> None:
    queue: CommandQueue[int] = CommandQueue()
    offer(queue, 0)
    offer(queue, 2)  # buffered
    assert isinstance(queue.offer(seq, digest(seq), seq, 1.0), Duplicate)
    with pytest.raises(ConflictError, match=f"command {seq} was already sent"):
        queue.offer(seq, b"another body", seq, 1.0)


def test_a_gap_expires_and_the_late_command_may_come_again() -> None:
    queue: CommandQueue[int] = CommandQueue(gap_timeout_s=30.0)
    offer(queue, 1, now=100.0)
    assert queue.expire(129.9) == []
    assert queue.expire(130.0) == [1]
    assert queue.expire(1000.0) == []
    assert offer(queue, 1, now=1000.0) == []
    assert offer(queue, 0, now=1001.0) == [0, 1]


def test_a_command_that_was_released_never_expires() -> None:
    queue: CommandQueue[int] = CommandQueue()
    offer(queue, 0, now=0.0)
    assert queue.expire(1e9) == []
