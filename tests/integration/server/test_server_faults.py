"""A job server whose parts fail: what waits fails with the cause, and the server goes on."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from server_tools import FAST, PROMPT, Server, datum, serving, wait_until

from opentinker.client.messages import LossConfig, Minibatch, SamplingParams
from opentinker.errors import DeadlineError, EngineError, TrainerError, WeightSyncError
from opentinker.server import state
from opentinker.server.engine.base import NamedTensors, RolloutEngine, WeightAck
from opentinker.server.state import Parts


class Meddling:
    """A real engine with a fault that a test switches on."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine
        self.fault = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def step(self) -> Any:
        if self.fault == "step fails":
            self.fault = ""
            raise RuntimeError("the device is on fire")
        if self.fault == "gets on with nothing":
            return []
        return self.engine.step()

    def update_weights(self, weights: NamedTensors, version: int) -> WeightAck:
        if self.fault == "a tensor is damaged on the way":
            return self.engine.update_weights(((n, t * 1.01 if "layers.1.mlp" in n else t) for n, t in weights), version)
        if self.fault == "a tensor is lost":
            ack = self.engine.update_weights(weights, version)
            return replace(ack, written=ack.written - {min(ack.written)})
        if self.fault == "the engine keeps its old weights":
            from opentinker.server.digest import tensor_digest

            digests = {name: tensor_digest(tensor) for name, tensor in weights}
            return WeightAck(digests, frozenset(digests), frozenset(digests))
        return self.engine.update_weights(weights, version)


@pytest.mark.parametrize("fault", ["a tensor is damaged on the way", "a tensor is lost", "the engine keeps its old weights"])
async def test_a_publish_that_went_wrong_is_an_error_and_nothing_is_sampled_until_one_goes_right(
    tiny_model_dir: Path, tmp_path: Path, fault: str
) -> None:
    meddling: list[Meddling] = []

    def change(parts: Parts) -> Parts:
        meddling.append(Meddling(parts.engine))
        return replace(parts, engine=meddling[0])

    async with serving(tiny_model_dir, tmp_path, change=change) as server:
        client = server.client
        meddling[0].fault = fault
        with pytest.raises(WeightSyncError):
            await client.train_step([datum()], [Minibatch(indices=(0,))], LossConfig(name="ppo"), FAST)
        assert (await client.state())["version"] == 0
        with pytest.raises(WeightSyncError):
            await client.sample(PROMPT, SamplingParams(max_tokens=1))
        meddling[0].fault = ""
        assert (await client.publish())["version"] == 2
        await client.sample(PROMPT, SamplingParams(max_tokens=1))


async def test_a_failing_engine_step_fails_the_running_requests_and_the_server_goes_on(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    meddling: list[Meddling] = []

    def change(parts: Parts) -> Parts:
        meddling.append(Meddling(parts.engine))
        return replace(parts, engine=meddling[0])

    async with serving(tiny_model_dir, tmp_path, change=change) as server:
        meddling[0].fault = "step fails"
        with pytest.raises(EngineError, match="on fire"):
            await server.client.sample(PROMPT, SamplingParams(max_tokens=4))
        assert len((await server.client.sample(PROMPT, SamplingParams(max_tokens=1))).samples) == 1


@pytest.mark.parametrize("command", ["publish", "train_step", "load", "delete"])
async def test_an_engine_that_gets_on_with_nothing_fails_what_waits_for_it(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    meddling: list[Meddling] = []

    def change(parts: Parts) -> Parts:
        meddling.append(Meddling(parts.engine))
        return replace(parts, engine=meddling[0])

    monkeypatch.setattr(state, "DRAIN_S", 0.3)
    async with serving(tiny_model_dir, tmp_path, change=change) as server:
        client = server.client
        await client.save("first")
        meddling[0].fault = "gets on with nothing"
        running = asyncio.create_task(client.sample(PROMPT, SamplingParams(max_tokens=4)))
        await asyncio.to_thread(wait_until, lambda: server.worker._running)
        arguments = {
            "train_step": {
                "data": [datum().to_wire()],
                "minibatches": [{"indices": [0]}],
                "loss": {"name": "ppo"},
                "optimizer": {"learning_rate": 1e-3},
            },
            "load": {"name": "first"},
        }
        with pytest.raises(DeadlineError, match="none of its running requests ended"):
            await client.command(command, arguments.get(command, {}))
        assert (await client.state())["version"] == 0
        meddling[0].fault = ""
        assert [v for v, _ in (await running).samples[0].versions] == [0]
        assert (await client.publish())["version"] == 1


async def test_interrupted_requests_that_the_engine_does_not_take_again_fail_with_the_cause(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, engine = server.client, server.parts.engine
    running = [asyncio.create_task(client.sample(PROMPT, SamplingParams(max_tokens=200), request_id=str(n))) for n in range(3)]
    await asyncio.to_thread(wait_until, lambda: len(server.worker._running) == 3)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "add", lambda *_: 1 / 0)
        with pytest.raises(EngineError, match="what a publish interrupted: division by zero"):
            await client.publish("abort")
    for result in await asyncio.gather(*running, return_exceptions=True):
        assert isinstance(result, EngineError)
    await client.publish()
    await client.sample(PROMPT, SamplingParams(max_tokens=1))


async def test_an_unexpected_error_in_a_command_fails_that_command_only(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(server.parts.trainer, "optim_step", lambda *_, **__: 1 / 0)
        with pytest.raises(TrainerError, match="division by zero"):
            await server.client.optim_step(FAST)
    await server.client.publish()
