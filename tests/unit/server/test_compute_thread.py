"""What a worker and the engine of a split server promise alike, on a thread that doubles numbers."""

import threading
from collections.abc import Callable, Iterator

import pytest

from opentinker.errors import DeadlineError, ServerLostError
from opentinker.server.compute_thread import ComputeThread

WAIT_S = 60.0


class Model:
    def __init__(self) -> None:
        self.built_in = threading.current_thread()
        self.closed = False
        self.close_fails = False


class Doubling(ComputeThread[Model, int, int]):
    role = "doubler"
    loads = "the doubler"

    def start(self, timeout_s: float = WAIT_S) -> Model:
        self._await_built(timeout_s)
        return self.model

    def submit(self, *numbers: int) -> None:
        with self._changed:
            self._check()
            self._inbox.extend(numbers)
            self._changed.notify_all()

    def _take(self, built: Model) -> None:
        self.model = built

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._inbox or self._stopping)
                if self._stopping:
                    return
                number = self._inbox.popleft()
            if number == 0:
                raise ZeroDivisionError("nothing doubles nothing")
            self._give([2 * number])

    def _close(self) -> None:
        self.model.closed = True
        if self.model.close_fails:
            raise OSError("it does not close")


Make = Callable[..., Doubling]


@pytest.fixture
def threads() -> Iterator[Make]:
    made: list[Doubling] = []

    def make(build: Callable[[], Model] = Model) -> Doubling:
        made.append(Doubling(build))
        return made[-1]

    yield make
    for thread in made:
        thread.stop(WAIT_S)


def test_what_is_built_is_built_in_the_thread_once_and_closed_at_the_end(threads: Make) -> None:
    thread = threads()
    model = thread.start()
    assert model.built_in is not threading.current_thread()
    assert thread.start() is model
    thread.submit(1, 2)
    answers: list[int] = []
    while len(answers) < 2:
        answers += thread.collect(WAIT_S)
    assert answers == [2, 4]
    thread.stop(WAIT_S)
    thread.stop(WAIT_S)
    assert model.closed
    with pytest.raises(ServerLostError, match="the server's doubler was stopped"):
        thread.submit(3)


def test_answers_that_were_given_before_the_end_are_still_collected(threads: Make) -> None:
    thread = threads()
    thread.start()
    thread.submit(4, 0)
    assert thread.collect(WAIT_S) == [8]
    with pytest.raises(ServerLostError, match="the server's doubler failed: ZeroDivisionError"):
        thread.collect(WAIT_S)


def test_what_the_build_raises_is_raised_by_the_start_and_no_work_is_taken(threads: Make) -> None:
    def build() -> Model:
        raise MemoryError("too large")

    thread = threads(build)
    with pytest.raises(MemoryError, match="too large"):
        thread.start()
    with pytest.raises(ServerLostError, match="too large"):
        thread.submit(1)


def test_a_start_that_takes_too_long_says_so_and_can_be_awaited_again(threads: Make) -> None:
    go = threading.Event()

    def build() -> Model:
        assert go.wait(WAIT_S)
        return Model()

    thread = threads(build)
    with pytest.raises(DeadlineError, match="the doubler did not load within"):
        thread.start(0.01)
    go.set()
    assert thread.start() is thread.model


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_whoever_waits_for_answers_hears_of_the_end_even_if_what_was_built_does_not_close(threads: Make) -> None:
    thread = threads()
    thread.start().close_fails = True
    heard: list[Exception] = []

    def collect() -> None:
        try:
            thread.collect(WAIT_S)
        except ServerLostError as error:
            heard.append(error)

    waiting = threading.Thread(target=collect)
    waiting.start()
    thread.stop(WAIT_S)
    waiting.join(WAIT_S)
    assert [str(error) for error in heard] == ["the server's doubler was stopped"]
