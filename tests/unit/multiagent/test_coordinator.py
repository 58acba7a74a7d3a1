"""The coordinator's own time, and how it ends."""

import asyncio
from typing import Any

import pytest
from coordination_tools import Place
from test_games import Relay

from opentinker.config.agents import TurnsConfig
from opentinker.config.rollout import RolloutConfig
from opentinker.env.frames import pack, unpack
from opentinker.errors import ConflictError, InvalidRequestError, NotFoundError, UnavailableError
from opentinker.multiagent.coordination.coordinator import KEPT_S, Coordinator

LEASE_S = 20.0


class Time:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def joining(place: Place, agent: str, **changes: Any) -> dict[str, Any]:
    terms = place.terms(RolloutConfig(), TurnsConfig())
    asked = {"driver": f"the-driver-of-{agent}", "run": "duel", "agents": {agent: "policy"}, "terms": terms, "steps": [0]}
    return asked | changes


@pytest.fixture
def place() -> Any:
    made = Place(Relay)
    made.coordinator._clock = made.time = Time()  # type: ignore[attr-defined]
    made.coordinator._looked_at = made.time.now  # type: ignore[attr-defined]
    made.coordinator._lease_s = LEASE_S
    made.coordinator._start = lambda: None  # type: ignore[method-assign]
    return made


def state(coordinator: Coordinator) -> Any:
    [run] = coordinator.runs()["runs"]
    return run["state"], run["cause"]


async def test_nobody_is_lost_because_the_server_stood_still(place) -> None:
    coordinator, time = place.coordinator, place.time
    for agent in ("black", "white"):
        await coordinator.join(joining(place, agent))
    time.now += 500.0
    coordinator.look()
    assert state(coordinator) == ("running", "")
    for _ in range(30):
        time.now += 0.9
        coordinator.alive({"driver": "the-driver-of-black"})
        coordinator.look()
    ended, cause = state(coordinator)
    assert ended == "ended"
    assert "the driver of 'white' is lost: it gave no sign of life for 20 s" in cause


async def test_what_is_over_is_forgotten_after_a_while(place) -> None:
    coordinator, time = place.coordinator, place.time
    for agent in ("black", "white"):
        await coordinator.join(joining(place, agent))
    for _ in range(int(LEASE_S + KEPT_S) + 10):
        time.now += 0.95
        coordinator.look()
    for _ in range(100):
        time.now += 0.95
        coordinator.look()
    assert coordinator.runs() == {"runs": []}
    with pytest.raises(NotFoundError, match="does not know this driver"):
        coordinator.alive({"driver": "the-driver-of-black"})


async def test_a_run_that_everybody_left_before_it_began_is_forgotten_and_takes_no_place(place, monkeypatch) -> None:
    monkeypatch.setattr("opentinker.multiagent.coordination.coordinator.MAX_RUNS", 1)
    coordinator = place.coordinator
    for run in ("first", "second", "third"):
        asked = joining(place, "black", run=run, driver=f"the-driver-of-{run}")
        await coordinator.join(asked)
        await coordinator.talk({"driver": asked["driver"], "heard": 0, "first": 1, "words": [pack(["leave", None])]})
    coordinator.look()
    assert coordinator.runs() == {"runs": []}


@pytest.mark.parametrize("looks", [True, False])
async def test_a_run_has_the_rules_of_those_who_begin_it_not_of_who_left_before(place, looks: bool) -> None:
    coordinator = place.coordinator
    stale, meant = TurnsConfig(join_timeout_s=1.0, turn_timeout_s=1.0), TurnsConfig(turn_timeout_s=7.0)
    wrong = place.terms(RolloutConfig(max_turns=1), stale)
    await coordinator.join(joining(place, "black", driver="a-driver-of-black-in-error", terms=wrong))
    leaves = {"driver": "a-driver-of-black-in-error", "heard": 0, "first": 1, "words": [pack(["leave", None])]}
    await coordinator.talk(leaves)
    if looks:
        coordinator.look()
    for agent in ("black", "white"):
        await coordinator.join(joining(place, agent, terms=place.terms(RolloutConfig(max_turns=5), meant)))
    [table] = coordinator._tables.values()
    assert (table.rules.rollout.max_turns, table.rules.turns) == (5, meant)
    assert table.run.patience.join_timeout_s == meant.join_timeout_s
    assert state(coordinator) == ("running", "")


async def test_a_driver_that_was_silent_while_the_run_gathered_hears_that_it_lost_its_seat(place) -> None:
    coordinator, time = place.coordinator, place.time
    await coordinator.join(joining(place, "black"))
    for _ in range(int(LEASE_S) + 5):
        time.now += 0.95
        coordinator.look()
    assert coordinator.runs() == {"runs": []}
    answer = await coordinator.talk({"driver": "the-driver-of-black", "heard": 0, "first": 1, "words": []})
    [word] = answer["words"]
    said, problem = unpack(word)
    assert said == "failed"
    assert problem["detail"] == "run 'duel': this driver gave no sign of life for 20 s, and has lost its seats"


async def test_a_server_that_ends_tells_its_drivers_and_takes_no_more(place) -> None:
    coordinator = place.coordinator
    await coordinator.join(joining(place, "black"))
    await coordinator.stop()
    assert state(coordinator) == ("ended", "run 'duel': the coordinator shuts down")
    with pytest.raises(UnavailableError):
        await coordinator.join(joining(place, "white"))


async def test_a_server_that_ends_answers_whoever_waits_at_once(place) -> None:
    """Whose run ends by it hears that; whose run was over, and who waits all the same, that there is nothing to wait for."""
    coordinator = place.coordinator

    def talk(run: str, **more: Any) -> Any:
        return coordinator.talk({"driver": f"the-driver-in-{run}", "heard": 0, "first": 1, "words": [], **more})

    await coordinator.join(joining(place, "black", run="duel", driver="the-driver-in-duel"))
    await coordinator.join(joining(place, "black", run="over", driver="the-driver-in-over"))
    await coordinator.join(joining(place, "white", run="over"))
    told = await talk("over", words=[pack(["dance"])])
    heard = len(told["words"])
    waiting = [talk("duel", wait_s=30.0), talk("over", heard=heard, wait_s=30.0)]
    a_seat = coordinator.join(joining(place, "black", driver="another-driver-of-black"))
    asked = [asyncio.ensure_future(request) for request in (*waiting, a_seat)]
    await asyncio.sleep(0)
    await coordinator.stop()
    told, *refused = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 20)
    [word] = map(unpack, told["words"])
    assert (word[0], word[1]["code"], word[1]["detail"]) == ("failed", "agent_lost", "run 'duel': the coordinator shuts down")
    assert [(type(error), str(error)) for error in refused] == [(UnavailableError, "the server is shutting down")] * 2
    assert (await talk("over", heard=heard))["words"] == [], "who says something and does not wait is confirmed"
    with pytest.raises(UnavailableError):
        await talk("over", heard=heard, wait_s=30.0)


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"driver": "short"}, InvalidRequestError, "an id of its own"),
        ({"agents": {}}, InvalidRequestError, "its agents"),
        ({"agents": {"red": "policy"}}, NotFoundError, "Relay has no agent 'red'"),
        ({"agents": {"black": "ghost"}}, InvalidRequestError, "its agents"),
        ({"steps": []}, InvalidRequestError, "its steps"),
        ({"run": "x" * 201}, InvalidRequestError, "a run's name"),
        ({"terms": {}}, ConflictError, "environment.name: None for 'black', 'Relay' on the server"),
    ],
)
async def test_odd_ways_to_join_are_refused(place, changes: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        await place.coordinator.join(joining(place, "black", **changes))
    assert place.coordinator.runs() == {"runs": []}


async def test_a_driver_that_talks_nonsense_ends_its_run_with_that_cause(place) -> None:
    coordinator = place.coordinator
    for agent in ("black", "white"):
        await coordinator.join(joining(place, agent))
    talk = {"driver": "the-driver-of-black", "heard": 0, "first": 1, "words": [pack(["dance"])]}
    await coordinator.talk(talk)
    assert state(coordinator) == ("ended", "there is no such word: ['dance']")
    with pytest.raises(InvalidRequestError):
        await coordinator.talk({"driver": "the-driver-of-white"})
    await coordinator.stop()
