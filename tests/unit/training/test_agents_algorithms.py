"""What one agent can have, several have too: a critic, resampling, an early end, the best checkpoint."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
import pytest

from opentinker.config.base import parse_config
from opentinker.config.job import RLJobConfig
from opentinker.config.rl import EvaluationConfig, StopConfig
from opentinker.config.server import LoraConfig
from opentinker.env.environment import Action
from opentinker.env.load import load_environment
from opentinker.errors import ConfigError
from opentinker.multiagent.environment import MultiAgentEnvironment, MultiStepResult
from opentinker.multiagent.protocol import Simultaneous
from opentinker.training.agents import AgentsLoop
from opentinker.training.agents_report import summarize_agents
from opentinker.training.agents_watch import AgentsWatch
from opentinker.training.progress import row_line
from opentinker.training.recorder import Recorder
from opentinker.training.trend import Verdict


class Digits(MultiAgentEnvironment):
    """Black earns 1 for a 7, white for a 3; both say their digit at once."""

    agents = ("black", "white")
    protocol = Simultaneous()

    @classmethod
    def held_out_tasks(cls) -> Sequence[Any]:
        return [{"question": i} for i in range(6)]

    def reset(self, task: Any) -> Mapping[str, str]:
        self.task = task
        return {name: f"{name}: which digit?" for name in self.agents}

    def step_together(self, actions: Mapping[str, Action]) -> MultiStepResult:
        right = {"black": "7", "white": "3"}
        hits = {name: float(action.text.strip() == right[name]) for name, action in actions.items()}
        return MultiStepResult(hits, done=True, metrics={name: {"exact": hit} for name, hit in hits.items()})


class Flat(Digits):
    """Of every three tasks, one pays black whatever it says, and one white."""

    def step_together(self, actions: Mapping[str, Action]) -> MultiStepResult:
        result = super().step_together(actions)
        flat = {0: "black", 1: "white"}.get(self.task["seed"] % 3)
        return MultiStepResult({name: 0.5 if name == flat else hit for name, hit in result.rewards.items()}, done=True)


class Still(Digits):
    """Everybody earns 0.5."""

    def step_together(self, actions: Mapping[str, Action]) -> MultiStepResult:
        return MultiStepResult(dict.fromkeys(actions, 0.5), done=True)


@pytest.fixture
def maker(policy: Any) -> Any:
    """A bandit that makes others beside itself, which are in `made`."""

    class Maker(type(policy)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.made: dict[str, Any] = {}
            self.critics_asked: dict[str, Any] = {}

        async def create_policy(self, lora: Any, *, name: str = "", seed: int = 0, critic: Any = None) -> Any:
            self.critics_asked[name] = critic
            self.made[name] = type(policy)()
            return self.made[name]

    return Maker()


def config(make_config: Any, agents: Any = None, **changes: Any) -> RLJobConfig:
    found: RLJobConfig = make_config(agents=agents or {"black": {}, "white": {}}, lora={"rank": 4}, **changes)
    return found


async def connected(config: RLJobConfig, policy: Any, recorder: Recorder, game: Any = Digits) -> AgentsLoop:
    return await AgentsLoop.connect(config, load_environment(game), policy, recorder)


PPO = {"kind": "ppo", "group_size": 8, "critic": {"rank": 2, "learning_rate": 0.1}}


async def test_one_agent_learns_by_ppo_with_a_critic_of_its_own_beside_one_that_compares(maker, make_config, recorder) -> None:
    wanted = config(make_config, {"black": {}, "white": {"algorithm": PPO, "optimizer": {"learning_rate": 0.5}}})
    loop = await connected(wanted, maker, recorder)
    assert maker.critics_asked == {"white": LoraConfig(rank=2)}
    await loop.run(12)
    white = maker.made["white"]
    assert (np.argmax(maker.logits), np.argmax(white.logits)) == (7, 3)
    assert (len(maker.critics), len(white.critics)) == (0, 12)
    assert white.value > 0.1, "its critic has learnt what white earns"
    row = [row for row in recorder.rows if row["kind"] == "agents_step"][-1]
    assert row["agents"]["white"]["value_loss"] is not None
    assert row["agents"]["black"]["value_loss"] is None


def test_the_jobs_own_policy_has_the_critic_of_the_first_agent_that_learns(make_config) -> None:
    first = config(make_config, {"black": {"algorithm": PPO}, "white": {}})
    assert (first.policy_critic, first.critic_of("white")) == (LoraConfig(rank=2), None)
    assert config(make_config, {"black": {"frozen": True}, "white": {"algorithm": PPO}}).policy_critic == LoraConfig(rank=2)
    every = config(make_config, {"black": {}, "white": {}, "red": {"frozen": True}}, algorithm=PPO)
    assert [every.critic_of(name) for name in ("black", "white", "red")] == [LoraConfig(rank=2), LoraConfig(rank=2), None]


RESAMPLES = {"kind": "dapo", "group_size": 8, "max_resamples": 4}


async def test_tasks_are_drawn_until_each_who_resamples_has_enough_and_all_learn_from_all(maker, make_config, recorder) -> None:
    """A third of the tasks teaches black nothing, another third white."""
    both = config(make_config, algorithm=RESAMPLES, evaluation={"at_start": False})
    loop = await connected(both, maker, recorder, Flat)
    row = await loop.step()
    agents = row["agents"]
    played = {agent["groups"] for agent in agents.values()}
    assert len(played) == 1, "a game counts for all"
    teaching = [agent["groups"] - agent["zero_variance_groups"] for agent in agents.values()]
    assert min(teaching) >= 8
    assert row["task_position"] == played.pop() > 8
    await loop.step()
    indices = [transcript["task"]["seed"] for transcript in recorder._transcripts]
    assert indices, "the next step draws behind them"


async def test_whoever_does_not_resample_asks_for_no_more_tasks(maker, make_config, recorder) -> None:
    one = config(make_config, {"black": {}, "white": {"algorithm": {**RESAMPLES, "max_resamples": 1}}})
    loop = await connected(one, maker, recorder, Flat)
    row = await loop.step()
    whites = row["agents"]["white"]
    assert 8 < whites["groups"] <= 16, "once, and as many as white lacked"
    none = await connected(config(make_config), maker, recorder, Flat)
    assert (await none.step())["agents"]["white"]["groups"] == 8


async def test_a_run_is_saved_and_ends_when_the_named_agent_has_learnt_all_it_will(maker, make_config, recorder) -> None:
    plateau = config(
        make_config,
        evaluation={"every": 1, "agent": "white", "keep_best": True},
        training={"stop": {"plateau": 3}, "optimizer": {"learning_rate": 2.0}},
    )
    loop = await connected(plateau, maker, recorder)
    await loop.run(60)
    assert loop.steps_done < 60
    assert loop.stopped.startswith("the held-out score of 'white' has not risen above ")
    scores = [row["agents"]["white"]["exact"] for row in recorder.rows if row["kind"] == "agents_evaluation"]
    risen = sum(score > max(scores[:place], default=-1.0) for place, score in enumerate(scores))
    for policy in (maker, maker.made["white"]):
        assert policy.calls.count("save best") == risen
        assert policy.calls[-1] == "save stopped-early"
    assert recorder.finish(wall_s=1.0, checkpoint=None)["stopped"] == loop.stopped
    assert row_line(recorder.rows[-1], 60) == f"{loop.stopped}: stopped"
    assert summarize_agents(recorder.rows)["stopped"] == loop.stopped


def agents_step(**rewards: float | None) -> dict[str, Any]:
    return {"kind": "agents_step", "step": 1, "agents": {name: {"reward_mean": reward} for name, reward in rewards.items()}}


def test_the_training_of_the_named_agent_counts_or_the_mean_over_those_who_learn() -> None:
    stop = StopConfig(falls=1, score="training", window=2)
    watches = {
        "black": AgentsWatch(stop, EvaluationConfig(agent="black"), ["black", "white"], "black"),
        "": AgentsWatch(stop, EvaluationConfig(), ["black", "white"]),
    }
    found: dict[str, list[Any]] = {name: [] for name in watches}
    played: list[dict[str, float | None]] = [
        {"black": 0.9, "white": 0.1},
        {"white": 0.1},  # black was in no game
        {"black": 0.7, "white": None},  # white earned nothing that counts
        {"black": 0.5, "white": 0.1},
        {"black": 0.5, "white": 0.1},
    ]
    for rewards in played:
        for name, watch in watches.items():
            saved = json.loads(json.dumps(watch.state()))
            watch.restore(saved)
            found[name] += watch.row(agents_step(**rewards))
    fallen = Verdict("the training reward of 'black' has fallen 1 window of 2 steps in a row, to 0.500", False)
    assert found["black"] == [(fallen, ("black",))]
    assert found[""] == [], "the mean was 0.3 and 0.5"
    watch = watches[""]
    for rewards in [{"black": 0.0, "white": 0.1}] * 3:
        found[""] += watch.row(agents_step(**rewards))
    ((verdict, concerned),) = found[""]
    assert verdict.reason == "the training reward (mean of black, white) has fallen 1 window of 2 steps in a row, to 0.175"
    assert concerned == (), "all learn more slowly"


async def test_a_run_of_several_agents_stops_by_the_training_of_one(maker, make_config, recorder, tmp_path) -> None:
    wanted = config(
        make_config,
        evaluation={"agent": "white"},
        training={
            "stop": {"plateau": 2, "score": "training", "window": 2},
            "save_every": 3,
            "optimizer": {"learning_rate": 0.0},
        },
    )
    loop = await connected(wanted, maker, recorder, Still)
    await loop.run(20)
    assert loop.stopped == "the training reward of 'white' has not risen above 0.500 in 2 windows of 2 steps"
    assert loop.steps_done == 6
    recorder.finish(wall_s=1.0, checkpoint=None)
    assert f"after step 6: {escape(loop.stopped)}: stopped" in (recorder.folder / "report.html").read_text()

    white, rows = maker.made["white"], Recorder(tmp_path / "again", wanted.model_dump(mode="json"))
    again = await connected(wanted, maker, rows, Still)
    maker.made["white"].saved, maker.made["white"].drivers = white.saved, white.drivers
    await again.resume(3)  # in the midst of a window
    await again.run(20)
    assert again.steps_done == 6


def test_who_does_not_learn_is_no_measure_of_training() -> None:
    fields: dict[str, Any] = {
        "base_model": "m",
        "lora": {"rank": 4},
        "environment": {"name": "x"},
        "agents": {"a": {}, "b": {"policy": "a"}, "c": {"frozen": True}},
        "training": {"stop": {"falls": 3, "score": "training"}},
    }
    assert parse_config(RLJobConfig, {**fields, "evaluation": {"agent": "a"}})
    for name in ("b", "c"):
        with pytest.raises(ConfigError, match=rf"evaluation.agent, and '{name}' has no policy of its own that learns; .* a$"):
            parse_config(RLJobConfig, {**fields, "evaluation": {"agent": name}})


async def test_without_a_name_it_is_the_mean_over_those_who_learn(maker, make_config, recorder) -> None:
    frozen = config(make_config, {"black": {}, "white": {"frozen": True}}, evaluation={"keep_best": True, "every": 1})
    loop = await connected(frozen, maker, recorder)
    await loop.run(3)
    blacks = [row["agents"]["black"]["exact"] for row in recorder.rows if row["kind"] == "agents_evaluation"]
    risen = sum(score > max(blacks[:place], default=-1.0) for place, score in enumerate(blacks))
    assert maker.calls.count("save best") == risen


async def test_only_the_agent_that_breaks_learns_more_slowly_and_the_run_ends_at_the_third_time(
    maker, make_config, recorder, tmp_path
) -> None:
    wanted = config(
        make_config,
        {"black": {}, "white": {"optimizer": {"learning_rate": 0.001}}},
        training={
            "stop": {"max_grad_norm": 1e-9, "action": "reduce", "factor": 0.5},
            "optimizer": {"learning_rate": 0.01},
            "save_every": 1,
        },
    )
    loop = await connected(wanted, maker, recorder)
    await loop.step()
    await loop.save("step-000001")
    assert loop._stopping.reductions == {"black": 1, "white": 1}
    stops = [row for row in recorder.rows if row["kind"] == "stopping"]
    assert [row["agents"] for row in stops] == [["black"], ["white"]]
    assert stops[0]["reason"].startswith("'black': grad_norm is ")
    assert stops[1]["action"] == "learning rate of white x 0.5"
    await loop.step()
    assert [o.learning_rate for o in maker.optimizers] == pytest.approx([0.01, 0.005])
    assert [o.learning_rate for o in maker.made["white"].optimizers] == pytest.approx([0.001, 0.0005])

    again = Recorder(tmp_path / "again", wanted.model_dump(mode="json"))
    second = type(maker)()
    second.saved, second.drivers = maker.saved, maker.drivers
    resumed = await connected(wanted, second, again)
    second.made["white"].saved, second.made["white"].drivers = maker.made["white"].saved, maker.made["white"].drivers
    await resumed.resume(1)
    assert resumed._stopping.reductions == {"black": 1, "white": 1}
    await resumed.run(5)
    assert resumed.stopped.startswith("'black': grad_norm is ")
    assert resumed.steps_done == 3


async def test_a_metric_that_the_judged_agent_does_not_report_is_named(maker, make_config, recorder) -> None:
    wanted = config(make_config, evaluation={"metric": "won", "keep_best": True, "agent": "white"})
    with pytest.raises(ConfigError, match=r"no held-out episode of white reports 'won' \(there are reward, exact, of black, w"):
        await (await connected(wanted, maker, recorder)).run(1)


def test_a_limit_that_no_agent_measures_is_refused() -> None:
    fields: dict[str, Any] = {
        "base_model": "m",
        "lora": {"rank": 4},
        "environment": {"name": "x"},
        "agents": {"a": {"algorithm": {"kl": {"coefficient": 0.1}}}, "b": {}},
        "training": {"stop": {"max_reference_kl": 1.0}},
    }
    assert parse_config(RLJobConfig, fields).learners == ["a", "b"]
    with pytest.raises(ConfigError, match="max_reference_kl needs"):
        parse_config(RLJobConfig, {**fields, "agents": {"a": {}, "b": {}}})
