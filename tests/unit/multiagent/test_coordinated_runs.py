"""The pure parts of runs with several drivers, whatever is said in whatever order, lost, doubled or late."""

from collections.abc import Mapping
from random import Random
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from opentinker.env.environment import Action
from opentinker.errors import (
    AgentLostError,
    ConflictError,
    InvalidRequestError,
    OpenTinkerError,
    ServerLostError,
    from_problem,
)
from opentinker.multiagent.coordination.channel import Channel, Words
from opentinker.multiagent.coordination.run import CoordinatedRun, Patience, Round
from opentinker.multiagent.coordination.words import Answer, Taken, event_from_wire, event_to_wire
from opentinker.multiagent.phases import Moment, Phase
from opentinker.rollout.machine import EpisodeEnded, ResetDone, StepDone, TurnGranted
from opentinker.rollout.types import Termination

LEASE, BARRIER, JOIN = 20.0, 30.0, 600.0


@given(seed=st.integers(0, 2**31), count=st.integers(1, 40), share=st.floats(0.0, 0.6))
def test_a_channel_carries_every_word_once_and_in_order_whatever_becomes_of_messages(
    seed: int, count: int, share: float
) -> None:
    numbers = Random(seed)
    ends = {"a": Channel(), "b": Channel()}
    said: dict[str, list[bytes]] = {"a": [], "b": []}
    heard: dict[str, list[bytes]] = {"a": [], "b": []}
    under_way: list[tuple[str, Words]] = []
    for step in range(20 * count):
        end = numbers.choice(("a", "b"))
        if step < count:
            word = f"{end}{step}".encode()
            ends[end].say(word)
            said[end].append(word)
        if numbers.random() > share:
            under_way.append(("b" if end == "a" else "a", ends[end].message()))
        if under_way and numbers.random() > 0.3:  # any of those under way arrives next, and perhaps again later
            to, message = numbers.choice(under_way)
            heard[to] += ends[to].take(message)
            if numbers.random() > share:
                under_way.remove((to, message))
    for end, other in (("a", "b"), ("b", "a"), ("a", "b"), ("b", "a")):
        heard[other] += ends[other].take(ends[end].message())
    assert heard == {"a": said["b"], "b": said["a"]}
    assert not ends["a"].waiting
    assert not ends["b"].waiting


@pytest.mark.parametrize("message", [Words(1, 1, []), Words(0, 2, [b"x"]), Words(-1, 1, []), Words(0, 0, [b"x"])])
def test_a_channel_refuses_what_cannot_be(message: Words) -> None:
    channel = Channel()
    with pytest.raises(InvalidRequestError):
        channel.take(message)
    assert channel.take(Words(0, 1, [b"x"])) == [b"x"]


def test_events_and_answers_arrive_as_they_were_sent() -> None:
    shown = ({"role": "user", "content": "0.1"},)
    for told in (
        ResetDone(shown, ({"type": "function"},), True),
        TurnGranted(shown, {}, 0.1 + 0.2, {"r": 1e-17}, {"won": 1.0}),
        StepDone(-0.3, True, shown, {"m": 1.0}, {"r": -0.3}, {}, 0.1),
        EpisodeEnded(shown, 1.0, {}, {}, Termination.TRUNCATED_TURNS),
        Taken(),
    ):
        assert event_from_wire(event_to_wire(told)) == told
    answer = Answer("act", Action("e5", True, "why"))
    assert Answer.from_wire(answer.to_wire()) == answer
    for odd in (None, ["act"], ["shout", ["", False, ""], "", False], ["act", [1, False, ""], "", False]):
        with pytest.raises(InvalidRequestError):
            Answer.from_wire(odd)
    for odd in (None, ["Nothing", {}], ["StepDone", {"reward": 1.0, "loss": 2.0}]):
        with pytest.raises(InvalidRequestError):
            event_from_wire(odd)


def a_round(step: int, kind: Any = "train", digest: str = "same") -> Round:
    return Round(kind, step, 0, 4, 3, digest)


def a_run(on_lost: Any = "fail", agents: tuple[str, ...] = ("black", "white")) -> CoordinatedRun:
    return CoordinatedRun("duel", agents, Patience(LEASE, JOIN, BARRIER, on_lost), 0.0)


def begun(on_lost: Any = "fail", agents: tuple[str, ...] = ("black", "white")) -> CoordinatedRun:
    """Each agent's driver is called like it."""
    run = a_run(on_lost, agents)
    for name in agents:
        run.join(name, {name: "policy"}, {}, [0], 0.0)
    return run


def test_a_run_begins_at_the_newest_step_that_all_drivers_have() -> None:
    run = a_run()
    run.join("b", {"black": "policy"}, {"rollout.max_turns": 3}, [0, 10, 20], 0.0)
    run.join("b", {"black": "policy"}, {"rollout.max_turns": 3}, [0, 10, 20], 1.0)
    assert run.barrier is None
    run.join("w", {"white": "policy"}, {"rollout.max_turns": 3}, [10, 0], 1.0)
    assert [(item.word, item.args) for item in run.news] == [("start", (10,))]
    assert run.barrier is not None
    assert run.barrier.moment == Moment(10, Phase.ROLLOUT)
    with pytest.raises(ConflictError, match="has begun"):
        run.join("r", {"white": "policy"}, {"rollout.max_turns": 3}, [0], 2.0)


def test_a_driver_that_is_lost_before_the_run_begins_frees_its_seat() -> None:
    run = a_run()
    run.join("b", {"black": "policy"}, {}, [0], 0.0)
    run.tick(LEASE + 1)
    assert run.drivers == {}
    run.join("b2", {"black": "policy"}, {"seed": 5}, [0], LEASE + 2)  # its terms are its own
    run.join("w", {"white": "policy"}, {"seed": 5}, [0], LEASE + 3)
    assert run.barrier is not None


def test_a_slow_update_is_late_only_when_somebody_waits_for_longer_than_is_allowed() -> None:
    run = begun()
    for name in run.seats:
        run.open(name, a_round(1), 10.0)
    assert run.ready == a_round(1)
    run.played()
    for name in run.seats:
        run.finish(name, Moment(0, Phase.ROLLOUT), 20.0)
    for now in range(20, 500, 5):
        for name in run.seats:
            run.alive(name, float(now))
        run.tick(float(now))
    assert run.ended is None, "both take their time, and nobody waits"
    run.finish("black", Moment(0, Phase.UPDATE), 500.0)
    run.alive("white", 525.0)
    run.alive("black", 525.0)
    run.tick(500.0 + BARRIER)
    assert run.ended is None
    run.tick(500.0 + BARRIER + 1)
    assert isinstance(run.ended, AgentLostError)
    assert "'white' held up the others in update 0 for 31 s" in run.ended.detail


def test_loading_checkpoints_before_the_first_games_may_take_as_long_as_joining() -> None:
    run = begun()
    run.open("black", a_round(1), 0.0)
    for now in range(0, int(JOIN), 10):
        for name in run.seats:
            run.alive(name, float(now))
        run.tick(float(now))
    assert run.ended is None
    run.open("white", a_round(1), JOIN)
    assert run.ready is not None


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (a_round(1), a_round(1, digest="other"), "have different tasks for the games of step 1"),
        (a_round(1), a_round(0, "evaluation"), "asks for the evaluation at step 0, that of 'black' for the games of step 1"),
        (
            a_round(1),
            Round("train", 1, 0, 8, 3, "same"),
            "8 episodes per task for the driver of 'white', 4 for that of 'black'",
        ),
        (a_round(1), a_round(2), "asks for the games of step 2; all are in rollout 0"),
    ],
)
def test_drivers_that_ask_for_different_games_are_told_so(first: Round, second: Round, says: str) -> None:
    run = begun()
    run.open("black", first, 0.0)
    run.open("white", second, 0.0)
    assert isinstance(run.ended, ConflictError)
    assert says in run.ended.detail


def test_a_driver_that_has_done_all_its_steps_leaves_in_order_and_the_others_hear_so_when_they_want_more() -> None:
    run = begun()
    run.leave("white", None)
    run.tick(1.0)
    assert run.ended is None
    run.open("black", a_round(1), 1.0)
    assert isinstance(run.ended, ConflictError)
    assert "the driver of 'white' left in order in rollout 0" in run.ended.detail
    other = begun()
    other.leave("white", None)
    other.finish("black", Moment(0, Phase.ROLLOUT), 1.0)
    assert "the driver of 'white' left in order in rollout 0" in str(other.ended)
    calm = begun()
    for name in calm.seats:
        calm.leave(name, None)
    assert calm.over
    assert calm.ended is None


def test_the_cause_that_a_driver_gives_reaches_the_others_as_it_is() -> None:
    run = begun()
    run.leave("white", ServerLostError("job j-1 is FAILED: its worker died", hint="look there"))
    assert run.ended is not None
    told = from_problem(run.ended.to_problem())
    assert isinstance(told, AgentLostError)
    assert "the driver of 'white' is lost: job j-1 is FAILED: its worker died (look there)" in told.detail


class Driving(RuleBasedStateMachine):
    """Two to five drivers of a run in any order, alive or not, on time or late. What they do is what a loop does: it opens
    games, finishes its rollout, finishes its update, and waits in between for what it was told.

    Always: nobody updates while games are played, nobody plays while somebody updates; whoever is alive and waits is told in
    the end, or the run has a cause that names somebody."""

    @initialize(count=st.integers(2, 5), on_lost=st.sampled_from(["fail", "go_on"]))
    def begin(self, count: int, on_lost: Any) -> None:
        self.names = tuple("abcde"[:count])
        self.run = begun(on_lost, self.names)
        self.on_lost = on_lost
        self.now = 0.0
        self.state: dict[str, str] = dict.fromkeys(self.names, "idle")
        """idle -> opened -> playing -> played -> rolled -> updating -> updated -> idle; or dead, or gone"""
        self.alive = set(self.names)
        self.iteration = 0
        self.follow()

    def follow(self) -> None:
        """What the shell does with the news."""
        news, self.run.news = self.run.news, []
        for item in news:
            if item.word == "moment":
                iteration, phase = item.args
                if phase == "update":
                    assert iteration == self.iteration
                    self._all({"rolled": "updating"})
                else:
                    assert iteration == self.iteration + 1
                    self.iteration = iteration
                    self._all({"updated": "idle"})
            elif item.word == "gone":
                for name in item.args[0]:
                    self.state[name] = "gone"
                    self.alive.discard(name)
        if self.run.ready is not None:
            self.run.ready = None
            self._all({"opened": "playing"})

    def _all(self, moves: Mapping[str, str]) -> None:
        self.state = {name: moves.get(state, state) for name, state in self.state.items()}

    def ones(self, state: str) -> list[str]:
        return [name for name in self.names if self.state[name] == state and name in self.alive]

    def goes_on(self, name: str) -> None:
        """What this driver does next, if it waits for nobody."""
        self.run.alive(name, self.now)
        match self.state[name]:
            case "idle":
                self.state[name] = "opened"
                self.run.open(name, a_round(self.iteration + 1), self.now)
            case "played":
                self.state[name] = "rolled"
                self.run.finish(name, Moment(self.iteration, Phase.ROLLOUT), self.now)
            case "updating":
                self.state[name] = "updated"
                self.run.finish(name, Moment(self.iteration, Phase.UPDATE), self.now)
        self.follow()

    @precondition(lambda self: self.run.ended is None)
    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        able = [name for name in self.names if name in self.alive and self.state[name] in ("idle", "played", "updating")]
        if not able:
            return
        name = data.draw(st.sampled_from(able))
        self.goes_on(name)

    @precondition(lambda self: self.run.ended is None and "playing" in self.state.values())
    @rule()
    def games_end(self) -> None:
        self.run.played()
        self._all({"playing": "played"})
        self.follow()

    @precondition(lambda self: self.run.ended is None)
    @rule(seconds=st.sampled_from([0.5, 5.0, 15.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for name in self.alive:
            self.run.alive(name, self.now)
        self.run.tick(self.now)
        self.follow()

    @precondition(lambda self: self.run.ended is None and len(self.alive) > 1)
    @rule(data=st.data(), said=st.booleans(), stops=st.booleans())
    def dies(self, data: st.DataObject, said: bool, stops: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.alive)))
        self.alive.discard(name)
        if said:
            if stops:
                self.run.stop(name, "its gradient grew")
            else:
                self.run.leave(name, OpenTinkerError("its server was lost"))
        else:
            self.state[name] = "dead"
        self.follow()

    @precondition(lambda self: self.run.ended is not None)
    @rule()
    def what_comes_after_the_end_changes_nothing(self) -> None:
        cause = self.run.ended
        for name in self.names:
            self.run.open(name, a_round(self.iteration + 1), self.now)
            self.run.finish(name, Moment(self.iteration, Phase.ROLLOUT), self.now)
            self.run.leave(name, None)
        self.run.tick(self.now + 2 * JOIN)
        assert self.run.ended is cause

    @invariant()
    def phases_are_apart(self) -> None:
        busy = {self.state[name] for name in getattr(self, "alive", ())}
        assert not ({"playing", "opened", "idle"} & busy and {"updating", "updated"} & busy)
        assert not ("playing" in busy and {"rolled"} & busy)

    def teardown(self) -> None:
        """From here on everybody who is alive does what it can: the run goes on, or has a cause that names somebody."""
        if not hasattr(self, "run"):
            return
        goal = self.iteration + 2
        for _ in range(400):
            if self.run.ended is not None or not self.alive or self.iteration >= goal:
                break
            for name in sorted(self.alive):
                if name not in self.alive:
                    continue
                self.goes_on(name)
            if "playing" in self.state.values():
                self.games_end()
            self.time_passes(5.0)
        if self.run.ended is not None:
            event("ended with a cause")
            assert any(f"'{name}'" in self.run.ended.detail for name in self.names), self.run.ended.detail
        else:
            event("went on")
            assert not self.alive or self.iteration >= goal, (self.state, self.run.document(self.now))


TestDriving = Driving.TestCase
TestDriving.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
