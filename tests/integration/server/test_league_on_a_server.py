"""Past versions and a checkpoint as opponents on one real server: the weights that play are those that were saved, and stay."""

import asyncio
import shutil
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agents_tools import LORA, agents_server, job_of
from server_tools import FAST, PROMPT, REWARDED, Server, datum

from opentinker.client.messages import FloatArray, LossConfig, Minibatch, SamplingParams
from opentinker.client.policy import PolicyClient
from opentinker.config.server import LoraConfig
from opentinker.env.environment import Action
from opentinker.env.load import load_environment
from opentinker.errors import CheckpointError, ConfigError, ConflictError, InvalidRequestError
from opentinker.multiagent.environment import MultiAgentEnvironment, MultiStepResult
from opentinker.multiagent.protocol import RoundRobin
from opentinker.training.agents import AgentsLoop
from opentinker.training.recorder import Recorder

CONTEXT = 128
ELSEWHERE = "ann/job-1/final@3"


class Longest(MultiAgentEnvironment):
    """Three say something; the more letters the better."""

    agents = ("black", "white", "red")
    protocol = RoundRobin()

    def reset(self, task: Any) -> dict[str, str]:
        return {name: f"{name}, talk." for name in self.agents}

    def step(self, agent: str, action: Action) -> MultiStepResult:
        return MultiStepResult({agent: float(len(action.text))}, done=agent == "red")


def played(model_dir: Path, root: Path, **options: Any) -> AbstractAsyncContextManager[Server]:
    return agents_server(model_dir, root, max_adapters=4, max_model_len=CONTEXT, **options)


async def logprobs(policy: PolicyClient) -> FloatArray:
    """The engine's, of fixed tokens."""
    result = await policy.sample(PROMPT + REWARDED, SamplingParams(max_tokens=1), prompt_logprobs=True)
    assert result.prompt_logprobs is not None
    return result.prompt_logprobs[1:]


async def train(policy: PolicyClient, steps: int = 3) -> None:
    loss = LossConfig(name="importance_sampling")
    for _ in range(steps):
        await policy.train_step([datum()], [Minibatch(indices=(0,), factor=1.0)], loss, FAST)


@pytest.fixture(scope="module")
def saved(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, FloatArray]:
    """(the folder of another job's checkpoint, what its policy says)."""

    async def other_job() -> tuple[str, FloatArray]:
        async with played(tiny_model_dir, tmp_path_factory.mktemp("other")) as other:
            await train(other.client)
            return str((await other.client.save("final"))["path"]), await logprobs(other.client)

    return asyncio.run(other_job())


async def test_past_versions_and_a_checkpoint_play_with_the_weights_that_were_saved(
    tiny_model_dir: Path, tmp_path: Path, saved: tuple[str, FloatArray]
) -> None:
    folder, theirs = saved
    async with played(tiny_model_dir, tmp_path / "checkpoints", starts={ELSEWHERE: folder}) as server:
        first = await logprobs(server.client)
        agents = {
            "black": {},
            "white": {"pool": {"of": "black", "every": 1, "strategy": "latest", "slots": 1}},
            "red": {"checkpoint": "job-1/final"},
        }
        rollout = {"groups_per_step": 4, "max_turns": 1}
        config = job_of(agents, {"steps": 3}, engine={"max_model_len": CONTEXT}, rollout=rollout)
        recorder = Recorder(tmp_path / "run", config.model_dump(mode="json"))
        loop = await AgentsLoop.connect(config, load_environment(Longest), server.client, recorder)
        red = loop._policies["red"]
        assert np.array_equal(await logprobs(red), theirs)  # type: ignore[arg-type]
        await loop.run(2)
        after = await logprobs(server.client)
        await loop.step()
        await loop.close()
        rows = [row for row in recorder.rows if row["kind"] == "agents_step"]
        assert [list(row["agents"]) for row in rows] == [["black"]] * 3
        assert [row["pools"]["white"]["drawn"] for row in rows] == [{"0": 16}, {"1": 16}, {"2": 16}]
        assert np.array_equal(await logprobs(red), theirs), "a checkpoint that plays never changes"  # type: ignore[arg-type]
        slot = loop._opponents.pools["white"]._slots[0]
        assert isinstance(slot, PolicyClient)
        assert np.array_equal(await logprobs(slot), after), "the member is the policy as it was when it entered"
        assert not np.array_equal(await logprobs(server.client), after)
        oldest = loop._opponents.pools["white"].pool.members[0]
        await slot.load_weights(oldest.checkpoint, policy="p")
        assert np.array_equal(await logprobs(slot), first)


async def test_weights_are_taken_from_what_is_there_and_fits_and_from_nothing_else(
    tiny_model_dir: Path, tmp_path: Path, saved: tuple[str, FloatArray]
) -> None:
    theirs, folder = saved[1], str(shutil.copytree(saved[0], tmp_path / "theirs"))
    async with played(tiny_model_dir, tmp_path / "checkpoints", starts={ELSEWHERE: folder}) as server:
        policy = server.client
        await train(policy, 1)
        await policy.save("mine")
        state = await policy.state()
        taken = await policy.load_weights("job-1/final@3")
        assert taken["version"] == state["version"] + 1
        assert np.array_equal(await logprobs(policy), theirs)
        other = await policy.create_policy(LORA, name="other")
        await other.load_weights("mine", policy="p")
        mine = await logprobs(other)
        for name, source, error, says in (
            ("absent", "p", CheckpointError, "there is no checkpoint 'absent'"),
            ("mine", "", CheckpointError, "there is no checkpoint 'mine' of this policy"),
            ("mine", "../..", InvalidRequestError, "is not the name of a policy"),
            ("../mine", "", ConfigError, "is not a checkpoint's address"),
            ("job-2/final", "", InvalidRequestError, "job-2/final is not among those that this job names"),
            ("job-1/final@4", "", InvalidRequestError, "not among those"),
        ):
            with pytest.raises(error, match=says):
                await other.load_weights(name, policy=source)
        with pytest.raises(InvalidRequestError, match="unknown argument 'folder'"):
            await other.command("load_weights", {"folder": folder})
        narrow = await policy.create_policy(LoraConfig(rank=2), name="narrow")
        with pytest.raises(CheckpointError, match="does not fit: its lora is"):
            await narrow.load_weights("mine", policy="p")
        _break(Path(folder, "optimizer.safetensors"))
        with pytest.raises(CheckpointError, match="is corrupt"):
            await other.load_weights("job-1/final@3")
        assert np.array_equal(await logprobs(other), mine), "what failed changed nothing"
        await other.create_policy(LORA, name="last")
        with pytest.raises(ConflictError, match="has room for 4"):
            await other.create_policy(LORA, name="one-too-many")


def _break(file: Path) -> None:
    file.write_bytes(b"broken")
