"""The barrier between rollouts and updates: nobody updates during rollouts, nobody samples before all updates are published."""

from typing import Any

import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from opentinker.errors import ConfigError, ConflictError, NotFoundError
from opentinker.multiagent.phases import Awaited, Moment, Phase, PhaseBarrier

R0, U0, R1 = Moment(0, Phase.ROLLOUT), Moment(0, Phase.UPDATE), Moment(1, Phase.ROLLOUT)


def test_phases_change_when_everybody_has_finished() -> None:
    barrier = PhaseBarrier(["black", "white"])
    assert barrier.may("black", R0)
    assert not barrier.finish("black", R0, 1.0)
    assert not barrier.may("black", U0)
    assert barrier.finish("white", R0, 2.0)
    assert barrier.moment == U0
    assert barrier.may("black", U0)
    assert not barrier.may("white", R1)
    barrier.finish("black", U0, 3.0)
    assert barrier.finish("white", U0, 4.0)
    assert barrier.moment == R1 == U0.next
    assert (R0 < U0 < R1, str(U0)) == (True, "update 0")


def test_who_is_awaited_and_since_when() -> None:
    barrier = PhaseBarrier(["a", "b", "c"])
    assert barrier.awaited() is None
    assert barrier.late(1e9, 30.0) is None, "nobody waits for anybody"
    barrier.finish("b", R0, 100.0)
    barrier.finish("a", R0, 110.0)
    assert barrier.late(130.0, 30.0) is None
    assert barrier.late(130.5, 30.0) == Awaited(("c",), R0, 100.0)
    assert barrier.leave("c", "its server was killed")
    assert (barrier.moment, barrier.gone) == (U0, {"c": "its server was killed"})
    assert barrier.awaited() is None


def test_what_was_said_before_changes_nothing_and_what_cannot_be_is_refused() -> None:
    barrier = PhaseBarrier(["a", "b"], start=R1)
    assert not barrier.finish("a", R0, 0.0), "said again, late"
    assert barrier.awaited() is None
    with pytest.raises(ConflictError, match="'a' cannot have finished update 1: all are in rollout 1"):
        barrier.finish("a", R1.next, 0.0)
    with pytest.raises(ConflictError, match="update 0 is over"):
        barrier.may("a", U0)
    with pytest.raises(NotFoundError, match="no learner 'c'"):
        barrier.finish("c", R1, 0.0)
    barrier.leave("b", "gone")
    with pytest.raises(ConflictError, match="'b' has left: gone"):
        barrier.may("b", R1)
    assert barrier.finish("a", R1, 0.0)
    barrier.leave("a", "gone, too")
    assert barrier.moment == U0.next.next, "without learners nothing moves"


@pytest.mark.parametrize("learners", [[], ["a", "a"]])
def test_learners_have_names_of_their_own(learners: list[str]) -> None:
    with pytest.raises(ConfigError, match="different names"):
        PhaseBarrier(learners)


def test_only_a_lag_of_0_is_played() -> None:
    with pytest.raises(ConfigError, match="lag 1 is not served"):
        PhaseBarrier(["a"], lag=1)
    with pytest.raises(ValueError, match="count from 0"):
        Moment(-1, Phase.ROLLOUT)


class AnyRun(RuleBasedStateMachine):
    """2 to 5 learners in processes of their own; what they say is lost, comes twice, out of order and late."""

    @initialize(count=st.integers(2, 5))
    def begin(self, count: int) -> None:
        self.names = "abcde"[:count]
        self.barrier = PhaseBarrier(list(self.names))
        self.now = 0.0
        self.at = dict.fromkeys(self.names, R0)
        """Where each learner is, as it knows it: it does that phase, or has done it and waits."""
        self.done = dict.fromkeys(self.names, False)
        self.sent: list[tuple[str, Moment]] = []
        self.lost: set[str] = set()
        self.releases = 0

    def alive(self) -> list[str]:
        return [name for name in self.names if name not in self.lost]

    @precondition(lambda self: self.alive())
    @rule(data=st.data(), arrives=st.booleans())
    def work(self, data: st.DataObject, arrives: bool) -> None:
        """A learner does its phase, which it may, and says so; the message may be lost."""
        name = data.draw(st.sampled_from(self.alive()))
        self.now += 1
        if not self.done[name]:
            assert self.barrier.may(name, self.at[name])
            self.done[name] = True
        self.sent.append((name, self.at[name]))
        if arrives:
            self.barrier.finish(name, self.at[name], self.now)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def say_again(self, data: st.DataObject) -> None:
        """An earlier message arrives now: again, late, in another order."""
        name, moment = data.draw(st.sampled_from(self.sent))
        if name in self.lost:
            with pytest.raises(ConflictError, match="has left"):
                self.barrier.finish(name, moment, self.now)
        else:
            self.barrier.finish(name, moment, self.now)
        event("said again")

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def look(self, data: st.DataObject) -> None:
        """A learner asks whether it may go on."""
        name = data.draw(st.sampled_from(self.alive()))
        following = self.at[name].next
        if self.done[name] and self.barrier.moment >= following and self.barrier.may(name, following):
            self.at[name], self.done[name] = following, False
            self.releases += 1
            event("went on")

    @rule(data=st.data())
    def time_out(self, data: st.DataObject) -> None:
        self.now += data.draw(st.floats(0, 60))
        late = self.barrier.late(self.now, 30.0)
        if late is not None and data.draw(st.booleans()):
            for name in late.learners:
                self.lost.add(name)
                self.barrier.leave(name, f"late since {late.since}")
            event("timed out")

    @invariant()
    def no_update_in_rollout_and_no_rollout_in_update(self) -> None:
        if hasattr(self, "at"):
            busy = {self.at[name] for name in self.alive() if not self.done[name]}
            assert len(busy) <= 1, "two phases at once"
            assert all(moment == self.barrier.moment for moment in busy)

    @invariant()
    def there_is_always_progress(self) -> None:
        """If all who are alive say what they have done, either the phase changes or one of them has work to do."""
        if hasattr(self, "at") and self.alive():
            waiting = [n for n in self.alive() if self.done[n] and self.barrier.moment == self.at[n]]
            working = [n for n in self.alive() if not self.done[n] or self.barrier.moment > self.at[n]]
            unheard = [n for n in waiting if n in (self.barrier.awaited() or Awaited(tuple(waiting), R0, 0)).learners]
            assert working or unheard, "a lost wake-up: all have been heard and nobody goes on"


TestAnyRun: Any = AnyRun.TestCase
TestAnyRun.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
