"""When a driver is lost, late or stops early, those of the other agents hear why, and end or go on."""

import asyncio
from typing import Any

import pytest
from apart_tools import SMALL, Digits, Three
from coordination_tools import meeting

from opentinker.errors import AgentLostError, ConflictError, ServerLostError, TrainerError


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (TrainerError("the loss is nan"), "the driver of 'white' is lost: the update of 'white': the loss is nan"),
        (ServerLostError("job job-1 is FAILED: its worker died"), "the driver of 'white' is lost: .*its worker died"),
    ],
)
async def test_a_driver_that_cannot_go_on_says_why_to_the_others(make_drivers, here, error: Exception, says: str) -> None:
    """Mid-update."""
    drivers = make_drivers()

    async def broken(*_: Any, **__: Any) -> Any:
        raise error

    drivers.policies["white"].train_step = broken
    async with meeting(Digits) as place:
        here(place)
        black, white = await asyncio.gather(*(drivers.drive(name, 2) for name in Digits.agents), return_exceptions=True)
        assert type(white) is type(error)
        with pytest.raises(AgentLostError, match=says):
            raise black
        assert place.coordinator.runs()["runs"][0]["state"] == "ended"


async def test_a_server_that_is_lost_within_a_game_ends_the_game_for_all_with_that_cause(make_drivers, here) -> None:
    drivers = make_drivers()
    drivers.policies["white"].broken = ServerLostError("job job-1 is FAILED: its worker died")
    async with meeting(Digits) as place:
        here(place)
        black, white = await asyncio.gather(*(drivers.drive(name, 2) for name in Digits.agents), return_exceptions=True)
    assert isinstance(white, ServerLostError)
    with pytest.raises(AgentLostError, match=r"the driver of 'white' is lost: .*its worker died"):
        raise black


async def test_who_holds_up_the_others_for_too_long_is_named(make_drivers, here) -> None:
    drivers = make_drivers(turns={"barrier_timeout_s": 2.0})

    async def slow(*_: Any, **__: Any) -> Any:
        await asyncio.sleep(3600)

    drivers.policies["white"].train_step = slow
    async with meeting(Digits) as place:
        here(place)
        white = asyncio.ensure_future(drivers.drive("white", 2))
        with pytest.raises(AgentLostError, match=r"'white' held up the others in update 0 for .* s") as caught:
            await drivers.drive("black", 2)
        assert "turns.barrier_timeout_s" in caught.value.hint
        white.cancel()
        await asyncio.gather(white, return_exceptions=True)


async def test_the_others_go_on_without_an_agent_that_is_lost_if_they_are_to(make_drivers, here) -> None:
    drivers = make_drivers(Three, turns={"on_lost": "go_on", "on_late": "forfeit"})

    async def broken(*_: Any, **__: Any) -> Any:
        raise TrainerError("the loss is nan")

    drivers.policies["red"].train_step = broken
    async with meeting(Three) as place:
        here(place)
        black, white, red = await asyncio.gather(*(drivers.drive(name, 3) for name in Three.agents), return_exceptions=True)
    assert isinstance(red, TrainerError)
    assert (black.steps_done, white.steps_done) == (3, 3)
    assert black._member.gone == {"red": "the driver of 'red' is lost: the update of 'red': the loss is nan"}


async def test_a_driver_without_which_the_others_go_on_hears_that(make_drivers, here) -> None:
    drivers = make_drivers(Three, turns={"on_lost": "go_on", "on_late": "forfeit", "barrier_timeout_s": 2.0})
    slow = asyncio.Event()
    train = drivers.policies["red"].train_step

    async def waits(*args: Any, **kwargs: Any) -> Any:
        await slow.wait()
        return await train(*args, **kwargs)

    drivers.policies["red"].train_step = waits
    async with meeting(Three) as place:
        here(place)
        red = asyncio.ensure_future(drivers.drive("red", 2))
        others = await asyncio.gather(drivers.drive("black", 2), drivers.drive("white", 2))
        slow.set()
        with pytest.raises(AgentLostError, match="goes on without this driver: 'red' held up the others in update 0"):
            await red
    assert [loop.steps_done for loop in others] == [2, 2]


STOPS: dict[str, Any] = {"stop": {"max_grad_norm": 1e-9}, "optimizer": {"learning_rate": 2.0}}
"""After the first step."""


@pytest.mark.parametrize(
    "evaluation", [{}, {"at_end": False}, {"every": 1}, {"every": 1, "at_end": False}, {"every": 1, "at_start": True}]
)
async def test_a_driver_that_stops_early_ends_in_order_and_the_others_hear_why(make_drivers, here, evaluation) -> None:
    drivers = make_drivers(evaluation=SMALL["evaluation"] | evaluation)
    async with meeting(Digits) as place:
        here(place)
        black, white = await asyncio.gather(
            drivers.drive("black", 3), drivers.drive("white", 3, training=STOPS), return_exceptions=True
        )
        assert white.steps_done == 1
        assert "stopped-early" in drivers.policies["white"].saved
        with pytest.raises(ConflictError, match=r"the driver of 'white' stopped early: .*1e-09"):
            raise black
        with pytest.raises(ConflictError, match="this driver has left run 'duel'"):
            await white.evaluate()


async def test_the_others_go_on_after_an_early_stop_if_they_are_to(make_drivers, here) -> None:
    turns = {"on_lost": "go_on", "on_late": "forfeit"}
    drivers = make_drivers(Three, turns=turns, evaluation={"samples_per_task": 2, "every": 2})
    async with meeting(Three) as place:
        here(place)
        red = drivers.drive("red", 3, training=STOPS)
        loops = await asyncio.gather(drivers.drive("black", 3), drivers.drive("white", 3), red)
    assert [loop.steps_done for loop in loops] == [3, 3, 1]
    assert "the driver of 'red' stopped early" in loops[0]._member.gone["red"]


@pytest.mark.parametrize("evaluation", [{}, {"at_end": False}, {"every": 1}, {"every": 1, "at_end": False}])
async def test_a_stop_at_the_last_step_is_an_end_like_the_others(make_drivers, here, evaluation: dict[str, Any]) -> None:
    drivers = make_drivers(evaluation=SMALL["evaluation"] | evaluation)
    async with meeting(Digits) as place:
        here(place)
        loops = await asyncio.gather(drivers.drive("black", 1), drivers.drive("white", 1, training=STOPS))
    assert [loop.steps_done for loop in loops] == [1, 1]


async def test_a_plateau_that_one_driver_stops_for_is_named_to_the_others(make_drivers, here) -> None:
    drivers = make_drivers(evaluation={"samples_per_task": 2, "every": 1})
    plateau = {"stop": {"plateau": 1}, "optimizer": {"learning_rate": 1e-9}}
    async with meeting(Digits) as place:
        here(place)
        black, white = await asyncio.gather(
            drivers.drive("black", 6), drivers.drive("white", 6, training=plateau), return_exceptions=True
        )
    assert white.stopped
    with pytest.raises(ConflictError, match="the driver of 'white' stopped early"):
        raise black
