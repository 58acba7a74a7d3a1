"""During a run policies meet each other, past versions and reference players; a run that goes on has the same ratings."""

import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

import opentinker.rollout.sampler as sampler_module
from opentinker.config.arena import ArenaConfig
from opentinker.config.base import parse_config
from opentinker.config.job import RLJobConfig
from opentinker.env.environment import Action, Message
from opentinker.env.load import load_environment
from opentinker.errors import ConfigError, EngineError, EpisodesFailedError, TrainerError
from opentinker.multiagent.environment import MultiAgentEnvironment, MultiStepResult
from opentinker.multiagent.protocol import Alternating, Simultaneous
from opentinker.training.agents import AgentsLoop
from opentinker.training.agents_report import render_agents_report, summarize_agents
from opentinker.training.arena_report import LATER, arena_files
from opentinker.training.checkpoint_arena import chosen, left_out, named, play_versions, versions
from opentinker.training.progress import row_line
from opentinker.training.recorder import Recorder, render_again
from opentinker.training.sinks.base import scalars


def any_digit(messages: Sequence[Message], numbers: random.Random) -> str:
    return str(numbers.randint(0, 9))


def five(messages: Sequence[Message], numbers: random.Random) -> str:
    return "5"


class Larger(MultiAgentEnvironment):
    """Both say a digit; the larger one wins."""

    agents = ("black", "white")
    protocol = Simultaneous()
    players: ClassVar = {"any": any_digit, "five": five}

    @classmethod
    def held_out_tasks(cls) -> Sequence[Any]:
        return [{"question": i} for i in range(6)]

    def reset(self, task: Any) -> Mapping[str, str]:
        return {name: f"{name}: which digit?" for name in self.agents}

    def step_together(self, actions: Mapping[str, Action]) -> MultiStepResult:
        said = {name: int(action.text.strip() or 0) for name, action in actions.items()}
        edge = {name: float(np.sign(digit - min(d for n, d in said.items() if n != name))) for name, digit in said.items()}
        metrics = {name: {"won": float(e > 0), "lost": float(e < 0)} for name, e in edge.items()}
        return MultiStepResult(edge, done=True, metrics=metrics)


class Sum(Larger):
    """Three earn together what they say; nobody wins."""

    agents = ("ann", "bob", "eve")

    def step_together(self, actions: Mapping[str, Action]) -> MultiStepResult:
        total = sum(int(action.text.strip() or 0) for action in actions.values()) / 10
        return MultiStepResult(dict.fromkeys(self.agents, total), done=True)


class World:
    """What a server holds: the checkpoints of its policies."""

    def __init__(self) -> None:
        self.saved: dict[tuple[str, str], np.ndarray] = {}
        self.drivers: dict[tuple[str, str], Any] = {}


@pytest.fixture
def server(policy: Any) -> Any:
    """(world) -> the policy of a job on a server of that world, which makes and deletes others beside itself."""

    class Served(type(policy)):  # type: ignore[misc]
        def __init__(self, world: World, name: str, lives: set[str]) -> None:
            super().__init__()
            self.world, self.policy, self.lives = world, name, lives
            lives.add(name)
            self.made: dict[str, Any] = {}

        async def create_policy(self, lora: Any, *, name: str = "", seed: int = 0, critic: Any = None) -> Any:
            assert name not in self.lives
            self.calls.append(f"create {name}")
            self.made[name] = Served(self.world, name, self.lives)
            return self.made[name]

        async def delete_policy(self, policy: str) -> None:
            self.lives.remove(policy)

        async def save(self, name: str, *, driver: Any = None, keep_last: int | None = None) -> dict[str, Any]:
            self.calls.append(f"save {name}")
            self.world.saved[self.policy, name] = self.logits.copy()
            self.world.drivers[self.policy, name] = json.loads(json.dumps(driver))
            return {"path": f"/checkpoints/{name}", "name": name, "version": self.version}

        async def load(self, name: str) -> dict[str, Any]:
            self.logits = self.world.saved[self.policy, name].copy()
            return {"version": self.version, "driver": self.world.drivers[self.policy, name]}

        async def load_weights(self, name: str, *, policy: str = "") -> dict[str, Any]:
            source, _, name = f"{policy or self.policy}/{name}".rpartition("/") if "/" not in name else name.rpartition("/")
            self.logits = self.world.saved[source, name.partition("@")[0]].copy()
            return {"version": self.version}

    return lambda world: Served(world, "default", set())


def config(make_config: Any, arena: Any, agents: Any = None, **changes: Any) -> RLJobConfig:
    training = {"optimizer": {"learning_rate": 12.0}, "save_every": 2}
    found: RLJobConfig = make_config(
        agents=agents or {"black": {}, "white": {}},
        lora={"rank": 4},
        arena=arena,
        **{
            "training": training,
            "evaluation": {"at_start": False, "at_end": False},
            "rollout": {"groups_per_step": 2, "max_turns": 1},
            **changes,
        },
    )
    return found


async def connected(config: RLJobConfig, policy: Any, recorder: Recorder, game: Any = Larger) -> AgentsLoop:
    return await AgentsLoop.connect(config, load_environment(game), policy, recorder)


def met(recorder: Recorder) -> list[Any]:
    return [row for row in recorder.rows if row["kind"] == "cross_play"]


ARENA = {"every": 3, "tasks": 2, "samples": 2}
GAMES = 2 * 2
"""For each pair and arrangement of the seats."""


async def test_policies_that_learn_rise_on_one_scale_and_beat_their_past(server, make_config, recorder) -> None:
    policy = server(World())
    rollout = {"groups_per_step": 8, "max_turns": 1}
    loop = await connected(config(make_config, {**ARENA, "every": 6, "samples": 12}, rollout=rollout), policy, recorder)
    await loop.run(6)
    rows = met(recorder)
    assert [row["step"] for row in rows] == [0, 6]
    last = rows[-1]
    assert (last["score"], last["anchor"]) == ("won", "any")
    assert last["ratings"]["any"] == {"mean": 0.0, "low": 0.0, "high": 0.0, "games": last["ratings"]["any"]["games"]}
    assert last["ratings"]["black@6"]["low"] > last["ratings"]["black@0"]["high"]
    assert last["rating"]["white"] == last["ratings"]["white@6"]
    assert last["matrix"]["black@6"]["white@0"]["low"] > 0.5
    assert set(last["matrix"]["black@6"]) == {"white@6", "black@0", "white@0", "any", "five"}
    one, other = last["matrix"]["black@6"]["white@0"], last["matrix"]["white@0"]["black@6"]
    assert one["mean"] + other["mean"] == pytest.approx(1.0)
    assert one["games"] == 2 * 2 * 12, "in both seats"
    assert last["matrix"]["any"]["black@6"]["mean"] == pytest.approx(1 - last["matrix"]["black@6"]["any"]["mean"])
    assert set(last["worst"]) == {"black", "white"}
    assert last["worst"]["black"]["mean"] == min(last["matrix"]["black@6"][name]["mean"] for name in ("any", "five"))
    assert policy.lives == {"default", "white"}, "the places of past versions are given back"


async def test_a_run_that_goes_on_has_the_same_ratings_and_does_not_meet_twice(server, make_config, tmp_path) -> None:
    wanted = config(make_config, {**ARENA, "every": 2, "past": 1, "samples": 1})

    def record(name: str, resume_at: int | None = None) -> Recorder:
        return Recorder(tmp_path / name, wanted.model_dump(mode="json"), resume_at=resume_at)

    whole = record("whole")
    await (await connected(wanted, server(World()), whole)).run(6)
    world = World()
    await (await connected(wanted, server(world), record("cut"))).run(5)
    again = record("cut", resume_at=4)
    loop = await connected(wanted, server(world), again)
    await loop.resume(4)
    await loop.run(2)

    def of(recorder: Recorder) -> list[Any]:
        clock = ("at", "cross_play_s")
        return [{name: value for name, value in row.items() if name not in clock} for row in met(recorder)]

    assert [row["step"] for row in of(again)] == [0, 2, 4, 6]
    assert of(again) == of(whole), "the same games, the same matrix, the same ratings"
    # Without the rows, as on another node, the checkpoint knows what was before it.
    alone = record("elsewhere")
    loop = await connected(wanted, server(world), alone)
    await loop.resume(4)
    await loop.run(2)
    assert of(alone)[-1]["ratings"] == of(whole)[-1]["ratings"]


async def test_in_own_seats_policies_meet_only_those_of_the_other_seats(server, make_config, recorder) -> None:
    agents = {"black": {}, "white": {"frozen": True}}
    loop = await connected(config(make_config, {**ARENA, "seats": "own"}, agents), server(World()), recorder)
    await loop.run(3)
    last = met(recorder)[-1]
    assert set(last["matrix"]["black@3"]) == {"white", "any", "five"}
    assert last["games"] == 3 * GAMES, "white is as it was, so that past casts bring no other games"
    assert last["matrix"]["black@3"]["white"]["games"] == GAMES


async def test_three_who_share_what_they_earn_have_rewards_and_no_ratings(server, make_config, recorder) -> None:
    agents: dict[str, Any] = {"ann": {}, "bob": {}, "eve": {"policy": "bob"}}
    loop = await connected(config(make_config, {**ARENA, "seats": "own"}, agents), server(World()), recorder, Sum)
    await loop.run(3)
    last = met(recorder)[-1]
    assert (last["score"], last["ratings"]) == ("reward", {})
    assert set(last["matrix"]["ann@3"]) == {"bob@3", "bob@0", "any", "five"}
    assert set(last["matrix"]["bob@3"]) == {"step 3", "step 0", "any", "five"}
    assert last["matrix"]["ann@3"]["five"]["mean"] == pytest.approx(1.0 + 0.45, abs=0.5), "two fives and its own digit"
    every = await connected(config(make_config, ARENA, agents), server(World()), recorder, Sum)
    await every.run(1)
    assert met(recorder)[-1]["matrix"]["bob@1"]["ann@0"]["games"] == 3 * GAMES, "once in each seat"


async def test_a_scripted_agent_and_own_functions_are_met_too(server, make_config, recorder, tmp_path) -> None:
    (tmp_path / "players.py").write_text("def nine(messages, numbers):\n    return '9'\n")
    agents = {"black": {}, "white": {"script": "players.py:nine"}}
    wanted = config(make_config, {**ARENA, "seats": "own", "references": ["players.py:nine", "five"], "past": 0}, agents)
    policy = server(World())
    loop = await AgentsLoop.connect(wanted, load_environment(Larger), policy, recorder, base_dir=tmp_path)
    await loop.run(1)
    row = met(recorder)[-1]
    assert set(row["matrix"]["black@1"]) == {"white", "nine", "five"}
    assert row["worst"]["black"]["against"] == "nine"
    assert row["anchor"] == "nine"
    assert not any(call.startswith(("create", "save arena")) for call in policy.calls)


async def test_a_meeting_without_a_usable_game_says_whose(server, make_config, recorder) -> None:
    policy = server(World())
    wanted = config(make_config, ARENA, rollout={"groups_per_step": 1, "max_turns": 1, "member_retries": 0})
    loop = await connected(wanted, policy, recorder)
    policy.made["white"].broken = EngineError("out of memory")
    with pytest.raises(EpisodesFailedError, match=r"no game of black@0 as black, white@0 as white could be used: .*out of mem"):
        await loop.run(1)


class Bare(Larger):
    players: ClassVar = {}


@pytest.mark.parametrize("white", [{"policy": "black"}, {"pool": {"of": "black", "every": 1, "slots": 1}}])
@pytest.mark.parametrize("rows_stand", [True, False])
async def test_who_first_has_nobody_to_meet_has_ratings_later(server, make_config, tmp_path, white, rows_stand) -> None:
    """What 'auto' stands for is told by games, and there are none before a past version plays; also after a checkpoint."""
    wanted, world = config(make_config, {**ARENA, "past": 2}, {"black": {}, "white": white}), World()
    first = Recorder(tmp_path / "run", wanted.model_dump(mode="json"))
    await (await connected(wanted, server(world), first, Bare)).run(2)
    assert met(first)[0]["results"] == []
    folder = tmp_path / ("run" if rows_stand else "elsewhere")
    again = Recorder(folder, wanted.model_dump(mode="json"), resume_at=2 if rows_stand else None)
    loop = await connected(wanted, server(world), again, Bare)
    await loop.resume(2)
    await loop.run(2)
    last = met(again)[-1]
    assert last["score"] == "won"
    assert set(last["rating"]) == {"black"}


class Giving(Larger):
    """In turns; who leaves has lost."""

    protocol = Alternating()
    players: ClassVar = {}

    def reset(self, task: Any) -> Mapping[str, str]:
        self.said: dict[str, Action] = {}
        return super().reset(task)

    def step(self, agent: str, action: Action) -> MultiStepResult:
        self.said[agent] = action
        if len(self.said) < 2:
            return MultiStepResult(observations={"white": "and you?"})
        return self.step_together(self.said)

    def leave(self, agent: str) -> MultiStepResult:
        metrics = {name: {"won": float(name != agent), "lost": float(name == agent)} for name in self.agents}
        return MultiStepResult({name: 1.0 if name != agent else -1.0 for name in self.agents}, done=True, metrics=metrics)


@pytest.mark.parametrize("chance", [0.3, 1.0])
@pytest.mark.parametrize("score", ["won", "auto"])
async def test_a_game_that_one_side_forfeits_counts_for_both(server, make_config, recorder, monkeypatch, chance, score) -> None:
    monkeypatch.setattr(sampler_module, "FIRST_BACKOFF_S", 0.001)
    rollout = {"groups_per_step": 2, "max_turns": 2, "member_retries": 0, "generation_retries": 0}
    arena = {**ARENA, "past": 0, "tasks": 6, "samples": 4, "score": score}
    loop = await connected(
        config(make_config, arena, turns={"on_late": "forfeit"}, rollout=rollout), policy := server(World()), recorder, Giving
    )
    white, numbers = policy.made["white"], random.Random(1)
    sample = white.sample

    async def shaky(*args: Any, **fields: Any) -> Any:
        if numbers.random() < chance:
            raise EngineError("the engine broke")
        return await sample(*args, **fields)

    white.sample = shaky
    assert loop._arena is not None
    row = await loop._arena.meet(0)
    games = {(name, other): (total, count) for name, other, total, _, count in row["results"]}
    assert set(games) == {("black@0", "white@0"), ("white@0", "black@0")}
    (won, count), (lost, as_many) = games["black@0", "white@0"], games["white@0", "black@0"]
    assert row["errors"] > 0
    assert count == as_many == 2 * 6 * 4
    assert won + lost == pytest.approx(count)
    assert won == count or chance < 1.0


async def test_where_rewards_count_who_forfeits_every_game_has_no_result(server, make_config, recorder, monkeypatch) -> None:
    monkeypatch.setattr(sampler_module, "FIRST_BACKOFF_S", 0.001)
    rollout = {"groups_per_step": 2, "max_turns": 2, "member_retries": 0, "generation_retries": 0}
    wanted = config(make_config, {**ARENA, "past": 0, "score": "reward"}, turns={"on_late": "forfeit"}, rollout=rollout)
    loop = await connected(wanted, policy := server(World()), recorder, Giving)
    policy.made["white"].broken = EngineError("the engine broke")
    assert loop._arena is not None
    row = await loop._arena.meet(0)
    assert set(row["matrix"]) == {"black@0"}
    assert row["matrix"]["black@0"]["white@0"]["mean"] == 1.0


async def test_a_game_that_fails_gives_back_the_places_of_past_versions(server, make_config, recorder) -> None:
    policy = server(World())
    loop = await connected(config(make_config, ARENA), policy, recorder)
    await loop.run(2)
    make = policy.create_policy

    async def broken(lora: Any, **fields: Any) -> Any:
        slot = await make(lora, **fields)
        slot.broken = TrainerError("the server is gone")
        return slot

    policy.create_policy = broken
    with pytest.raises(TrainerError, match="the server is gone"):
        await loop.run(1)
    assert policy.lives == {"default", "white"}


async def test_the_run_has_a_table_a_picture_a_part_of_the_page_and_lines(server, make_config, recorder) -> None:
    wanted = config(make_config, ARENA)
    loop = await connected(wanted, server(World()), recorder)
    await loop.run(4)
    summary = recorder.finish(wall_s=1.0, checkpoint=None) | summarize_agents(recorder.rows)
    assert set(summary["worst"]) == {"black", "white"}
    folder = recorder.folder
    table = json.loads((folder / "cross_play.json").read_text())
    assert [row["step"] for row in table["meetings"]] == [0, 3, 4]
    text = (folder / "cross_play.md").read_text()
    assert "# Cross-play after 4 steps" in text
    assert re.search(r"\| step \| black +\| white +\|", text)
    assert "## Worst result against a reference player" in text
    picture = (folder / "cross_play.svg").read_text()
    assert picture.startswith("<svg xmlns")
    assert picture.count("<svg") == 3
    page = render_agents_report(wanted.model_dump(mode="json"), recorder.rows, [], summary)
    assert "Who beats whom after 4 steps" in page
    assert "Elo over the run" in page
    row = met(recorder)[-1]
    assert row_line(row, 4).startswith("Elo black ")
    assert "cross_play/rating/black/mean" in scalars(row)
    assert not any("@" in name for name in scalars(row)), "names that would be others at each step"
    assert json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["kind"] == "cross_play"


FIELDS: dict[str, Any] = {
    "base_model": "m",
    "lora": {"rank": 4},
    "environment": {"name": "x"},
    "agents": {"a": {}, "b": {}, "c": {"frozen": True}},
}


def test_the_server_has_room_for_past_versions() -> None:
    assert parse_config(RLJobConfig, FIELDS | {"arena": {}}).engine.max_adapters == 4
    assert parse_config(RLJobConfig, FIELDS | {"arena": {"seats": "own"}}).engine.max_adapters == 5
    assert parse_config(RLJobConfig, FIELDS | {"arena": {"past": 0}}).engine.max_adapters == 3
    resolved = parse_config(RLJobConfig, FIELDS | {"arena": {}})
    assert parse_config(RLJobConfig, resolved.model_dump(mode="json")) == resolved


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"arena": {}, "engine": {"max_adapters": 3}}, "engine.max_adapters=3 has room for the 3 policies of agents only"),
        ({"arena": {}, "agents": {}}, "arena is for several agents"),
        ({"arena": {"evry": 1}}, "every"),
    ],
)
def test_an_arena_that_cannot_be_is_refused(changes: Any, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(RLJobConfig, FIELDS | changes)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("arena", "says"),
    [
        ({"references": ["fve"]}, "Larger brings no player 'fve'"),
        ({"references": ["five", "five"]}, "two players are called 'five'"),
        ({"references": ["p.py:black"]}, "a player is called as an agent, 'black'"),
    ],
)
async def test_a_reference_player_that_is_not_there_is_named(server, make_config, recorder, arena: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        await connected(config(make_config, arena), server(World()), recorder)


async def test_games_of_three_have_no_winner_of_two(server, make_config, recorder) -> None:
    agents: dict[str, Any] = {"ann": {}, "bob": {}, "eve": {}}
    with pytest.raises(ConfigError, match=r"arena.score 'won' is for games between two, and here are 3"):
        await connected(config(make_config, {"score": "won"}, agents), server(World()), recorder, Sum)


def listed(policy: str | None, name: str) -> dict[str, Any]:
    """A checkpoint as the scheduler lists it."""
    return {"policy": policy, "name": name, "ref": f"ann/job-1/{policy or ''}/{name}@1"}


SAVED = [
    *(listed(None, name) for name in ("final", "arena-000004", "step-000004", "step-000002", "best", "arena-000000")),
    *(listed("b", name) for name in ("final", "step-000002")),
    listed("c", "final"),
]


def test_checkpoints_of_a_run_are_found_by_agent_and_step() -> None:
    found = versions(parse_config(RLJobConfig, FIELDS), SAVED, 5)
    assert [one.name for one in found] == ["a@0", "a@2", "a@4", "a@5", "a@best", "b@2", "b@5"], "c does not learn"
    assert [one.name for one in chosen(found, 2)] == ["a@0", "a@5", "b@2", "b@5"]
    assert [one.name for one in named(found, ["b@2", "a@best"])] == ["b@2", "a@best"]
    with pytest.raises(ConfigError, match="the run has no checkpoint 'a@3'"):
        named(found, ["a@3"])
    alone = versions(parse_config(RLJobConfig, FIELDS), SAVED[:1], None)
    assert [one.name for one in chosen(alone, 2)] == ["a@final"], "also where no row tells its step"


def test_agents_on_further_servers_play_or_it_is_said_why_not() -> None:
    fields = FIELDS | {
        "agents": {"a": {}, "b": {"server": "same"}, "d": {"server": "other"}, "e": {"server": "whole"}},
        "servers": {"same": {"lora": {"rank": 8}}, "other": {"base_model": "n"}, "whole": {"lora": None}},
    }
    job = parse_config(RLJobConfig, fields)
    found = versions(job, [listed(name, "step-000002") for name in (None, "b", "d", "e")], 2)
    assert [one.name for one in named(found, ["a@2", "b@2"], left_out(job))] == [one.name for one in found] == ["a@2", "b@2"]
    assert set(left_out(job)) == {"d", "e"}
    for name, says in (
        ("d@2", "the base model of its server is n, that of the job's own m"),
        ("e@2", "trained full parameters"),
    ):
        with pytest.raises(ConfigError, match=f"'{name}' cannot play here: .*{says}"):
            named(found, [name], left_out(job))


async def test_checkpoints_of_a_finished_run_meet_on_a_server(server, make_config, tmp_path) -> None:
    world = World()
    wanted = config(make_config, ARENA)
    fields = wanted.model_dump(mode="json")
    recorder = Recorder(tmp_path / "whole", fields, summarize=summarize_agents, render=render_agents_report)
    loop = await connected(wanted, server(world), recorder)
    await loop.run(4)
    summary = recorder.finish(wall_s=1.0, checkpoint=None)
    saved = [
        {"policy": None if policy == "default" else policy, "name": name, "ref": f"{policy}/{name}"}
        for policy, name in world.saved
    ]
    playing = chosen(versions(wanted, saved, 4), 2)
    assert [one.name for one in playing] == ["black@0", "black@4", "white@0", "white@4"]
    settings = ArenaConfig(tasks=2, samples=2, references=("any",))
    rows = [await play_versions(server(world), wanted, settings, load_environment(Larger), playing) for _ in range(2)]
    matrices = [row["matrix"] for row in rows]
    assert matrices[0] == matrices[1], "the same checkpoints and seed, the same games"
    assert set(matrices[0]["black@4"]) == {"black@0", "white@0", "white@4", "any"}
    assert matrices[0]["black@0"]["black@4"]["games"] == 2 * GAMES
    assert rows[0]["anchor"] == "any"
    assert set(rows[0]["worst"]) == {"black@0", "black@4", "white@0", "white@4"}
    folder = recorder.folder / LATER
    folder.mkdir()
    for name, text in arena_files([rows[0]], "Checkpoints of job-1").items():
        (folder / name).write_text(text)
    assert (folder / "cross_play.md").read_text().startswith("# Checkpoints of job-1")
    render_again(recorder.folder, render_agents_report)
    page = (recorder.folder / "report.html").read_text()
    assert "Checkpoints that met after the run" in page
    assert "Who beats whom after 4 steps" in page
    assert str(summary["steps"]) == "4"
    render_again(tmp_path / "nowhere", render_agents_report)
