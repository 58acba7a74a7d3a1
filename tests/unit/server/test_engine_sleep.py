"""An engine that sleeps while its trainer has the GPU: no order of events loses weights, cache or requests in silence."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker.config.server import ServerConfig
from opentinker.errors import ConflictError, EngineError, ServerLostError, TrainerError
from opentinker.server import loading
from opentinker.server.engine.sleeping import Event, Sleep, Sleeper, after
from opentinker.server.execute import execute
from opentinker.server.protocol import CommandWork
from opentinker.server.state import Hosted, Parts, State


class Memory:
    """What an engine has: weights as they should be, its cache, running requests. It fails when told to, and when it is asked
    for what makes no sense."""

    def __init__(self) -> None:
        self.resident = {"weights", "kv_cache"}
        self.kept = False
        self.lost = False
        self.running = False
        self.fails = False
        self.calls: list[object] = []

    def suspend(self, level: int) -> None:
        assert self.resident == {"weights", "kv_cache"}
        if self.fails:
            raise RuntimeError("CUDA error")
        self.calls.append(level)
        self.resident, self.kept, self.lost = set(), level == 1, level == 2

    def resume(self, tags: tuple[str, ...]) -> None:
        assert not self.resident & set(tags)
        if self.fails:
            raise RuntimeError("out of memory")
        self.calls.append(tags)
        self.resident |= set(tags)

    def has_unfinished(self) -> bool:
        return self.running


def asleep(event: Event = Event.SLEEP_KEEPING) -> tuple[Memory, Sleeper]:
    memory = Memory()
    sleeper = Sleeper(memory)
    sleeper.tell(event)
    return memory, sleeper


def test_sleep_and_wake_give_the_memory_up_and_get_it_back() -> None:
    memory, sleeper = asleep()
    assert memory.resident == set()
    with pytest.raises(ConflictError, match="cannot compute: it is asleep, its weights kept"):
        sleeper.require_awake()
    sleeper.tell(Event.WAKE)
    sleeper.require_awake()
    assert memory.calls == [1, ("weights", "kv_cache")]


@pytest.mark.parametrize("event", [Event.SLEEP_KEEPING, Event.SLEEP_DISCARDING])
def test_to_sleep_twice_or_to_wake_when_awake_does_nothing_more(event: Event) -> None:
    memory, sleeper = asleep(event)
    sleeper.tell(event)
    assert len(memory.calls) == 1
    fresh = Sleeper(Memory())
    fresh.tell(Event.WAKE)
    assert fresh.state is Sleep.AWAKE


def test_an_engine_with_running_requests_does_not_fall_asleep() -> None:
    memory = Memory()
    memory.running = True
    sleeper = Sleeper(memory)
    with pytest.raises(ConflictError, match="requests are running, whose cache would be lost"):
        sleeper.tell(Event.SLEEP_KEEPING)
    assert (sleeper.state, memory.calls) == (Sleep.AWAKE, [])


@pytest.mark.parametrize("event", [Event.SLEEP_KEEPING, Event.SLEEP_DISCARDING])
def test_a_publish_while_it_sleeps_wakes_the_weights_first_and_the_cache_when_all_are_written(event: Event) -> None:
    memory, sleeper = asleep(event)
    sleeper.tell(Event.BEGIN_UPDATE)
    assert memory.resident == {"weights"}
    with pytest.raises(ConflictError):
        sleeper.require_awake()
    sleeper.tell(Event.UPDATED)
    sleeper.require_awake()
    assert memory.resident == {"weights", "kv_cache"}


def test_discarded_weights_come_back_by_a_publish_only_and_one_that_fails_has_to_be_repeated() -> None:
    _, sleeper = asleep(Event.SLEEP_DISCARDING)
    with pytest.raises(ConflictError, match="a publish gives it new ones"):
        sleeper.tell(Event.WAKE)
    sleeper.tell(Event.BEGIN_UPDATE)
    sleeper.tell(Event.UPDATE_FAILED)
    for event in (Event.WAKE, Event.SLEEP_KEEPING, Event.UPDATED):
        with pytest.raises(ConflictError, match="publish again"):
            sleeper.tell(event)
    sleeper.tell(Event.BEGIN_UPDATE)
    sleeper.tell(Event.UPDATED)
    assert sleeper.state is Sleep.AWAKE


def test_a_wake_that_fails_can_be_tried_again_and_room_is_made_before_each() -> None:
    memory, rooms = Memory(), list[str]()
    sleeper = Sleeper(memory, lambda: rooms.append("made"))
    sleeper.tell(Event.SLEEP_KEEPING)
    memory.fails = True
    with pytest.raises(EngineError, match="failed to wake up: out of memory"):
        sleeper.tell(Event.WAKE)
    assert sleeper.state is Sleep.KEPT
    memory.fails = False
    sleeper.tell(Event.WAKE)
    assert (sleeper.state, rooms) == (Sleep.AWAKE, ["made", "made"])


def test_a_lost_process_is_no_failure_to_sleep_or_to_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*_: object) -> None:
        raise ServerLostError("rank 1 of 2 was killed")

    memory, sleeper = asleep()
    monkeypatch.setattr(memory, "resume", lose)
    with pytest.raises(ServerLostError, match="rank 1 of 2 was killed"):
        sleeper.tell(Event.WAKE)
    assert sleeper.state is Sleep.KEPT
    sleeper.make_room = lose
    with pytest.raises(ServerLostError, match="rank 1 of 2 was killed"), sleeper.asleep():
        raise TrainerError("a rank is gone")


@pytest.mark.parametrize("parts", [1, 2])
def test_before_an_engine_wakes_on_several_gpus_each_rank_of_the_trainer_makes_room(
    parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, rooms = Memory(), list[str]()
    sleeper = Sleeper(memory, lambda: rooms.append("here"))
    engine = SimpleNamespace(sleeper=sleeper, max_model_len=64, close=lambda: None)
    trainer = SimpleNamespace(release_cache=lambda: rooms.append("on every rank"), close=lambda: None)
    monkeypatch.setattr(loading, "_images", lambda model_dir: None)
    monkeypatch.setattr(loading, "_engine", lambda *_, **more: engine)
    monkeypatch.setattr(loading, "_load_trainer", lambda *_: trainer)
    monkeypatch.setattr(loading, "canary_prompts", lambda *_: ())
    config = ServerConfig.model_validate({"base_model": "m", "engine": {"tensor_parallel": parts}, "trainer": {"ranks": parts}})
    loaded = loading.load_parts(Path("m"), config, None, Path("unused"))
    assert loaded.sleeper is sleeper
    with sleeper.asleep():
        assert not rooms
    assert rooms == ["here" if parts == 1 else "on every rank"]


def test_it_sleeps_while_the_trainer_computes_and_wakes_however_that_ends() -> None:
    memory = Memory()
    sleeper = Sleeper(memory)
    with sleeper.asleep():
        assert memory.resident == set()
    with pytest.raises(TrainerError), sleeper.asleep():
        raise TrainerError("out of memory")
    sleeper.require_awake()
    memory.running = True
    with sleeper.asleep():
        sleeper.require_awake()
    assert memory.calls == [1, ("weights", "kv_cache")] * 2


def test_a_train_step_has_the_memory_to_itself_and_its_publish_an_engine_that_is_awake() -> None:
    memory = Memory()
    sleeper = Sleeper(memory)

    class Trainer:
        def check(self, *_: object) -> None:
            sleeper.require_awake()

        def forward_backward(self, *_: object) -> Any:
            assert sleeper.state is Sleep.KEPT
            raise TrainerError("the batch is too large")

    parts = Parts(cast(Any, memory), cast(Any, Trainer()), Path("m"), Path("unused"), sleeper=sleeper)
    state = State(parts, pump=lambda: 0, fail=lambda *_: None, policies={"p": Hosted(0.0, [], {})})
    datum = {"chunks": [1], "targets": [2], "weights": [1.0]}
    args = {
        "data": [datum],
        "minibatches": [{"indices": [0]}],
        "loss": {"name": "cross_entropy"},
        "optimizer": {"learning_rate": 0.1},
    }
    with pytest.raises(TrainerError, match="too large"):
        execute(state, CommandWork("o", "p", "train_step", args))
    sleeper.require_awake()


@pytest.mark.parametrize("state", list(Sleep))
def test_it_can_be_closed_in_any_state_and_does_nothing_after(state: Sleep) -> None:
    assert after(state, Event.CLOSE) == (Sleep.CLOSED, None)
    for event in Event:
        if event is not Event.CLOSE:
            with pytest.raises(ConflictError, match="it is closed"):
                after(Sleep.CLOSED, event)


@given(st.lists(st.tuples(st.sampled_from(list(Event)), st.booleans(), st.booleans()), max_size=30))
def test_whatever_happens_an_engine_that_says_awake_has_weights_and_cache(steps: list[tuple[Event, bool, bool]]) -> None:
    memory = Memory()
    sleeper = Sleeper(memory)
    for event, memory.running, memory.fails in steps:
        before = sleeper.state
        try:
            sleeper.tell(event)
        except (ConflictError, EngineError):
            assert sleeper.state is before
        if event is Event.UPDATED and sleeper.state is Sleep.AWAKE and before is Sleep.WRITING:
            memory.lost = False
        if sleeper.state is Sleep.AWAKE:
            assert memory.resident == {"weights", "kv_cache"}
            assert not memory.lost
        elif sleeper.state in (Sleep.KEPT, Sleep.DISCARDED):
            assert memory.resident == set()
            assert memory.kept is (sleeper.state is Sleep.KEPT)
