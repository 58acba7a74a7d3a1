"""Agents bound to a checkpoint, to past versions and to a model elsewhere; the policies live in memory and really learn."""

import asyncio
import json
import logging
import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import httpx
import numpy as np
import pytest

from opentinker.config.agents import AgentConfig
from opentinker.config.base import parse_config
from opentinker.config.job import InteractiveJobConfig, RLJobConfig
from opentinker.env.environment import Action
from opentinker.env.load import load_environment
from opentinker.errors import CheckpointError, ConfigError, EpisodesFailedError
from opentinker.multiagent import models
from opentinker.multiagent.environment import MultiAgentEnvironment, MultiStepResult
from opentinker.multiagent.protocol import Simultaneous
from opentinker.training.agents import AgentsLoop
from opentinker.training.agents_report import render_agents_report, summarize_agents
from opentinker.training.opponents import Opponents
from opentinker.training.recorder import Recorder


class Higher(MultiAgentEnvironment):
    """Both say a digit; the higher one wins."""

    agents = ("black", "white")
    protocol = Simultaneous()

    @classmethod
    def held_out_tasks(cls) -> Sequence[Any]:
        return [{"question": i} for i in range(3)]

    def reset(self, task: Any) -> Mapping[str, str]:
        return {name: f"{name}: a digit?" for name in self.agents}

    def step_together(self, actions: Mapping[str, Action]) -> MultiStepResult:
        said = {name: int(a.text) if a.text.strip().isdigit() else -1 for name, a in actions.items()}
        sign = float(np.sign(said["black"] - said["white"]))
        return MultiStepResult({"black": sign, "white": -sign}, done=True)


class Server:
    """What the policies of one server share: their checkpoints, and those of other jobs."""

    def __init__(self, bandit: type) -> None:
        self.bandit = bandit
        self.saved: dict[tuple[str, str], np.ndarray] = {}
        self.made: dict[str, Any] = {}
        self.loads: list[tuple[str, str, str]] = []
        self.asked: list[tuple[str, str]] = []

    def policy(self, name: str = "own") -> Any:
        server = self

        class Policy(self.bandit):  # type: ignore[misc, name-defined]
            policy = name

            async def create_policy(self, lora: Any, *, name: str = "", seed: int = 0, critic: Any = None) -> Any:
                return server.policy(name)

            async def sample(self, prompt: Any, params: Any, *, request_id: str, deadline_s: float) -> Any:
                server.asked.append((self.policy, request_id))
                return await super().sample(prompt, params, request_id=request_id, deadline_s=deadline_s)

            async def save(self, name: str, *, driver: Any = None, keep_last: int | None = None) -> dict[str, Any]:
                answer = await super().save(name, driver=driver, keep_last=keep_last)
                server.saved[self.policy, f"{name}@{self.version}"] = self.logits.copy()
                return answer

            async def load_weights(self, name: str, *, policy: str = "") -> dict[str, Any]:
                server.loads.append((self.policy, name, policy))
                if (policy, name) not in server.saved:
                    raise CheckpointError(f"there is no checkpoint '{name}' of this policy")
                self.logits = server.saved[policy, name].copy()
                self.version += 1
                return {"version": self.version}

        self.made[name] = Policy()
        return self.made[name]


@pytest.fixture
def server(policy: Any) -> Server:
    return Server(type(policy))


def config(make_config: Any, white: Any, **changes: Any) -> RLJobConfig:
    sections = {"evaluation": {"at_start": False, "at_end": False}, "training": {"optimizer": {"learning_rate": 0.5}}}
    found: RLJobConfig = make_config(agents={"black": {}, "white": white}, lora={"rank": 4}, **(sections | changes))
    return found


async def loop_of(wanted: RLJobConfig, server: Server, recorder: Recorder) -> AgentsLoop:
    return await AgentsLoop.connect(wanted, load_environment(Higher), server.policy(), recorder)


async def test_a_checkpoint_plays_as_it_was_saved_and_a_learning_agent_begins_with_one(make_config, server, recorder) -> None:
    strong = np.zeros(10)
    strong[8] = 50.0
    server.saved["", "ann/job-1/final@3"] = strong
    wanted = make_config(
        agents={"black": {"start_from": "ann/job-1/final@3"}, "white": {"checkpoint": "ann/job-1/final@3"}}, lora={"rank": 4}
    )
    loop = await loop_of(wanted, server, recorder)
    assert [(policy, address) for policy, address, _ in server.loads] == [
        ("own", "ann/job-1/final@3"),
        ("white", "ann/job-1/final@3"),
    ]
    before = server.made["own"].logits.copy()
    await loop.run(2)
    assert np.array_equal(server.made["white"].logits, strong)
    assert "train_step" not in server.made["white"].calls
    assert before.argmax() == 8
    assert [list(row["agents"]) for row in recorder.rows if row["kind"] == "agents_step"] == [["black"]] * 2


async def test_a_checkpoint_that_is_not_there_is_said_of_its_agent(make_config, server, recorder) -> None:
    with pytest.raises(CheckpointError, match=r"agents\.white: there is no checkpoint 'job-2/final'"):
        await loop_of(config(make_config, {"checkpoint": "job-2/final"}), server, recorder)


async def test_past_versions_play_and_stay_as_they_were(make_config, server, recorder) -> None:
    pool = {"of": "black", "every": 2, "size": 3, "slots": 2}
    loop = await loop_of(config(make_config, {"pool": pool}), server, recorder)
    await loop.run(9)
    rows = [row for row in recorder.rows if row["kind"] == "agents_step"]
    assert [list(row["agents"]) for row in rows] == [["black"]] * 9
    assert [row["pools"]["white"]["members"] for row in rows] == [1, 1, 2, 2, 3, 3, 3, 3, 3]
    assert [member.step for member in loop._opponents.pools["white"].pool.members] == [0, 6, 8]
    assert server.made["own"].kept["pool-white-000008"] == 3, "no more files than members, if there are no checkpoints"
    assert set(server.made) == {"own", "white.0", "white.1"}, "memory for two, not for all"
    for name in ("white.0", "white.1"):
        assert "train_step" not in server.made[name].calls
    for slot, checkpoint, source in server.loads:
        assert slot in ("white.0", "white.1")
        assert source == "own"
        assert checkpoint.startswith("pool-white-")
    held = server.loads[-1]
    assert np.array_equal(server.made[held[0]].logits, server.saved["own", held[1]])
    games = sum(sum(row["pools"]["white"]["drawn"].values()) for row in rows)
    assert games == 9 * 8 * 8
    assert rows[-1]["pools"]["white"]["score"] > 0.5, "black has learnt since"


async def test_all_games_of_a_group_are_against_the_same_member(make_config, server, recorder) -> None:
    loop = await loop_of(config(make_config, {"pool": {"of": "black", "every": 1, "slots": 4}}), server, recorder)
    await loop.run(3)
    server.asked.clear()
    await loop.step()
    by_group: dict[str, set[str]] = {}
    for slot, request in server.asked:
        if slot != "own":
            by_group.setdefault(request.split("-")[1], set()).add(slot)
    assert len(by_group) == 8
    assert {len(slots) for slots in by_group.values()} == {1}
    assert len(set.union(*by_group.values())) > 1
    drawn = [member.checkpoint for member in loop._opponents.pools["white"]._drawn]
    assert len(set(drawn)) == len(set.union(*by_group.values()))


async def test_in_evaluations_the_first_member_plays(make_config, server, recorder) -> None:
    pool = {"of": "black", "every": 1, "strategy": "latest", "slots": 1}
    fast = {"evaluation": {"every": 4}, "training": {"optimizer": {"learning_rate": 20.0}}}
    loop = await loop_of(config(make_config, {"pool": pool}, **fast), server, recorder)
    await loop.run(8)
    evaluations = [row for row in recorder.rows if row["kind"] == "agents_evaluation"]
    assert [row["step"] for row in evaluations] == [0, 4, 8]
    assert evaluations[-1]["agents"]["black"]["reward_mean"] > 0.3
    assert server.loads[-1][1] == "pool-white-first@0"
    assert not server.made["white.0"].logits.any()


async def test_a_run_with_a_pool_goes_on_as_if_it_had_never_ended(make_config, server, tmp_path) -> None:
    pool = {"of": "black", "every": 2, "size": 4, "slots": 2, "strategy": "pfsp"}
    training = {"optimizer": {"learning_rate": 0.5}, "save_every": 3}
    wanted = config(make_config, {"pool": pool}, training=training)

    def record(name: str, resume_at: int | None = None) -> Recorder:
        return Recorder(tmp_path / name, wanted.model_dump(mode="json"), resume_at=resume_at)

    whole = record("whole")
    await (await loop_of(wanted, Server(server.bandit), whole)).run(9)

    await (await loop_of(wanted, server, record("cut"))).run(8)
    first = server.made["own"]
    again = record("cut", resume_at=6)
    loop = await loop_of(wanted, server, again)
    own = server.made["own"]
    own.saved, own.drivers = first.saved, first.drivers
    await loop.resume(6)
    own.version = 6  # as a real server goes on with the checkpoint's numbers
    await loop.run(3)

    def told(recorder: Recorder) -> list[Any]:
        return [(row["step"], row["pools"], row["reward_mean"]) for row in recorder.rows if row["kind"] == "agents_step"]

    assert told(again) == told(whole)
    assert own.kept["pool-white-000008"] == 4 + 3 * 2, "what a run may have to go on with is not deleted"


async def test_a_run_with_a_pool_has_a_page(make_config, server, recorder) -> None:
    loop = await loop_of(config(make_config, {"pool": {"of": "black", "every": 1}}), server, recorder)
    await loop.run(3)
    summary = summarize_agents(recorder.rows) | {"wall_s": 1.0}
    page = render_agents_report(loop.config.model_dump(mode="json"), recorder.rows, [], summary)
    assert "Against past versions" in page


class Elsewhere:
    """A server with OpenAI's chat API. `answers` are (status, body, headers) for the first requests; then it says `says`."""

    def __init__(self, says: str = "4", answers: Sequence[tuple[int, Any, Mapping[str, str]]] = ()) -> None:
        self.says, self.answers = says, list(answers)
        self.requests: list[httpx.Request] = []
        self.busy = self.most = 0

    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self.answer)

    async def answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if self.answers:
            status, body, headers = self.answers.pop(0)
            return httpx.Response(status, json=body, headers=headers)
        return httpx.Response(200, json={"choices": [{"message": {"role": "assistant", "content": self.says}}]})

    def bodies(self) -> list[Any]:
        return [json.loads(request.content) for request in self.requests]


MODEL = {"url": "http://models.example/v1/", "name": "gpt-small", "api_key_secret": "the-key"}


@pytest.fixture
def with_model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs have this server as the one that is asked."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    monkeypatch.setattr(models, "FIRST_PAUSE_S", 0.0)

    def use(elsewhere: Elsewhere) -> None:
        plain = Opponents.__init__

        def init(self: Opponents, agents: Any, base_dir: Any) -> None:
            plain(self, agents, base_dir, elsewhere.transport())

        monkeypatch.setattr(Opponents, "__init__", init)

    return use


async def test_a_model_elsewhere_plays_and_nothing_of_it_is_learnt(make_config, server, recorder, with_model, caplog) -> None:
    busy = (429, {"error": {"message": "slow down"}}, {"retry-after": "0"})
    elsewhere = Elsewhere(answers=[busy, (503, "away", {})])
    with_model(elsewhere)
    caplog.set_level(logging.DEBUG)
    wanted = config(make_config, {"model": MODEL | {"temperature": 0.5, "extra": {"top_p": 0.9}}})
    loop = await loop_of(wanted, server, recorder)
    await loop.step()
    await loop.close()
    assert len(elsewhere.requests) == 64 + 2
    request, body = elsewhere.requests[0], elsewhere.bodies()[0]
    assert str(request.url) == "http://models.example/v1/chat/completions"
    assert request.headers["authorization"] == "Bearer sk-very-secret"
    assert body["messages"] == [{"role": "user", "content": "white: a digit?"}]
    assert (body["model"], body["temperature"], body["top_p"], body["max_tokens"]) == ("gpt-small", 0.5, 0.9, 256)
    seeds = {body["seed"] for body in elsewhere.bodies()}
    assert len(seeds) == 64, "each turn has a seed of its own, and an attempt its turn's"
    (row,) = recorder.rows
    assert list(row["agents"]) == ["black"]
    assert len(server.made["own"].batches[0][0]) <= 64
    kept = "".join(path.read_text() for path in recorder.folder.rglob("*") if path.is_file())
    for text in (kept, caplog.text, wanted.model_dump_json(), repr(wanted)):
        assert "sk-very-secret" not in text


async def test_a_model_that_refuses_ends_the_run_with_the_agents_name(make_config, server, recorder, with_model) -> None:
    refusal = (401, {"error": {"message": "Incorrect API key provided: sk-very-secret."}}, {})
    with_model(Elsewhere(answers=[refusal] * 500))
    loop = await loop_of(config(make_config, {"model": MODEL}), server, recorder)
    with pytest.raises(
        ConfigError, match=r"agents\.white\.model: http://models\.example/v1/ refuses 'gpt-small': 401"
    ) as caught:
        await loop.step()
    assert "sk-very-secret" not in str(caught.value)
    assert "[secret the-key]" in str(caught.value)


async def test_a_model_that_stays_away_ends_the_run_after_bounded_attempts(make_config, server, recorder, with_model) -> None:
    elsewhere = Elsewhere(answers=[(500, {"error": "no memory"}, {})] * 10_000)
    with_model(elsewhere)
    wanted = config(
        make_config,
        {"model": MODEL | {"retries": 2}},
        rollout={"groups_per_step": 1, "max_turns": 1, "member_retries": 0},
    )
    loop = await loop_of(wanted, server, recorder)
    with pytest.raises(EpisodesFailedError, match=r"'white': the model 'gpt-small' at .* did not answer: 500: no memory"):
        await loop.run(5)
    assert len(elsewhere.requests) == 3 * 8 * 3, "three steps of eight games with three attempts each"


async def test_no_more_requests_are_under_way_than_allowed_and_a_late_one_is_given_up(with_model) -> None:
    busy = most = 0

    async def slow(request: httpx.Request) -> httpx.Response:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        await asyncio.sleep(0.01)
        busy -= 1
        return httpx.Response(200, json={"choices": [{"message": {"content": None}}]})

    agent = AgentConfig.model_validate({"model": MODEL | {"max_concurrent": 3}})
    assert agent.model is not None
    model = models.ChatModel("white", agent.model, httpx.MockTransport(slow))
    said = await asyncio.gather(*(model.ask([{"role": "user", "content": "x"}], 1) for _ in range(20)))
    await model.close()
    assert said == [""] * 20
    assert most == 3

    async def never(request: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    hasty = models.ChatModel(
        "white", agent.model.model_copy(update={"timeout_s": 0.01, "retries": 1}), httpx.MockTransport(never)
    )
    with pytest.raises(models.UnavailableError, match=r"no answer within 0\.01 s"):
        await hasty.ask([{"role": "user", "content": "x"}], 1)
    await hasty.close()


class Real(BaseHTTPRequestHandler):
    """Hangs up on the first request, is busy at the second, and then repeats what it was asked last."""

    paths: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.paths.append(self.path)
        if len(self.paths) == 1:
            self.close_connection = True
            return
        answer = {"choices": [{"message": {"content": asked["messages"][-1]["content"].upper()}}]}
        body = json.dumps(answer).encode() if len(self.paths) > 2 else b"busy"
        self.send_response(200 if len(self.paths) > 2 else 503)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


async def test_a_real_server_is_asked_again_until_it_answers_and_one_that_is_away_is_named(with_model) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Real)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    agent = AgentConfig.model_validate({"model": MODEL | {"url": url, "retries": 3}})
    assert agent.model is not None
    model = models.ChatModel("white", agent.model)
    try:
        assert await model.ask([{"role": "user", "content": "b2?"}], 1) == "B2?"
        assert Real.paths == ["/v1/chat/completions"] * 3
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()
    with pytest.raises(models.UnavailableError, match=rf"the model 'gpt-small' at {url} did not answer: no connection"):
        await model.ask([{"role": "user", "content": "b2?"}], 1)
    await model.close()


async def test_an_answer_that_is_no_completion_says_what_it_was(with_model) -> None:
    agent = AgentConfig.model_validate({"model": MODEL})
    assert agent.model is not None
    model = models.ChatModel("white", agent.model, httpx.MockTransport(lambda request: httpx.Response(200, text="<html>")))
    with pytest.raises(models.UnavailableError, match="gave no chat completion: <html>"):
        await model.ask([{"role": "user", "content": "x"}], 1)
    await model.close()


def test_a_key_that_is_not_there_is_missed_before_anything_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    agents = {"white": AgentConfig.model_validate({"model": MODEL})}
    with pytest.raises(ConfigError, match=r"agents\.white\.model: the variable OPENAI_API_KEY is not set"):
        Opponents(agents, None)
    Opponents({"white": AgentConfig.model_validate({"model": MODEL | {"api_key_secret": ""}})}, None)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-one\nsk-two")
    with pytest.raises(ConfigError, match="cannot be an API key") as caught:
        Opponents(agents, None)
    assert "sk-" not in str(caught.value)


POOL = {"pool": {"of": "a"}}


@pytest.mark.parametrize(
    ("agents", "changes", "says"),
    [
        (
            {"a": {}, "b": POOL | {"checkpoint": "job-1/final"}},
            {},
            "bound to two players, the checkpoint job-1/final and a pool",
        ),
        ({"a": {}, "b": POOL | {"policy": "a"}}, {}, "bound to two players, the policy of 'a' and a pool of past versions"),
        ({"a": {}, "b": {"script": "x.py:f", "model": MODEL}}, {}, "two players, the script x.py:f and the model 'gpt-small'"),
        ({"a": {}, "b": POOL | {"frozen": True}}, {}, "frozen has no meaning: a pool of past versions plays"),
        ({"a": {}, "b": POOL | {"lora": {"rank": 2}}}, {}, "lora has no meaning: a pool"),
        ({"a": {}, "b": {"model": MODEL, "sampling": {}}}, {}, "sampling has no meaning: the model 'gpt-small' plays"),
        ({"a": {}, "b": {"checkpoint": "job-1/x", "optimizer": {}}}, {}, "optimizer has no meaning: the checkpoint job-1/x"),
        ({"a": {}, "b": {"policy": "a", "start_from": "job-1/x"}}, {}, "start_from has no meaning"),
        ({"a": {}, "b": {"checkpoint": "final"}}, {}, "'final' is not a checkpoint's address"),
        ({"a": {}, "b": {"pool": {"of": "b"}}}, {}, "agents.b.pool.of: 'b' plays itself; those are a"),
        ({"a": {}, "b": {"pool": {"of": "c"}}, "c": {"frozen": True}}, {}, "agents.b.pool.of: 'c' is no agent that learns"),
        ({"a": {"frozen": True}, "b": {"checkpoint": "job-1/x"}}, {}, "nobody learns"),
        ({"a": {"pool": {"of": "b"}}, "b": {"model": MODEL}}, {}, "nobody learns"),
        ({"a": {}, "b": POOL}, {"engine": {"max_adapters": 2}}, "1 policies and pools 2 slots, and engine.max_adapters is 2"),
        ({"a": {}, "b": POOL}, {"lora": None}, "share one base model, so they are adapters; set lora"),
        ({"a": {}, "b": {"pool": {}}}, {}, "agents.b.pool.of"),
        ({"a": {}, "b": {"model": MODEL | {"url": "ftp://x"}}}, {}, "url begins with http:// or https://"),
        ({"a": {}, "b": {"model": MODEL | {"url": "http://me:sk-1@x/v1"}}}, {}, "url holds no login"),
        ({"a": {}, "b": {"model": MODEL | {"api_key_variable": "PATH"}}}, {}, "PATH has a meaning of its own"),
        ({"a": {}, "b": {"model": MODEL | {"extra": {"n": 2}}}}, {}, "extra.n is not for extra"),
        (
            {"a": {}, "b": {"model": MODEL}, "c": {"model": MODEL | {"api_key_secret": "other"}}},
            {},
            "agents.b.model and agents.c.model both bring a secret as OPENAI_API_KEY",
        ),
    ],
)
def test_players_that_do_not_fit_together_are_refused_with_the_agents_name(agents: Any, changes: Any, says: str) -> None:
    fields = {"base_model": "m", "lora": {"rank": 4}, "environment": {"name": "x"}, "algorithm": {"group_size": 8}}
    with pytest.raises(ConfigError) as caught:
        parse_config(RLJobConfig, fields | {"agents": agents} | changes)
    assert says in str(caught.value)
    assert "sk-1" not in str(caught.value)


def test_a_server_has_room_for_a_pools_slots_and_the_scheduler_knows_what_is_named() -> None:
    fields = {"base_model": "m", "lora": {"rank": 4}, "environment": {"name": "x"}}
    agents = {"a": {"start_from": "job-1/x"}, "b": {"pool": {"of": "a", "slots": 3}}, "c": {"checkpoint": "job-1/a/y@3"}}
    job = parse_config(RLJobConfig, fields | {"agents": agents | {"d": {"model": MODEL}}})
    assert job.engine.max_adapters == 5
    assert job.policies == ["a", "c"]
    assert job.starts == {("agents", "a", "start_from"): "job-1/x", ("agents", "c", "checkpoint"): "job-1/a/y@3"}
    assert job.secrets == {"OPENAI_API_KEY": "the-key"}
    assert parse_config(RLJobConfig, job.model_dump(mode="json")) == job
    one = parse_config(RLJobConfig, fields | {"agents": {"a": {}, "b": {"pool": {"of": "a", "size": 1}}}})
    assert one.engine.max_adapters == 2
    asked = parse_config(InteractiveJobConfig, {"base_model": "m", "checkpoints": ["job-1/x", "job-2/y"]})
    assert asked.starts == {("checkpoints", "0"): "job-1/x", ("checkpoints", "1"): "job-2/y"}
