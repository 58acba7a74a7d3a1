"""The updates of a step: who holds up the others, and that whatever ends them leaves none behind."""

import asyncio
import time
from collections.abc import Awaitable

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from opentinker.errors import AgentLostError, AgentStuckError, TrainerError, from_problem
from opentinker.multiagent.phases import Moment, Phase
from opentinker.training import updates
from opentinker.training.learner import Learned
from opentinker.training.updates import Straggler, Stragglers, together

U3 = Moment(3, Phase.UPDATE)
TRIO = {"black": "", "white": "second", "red": "second"}
LIMIT = 30.0


def learned(trained: bool = True) -> Learned:
    return Learned(None, {"publish": None} if trained else None)  # type: ignore[arg-type]


def test_a_server_is_late_when_another_waits_and_it_has_finished_nothing_for_too_long() -> None:
    stragglers = Stragglers(TRIO, LIMIT)
    assert (stragglers.late(1e9), stragglers.next_late_at()) == ([], None), "nobody waits"
    stragglers.finish("black", 1000.0)
    assert (stragglers.waited_since, stragglers.next_late_at()) == (1000.0, 1030.0)
    assert stragglers.late(1029.9) == []
    assert stragglers.late(1030.0) == [Straggler("second", ("white", "red"))]


def test_each_update_that_ends_starts_its_servers_time_anew() -> None:
    stragglers = Stragglers(TRIO, LIMIT)
    stragglers.finish("black", 1000.0)
    stragglers.finish("white", 1025.0)
    assert stragglers.late(1054.9) == []
    assert stragglers.late(1055.0) == [Straggler("second", ("red",))]
    stragglers.finish("red", 1055.0)
    assert (stragglers.late(1e9), stragglers.next_late_at()) == ([], None)


def test_what_ended_before_anybody_waited_takes_nothing_off_a_servers_time() -> None:
    stragglers = Stragglers(TRIO, LIMIT)
    stragglers.finish("white", 10.0)
    assert stragglers.late(1e9) == [], "the server itself goes on"
    stragglers.finish("black", 1000.0)
    assert stragglers.next_late_at() == 1030.0


def test_agents_of_one_server_never_hold_each_other_up() -> None:
    stragglers = Stragglers({"black": "", "white": "", "red": ""}, LIMIT)
    stragglers.finish("black", 0.0)
    assert (stragglers.late(1e9), stragglers.next_late_at()) == ([], None)


def test_a_server_with_nothing_to_train_does_not_wait() -> None:
    stragglers = Stragglers({"black": "", "white": "second", "red": "third"}, LIMIT)
    stragglers.finish("black", 0.0, trained=False)
    assert stragglers.late(1e9) == []
    stragglers.finish("white", 1000.0)
    assert stragglers.late(1030.0) == [Straggler("third", ("red",))]


@given(st.data())
def test_nobody_is_late_while_nobody_waits_and_those_who_are_have_not_finished(data: st.DataObject) -> None:
    names = "abcdef"[: data.draw(st.integers(1, 6), "agents")]
    servers = {name: data.draw(st.sampled_from(["", "second", "third"]), f"server of {name}") for name in names}
    stragglers, now = Stragglers(servers, LIMIT), 0.0
    left, heard_at, waits_since = set(names), dict.fromkeys(servers.values(), 0.0), None
    idle = set(servers.values())
    """Servers that have trained nothing yet."""
    for name in data.draw(st.permutations(names), "order"):
        now += data.draw(st.floats(0.0, 2 * LIMIT), "pause")
        due, late = stragglers.next_late_at(), stragglers.late(now)
        pending = {server: tuple(n for n in names if n in left and servers[n] == server) for server in servers.values()}
        silent = {s for s in pending if pending[s] and waits_since is not None and now - max(waits_since, heard_at[s]) >= LIMIT}
        assert {one.server: one.agents for one in late} == {server: pending[server] for server in silent}
        assert (due is None) == (waits_since is None), "somebody is pending here: it is due if somebody waits, and not before"
        assert bool(late) == (due is not None and due <= now)
        event(f"{len(late)} late")
        left.discard(name)
        heard_at[servers[name]] = now
        if trained := data.draw(st.booleans(), "trained"):
            idle.discard(servers[name])
        stragglers.finish(name, now, trained=trained)
        if waits_since is None and servers[name] not in idle and not any(servers[n] == servers[name] for n in left):
            waits_since = now
    assert (stragglers.late(1e9), stragglers.next_late_at()) == ([], None), "all have finished"


def test_to_other_drivers_its_agents_are_lost() -> None:
    error = from_problem(AgentStuckError("'white' held up the others").to_problem())
    assert (type(error), isinstance(error, AgentLostError)) == (AgentStuckError, True)


class Updates:
    """Updates of agents that end when they are told to; `running` are those that have not ended in any way."""

    def __init__(self) -> None:
        self.may_end = {name: asyncio.Event() for name in TRIO}
        self.running: set[str] = set()
        self.under_way = asyncio.Event()
        self.ended = {name: asyncio.Event() for name in TRIO}

    def all(self) -> dict[str, Awaitable[Learned]]:
        return {name: self.one(name) for name in TRIO}

    async def one(self, name: str) -> Learned:
        self.running.add(name)
        if len(self.running) == len(TRIO):
            self.under_way.set()
        try:
            await self.may_end[name].wait()
            return learned()
        finally:
            self.running.remove(name)
            self.ended[name].set()


async def test_the_result_is_by_agent_in_the_order_of_the_agents() -> None:
    those = Updates()
    for each in those.may_end.values():
        each.set()
    assert list(await together(those.all(), TRIO, U3, LIMIT)) == list(TRIO)


async def test_a_server_that_hangs_is_named_with_its_agents_and_nothing_is_left_running() -> None:
    those = Updates()
    those.may_end["black"].set()
    with pytest.raises(
        AgentStuckError, match=r"^'white' and 'red' on server 'second' held up the others in update 3"
    ) as caught:
        await together(those.all(), TRIO, U3, 0.05)
    assert caught.value.detail.endswith(" s")
    assert float(caught.value.detail.split()[-2]) >= 0.05
    assert "turns.barrier_timeout_s (0.05)" in caught.value.hint
    assert not those.running


async def test_the_jobs_own_server_may_be_the_one_that_hangs() -> None:
    those = Updates()
    for name in ("white", "red"):
        those.may_end[name].set()
    with pytest.raises(AgentStuckError, match=r"^'black' on the job's own server held up"):
        await together(those.all(), TRIO, U3, 0.05)
    assert not those.running


async def test_nobody_is_late_because_this_process_stood_still() -> None:
    """As after Ctrl-Z: what ended meanwhile is heard of only after the time is up."""
    those = Updates()
    waiting = asyncio.ensure_future(together(those.all(), TRIO, U3, 0.05))
    await those.under_way.wait()
    those.may_end["black"].set()
    await those.ended["black"].wait()
    loop = asyncio.get_running_loop()
    for name in ("white", "red"):
        loop.call_later(0.1, those.may_end[name].set)
    time.sleep(0.2)  # noqa: ASYNC251 - that is the point
    assert list(await waiting) == list(TRIO)


async def test_an_update_that_fails_ends_the_others_and_is_the_error() -> None:
    those = Updates()

    async def fails() -> Learned:
        raise TrainerError("the loss is nan")

    with pytest.raises(TrainerError, match="the loss is nan"):
        await together({"black": those.one("black"), "white": those.one("white"), "red": fails()}, TRIO, U3, LIMIT)
    assert not those.running


async def test_who_is_cancelled_leaves_no_update_behind() -> None:
    those = Updates()
    waiting = asyncio.ensure_future(together(those.all(), TRIO, U3, LIMIT))
    await those.under_way.wait()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert waiting.cancelled()
    assert not those.running


async def test_a_queue_on_one_server_may_take_longer_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of nine updates takes 0.9 of the limit, by a clock that only they move."""
    now = 0.0
    monkeypatch.setattr(updates, "monotonic", lambda: now)
    queue = asyncio.Lock()

    async def one(takes_s: float) -> Learned:
        nonlocal now
        async with queue:
            now += takes_s
            await asyncio.sleep(0)
            return learned()

    async def quick() -> Learned:
        return learned()

    names = [f"white-{n}" for n in range(9)]
    results = await together(
        {"black": quick(), **{name: one(0.9 * LIMIT) for name in names}},
        {"black": "", **dict.fromkeys(names, "second")},
        U3,
        LIMIT,
    )
    assert list(results) == ["black", *names]
    assert now == pytest.approx(8.1 * LIMIT)
