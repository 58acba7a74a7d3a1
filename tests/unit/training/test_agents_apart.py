"""Agents whose drivers are different processes learn what they would learn in one; and each hears what became of the others."""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import yaml
from coordination_tools import TOKEN, Place, meeting

import opentinker as ot
import opentinker.training.meeting as meeting_module
import opentinker.training.run as run_module
from opentinker.config.base import parse_config
from opentinker.config.job import InteractiveJobConfig, RLJobConfig
from opentinker.env.environment import Action
from opentinker.env.load import load_environment
from opentinker.errors import AgentLostError, ConfigError, ConflictError, DeadlineError, ServerLostError, TrainerError
from opentinker.multiagent.coordination.member import Member
from opentinker.multiagent.coordination.run import Driver, check_terms
from opentinker.multiagent.coordination.seat import RemoteSeat
from opentinker.multiagent.environment import MultiAgentEnvironment, MultiStepResult
from opentinker.multiagent.protocol import RoundRobin
from opentinker.training.agents import AgentsLoop
from opentinker.training.book import CheckpointBook
from opentinker.training.loop import FRUITLESS_STEPS
from opentinker.training.meeting import terms_of
from opentinker.training.own_run import OwnRun, Resume, policy_places
from opentinker.training.recorder import Recorder


class Digits(MultiAgentEnvironment):
    """Black earns 1 for a 7, white for a 3, red for a 5; each says its digit in its turn."""

    agents = ("black", "white")
    protocol = RoundRobin()
    version = "2"
    right: Mapping[str, str] = {"black": "7", "white": "3", "red": "5"}

    @classmethod
    def held_out_tasks(cls) -> Sequence[Any]:
        return [{"question": i} for i in range(3)]

    def reset(self, task: Any) -> Mapping[str, str]:
        return {name: f"{name}: which digit?" for name in self.agents}

    def step(self, agent: str, action: Action) -> MultiStepResult:
        hit = float(action.text.strip() == self.right[agent])
        return MultiStepResult({agent: hit}, done=agent == self.agents[-1], left=[agent], metrics={agent: {"exact": hit}})

    def leave(self, agent: str) -> MultiStepResult:
        return MultiStepResult(done=agent == self.agents[-1], left=[agent])


class Three(Digits):
    agents = ("black", "white", "red")


class Sits(Three):
    """Red is needed in no task."""

    def reset(self, task: Any) -> Mapping[str, str]:
        return dict.fromkeys(("black", "white"), "which digit?")

    def step(self, agent: str, action: Action) -> MultiStepResult:
        return replace(super().step(agent, action), done=agent == "white")


SMALL = {
    "rollout": {"groups_per_step": 3, "max_turns": 1},
    "algorithm": {"group_size": 4},
    "evaluation": {"samples_per_task": 2, "at_start": False},
}


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes drivers that reach a place without a network."""

    def reach(place: Place) -> None:
        monkeypatch.setenv("OPENTINKER_ENV_TOKEN", TOKEN)
        transport = httpx.ASGITransport(place.app)
        monkeypatch.setattr(meeting_module, "Member", partial(Member, transport=transport))

    return reach


class Drivers:
    """One loop for each agent, with a policy of its own."""

    def __init__(
        self, make_policy: Any, make_config: Any, folder: Path, environment: type[MultiAgentEnvironment], **changes: Any
    ):
        self.policies = {name: make_policy() for name in environment.agents}
        self._environment = environment
        self._folder = folder
        self._changes = SMALL | changes
        self._make_config = make_config

    def config(self, *agents: str, **changes: Any) -> RLJobConfig:
        meets = {"run": "duel", "url": "http://coordinator"}
        given = {"agents": {name: {} for name in agents}, "coordinator": meets} | self._changes | changes
        found: RLJobConfig = self._make_config(**given)
        return found

    async def connect(
        self,
        name: str,
        steps: Sequence[int] = (),
        resume_at: int | None = None,
        book: CheckpointBook | None = None,
        **changes: Any,
    ) -> AgentsLoop:
        config = self.config(name, **changes)
        recorder = Recorder(self._folder / name, config.model_dump(mode="json"), resume_at=resume_at, checkpoints=book)
        environment = load_environment(self._environment)
        return await AgentsLoop.connect(config, environment, self.policies[name], recorder, steps=steps)

    async def drive(self, name: str, count: int, **options: Any) -> AgentsLoop:
        loop = await self.connect(name, **options)
        await loop.resume(max(options.get("steps", ()), default=0))
        await loop.run(count)
        await loop.close()
        return loop


@pytest.fixture
def make_drivers(policy: Any, make_config: Any, tmp_path: Path) -> Any:
    return lambda environment=Digits, **changes: Drivers(type(policy), make_config, tmp_path, environment, **changes)


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


async def test_drivers_that_do_not_agree_are_refused_with_both_values(make_drivers, here) -> None:
    drivers = make_drivers()
    async with meeting(Digits, lease_s=5.0) as place:
        here(place)
        black = asyncio.ensure_future(drivers.connect("black"))
        await place.joined("black")
        for changes, says in (
            (
                {"rollout": SMALL["rollout"] | {"max_turns": 3}},
                "do not agree on rollout.max_turns: 3 for 'white', 1 for 'black'",
            ),
            ({"training": {"seed": 5}}, "do not agree on training.seed: 5 for 'white', 0 for 'black'"),
            ({"algorithm": {"group_size": 8}}, "do not agree on algorithm.group_size: 8 for 'white', 4 for 'black'"),
        ):
            with pytest.raises(ConflictError, match=says):
                await drivers.connect("white", resume_at=-1, **changes)
        Digits.version = "3"
        with pytest.raises(ConflictError, match="the environment's version: '3' for 'white', '2' on the server"):
            await drivers.connect("white", resume_at=-1)
        Digits.version = "2"
        again = Drivers(type(drivers.policies["black"]), drivers._make_config, drivers._folder / "again", Digits, **SMALL)
        with pytest.raises(ConflictError, match="'black' of run 'duel' is played by another driver, which is alive"):
            await again.connect("black")
        black.cancel()
        await asyncio.gather(black, return_exceptions=True)


class Rich(Digits):
    """Who says anything earns `prize`."""

    def __init__(self, prize: float = 1.0) -> None:
        self.prize = prize

    def step(self, agent: str, action: Action) -> MultiStepResult:
        return MultiStepResult({agent: self.prize}, done=agent == self.agents[-1], left=[agent])


async def test_games_are_those_on_which_the_drivers_agreed_whoever_came_and_left_before(make_drivers, here) -> None:
    drivers = make_drivers(Rich, evaluation={"at_start": False, "at_end": False})
    async with meeting(Rich) as place:
        here(place)
        wrong = asyncio.ensure_future(make_drivers(Rich).connect("black", environment={"name": "rich", "args": {"prize": 7.0}}))
        await place.joined("black")
        wrong.cancel()
        await asyncio.gather(wrong, return_exceptions=True)
        drivers._folder /= "again"
        right = {"environment": {"name": "rich", "args": {"prize": 2.0}}}
        loops = await asyncio.gather(*(drivers.drive(name, 1, **right) for name in Rich.agents))
    assert [[row["reward_mean"] for row in loop._recorder.rows] for loop in loops] == [[2.0], [2.0]]


async def test_the_coordinator_waits_for_an_answer_as_long_as_a_turn_may_take(make_drivers, here, monkeypatch) -> None:
    """How long a sample may take is each driver's own affair."""
    waits: list[float] = []
    sample = RemoteSeat.sample

    async def watched(seat: RemoteSeat, request: Any, turn: int, timeout_s: float) -> Any:
        waits.append(timeout_s)
        return await sample(seat, request, turn, timeout_s)

    monkeypatch.setattr(RemoteSeat, "sample", watched)
    limits = {"episode_timeout_s": 3000.0, "generation_timeout_s": 1500.0}
    drivers = make_drivers(turns={"turn_timeout_s": 1500.0}, rollout=SMALL["rollout"] | limits)
    async with meeting(Digits) as place:
        here(place)
        await asyncio.gather(*(drivers.drive(name, 1) for name in Digits.agents))
    assert set(waits) == {1500.0}


def test_the_drivers_that_the_page_shows_agree(tmp_path) -> None:
    """As would they with whatever else must agree, since a trainer can say each of the terms."""
    page = (Path(__file__).parents[3] / "docs" / "multiagent.md").read_text().split("## Agents in different processes")[1]
    [python, *_] = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    [yaml_, *_] = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    given: dict[str, Any] = {}

    def trainer(job: Any, environment: str, agents: Any, **options: Any) -> Any:
        given.update(options, environment=environment, agents=agents)
        return SimpleNamespace(fit=lambda steps: given.update(steps=steps))

    parts = {name: getattr(ot, name) for name in ("AgentConfig", "CoordinatorConfig", "LoraConfig", "TurnsConfig")}
    parts["MultiAgentTrainer"] = trainer
    exec(python, {"ot": SimpleNamespace(**parts), "client": SimpleNamespace(create_job=lambda **_: None)})
    steps, url = given.pop("steps"), given.pop("environment")
    given["coordinator"] = given["coordinator"].model_copy(update={"url": url})  # as the environment's, which is here a class
    hosted = InteractiveJobConfig(base_model="m", lora=ot.LoraConfig(rank=4))
    job: Any = SimpleNamespace(id="job-1", record={"owner": "ann"}, config=hosted)
    made = ot.MultiAgentTrainer(job, Digits, given.pop("agents"), run_dir=tmp_path, progress=False, **given)  # type: ignore[arg-type]
    config = yaml.safe_load(yaml_)
    white = parse_config(RLJobConfig, {"base_model": "m", "lora": {"rank": 4}} | config)
    assert white.environment.name == url
    identity = {"version": "2", "name": "Digits", "agents": ["black", "white"]}
    black = made.config
    assert isinstance(black, RLJobConfig)
    [one, other] = [
        Driver(f"{c.learners}", {c.learners[0]: "policy"}, terms_of(c, identity), (0,), 0.0) for c in (black, white)
    ]
    check_terms(one, other)
    assert steps == white.training.steps
    assert black.training.save_every == white.training.save_every > 0


async def test_a_seat_that_stays_empty_is_named(make_drivers, here) -> None:
    drivers = make_drivers(turns={"join_timeout_s": 1.0})
    async with meeting(Digits) as place:
        here(place)
        with pytest.raises(DeadlineError, match="nobody joined for 'white' within 1 s; 'black' waited"):
            await drivers.connect("black")


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


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"coordinator": {"run": "duel"}}, "coordinator.url is missing"),
        ({"coordinator": {"run": ""}}, "coordinator.run"),
        ({"agents": {}, "coordinator": {"run": "duel"}}, "coordinator is for agents"),
        ({"coordinator": {"run": "duel", "url": "http://x"}, "arena": {"past": 0}}, "arena needs all agents in one process"),
        (
            {"coordinator": {"run": "duel", "url": "http://x"}, "algorithm": {"max_resamples": 2}},
            "max_resamples must be 0 with a coordinator",
        ),
        ({"turns": {"on_lost": "go_on"}}, "on_lost 'go_on' takes on_late 'forfeit'"),
        ({"turns": {"on_lost": "go_on", "on_late": "forfeit"}}, "turns.on_lost .* there is no coordinator"),
        ({"turns": {"barrier_timeout_s": 0}}, "turns.barrier_timeout_s"),
    ],
)
def test_odd_coordinators_are_refused(changes: Any, says: str) -> None:
    fields = {"base_model": "m", "environment": {"name": "x"}, "agents": {"black": {}}}
    with pytest.raises(ConfigError, match=says):
        parse_config(RLJobConfig, fields | changes)
