"""Fair share against the formula, and the order of the queue."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker.scheduler.fairshare import UsageLedger, decayed_usage, fair_share_factors, in_order
from opentinker.scheduler.plan import JobView
from opentinker.scheduler.states import JobState

HALF_LIFE_S = 1000.0
spans = st.tuples(st.floats(0.0, 5e3), st.floats(0.0, 3e3)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(spans, st.floats(0.0, 1e4))
def test_decayed_usage_is_the_integral_of_its_definition(span: tuple[float, float], now: float) -> None:
    begin, end = span
    t = np.linspace(min(begin, now), min(end, now), 20_001)
    reference = np.trapezoid(3.0 * 2.0 ** (-(now - t) / HALF_LIFE_S), t)
    assert decayed_usage(3.0, begin, end, now, HALF_LIFE_S) == pytest.approx(reference, rel=1e-6, abs=1e-6)


@given(st.lists(st.tuples(st.sampled_from("ab"), spans), max_size=8), st.floats(0.0, 1e4))
def test_a_ledger_holds_what_a_history_would(history: list[tuple[str, tuple[float, float]]], later: float) -> None:
    ledger = UsageLedger(HALF_LIFE_S)
    for owner, (begin, end) in history:
        ledger.charge(owner, 2.0, begin, end)
    now = max([end for _, (_, end) in history], default=0.0) + later
    usage = ledger.usage(now)
    for owner in "ab":
        expected = sum(decayed_usage(2.0, *span, now, HALF_LIFE_S) for name, span in history if name == owner)
        assert usage.get(owner, 0.0) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_a_clock_that_goes_back_gives_no_negative_usage() -> None:
    assert decayed_usage(1.0, 100.0, 50.0, 50.0, HALF_LIFE_S) == 0.0
    ledger = UsageLedger(HALF_LIFE_S)
    ledger.charge("a", 1.0, 0.0, 100.0)
    before = ledger.usage(100.0)
    ledger.charge("a", 1.0, 90.0, 20.0)
    assert ledger.usage(30.0) == before


def test_the_factor_is_a_half_for_who_used_exactly_their_share() -> None:
    usage, shares = {"a": 30.0, "b": 10.0}, {"a": 3.0}
    assert fair_share_factors(["a", "b"], usage, shares) == pytest.approx({"a": 0.5, "b": 0.5})
    factors = fair_share_factors(["a", "b", "new"], usage, {"a": 1.0, "b": 1.0, "none": 0.0})
    assert factors["new"] == 1.0 > factors["b"] > factors["a"] > 0.0
    assert fair_share_factors(["a"], {"a": 1.0}, {"a": 0.0}) == {"a": 0.0}


def queued(name: str, owner: str, priority: int = 0, at: float = 0.0) -> JobView:
    return JobView(name, JobState.QUEUED, (), owner=owner, priority=priority, submitted_at=at)


def test_priority_comes_first_then_fair_share_then_patience() -> None:
    factors = {"heavy": 0.1, "light": 0.9}
    queue = [queued("h", "heavy"), queued("l", "light", at=10.0), queued("urgent", "heavy", priority=1, at=20.0)]
    assert [job.id for job in in_order(queue, factors, 100.0)] == ["urgent", "l", "h"]
    patient = [queued("h", "heavy"), queued("l", "light", at=81.0)]
    assert [job.id for job in in_order(patient, factors, 100.0)] == ["h", "l"]


@given(st.lists(st.tuples(st.integers(-10, 10), st.floats(0, 1e5)), max_size=12))
def test_of_equals_the_earlier_goes_first(asked: list[tuple[int, float]]) -> None:
    times = sorted(at for _, at in asked)
    queue = [queued(f"{i}", "a", priority, at) for i, ((priority, _), at) in enumerate(zip(asked, times, strict=True))]
    ordered = in_order(queue, {"a": 0.5}, 100.0)
    keys = [(-job.priority, job.submitted_at, int(job.id)) for job in ordered]
    assert keys == sorted(keys)
