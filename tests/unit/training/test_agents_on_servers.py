"""Agents of one job on several servers: each policy is made, sampled, trained and saved where its agent is."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opentinker.config.job import RLJobConfig
from opentinker.env.environment import Action
from opentinker.env.load import load_environment
from opentinker.errors import AgentStuckError, ConfigError, ServerLostError
from opentinker.multiagent.environment import MultiAgentEnvironment, MultiStepResult
from opentinker.multiagent.protocol import Simultaneous
from opentinker.training import updates
from opentinker.training.agents import AgentsLoop
from opentinker.training.run import _drive_agents

OTHER_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant: {% endif %}"
)


class Trio(MultiAgentEnvironment):
    """Each earns 1 for a digit of its own; all say it at once."""

    agents = ("black", "white", "red")
    protocol = Simultaneous()

    def reset(self, task: Any) -> Mapping[str, str]:
        return {name: f"{name}: which digit?" for name in self.agents}

    def step_together(self, actions: Mapping[str, Action]) -> MultiStepResult:
        right = {"black": "7", "white": "3", "red": "5"}
        return MultiStepResult({name: float(a.text.strip() == right[name]) for name, a in actions.items()}, done=True)


@pytest.fixture
def make_host(policy: Any) -> Any:
    """The policy that a server began with; those that were made beside it are in `made`."""

    class Host(type(policy)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.made: dict[str, Any] = {}
            self.asked: list[tuple[str, Any, int]] = []
            self.contexts: list[Any] = []
            self.max_model_len = 1024
            self.lost = ""

        async def info(self) -> dict[str, Any]:
            self.check()
            return {**await super().info(), "max_model_len": self.max_model_len}

        def check(self) -> None:
            if self.lost:
                raise ServerLostError(self.lost)

        async def create_policy(self, lora: Any, *, name: str = "", seed: int = 0, critic: Any = None) -> Any:
            self.check()
            self.asked.append((name, lora, seed))
            self.made[name] = type(policy)()
            return self.made[name]

        async def sample(self, prompt: Any, params: Any, **more: Any) -> Any:
            self.check()
            self.contexts.append(prompt)
            return await super().sample(prompt, params, **more)

        async def train_step(self, *args: Any, **more: Any) -> Any:
            self.check()
            return await super().train_step(*args, **more)

    return Host


def config(make_config: Any, **changes: Any) -> RLJobConfig:
    sections: dict[str, Any] = {
        "lora": {"rank": 4},
        "servers": {"second": {"base_model": "other", "lora": {"rank": 2}}},
        "agents": {"black": {}, "white": {"server": "second"}, "red": {"server": "second"}},
    }
    found: RLJobConfig = make_config(**sections | changes)
    return found


async def test_each_policy_is_made_on_its_agents_server_and_all_learn(make_host, make_config, recorder) -> None:
    own, second = make_host(), make_host()
    job = config(make_config, training={"optimizer": {"learning_rate": 2.0}, "seed": 5})
    loop = await AgentsLoop.connect(job, load_environment(Trio), own, recorder, servers={"second": second})
    await loop.run(12)
    assert own.asked == []
    assert [(name, lora.rank, seed) for name, lora, seed in second.asked] == [("red", 2, 7)]
    learnt = [np.argmax(policy.logits) for policy in (own, second, second.made["red"])]
    assert learnt == [7, 3, 5], "black, white, red"
    await loop.save("step-000012")
    saved = [policy.calls[-1] for policy in (own, second, second.made["red"])]
    assert saved == ["save step-000012"] * 3


async def test_each_agent_is_asked_in_the_words_and_within_the_context_of_its_servers_model(
    make_host, make_config, recorder
) -> None:
    import json

    own, second = make_host(), make_host()
    files = json.loads(second.files["tokenizer_config.json"])
    second.files = {**second.files, "tokenizer_config.json": json.dumps(files | {"chat_template": OTHER_TEMPLATE}).encode()}
    second.max_model_len = 24
    job = config(make_config, agents={"black": {}, "white": {"server": "second"}, "red": {"policy": "black"}})
    loop = await AgentsLoop.connect(job, load_environment(Trio), own, recorder, servers={"second": second})
    assert (loop._player("black", None).max_model_len, loop._player("white", None).max_model_len) == (1024, 24)
    second.max_model_len = 1024
    loop = await AgentsLoop.connect(job, load_environment(Trio), own, recorder, servers={"second": second})
    await loop.step()
    lengths = {len(prompt) for prompt in second.contexts}
    assert lengths.isdisjoint({len(prompt) for prompt in own.contexts}), "another template makes other prompts"


async def test_a_server_that_is_not_there_is_an_error_before_anything_is_made(make_host, make_config, recorder) -> None:
    own = make_host()
    with pytest.raises(ConfigError, match="there is no server 'second'"):
        await AgentsLoop.connect(config(make_config), load_environment(Trio), own, recorder)
    second = make_host()
    second.lost = "the worker died"
    with pytest.raises(ServerLostError, match="server 'second': the worker died"):
        await AgentsLoop.connect(config(make_config), load_environment(Trio), own, recorder, servers={"second": second})


async def test_a_server_lost_amid_the_games_is_named_by_its_agent_and_nobody_is_updated(
    make_host, make_config, recorder
) -> None:
    own, second = make_host(), make_host()
    loop = await AgentsLoop.connect(config(make_config), load_environment(Trio), own, recorder, servers={"second": second})
    await loop.step()
    second.lost = "the worker died"
    with pytest.raises(ServerLostError, match=r"the server of '(white|red)': the worker died"):
        await loop.step()
    assert own.calls.count("train_step") == 1


async def test_a_server_lost_amid_the_updates_releases_the_others_and_names_its_agent(make_host, make_config, recorder) -> None:
    own, second = make_host(), make_host()
    loop = await AgentsLoop.connect(config(make_config), load_environment(Trio), own, recorder, servers={"second": second})
    released = asyncio.Event()

    async def never(*args: Any, **more: Any) -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            released.set()

    own.train_step = never

    original = second.train_step

    async def dies(*args: Any, **more: Any) -> Any:
        second.lost = "the worker died"
        return await original(*args, **more)

    second.train_step = dies
    with pytest.raises(ServerLostError, match="the update of 'white': the worker died"):
        await loop.step()
    assert released.is_set(), "black's update does not hold up the end"
    assert loop.steps_done == 0


async def connected(make_host: Any, make_config: Any, recorder: Any, barrier_timeout_s: float) -> tuple[AgentsLoop, Any, Any]:
    own, second = make_host(), make_host()
    job = config(make_config, turns={"barrier_timeout_s": barrier_timeout_s})
    loop = await AgentsLoop.connect(job, load_environment(Trio), own, recorder, servers={"second": second})
    return loop, own, second


def train_after(policy: Any, ready: Callable[[], Awaitable[Any]]) -> asyncio.Event:
    """The policy trains when `ready` has returned; what is set when it does so, or is not asked to any more."""
    train, ended = policy.train_step, asyncio.Event()

    async def waits(*args: Any, **more: Any) -> Any:
        try:
            await ready()
            return await train(*args, **more)
        finally:
            ended.set()

    policy.train_step = waits
    return ended


async def test_a_server_that_hangs_in_an_update_ends_the_run_and_is_named(make_host, make_config, recorder) -> None:
    loop, own, second = await connected(make_host, make_config, recorder, 0.2)
    trained = train_after(second.made["red"], lambda: asyncio.sleep(0))
    train_after(own, trained.wait)  # so that red has published when somebody begins to wait
    given_up = train_after(second, asyncio.Event().wait)
    with pytest.raises(AgentStuckError, match=r"^'white' on server 'second' held up the others in update 0 for .* s") as caught:
        await asyncio.wait_for(loop.run(2), 60)
    assert "turns.barrier_timeout_s (0.2)" in caught.value.hint
    assert given_up.is_set(), "nothing is left running"
    assert loop.steps_done == 0


async def test_a_server_that_is_slow_but_in_time_holds_up_nobody(make_host, make_config, recorder) -> None:
    loop, own, second = await connected(make_host, make_config, recorder, 600.0)
    trained = train_after(own, lambda: asyncio.sleep(0))
    for policy in (second, second.made["red"]):
        train_after(policy, trained.wait)
    await loop.run(2)
    assert loop.steps_done == 2


async def test_agents_of_one_server_may_together_take_longer_than_one_server_may(
    make_host, make_config, recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, queue = 0.0, asyncio.Lock()
    monkeypatch.setattr(updates, "monotonic", lambda: now)
    loop, own, second = await connected(make_host, make_config, recorder, 600.0)
    trained = train_after(own, lambda: asyncio.sleep(0))

    async def in_turn() -> None:
        nonlocal now
        await trained.wait()
        async with queue:
            now += 590.0
            await asyncio.sleep(0)

    for policy in (second, second.made["red"]):
        train_after(policy, in_turn)
    await loop.run(2)
    assert (loop.steps_done, now) == (2, 4 * 590.0)


def test_a_driver_does_not_go_back_to_a_server_that_hangs(make_config, tmp_path: Path) -> None:
    """It would only wait behind the update. The scheduler restarts the job, with other servers."""
    (tmp_path / "checkpoints" / "step-000002@2").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-000002@2" / "manifest.json").write_text("{}")
    lives = []

    class Life:
        folder, steps_saved = tmp_path, (2,)

        def drive(self, *_: Any, **__: Any) -> None:
            lives.append(self)
            raise AgentStuckError("'white' on server 'second' held up the others in update 3 for 31 s")

    job = config(make_config, scheduling={"max_restarts": 3})
    access = {"": {"endpoint": "http://x", "token": "t", "policy": "p"}}
    with pytest.raises(AgentStuckError, match="'white' on server 'second'"):
        _drive_agents(job, load_environment(Trio), lambda *_: Life(), access, None, False, 0.0)  # type: ignore[arg-type]
    assert len(lives) == 1
