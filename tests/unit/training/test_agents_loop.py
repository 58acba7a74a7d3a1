"""Several agents in one job, with policies that live in memory and really learn."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from opentinker.config.base import parse_config
from opentinker.config.job import RLJobConfig
from opentinker.env.environment import Action
from opentinker.env.load import load_environment
from opentinker.errors import ConfigError, EngineError, EpisodesFailedError, TrainerError
from opentinker.multiagent.environment import MultiAgentEnvironment, MultiStepResult
from opentinker.multiagent.phases import Moment, Phase
from opentinker.multiagent.protocol import RoundRobin, Simultaneous
from opentinker.training.agents import AgentsLoop, check_agents
from opentinker.training.agents_report import render_agents_report, summarize_agents
from opentinker.training.progress import row_line
from opentinker.training.recorder import Recorder
from opentinker.training.sinks.base import scalars


class Seats(MultiAgentEnvironment):
    """Black earns 1 for a 7, white for a 3; both say their digit at once."""

    agents = ("black", "white")
    protocol = Simultaneous()

    @classmethod
    def held_out_tasks(cls) -> Sequence[Any]:
        return [{"question": i} for i in range(6)]

    def reset(self, task: Any) -> Mapping[str, str]:
        return {name: f"{name}: which digit?" for name in self.agents}

    def step_together(self, actions: Mapping[str, Action]) -> MultiStepResult:
        right = {"black": "7", "white": "3"}
        hits = {name: float(action.text.strip() == right[name]) for name, action in actions.items()}
        return MultiStepResult(hits, done=True, metrics={name: {"exact": hit} for name, hit in hits.items()})


@pytest.fixture
def make_policy(policy: Any) -> Any:
    """A bandit that makes others beside itself, which are in `made`."""

    class Maker(type(policy)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.made: dict[str, Any] = {}
            self.asked: list[tuple[str, Any, int]] = []

        async def create_policy(self, lora: Any, *, name: str = "", seed: int = 0, critic: Any = None) -> Any:
            self.asked.append((name, lora, seed))
            self.made[name] = type(policy)()
            return self.made[name]

    return Maker


def config(make_config: Any, agents: Any = None, **changes: Any) -> RLJobConfig:
    found: RLJobConfig = make_config(agents=agents or {"black": {}, "white": {}}, lora={"rank": 4}, **changes)
    return found


async def test_each_agent_learns_what_pays_in_its_seat(make_policy, make_config, recorder) -> None:
    black = make_policy()
    loop = await AgentsLoop.connect(config(make_config), load_environment(Seats), black, recorder)
    await loop.run(15)
    white = black.made["white"]
    assert (np.argmax(black.logits), np.argmax(white.logits)) == (7, 3)
    evaluations = [row for row in recorder.rows if row["kind"] == "agents_evaluation"]
    assert [row["step"] for row in evaluations] == [0, 15]
    for name in ("black", "white"):
        assert evaluations[0]["agents"][name]["exact"] < 0.35
        assert evaluations[-1]["agents"][name]["exact"] > 0.8
    steps = [row for row in recorder.rows if row["kind"] == "agents_step"]
    assert [row["step"] for row in steps] == list(range(1, 16))
    assert steps[0]["agents"]["black"]["episodes"] == 64
    assert steps[-1]["agents"]["white"]["version"] == white.version == 15
    assert loop.phases.moment == Moment(15, Phase.ROLLOUT)


async def test_a_frozen_agent_stays_as_it_began_and_a_scripted_one_needs_no_policy(
    make_policy, make_config, recorder, tmp_path
) -> None:
    black = make_policy()
    frozen = config(make_config, {"black": {}, "white": {"frozen": True}})
    await (await AgentsLoop.connect(frozen, load_environment(Seats), black, recorder)).run(6)
    assert black.logits.any()
    assert not black.made["white"].logits.any()
    assert "train_step" not in black.made["white"].calls

    (tmp_path / "players.py").write_text("def three(messages, numbers):\n    return '3'\n")
    scripted = config(make_config, {"black": {}, "white": {"script": "players.py:three"}})
    alone = make_policy()
    again = Recorder(tmp_path / "again", scripted.model_dump(mode="json"))
    loop = await AgentsLoop.connect(scripted, load_environment(Seats), alone, again, base_dir=tmp_path)
    await loop.run(2)
    assert alone.asked == []
    assert list(again.rows[-1]["agents"]) == ["black"]


async def test_agents_that_share_a_policy_teach_it_together(make_policy, make_config, recorder) -> None:
    own = make_policy()
    shared = config(make_config, {"black": {}, "white": {"policy": "black"}})
    loop = await AgentsLoop.connect(shared, load_environment(Seats), own, recorder)
    await loop.step()
    assert own.asked == []
    data, _ = own.batches[0]
    prompts = {datum.chunks[0].tokens[:30].tobytes() for datum in data}
    assert len(prompts) == 2, "data of both seats"
    assert recorder.rows[-1]["agents"]["black"]["episodes"] == 128


async def test_learning_rates_ranks_algorithms_and_sampling_are_each_agents_own(make_policy, make_config, recorder) -> None:
    own = make_policy()
    differs = config(
        make_config,
        {
            "black": {},
            "white": {
                "lora": {"rank": 2},
                "optimizer": {"learning_rate": 0.25},
                "algorithm": {"kind": "rloo", "group_size": 8},
                "sampling": {"max_tokens": 3, "temperature": 0.5},
            },
        },
        training={"optimizer": {"learning_rate": 2.0}, "seed": 5},
    )
    await (await AgentsLoop.connect(differs, load_environment(Seats), own, recorder)).step()
    white = own.made["white"]
    assert [(name, lora.rank, seed) for name, lora, seed in own.asked] == [("white", 2, 6)]
    assert (own.optimizers[0].learning_rate, white.optimizers[0].learning_rate) == (2.0, 0.25)
    assert (own.losses[0].temperature, white.losses[0].temperature) == (1.0, 0.5)
    advantages = [np.abs(d.arrays["advantages"]).max() for d in white.batches[0][0]]
    assert max(advantages) <= 1.0 + 1e-6, "leave-one-out advantages are not divided by their deviation"


async def test_a_run_goes_on_from_its_checkpoints_as_if_it_had_never_ended(make_policy, make_config, tmp_path) -> None:
    wanted = config(make_config, training={"optimizer": {"learning_rate": 1.0}, "save_every": 2})

    def record(name: str, resume_at: int | None = None) -> Recorder:
        return Recorder(tmp_path / name, wanted.model_dump(mode="json"), resume_at=resume_at)

    whole = make_policy()
    await (await AgentsLoop.connect(wanted, load_environment(Seats), whole, record("whole"))).run(6)
    first = make_policy()
    await (await AgentsLoop.connect(wanted, load_environment(Seats), first, record("cut"))).run(5)
    assert first.calls.count("save step-000004") == first.made["white"].calls.count("save step-000004") == 1
    # Another server: the policies are made anew, their checkpoints are where they were.
    second = make_policy()
    second.saved, second.drivers = first.saved, first.drivers
    loop = await AgentsLoop.connect(wanted, load_environment(Seats), second, record("cut", resume_at=4))
    second.made["white"].saved, second.made["white"].drivers = first.made["white"].saved, first.made["white"].drivers
    await loop.resume(4)
    await loop.run(2)
    for there, here in ((whole, second), (whole.made["white"], second.made["white"])):
        assert np.array_equal(there.logits, here.logits)


async def test_an_update_that_fails_ends_the_run_after_the_others(make_policy, make_config, recorder) -> None:
    own = make_policy()
    loop = await AgentsLoop.connect(config(make_config), load_environment(Seats), own, recorder)

    async def broken(*_: Any, **__: Any) -> Any:
        raise TrainerError("the loss is nan")

    own.made["white"].train_step = broken
    with pytest.raises(TrainerError, match="the update of 'white': the loss is nan"):
        await loop.step()
    assert loop.steps_done == 0
    assert loop.phases.moment == Moment(0, Phase.UPDATE), "nobody samples before all updates are published"


async def test_an_agent_whose_policy_always_fails_is_named(make_policy, make_config, recorder) -> None:
    own = make_policy()
    never = config(
        make_config,
        rollout={"groups_per_step": 1, "max_turns": 1, "member_retries": 0, "generation_retries": 0},
        evaluation={"at_start": False},
    )
    loop = await AgentsLoop.connect(never, load_environment(Seats), own, recorder)
    own.made["white"].broken = EngineError("out of memory")
    with pytest.raises(EpisodesFailedError, match="'white': out of memory"):
        await loop.run(10)


async def test_a_run_that_dies_between_the_checkpoints_of_a_step_goes_on_from_those_before(
    make_policy, make_config, recorder
) -> None:
    own = make_policy()
    wanted = config(make_config, training={"save_every": 1, "keep_last": 1})
    loop = await AgentsLoop.connect(wanted, load_environment(Seats), own, recorder)
    await loop.run(1)
    assert own.kept["step-000001"] == 1
    assert own.made["white"].kept["step-000001"] == 2, "its last one stays until the job's own is written"


class Sometimes(MultiAgentEnvironment):
    """White is only asked in training."""

    agents = ("black", "white")
    protocol = RoundRobin()

    @classmethod
    def held_out_tasks(cls) -> Sequence[Any]:
        return [{"held out": True}]

    def reset(self, task: Any) -> Mapping[str, str]:
        return {name: "which digit?" for name in self.agents if name == "black" or "held out" not in task}

    def step(self, agent: str, action: Action) -> MultiStepResult:
        return MultiStepResult({agent: float(action.text == "7")}, done=agent == "white" or len(action.text) > 1, left=[agent])


async def test_who_never_takes_part_in_an_evaluation_is_left_out_of_it(make_policy, make_config, recorder) -> None:
    loop = await AgentsLoop.connect(config(make_config), load_environment(Sometimes), make_policy(), recorder)
    row = await loop.evaluate()
    assert row is not None
    assert list(row["agents"]) == ["black"]
    await loop.step()
    evaluation, step = recorder.rows
    assert list(step["agents"]) == ["black", "white"]
    summary = summarize_agents(recorder.rows) | {"wall_s": 1.0}
    assert "mean reward of white" in render_agents_report(loop.config.model_dump(mode="json"), recorder.rows, [], summary)
    assert row_line(evaluation, 1).startswith("held-out reward black ")


async def test_a_frozen_agent_needs_no_algorithm_that_fits(make_policy, make_config, recorder) -> None:
    mixed = {"black": {"algorithm": {"kind": "rloo", "group_size": 3}}, "white": {"frozen": True}}
    loop = await AgentsLoop.connect(config(make_config, mixed), load_environment(Seats), make_policy(), recorder)
    await loop.step()
    agent = recorder.rows[-1]["agents"]["black"]
    assert agent["episodes"] == 3 * agent["groups"]


async def test_a_run_has_a_page_a_line_and_scalars(make_policy, make_config, recorder) -> None:
    loop = await AgentsLoop.connect(config(make_config), load_environment(Seats), make_policy(), recorder)
    await loop.run(3)
    rows = recorder.rows
    summary = summarize_agents(rows) | {"wall_s": 1.0}
    assert list(summary["agents"]) == ["black", "white"]
    page = render_agents_report(config(make_config).model_dump(mode="json"), rows, [], summary)
    assert "mean reward of white" in page
    assert "exact in training" in page
    assert page.count("<h3>gradient norm</h3>") == 2, "each agent's"
    assert row_line(rows[0], 3).startswith("held-out reward black 0.")
    assert "reward black" in row_line(rows[1], 3)
    assert {"train/agents/black/reward_mean", "train/agents/white/grad_norm"} <= set(scalars(rows[1]))
    talks = [json.loads(line) for line in (recorder.folder / "transcripts.jsonl").read_text().splitlines()]
    assert {talk["agent"] for talk in talks} == {"black", "white"}


@pytest.mark.parametrize(
    ("agents", "says"),
    [
        ({"black": {}}, "nobody plays 'white' of Seats"),
        ({"black": {}, "white": {}, "red": {}}, "Seats has no agent 'red'"),
    ],
)
def test_agents_that_are_not_the_environments_are_refused(make_config, agents: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_agents(config(make_config, agents), load_environment(Seats))


def test_an_environment_for_one_takes_no_agents_and_one_for_several_needs_them(make_config, seven) -> None:
    with pytest.raises(ConfigError, match="Seven is an environment for one agent"):
        check_agents(config(make_config), seven)
    check_agents(make_config(), seven)
    with pytest.raises(ConfigError, match="nobody plays 'black'"):
        check_agents(make_config(), load_environment(Seats))


@pytest.mark.parametrize(
    ("agents", "changes", "says"),
    [
        ({"a": {"policy": "b", "script": "x.py:f"}, "b": {}}, {}, "bound to two players"),
        ({"a": {"policy": "c"}, "b": {}}, {}, "'c' is no agent with a policy of its own; those are b"),
        ({"a": {"policy": "a"}, "b": {}}, {}, "'a' plays itself"),
        ({"a": {"policy": "b", "frozen": True}, "b": {}}, {}, "frozen has no meaning: 'b' plays this seat"),
        ({"a": {"frozen": True}, "b": {"script": "x.py:f"}}, {}, "nobody learns"),
        ({"a": {"frozen": True, "optimizer": {"learning_rate": 1.0}}, "b": {}}, {}, "a frozen policy does not learn"),
        ({"a": {}, "b": {}}, {"lora": None}, "2 policies share one base model, so they are adapters; set lora"),
        ({"a": {}, "b": {}}, {"engine": {"max_adapters": 1}}, "agents have 2 policies, and engine.max_adapters is 1"),
        ({"a": {}, "b": {"lora": {"rank": 8}}}, {}, "agents.b.lora.rank is above lora.rank"),
        ({"a": {"lora": {"rank": 2}}, "b": {}}, {}, "agents.a has the job's own policy"),
        ({"a": {}, "b": {"algorithm": {"kind": "grpo", "group_size": 4}}}, {}, "need the same group_size"),
        ({"a": {}, "b": {}}, {"start_from": "job-1/final"}, "start_from is for a job of one agent"),
        ({"a": {}, "b": {}}, {"evaluation": {"agent": "c"}}, "'c' is no agent that a policy plays; policies play a, b"),
        ({}, {"evaluation": {"agent": "c"}}, "this job has no agents"),
        ({"a": {}, "b": {"sampling": {"max_tokens": 4096}}}, {}, "agents.b.sampling.max_tokens (4096) leaves no room"),
        ({}, {"turns": {"on_late": "skip"}}, "turns are those of several agents"),
        ({"a": {"polcy": "b"}, "b": {}}, {}, "policy"),
    ],
)
def test_agents_bound_to_no_one_or_two_or_oddly_are_refused(agents: Any, changes: Any, says: str) -> None:
    fields = {"base_model": "m", "lora": {"rank": 4}, "environment": {"name": "x"}, "algorithm": {"group_size": 8}}
    with pytest.raises(ConfigError) as caught:
        parse_config(RLJobConfig, fields | {"agents": agents} | changes)
    assert says in str(caught.value)


def test_a_server_has_room_for_the_adapters_of_all_agents() -> None:
    fields = {"base_model": "m", "lora": {"rank": 4}, "environment": {"name": "x"}}
    job = parse_config(RLJobConfig, fields | {"agents": {"a": {}, "b": {"policy": "a"}, "c": {"frozen": True}}})
    assert job.engine.max_adapters == 2
    assert job.policies == ["a", "c"]
    assert parse_config(RLJobConfig, fields | {"agents": {"a": None, "b": None}}).policies == ["a", "b"]
    assert parse_config(RLJobConfig, job.model_dump(mode="json")) == job
