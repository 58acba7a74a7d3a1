"""An exception thrown at a call reaches that call or nothing: the moments at which they could miss each other, one by one."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from opentinker.env.stopping import Abandoned, Door, raise_in_thread


@contextmanager
def thread(function: Callable[[], None]) -> Iterator[threading.Thread]:
    running = threading.Thread(target=function, daemon=True)
    running.start()
    yield running
    running.join(10)
    assert not running.is_alive()


def test_nothing_is_thrown_before_or_after_the_call_or_at_another_one() -> None:
    thrown: list[int] = []
    door = Door(thrown.append)
    assert not door.throw("a")
    assert door.run("a", lambda: (door.throw("b"), door.throw("a"))) == (False, True)
    assert not door.throw("a")
    assert thrown == [threading.get_ident()]


def test_a_call_that_raises_has_left_too() -> None:
    door = Door(lambda ident: pytest.fail("thrown"))
    with pytest.raises(LookupError):
        door.run("a", lambda: [][0])
    assert not door.throw("a")


def test_one_that_is_thrown_while_the_call_ends_is_raised_at_the_door_and_nowhere_later() -> None:
    """The thrower has found the call inside; the call returns before the exception is set."""
    throwing, returned = threading.Event(), threading.Event()
    history: list[str] = []

    def slow_throw(ident: int) -> None:
        throwing.set()
        assert returned.wait(10)
        raise_in_thread(ident)

    door = Door(slow_throw)

    def call() -> str:
        assert throwing.wait(10)
        returned.set()
        return "value"

    def work() -> None:
        try:
            history.append(door.run("a", call))
        except Abandoned:
            history.append("abandoned")
        for _ in range(10_000):  # plenty of places where a late one would be raised
            threading.get_ident()
        history.append(door.run("b", lambda: "the next call"))

    with thread(work):
        while not door.throw("a"):
            pass
    assert history == ["abandoned", "the next call"]


def test_one_that_is_raised_inside_leaves_the_door_shut() -> None:
    entered = threading.Event()
    history: list[str] = []

    def spin() -> None:
        entered.set()
        while True:
            pass

    door = Door()

    def work() -> None:
        with pytest.raises(Abandoned):
            door.run("a", spin)
        history.append(door.run("b", lambda: "the next call"))

    with thread(work):
        assert entered.wait(10)
        assert door.throw("a")
    assert history == ["the next call"]
    assert not door.throw("b")


def test_no_number_of_throws_from_many_threads_escapes_the_call() -> None:
    """Threads throw as fast as they can while calls begin and end: each call ends with its value or with the exception."""
    door, stop = Door(), threading.Event()
    current: list[object] = [None]
    counts = {"value": 0, "abandoned": 0}
    escaped: list[BaseException] = []

    def throw_all_the_time() -> None:
        while not stop.is_set():
            door.throw(current[0])

    def work() -> None:
        try:
            for number in range(3_000):
                current[0] = number
                try:
                    door.run(number, lambda: sum(range(500)))
                    outcome = "value"
                except Abandoned:
                    outcome = "abandoned"
                counts[outcome] += 1
                current[0] = None
        except BaseException as error:
            escaped.append(error)
        finally:
            stop.set()

    with thread(throw_all_the_time), thread(throw_all_the_time), thread(work):
        pass
    assert escaped == []
    assert sum(counts.values()) == 3_000
