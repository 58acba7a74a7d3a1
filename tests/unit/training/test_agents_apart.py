"""Agents whose drivers are different processes learn what they would learn in one, in step."""

import asyncio
from typing import Any

import numpy as np
from apart_tools import SMALL, Digits, Sits
from coordination_tools import meeting

from opentinker.env.load import load_environment
from opentinker.training.agents import AgentsLoop
from opentinker.training.loop import FRUITLESS_STEPS


async def test_two_drivers_learn_what_one_driver_of_both_learns(make_drivers, make_config, policy, recorder, here) -> None:
    whole = make_config(agents={"black": {}, "white": {}}, lora={"rank": 4}, **SMALL)
    black, white = type(policy)(), type(policy)()

    async def another(*_: Any, **__: Any) -> Any:
        return white

    black.create_policy = another
    one = await AgentsLoop.connect(whole, load_environment(Digits), black, recorder)
    await one.run(4)
    apart = make_drivers()
    async with meeting(Digits) as place:
        here(place)
        loops = await asyncio.gather(*(apart.drive(name, 4) for name in Digits.agents))
    for name, alone in (("black", black), ("white", white)):
        assert np.array_equal(apart.policies[name].logits, alone.logits)
        assert alone.logits.any()
    assert [loop.steps_done for loop in loops] == [4, 4]
    rows = recorder.rows
    for loop in loops:
        for row, there in zip(loop._recorder.rows, rows, strict=True):
            for name, numbers in row["agents"].items():
                same = {k: v for k, v in numbers.items() if not k.endswith("_s") and "per_s" not in k}
                assert same == {k: there["agents"][name][k] for k in same}


async def test_no_driver_updates_before_all_games_are_over_and_none_plays_before_all_updates(make_drivers, here) -> None:
    drivers, order = make_drivers(), []
    for name, policy in drivers.policies.items():
        sample, train = policy.sample, policy.train_step

        async def sampled(*args: Any, name: str = name, sample: Any = sample, **kwargs: Any) -> Any:
            found = await sample(*args, **kwargs)
            order.append(("sampled", name))
            return found

        async def trained(*args: Any, name: str = name, train: Any = train, **kwargs: Any) -> Any:
            order.append(("update", name))
            await asyncio.sleep(0.05 if name == "white" else 0.0)
            order.append(("updated", name))
            return await train(*args, **kwargs)

        policy.sample, policy.train_step = sampled, trained
    async with meeting(Digits) as place:
        here(place)
        await asyncio.gather(
            *(drivers.drive(name, 3, evaluation={"at_start": False, "at_end": False}) for name in Digits.agents)
        )
    updating, updates = 0, 0
    for what, _ in order:
        updating += {"update": 1, "updated": -1}.get(what, 0)
        updates += what == "updated"
        assert what != "sampled" or (updating == 0 and updates % 2 == 0)
    assert updates == 6


async def test_an_agent_that_no_task_needs_for_many_steps_does_not_end_the_run(make_drivers, here) -> None:
    drivers = make_drivers(Sits)
    async with meeting(Sits) as place:
        here(place)
        loops = await asyncio.gather(*(drivers.drive(name, FRUITLESS_STEPS + 1) for name in Sits.agents))
    assert [loop.steps_done for loop in loops] == [FRUITLESS_STEPS + 1] * 3
    assert not drivers.policies["red"].logits.any()


async def test_one_process_whose_only_learner_no_task_needs_for_many_steps_goes_on(make_config, policy, recorder) -> None:
    agents = {"black": {"frozen": True}, "white": {"frozen": True}, "red": {}}
    config = make_config(agents=agents, lora={"rank": 4}, **SMALL)

    async def another(*_: Any, **__: Any) -> Any:
        return type(policy)()

    policy.create_policy = another
    loop = await AgentsLoop.connect(config, load_environment(Sits), policy, recorder)
    await loop.run(FRUITLESS_STEPS + 1)
    assert loop.steps_done == FRUITLESS_STEPS + 1
