"""The drivers of a run's agents agree on what they play, or are refused with what each says."""

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from apart_tools import SMALL, Digits, Drivers
from coordination_tools import meeting

import opentinker as ot
from opentinker.config.base import parse_config
from opentinker.config.job import InteractiveJobConfig, RLJobConfig
from opentinker.env.environment import Action
from opentinker.errors import ConfigError, ConflictError, DeadlineError
from opentinker.multiagent.coordination.run import Driver, check_terms
from opentinker.multiagent.coordination.seat import RemoteSeat
from opentinker.multiagent.environment import MultiStepResult
from opentinker.training.meeting import terms_of


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
