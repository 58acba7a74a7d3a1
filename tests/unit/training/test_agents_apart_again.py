"""Drivers of different agents that were killed go on together."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from apart_tools import Digits
from coordination_tools import meeting

import opentinker.training.run as run_module
from opentinker.config.base import parse_config
from opentinker.config.job import RLJobConfig
from opentinker.errors import AgentLostError, ConflictError, DeadlineError, ServerLostError
from opentinker.training.agents import AgentsLoop
from opentinker.training.own_run import OwnRun, Resume, policy_places


async def test_drivers_that_were_killed_go_on_from_the_newest_step_that_all_have(make_drivers, here) -> None:
    """White's checkpoint of step 4 was not written in time."""
    save = {"training": {"save_every": 2, "optimizer": {"learning_rate": 2.0}}}
    whole = make_drivers(**save)
    async with meeting(Digits) as place:
        here(place)
        await asyncio.gather(*(whole.drive(name, 6) for name in Digits.agents))
        first, second = make_drivers(**save), make_drivers(**save)
        first._folder = second._folder = whole._folder / "cut"
        await asyncio.gather(*(first.drive(name, 4) for name in Digits.agents))
        for name, policy in second.policies.items():
            policy.saved, policy.drivers = first.policies[name].saved, first.policies[name].drivers
        loops = await asyncio.gather(
            second.drive("black", 4, steps=[2, 4], resume_at=4), second.drive("white", 4, steps=[2], resume_at=2)
        )
    for name in Digits.agents:
        assert np.array_equal(second.policies[name].logits, whole.policies[name].logits)
    assert [loop.steps_done for loop in loops] == [6, 6]
    for loop in loops:
        assert [row["step"] for row in loop._recorder.rows if row["kind"] == "agents_step"] == [1, 2, 3, 4, 5, 6]


async def test_drivers_of_users_processes_go_on_in_other_jobs_from_a_step_that_all_their_folders_know(
    make_drivers, here, tmp_path
) -> None:
    drivers = make_drivers(training={"save_every": 2, "optimizer": {"learning_rate": 2.0}})

    def runs(job: str, resume: Resume = False) -> dict[str, OwnRun]:
        found = {}
        for name in Digits.agents:
            config = drivers.config(name)
            found[name] = OwnRun(tmp_path / name, config.model_dump(mode="json"), resume)
            found[name].begin("ann", f"{job}{name[0]}", policy_places(config))
        return found

    async def drive(own: dict[str, OwnRun], count: int) -> list[AgentsLoop]:
        found = own.items()
        steps = {name: {"steps": run.steps, "resume_at": run.resume_at} for name, run in found}
        return await asyncio.gather(*(drivers.drive(name, count, book=run, **steps[name]) for name, run in found))

    async with meeting(Digits) as place:
        here(place)
        await drive(runs("job-0"), 4)
        learnt = {name: policy.logits.copy() for name, policy in drivers.policies.items()}
        record = tmp_path / "white" / "resume.json"
        state = json.loads(record.read_text())
        assert [saved["step"] for saved in state["checkpoints"]] == [2, 4]
        del state["checkpoints"][-1]  # it was killed before it had noted the last one
        record.write_text(json.dumps(state))
        loops = await drive(runs("job-1", True), 2)
    for loop, (name, policy) in zip(loops, drivers.policies.items(), strict=True):
        assert f"load ann/job-0{name[0]}/step-000002@2" in policy.calls
        assert np.array_equal(policy.logits, learnt[name])
        assert [row["step"] for row in loop._recorder.rows if row["kind"] == "agents_step"] == [1, 2, 3, 4]
        jobs = [
            address.split("/")[1] for address in OwnRun(tmp_path / name, loop.config.model_dump(mode="json"), True).addresses
        ]
        assert jobs == [f"job-0{name[0]}", f"job-1{name[0]}"]


@pytest.mark.parametrize("recorded", [(), ("black",), ("black", "white")])
@pytest.mark.parametrize("evaluation", [{"every": 2, "at_end": False}, {"at_end": True}])
async def test_a_run_goes_on_whoever_had_recorded_the_evaluation_after_the_checkpoint(
    make_drivers, here, recorded: Sequence[str], evaluation: dict[str, Any]
) -> None:
    """The others were killed before their row was written; every driver has each evaluation once in the end."""
    changes = {
        "training": {"save_every": 2, "optimizer": {"learning_rate": 2.0}},
        "evaluation": {"samples_per_task": 2, "at_start": False} | evaluation,
    }
    steps = 4 if "every" in evaluation else 2
    async with meeting(Digits) as place:
        here(place)
        first, second = make_drivers(**changes), make_drivers(**changes)
        loops = await asyncio.gather(*(first.drive(name, 2) for name in Digits.agents))
        for name, loop in zip(Digits.agents, loops, strict=True):
            second.policies[name].saved, second.policies[name].drivers = (
                first.policies[name].saved,
                first.policies[name].drivers,
            )
            if name not in recorded:
                file = loop._recorder.folder / "metrics.jsonl"
                *lines, last = file.read_text().splitlines(keepends=True)
                assert "agents_evaluation" in last
                file.write_text("".join(lines))
        again = await asyncio.gather(*(second.drive(name, steps - 2, steps=[2], resume_at=2) for name in Digits.agents))
    for loop in again:
        assert loop.steps_done == steps
        evaluated = [row["step"] for row in loop._recorder.rows if row["kind"] == "agents_evaluation"]
        assert evaluated == ([2, 4] if "every" in evaluation else [2])


@pytest.mark.parametrize("white_has", [[], [0]])
@pytest.mark.parametrize("at_start", [False, True])
async def test_a_run_goes_on_from_its_beginning_if_a_driver_was_killed_within_its_first_checkpoint(
    make_drivers, here, white_has: list[int], at_start: bool
) -> None:
    """Black's server has learnt meanwhile."""
    changes = {
        "training": {"save_every": 2, "keep_last": 1, "optimizer": {"learning_rate": 2.0}},
        "evaluation": {"samples_per_task": 2, "at_start": at_start},
    }
    drivers = make_drivers(**changes)
    async with meeting(Digits) as place:
        here(place)
        loops = await asyncio.gather(*(drivers.drive(name, 2) for name in Digits.agents))
        learnt = {name: policy.logits.copy() for name, policy in drivers.policies.items()}
        assert all(logits.any() for logits in learnt.values())
        assert set(drivers.policies["black"].saved) == {"step-000000", "step-000002"}
        before, new = drivers.policies["white"], type(drivers.policies["white"])()
        drivers.policies["white"] = new
        new.saved, new.drivers = before.saved, before.drivers
        loops = await asyncio.gather(
            drivers.drive("black", 2, steps=[0, 2], resume_at=2),
            drivers.drive("white", 2, steps=white_has, resume_at=max(white_has, default=-1)),
        )
    for name, loop in zip(Digits.agents, loops, strict=True):
        assert np.array_equal(drivers.policies[name].logits, learnt[name])
        kinds = [(row["kind"], row["step"]) for row in loop._recorder.rows]
        assert kinds == [("agents_evaluation", 0)] * at_start + [
            ("agents_step", 1),
            ("agents_step", 2),
            ("agents_evaluation", 2),
        ]


async def test_drivers_without_a_step_in_common_are_told_which_they_have(make_drivers, here) -> None:
    drivers = make_drivers()
    async with meeting(Digits) as place:
        here(place)
        with pytest.raises(ConflictError, match=r"'black' from steps 20, 10; 'white' from step 0|'white' from step 0; 'black'"):
            await asyncio.gather(drivers.connect("black", steps=[10, 20]), drivers.connect("white"))


async def test_a_driver_that_is_started_anew_takes_its_seat_when_the_lease_of_the_one_before_has_ended(
    make_drivers, here
) -> None:
    drivers, again = make_drivers(), make_drivers()
    again._folder = drivers._folder / "again"
    async with meeting(Digits, lease_s=4.0) as place:
        here(place)
        black, white = await asyncio.gather(*(drivers.connect(name) for name in Digits.agents))
        for task in black._member._tasks:  # as after SIGKILL: nothing is said any more
            task.cancel()
        playing = asyncio.ensure_future(white.run(1))
        new = asyncio.ensure_future(again.drive("black", 1))
        with pytest.raises(AgentLostError, match="the driver of 'black' is lost: it gave no sign of life for 4 s"):
            await playing
        await asyncio.gather(new, again.drive("white", 1))
    assert again.policies["black"].logits.any()


@pytest.mark.parametrize(
    ("joins", "then", "kind", "says"),
    [
        (
            False,
            ConflictError("run 'duel' has begun"),
            AgentLostError,
            "'red' held up.*joining anew failed: run 'duel' has begun",
        ),
        (False, DeadlineError("nobody joined for 'white'"), AgentLostError, "'red' held up.*failed: nobody joined for 'white'"),
        (False, ServerLostError("its worker died"), ServerLostError, "^its worker died"),
        (True, ConflictError("'white' stopped early"), ConflictError, "^'white' stopped early"),
        (True, AgentLostError("'white' is lost"), AgentLostError, "^'white' is lost"),
    ],
)
def test_a_driver_that_cannot_join_anew_ends_with_the_cause_for_which_it_had_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, joins: bool, then: Exception, kind: type[Exception], says: str
) -> None:
    fields = {"base_model": "m", "lora": {"rank": 4}, "environment": {"name": "x"}, "agents": {"red": {}}}
    meets = {"coordinator": {"run": "duel", "url": "http://x"}, "scheduling": {"max_restarts": 1}}
    job = parse_config(RLJobConfig, fields | meets)
    (tmp_path / "checkpoints" / "step-000002@2").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-000002@2" / "manifest.json").write_text("{}")
    lives = iter([(True, AgentLostError("'red' held up the others in update 3 for 31 s")), (joins, then)])

    class Life:
        folder, steps_saved = tmp_path, (2,)

        def drive(self, client: Any, connect: Any, *_: Any, **__: Any) -> None:
            async def live() -> None:
                joined, error = next(lives)

                async def connected(*_: Any, **__: Any) -> None:
                    if not joined:
                        raise error

                monkeypatch.setattr(AgentsLoop, "connect", connected)
                await connect(client, None)
                raise error

            asyncio.run(live())

    access = {"": {"endpoint": "http://x", "token": "t", "policy": "p"}}
    with pytest.raises(kind, match=says):
        run_module._drive_agents(job, None, lambda *_: Life(), access, None, False, 0.0)  # type: ignore[arg-type]
