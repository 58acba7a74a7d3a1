"""The barrier inside a rollout: exactly those run whom the protocol named, no action is lost or queued silently, and whatever
comes in whatever order, somebody can go on."""

from typing import Any

import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from opentinker.errors import ProtocolError
from opentinker.multiagent.protocol import (
    AgentProtocol,
    Alternating,
    EnvironmentChooses,
    Free,
    ModeratorChooses,
    RoundRobin,
    Simultaneous,
    Table,
    Turn,
)
from opentinker.multiagent.turns import Next, Standing, TurnBarrier

BOTH = ("black", "white")
THREE = ("a", "b", "c")


def barrier(protocol: AgentProtocol, seats: tuple[str, ...] = BOTH) -> TurnBarrier[str]:
    made: TurnBarrier[str] = TurnBarrier(protocol, seats)
    assert made.start(seats).grant == made.running
    return made


def test_two_alternate_and_only_one_runs() -> None:
    game = barrier(Alternating())
    for agent, other in (BOTH, BOTH[::-1], BOTH):
        assert game.running == (agent,)
        assert game.standing(other) is Standing.PENDING
        assert game.act(agent, "move") == Next(apply=((agent, "move"),))
        assert game.running == ()
        assert game.applied(present=BOTH) == Next(grant=(other,))


def test_simultaneous_actions_are_all_there_before_the_environment_sees_any() -> None:
    game = barrier(Simultaneous(), THREE)
    assert game.act("c", "paper") == Next()
    assert game.act("a", "rock") == Next()
    assert game.running == ("b",)
    assert game.act("b", "rock") == Next(apply=(("a", "rock"), ("b", "rock"), ("c", "paper")), together=True)
    assert game.applied(present=THREE) == Next(grant=THREE)


def test_free_actions_are_applied_as_they_come_one_after_the_other() -> None:
    game = barrier(Free(), THREE)
    assert game.act("b", "1") == Next(apply=(("b", "1"),))
    assert game.act("c", "2") == Next(), "the environment is busy"
    assert game.act("a", "3") == Next()
    assert game.applied(present=THREE) == Next(apply=(("c", "2"),), grant=("b",))
    assert game.applied(present=THREE) == Next(apply=(("a", "3"),), grant=("c",))
    assert game.applied(present=THREE) == Next(grant=("a",))


def test_who_it_is_not_who_was_faster_and_who_is_not_there_are_refused_and_nothing_changes() -> None:
    game = barrier(Alternating())
    with pytest.raises(ProtocolError, match="it is not the turn of 'white'; awaited: black"):
        game.act("white", "move")
    with pytest.raises(ProtocolError, match="there is no agent 'red'") as caught:
        game.act("red", "move")
    assert "black, white" in caught.value.hint
    game.act("black", "move")
    with pytest.raises(ProtocolError, match="it is not the turn of 'black'; awaited: nobody"):
        game.act("black", "move")
    game.applied(present=("black",))
    with pytest.raises(ProtocolError, match="'white' does not take part"):
        game.act("white", "move")
    assert game.running == ("black",)
    both = barrier(Simultaneous())
    both.act("black", "x")
    with pytest.raises(ProtocolError, match="'black' has acted already in this turn; awaited: white"):
        both.act("black", "y")
    assert both.act("white", "z").apply == (("black", "x"), ("white", "z"))


def test_a_turn_that_is_lost_goes_to_the_next() -> None:
    game = barrier(RoundRobin(), THREE)
    assert game.skip("a") == Next(grant=("b",))
    with pytest.raises(ProtocolError, match="not the turn of 'a'"):
        game.act("a", "too late")
    together = barrier(Simultaneous(), THREE)
    together.act("a", "x")
    together.skip("b")
    assert together.act("c", "y").apply == (("a", "x"), ("c", "y"))
    nobody = barrier(Simultaneous())
    nobody.skip("black")
    assert nobody.skip("white") == Next(grant=BOTH), "the next round"


def test_who_leaves_releases_the_others_and_never_comes_back() -> None:
    game = barrier(Simultaneous(), THREE)
    game.act("a", "x")
    game.act("b", "y")
    assert game.leave("c").apply == (("a", "x"), ("b", "y"))
    assert game.applied(present=THREE).grant == ("a", "b"), "whatever the environment says"
    assert game.leave("c") == Next()
    game.act("a", "x")
    assert game.leave("a") == Next(), "its action is dropped, b's is awaited"
    assert game.act("b", "y").apply == (("b", "y"),)
    assert game.leave("b") == Next()
    assert game.applied(present=()) == Next(over=True)
    assert game.over


def test_agents_enter_and_leave_as_the_environment_says() -> None:
    game: TurnBarrier[str] = TurnBarrier(RoundRobin(), THREE)
    assert game.start(("a",)) == Next(grant=("a",))
    game.act("a", "x")
    assert game.applied(present=("a", "c")) == Next(grant=("c",))
    game.act("c", "y")
    assert game.applied(present=("b", "c")) == Next(grant=("b",))
    assert game.standing("a") is Standing.GONE


def test_the_end_is_the_end() -> None:
    game = barrier(Free())
    game.act("black", "x")
    game.act("white", "y")
    assert game.applied(present=BOTH, over=True) == Next(over=True)
    assert (game.running, game.present) == ((), ())
    with pytest.raises(ProtocolError, match="does not take part"):
        game.act("black", "z")


class Fickle:
    """Names the other one as soon as it is asked again."""

    def next_turn(self, table: Table) -> Turn:
        return Turn(("white",)) if table.last == ("black",) else Turn(("black", "red"))


def test_a_protocol_may_not_take_back_a_turn() -> None:
    seats = ("black", "white", "red")
    game: TurnBarrier[str] = TurnBarrier(Fickle(), seats)
    game.start(seats)
    game.act("black", "x")
    with pytest.raises(ProtocolError, match="Fickle takes back the turn of red"):
        game.applied(present=seats)


class AnyGame(RuleBasedStateMachine):
    """2 to 5 agents whose messages are lost, doubled, reordered or late, under every built-in protocol."""

    @initialize(data=st.data(), count=st.integers(2, 5), kind=st.integers(0, 5))
    def begin(self, data: st.DataObject, count: int, kind: int) -> None:
        self.seats = tuple("abcde"[: 2 if kind == 0 else count])
        self.protocol: AgentProtocol = [
            Alternating(),
            RoundRobin(),
            Simultaneous(),
            Free(),
            ModeratorChooses("a"),
            EnvironmentChooses(),
        ][kind]
        self.barrier: TurnBarrier[int] = TurnBarrier(self.protocol, self.seats)
        self.applying: tuple[tuple[str, int], ...] = ()
        self.numbers: dict[str, int] = {}
        self.given: list[tuple[str, int]] = []
        self.accepted: list[tuple[str, int]] = []
        self.dropped: set[str] = set()
        self.gone: set[str] = set()
        present = [a for a in self.seats if data.draw(st.booleans())] or [self.seats[0]]
        self.did(self.barrier.start(present))

    def did(self, next: Next[int]) -> None:
        if next.apply:
            assert not self.applying, "one call at a time"
            self.applying = next.apply
            self.given += next.apply
            assert next.together or len(next.apply) == 1
            if next.together and not isinstance(self.protocol, Free):
                assert not self.barrier.running, "simultaneous: nobody is awaited any more"
        assert set(next.grant) <= set(self.barrier.running)
        assert not set(next.grant) & self.gone

    @rule(data=st.data(), agent=st.sampled_from("abcdef"))
    def act(self, data: st.DataObject, agent: str) -> None:
        """In turn, out of turn, twice, or of nobody."""
        running = agent in self.barrier.running
        before = (self.barrier.running, self.barrier.present)
        number = self.numbers.get(agent, 0)
        if running:
            self.numbers[agent] = number + 1
            self.accepted.append((agent, number))
            self.did(self.barrier.act(agent, number))
            event("acted")
        else:
            with pytest.raises(ProtocolError):
                self.barrier.act(agent, number)
            assert (self.barrier.running, self.barrier.present) == before
            event("refused")

    @precondition(lambda self: self.applying)
    @rule(data=st.data(), over=st.integers(0, 19))
    def answer(self, data: st.DataObject, over: int) -> None:
        self.applying = ()
        running = set(self.barrier.running)
        stays = [a for a in self.seats if a in running or data.draw(st.integers(0, 9)) > 0]
        named = data.draw(st.lists(st.sampled_from(self.seats), unique=True, max_size=2))
        keeps = isinstance(self.protocol, Free)
        present = [a for a in self.seats if a in self.barrier.present] if keeps else stays
        self.did(self.barrier.applied(present=present, named=named, over=over == 0))
        event("applied")

    @precondition(lambda self: self.barrier.running)
    @rule(data=st.data(), leaves=st.booleans())
    def time_out(self, data: st.DataObject, leaves: bool) -> None:
        agent = data.draw(st.sampled_from(self.barrier.running))
        if leaves:
            self.gone.add(agent)
            self.did(self.barrier.leave(agent))
        else:
            self.did(self.barrier.skip(agent))
        event("timed out")

    @rule(agent=st.sampled_from("abcde"))
    def die(self, agent: str) -> None:
        if agent in self.seats and len(self.gone) < len(self.seats) - 1:
            self.gone.add(agent)
            self.dropped.add(agent)
            self.did(self.barrier.leave(agent))
            event("died")

    @precondition(lambda self: not self.applying)
    @rule()
    def answer_without_a_question(self) -> None:
        with pytest.raises(ProtocolError, match="was given no action"):
            self.barrier.applied(present=self.seats)

    @invariant()
    def in_an_alternating_game_no_two_run(self) -> None:
        if hasattr(self, "barrier") and isinstance(self.protocol, Alternating | RoundRobin):
            assert len(self.barrier.running) <= 1
            assert not (self.applying and self.barrier.running)

    @invariant()
    def somebody_can_always_go_on(self) -> None:
        if hasattr(self, "barrier"):
            assert self.barrier.over or self.barrier.running or self.applying, "a lost wake-up"

    @invariant()
    def every_action_is_seen_once_and_in_the_order_of_its_agent(self) -> None:
        if hasattr(self, "barrier"):
            assert len(set(self.given)) == len(self.given)
            assert set(self.given) <= set(self.accepted)
            for agent in self.seats:
                seen = [number for name, number in self.given if name == agent]
                assert seen == sorted(seen)


TestAnyGame: Any = AnyGame.TestCase
TestAnyGame.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
