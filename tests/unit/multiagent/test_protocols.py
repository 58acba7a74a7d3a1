"""Every built-in order of play names somebody who is there, whatever happened before; what cannot go on is refused by name."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker.errors import ConfigError, ProtocolError
from opentinker.multiagent.protocol import (
    BUILT_IN,
    AgentProtocol,
    Alternating,
    EnvironmentChooses,
    Free,
    ModeratorChooses,
    RoundRobin,
    Simultaneous,
    Table,
    Turn,
    check_seats,
    checked_turn,
    make_protocol,
)

SEATS = ("a", "b", "c", "d", "e")
PROTOCOLS: list[AgentProtocol] = [
    Alternating(),
    RoundRobin(),
    Simultaneous(),
    Free(),
    ModeratorChooses("a"),
    EnvironmentChooses(),
]


@st.composite
def tables(draw: st.DrawFn) -> Table:
    seats = SEATS[: draw(st.integers(2, 5))]
    present = tuple(a for a in seats if draw(st.booleans())) or (draw(st.sampled_from(seats)),)
    some = st.lists(st.sampled_from((*seats, "nobody")), unique=True, max_size=3).map(tuple)
    return Table(seats, present, last=draw(some), named=draw(some))


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda p: type(p).__name__)
@given(table=tables())
def test_whatever_happened_somebody_who_is_there_may_act(protocol: AgentProtocol, table: Table) -> None:
    turn = checked_turn(protocol, table)
    assert turn.agents
    assert set(turn.agents) <= set(table.present)
    assert turn == protocol.next_turn(table), "a protocol remembers nothing"


@given(table=tables())
def test_one_at_a_time_means_one(table: Table) -> None:
    for protocol in (Alternating(), RoundRobin()):
        assert len(protocol.next_turn(table).agents) == 1


@given(seats=st.integers(2, 5), gone=st.sets(st.integers(0, 4)))
def test_round_robin_reaches_everybody_who_is_present_before_anybody_again(seats: int, gone: set[int]) -> None:
    names = SEATS[:seats]
    present = tuple(name for place, name in enumerate(names) if place not in gone) or names[:1]
    last: tuple[str, ...] = ()
    acted = []
    for _ in range(2 * len(present)):
        last = RoundRobin().next_turn(Table(names, present, last)).agents
        acted += last
    assert acted == [*present, *present]


def test_alternating_begins_with_the_first_seat_and_changes_after_each_action() -> None:
    table = Table(("black", "white"), ("black", "white"))
    assert Alternating().next_turn(table) == Turn(("black",))
    assert Alternating().next_turn(Table(table.seats, table.present, last=("black",))) == Turn(("white",))
    assert Alternating().next_turn(Table(table.seats, table.present, last=("white",))) == Turn(("black",))
    assert Alternating().next_turn(Table(table.seats, ("black",), last=("black",))) == Turn(("black",))


def test_the_moderator_acts_before_and_after_whom_it_chose() -> None:
    protocol, seats = ModeratorChooses("chair"), ("ann", "bob", "chair")
    assert protocol.next_turn(Table(seats, seats)) == Turn(("chair",))
    assert protocol.next_turn(Table(seats, seats, last=("chair",), named=("bob",))) == Turn(("bob",))
    both = Table(seats, seats, last=("chair",), named=("bob", "ann"))
    assert protocol.next_turn(both) == Turn(("ann", "bob"), together=True)
    assert protocol.next_turn(Table(seats, seats, last=("bob",))) == Turn(("chair",))
    assert protocol.next_turn(Table(seats, seats, last=("chair",), named=("chair",))) == Turn(("chair",)), "it chose itself"
    assert protocol.next_turn(Table(seats, ("ann", "chair"), last=("chair",), named=("bob",))) == Turn(("chair",)), "bob left"
    assert protocol.next_turn(Table(seats, ("ann", "bob"), last=("ann",))) == Turn(("bob",)), "no moderator any more"


@dataclass(frozen=True)
class Says:
    turn: Turn

    def next_turn(self, table: Table) -> Turn:
        return self.turn


@pytest.mark.parametrize(
    ("turn", "says"),
    [
        (Turn(()), "Says names no one, so nothing can ever happen; a, b are present"),
        (Turn(("a", "a")), "Says names an agent twice: a, a"),
        (Turn(("a", "c")), "Says names c; present are a, b"),
        (("a",), "Says.next_turn gave tuple"),
    ],
)
def test_a_protocol_of_ones_own_that_cannot_go_on_is_refused(turn: Turn, says: str) -> None:
    with pytest.raises(ProtocolError, match="^" + says):
        checked_turn(Says(turn), Table(("a", "b", "c"), ("a", "b")))


@pytest.mark.parametrize(
    ("protocol", "seats", "says"),
    [
        (RoundRobin(), (), "names no agents"),
        (RoundRobin(), ("a", "b", "a"), "two agents have the same name"),
        (Alternating(), ("a", "b", "c"), "Alternating takes 2 agents, the environment has 3"),
        (ModeratorChooses(), ("a",), "takes at least 2 agents"),
        (ModeratorChooses("moderater"), ("moderator", "b"), "no agent is called 'moderater'"),
    ],
)
def test_seats_that_do_not_fit_are_refused(protocol: AgentProtocol, seats: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_seats(protocol, seats)


def test_built_in_protocols_have_names() -> None:
    assert {type(protocol) for protocol in PROTOCOLS} == set(BUILT_IN.values())
    assert make_protocol("moderator_chooses", moderator="chair") == ModeratorChooses("chair")
    with pytest.raises(ConfigError, match="no agent protocol 'alternate'") as caught:
        make_protocol("alternate")
    assert "alternating" in caught.value.hint
    with pytest.raises(ConfigError, match="does not take these fields"):
        make_protocol("free", moderator="x")
