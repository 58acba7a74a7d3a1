"""Which samples start while commands run, against the rule in plain words."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from opentinker.client.messages import SampleRequest
from opentinker.server.overlap import SWITCHING, SampleGate
from opentinker.server.protocol import CommandWork, SampleWork

COMPUTING = ["train_step", "forward", "optim_step", "save"]
ARRIVAL = st.one_of(
    st.tuples(st.just("sample"), st.sampled_from("ab"), st.sampled_from([None, 0, 1])),
    st.tuples(st.just("command"), st.sampled_from("ab"), st.sampled_from([*sorted(SWITCHING), *COMPUTING])),
)
STEP = st.one_of(ARRIVAL, st.just(("run",)), st.just(("end",)), st.just(("start",)), st.just(("start before",)))


def sample(name: str, policy: str = "a", version: int | None = None) -> SampleWork:
    return SampleWork(name, policy, SampleRequest(name, (), version=version))


def served(work: SampleWork) -> bool:
    """Version 0 is there, version 1 never is."""
    return work.request.version != 1


@given(st.lists(STEP, max_size=40))
def test_a_sample_starts_once_nothing_before_it_can_decide_what_it_comes_from_and_not_before(
    steps: list[tuple[Any, ...]],
) -> None:
    gate = SampleGate()
    arrived: list[tuple[str, str, Any]] = []
    ended: set[int] = set()
    running: int | None = None
    started: list[int] = []

    def may(number: int) -> bool:
        """The rule."""
        _, policy, version = arrived[number]
        before = [n for n in range(number) if arrived[n][0] == "command" and arrived[n][1] == policy and n not in ended]
        return not any(arrived[n][2] in SWITCHING for n in before) and (version != 1 or not before)

    def expect(found: list[SampleWork], limit: int) -> None:
        waiting = [n for n, what in enumerate(arrived) if what[0] == "sample" and n not in started]
        chosen = [n for n in waiting if n < limit and may(n)]
        assert [int(work.operation) for work in found] == chosen
        started.extend(chosen)

    for step in steps:
        match step[0]:
            case "sample" | "command":
                name = str(len(arrived))
                arrived.append(step)
                gate.put(sample(name, *step[1:]) if step[0] == "sample" else CommandWork(name, step[1], step[2]))
            case "run" if running is None:
                work = gate.next_command()
                running = None if work is None else int(work.operation)
            case "end" if running is not None:
                gate.done()
                ended.add(running)
                running = None
            case "start":
                could = gate.has_startable(served)
                found = gate.startable(served)
                assert could == bool(found)
                expect(found, len(arrived))
            case "start before" if running is not None:
                expect(gate.startable(served, before_running=True), running)
    if running is not None:
        gate.done()
        ended.add(running)
    while (work := gate.next_command()) is not None:
        gate.done()
        ended.add(int(work.operation))
    expect(gate.startable(served), len(arrived))
    assert sorted(started) == [n for n, what in enumerate(arrived) if what[0] == "sample"]


def test_what_has_ended_holds_nobody_back_and_is_forgotten() -> None:
    gate = SampleGate()
    for number in range(100):
        gate.put(CommandWork(str(number), f"policy-{number}", "create"))
        gate.next_command()
        gate.done()
    assert not gate._switching
    assert not gate._any
    gate.put(sample("x", "policy-7"))
    assert [work.operation for work in gate.startable(served)] == ["x"]
