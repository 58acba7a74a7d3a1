"""The whole job server on a tiny model: client, HTTP front, worker, a real engine and a real trainer."""

import asyncio
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from opentinker.checkpoints import checkpoints
from opentinker.client.messages import AdamParams, Datum, FloatArray, LossConfig, Minibatch, SamplingParams, TokenChunk
from opentinker.client.policy import PolicyClient
from opentinker.config.job import EngineConfig, LoraConfig, ServerConfig, TrainerConfig
from opentinker.errors import (
    CheckpointError,
    ConflictError,
    DeadlineError,
    EngineError,
    InvalidRequestError,
    NotFoundError,
    ServerLostError,
    TrainerError,
    VersionNotServedError,
    WeightSyncError,
    from_problem,
)
from opentinker.server import state
from opentinker.server.engine.base import NamedTensors, RolloutEngine, WeightAck
from opentinker.server.execute import _COMMANDS
from opentinker.server.front import create_app
from opentinker.server.listener import Listener
from opentinker.server.loading import load_parts, server_info
from opentinker.server.protocol import COMMANDS, CommandWork
from opentinker.server.state import Parts
from opentinker.server.worker import InProcessWorker, Worker
from opentinker.storage import Storage

PROMPT = [5, 6, 7, 8]
REWARDED = [11, 12, 13, 14]
LORA = LoraConfig(rank=8)
FAST = AdamParams(learning_rate=3e-3)
START_S = 120.0


@dataclass
class Server:
    client: PolicyClient
    worker: Worker
    parts: Parts
    endpoint: str

    async def logprobs(self) -> FloatArray:
        """The trainer's logprobs of the rewarded tokens."""
        return (await self.client.forward([datum()]))["logprobs"][0][-len(REWARDED) :]

    async def engine_logprobs(self) -> FloatArray:
        """The engine's."""
        result = await self.client.sample(PROMPT + REWARDED, SamplingParams(max_tokens=1), prompt_logprobs=True)
        assert result.prompt_logprobs is not None
        return result.prompt_logprobs[-len(REWARDED) :]


def datum(advantage: float = 1.0) -> Datum:
    tokens = np.asarray(PROMPT + REWARDED, np.int32)
    weights = np.asarray([0.0] * (len(PROMPT) - 1) + [1.0] * len(REWARDED), np.float32)
    behaviour = np.full(len(weights), -6.0, np.float32) * weights
    arrays = {"weights": weights, "advantages": advantage * weights, "behaviour_logprobs": behaviour}
    return Datum((TokenChunk(tokens[:-1]),), tokens[1:], arrays)


def wait_until(condition: Callable[[], Any], timeout_s: float = 30.0) -> None:
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.005)


@asynccontextmanager
async def serving(
    model_dir: Path,
    root: Path,
    *,
    kind: str = "transformers",
    lora: LoraConfig | None = None,
    lora_serving: str = "merge",
    create: bool = True,
    trains: bool = True,
    checkpoint: str | None = None,
    change: Callable[[Parts], Parts] = lambda parts: parts,
) -> AsyncIterator[Server]:
    config = ServerConfig(
        base_model=str(model_dir),
        engine=EngineConfig.model_validate(
            {"kind": kind, "max_model_len": 256, "max_num_seqs": 16, "cache_gib": 0.1, "lora_serving": lora_serving}
        ),
        dtype="float32",
        trainer=TrainerConfig(dtype="float32") if trains else None,
    )
    worker = Worker(lambda: change(load_parts(model_dir, config, lora, root)))
    parts = await asyncio.to_thread(worker.start, START_S)
    app = create_app(InProcessWorker(worker), {"p": "secret"}, server_info(model_dir, config, parts))
    listener = Listener(app, "127.0.0.1")
    endpoint = await listener.start()
    client = PolicyClient(endpoint, "secret", "p")
    try:
        if create:
            spec = {"lora": None if lora is None else lora.model_dump(), "checkpoint": checkpoint}
            created = app.state.front.dispatcher.command("p", 0, b"", "create", spec)  # as the scheduler does
            await created.wait(START_S)
            if created.problem is not None:
                raise from_problem(created.problem)
        yield Server(client, worker, parts, endpoint)
    finally:
        await client.close()
        await listener.stop()
        await asyncio.to_thread(worker.stop)


@pytest.fixture
async def server(tiny_model_dir: Path, tmp_path: Path) -> AsyncIterator[Server]:
    async with serving(tiny_model_dir, tmp_path) as server:
        yield server


@pytest.mark.parametrize(
    ("kind", "lora", "lora_serving"),
    [
        ("transformers", None, "merge"),
        ("transformers", LORA, "merge"),
        ("vllm", None, "merge"),
        ("vllm", LORA, "merge"),
        ("vllm", LORA, "adapter"),
    ],
)
async def test_training_raises_the_logprob_of_rewarded_tokens_and_the_engine_follows(
    tiny_model_dir: Path, tmp_path: Path, kind: str, lora: LoraConfig | None, lora_serving: str
) -> None:
    async with serving(tiny_model_dir, tmp_path, kind=kind, lora=lora, lora_serving=lora_serving) as server:
        before = await server.logprobs()
        np.testing.assert_allclose(await server.engine_logprobs(), before, atol=0.02)
        for step in range(4):
            result = await server.client.train_step(
                [datum(), datum()], [Minibatch(indices=(0, 1), factor=0.5)], LossConfig(name="importance_sampling"), FAST
            )
            assert result["version"] == step + 1
            assert result["minibatches"][0]["grad_norm"] > 0
            assert result["publish"]["changed"]
            assert result["publish"]["drift"] < 0.02
            assert result["publish"]["parameters"] > 10
        after = await server.logprobs()
        assert after.sum() > before.sum() + 0.5
        np.testing.assert_allclose(await server.engine_logprobs(), after, atol=0.02)
        sample = (await server.client.sample(PROMPT, SamplingParams(max_tokens=4))).samples[0]
        assert sample.versions == ((4, len(sample.tokens)),)
        assert (await server.client.state())["version"] == 4


async def test_everything_works_in_json_by_plain_http(server: Server) -> None:
    async with httpx.AsyncClient(base_url=server.endpoint, headers={"Authorization": "Bearer secret"}, timeout=60) as http:
        info = (await http.get("/v1/info")).json()
        assert info["vocab_size"] == 512
        assert info["stop_token_ids"]
        assert "tokenizer.json" in (await http.get("/v1/tokenizer")).json()["files"]
        sampled = await http.post(
            "/v1/policies/p/sample?wait_s=30", json={"request_id": "r", "prompt": PROMPT, "params": {"max_tokens": 3}, "n": 2}
        )
        result = sampled.json()["result"]
        assert len(result["samples"]) == 2
        assert result["params"]["max_tokens"] == 3
        tokens = PROMPT + REWARDED
        body = {
            "chunks": tokens[:-1],
            "targets": tokens[1:],
            "weights": [0, 0, 0, 1, 1, 1, 1],
        }
        args = {
            "data": [body],
            "minibatches": [{"indices": [0]}],
            "loss": {"name": "cross_entropy"},
            "optimizer": {"learning_rate": 1e-3},
            "publish": True,
        }
        trained = await http.post("/v1/policies/p/commands?wait_s=30", json={"seq": 1, "command": "train_step", "args": args})
        assert trained.status_code == 200
        assert trained.json()["result"]["version"] == 1


async def test_a_retried_optim_step_is_applied_once(server: Server) -> None:
    client = server.client
    await client.forward_backward([datum()], LossConfig(name="importance_sampling"))
    before = await server.logprobs()
    seq = (await client.state())["next_seq"]
    async with httpx.AsyncClient(base_url=server.endpoint, headers={"Authorization": "Bearer secret"}, timeout=60) as http:
        body = {"seq": seq, "command": "optim_step", "args": {"learning_rate": 0.01}}
        first = (await http.post("/v1/policies/p/commands?wait_s=30", json=body)).json()
        fresh = PolicyClient(server.endpoint, "secret", "p")
        once = (await fresh.forward([datum()]))["logprobs"][0]
        again = (await http.post("/v1/policies/p/commands?wait_s=30", json=body)).json()
        twice = (await fresh.forward([datum()]))["logprobs"][0]
        await fresh.close()
    assert first == again
    assert first["result"]["grad_norm"] > 0
    np.testing.assert_array_equal(once, twice)
    assert not np.array_equal(once[-len(REWARDED) :], before)


async def test_a_retried_sample_is_sampled_once(server: Server) -> None:
    params = SamplingParams(max_tokens=20)
    first, again, other = [
        (await server.client.sample(PROMPT, params, request_id=request_id)).samples[0].tokens.tolist()
        for request_id in ("a", "a", "b")
    ]
    assert first == again
    assert first != other  # 20 tokens at temperature 1 do not repeat by chance
    with pytest.raises(ConflictError):
        await server.client.sample([9], params, request_id="a")


async def test_a_sample_may_be_held_to_the_live_version_and_a_retry_still_gets_its_first_answer(server: Server) -> None:
    client, params = server.client, SamplingParams(max_tokens=20)
    first = await client.sample(PROMPT, params, version=0, request_id="a")
    with pytest.raises(VersionNotServedError, match="version 0 is live"):
        await client.sample(PROMPT, params, version=1)
    await client.train_step([datum()], [Minibatch(indices=(0,))], LossConfig(name="ppo"), FAST)
    again = await client.sample(PROMPT, params, version=0, request_id="a")
    np.testing.assert_array_equal(again.samples[0].tokens, first.samples[0].tokens)
    with pytest.raises(VersionNotServedError, match=r"version 0 of policy 'p' is not served: version 1 is live"):
        await client.sample(PROMPT, params, version=0)
    assert [v for v, _ in (await client.sample(PROMPT, params, version=1)).samples[0].versions] == [1]


async def test_an_abort_fails_the_running_samples_of_the_old_version_only(server: Server) -> None:
    params = SamplingParams(max_tokens=200)
    asked = [None, 0, None, 0]
    running = [asyncio.create_task(server.client.sample(PROMPT, params, version=version)) for version in asked]
    await asyncio.to_thread(wait_until, lambda: len(server.worker._running) == 4)
    await server.client.publish("abort")
    for version, result in zip(asked, await asyncio.gather(*running, return_exceptions=True), strict=True):
        if version is None:
            assert not isinstance(result, BaseException)
            assert [v for v, _ in result.samples[0].versions] == [1]
        else:
            assert isinstance(result, VersionNotServedError)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
async def test_forward_computes_what_is_asked_for(tiny_model_dir: Path, tmp_path: Path, lora: LoraConfig | None) -> None:
    async with serving(tiny_model_dir, tmp_path, lora=lora) as server:
        client = server.client
        before = await server.logprobs()
        await client.train_step([datum()], [Minibatch(indices=(0,))], LossConfig(name="ppo"), FAST)
        scores = await client.forward([datum(), datum(-1.0)], compute=("reference_logprobs", "logprobs", "entropy"))
        assert set(scores) == {"logprobs", "reference_logprobs", "entropy"}
        for arrays in scores.values():
            assert [(a.shape, a.dtype) for a in arrays] == [((len(datum()),), np.float32)] * 2
            assert not arrays[0][datum().weights == 0].any()
        np.testing.assert_array_equal(scores["reference_logprobs"][0][-len(REWARDED) :], before)
        np.testing.assert_array_equal(scores["logprobs"][0][-len(REWARDED) :], await server.logprobs())
        entropies = scores["entropy"][0][-len(REWARDED) :]
        assert ((entropies > 0) & (entropies < np.log(512))).all()


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (["logprobs", "entropi"], "there is no 'entropi'.*did you mean 'entropy'"),
        (["values"], "policy p has no value head"),
        ([], "compute must be a list that is not empty"),
        ("entropy", "compute must be a list"),
        ([7], "there is no '7'"),
    ],
)
async def test_a_forward_that_asks_for_what_there_is_not_says_so(server: Server, compute: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        await server.client.command("forward", {"data": [datum().to_wire()], "compute": compute})
    assert (await server.client.command("forward", {"data": [datum().to_wire()]})).keys() == {"logprobs"}


def _bad_train_steps() -> dict[str, dict[str, Any]]:
    good = datum().to_wire()
    nan = {**good, "advantages": np.full(7, np.nan, np.float32)}
    foreign = {**good, "targets": np.full(7, 512, np.int32)}
    bare = {name: value for name, value in good.items() if name != "advantages"}
    return {
        "NaN advantages": {"data": [good, nan]},
        "a token outside the vocabulary": {"data": [good, foreign]},
        "an array the loss needs is missing": {"data": [good, bare]},
        "an index out of range": {"minibatches": [{"indices": [0]}, {"indices": [2]}]},
        "an empty minibatch": {"minibatches": [{"indices": [0]}, {"indices": []}]},
        "an infinite factor": {"minibatches": [{"indices": [0]}, {"indices": [1], "factor": float("inf")}]},
        "no data": {"data": []},
        "an unknown loss": {"loss": {"name": "pppo"}},
        "an unknown argument": {"optimiser": {}},
        "a negative learning rate": {"optimizer": {"learning_rate": -1.0}},
    }


@pytest.mark.parametrize("name", list(_bad_train_steps()))
async def test_an_invalid_train_step_trains_nothing(server: Server, name: str) -> None:
    good = {
        "data": [datum().to_wire()] * 2,
        "minibatches": [{"indices": [0]}, {"indices": [1]}],
        "loss": {"name": "ppo"},
        "optimizer": {"learning_rate": 0.1},
    }
    before = await server.logprobs()
    with pytest.raises(InvalidRequestError):
        await server.client.command("train_step", good | _bad_train_steps()[name])
    np.testing.assert_array_equal(await server.logprobs(), before)
    assert (await server.client.state())["version"] == 0
    assert (await server.client.train_step([datum()], [Minibatch(indices=(0,))], LossConfig(name="ppo"), FAST))["version"] == 1


async def test_a_minibatch_that_fails_after_others_were_applied_says_so(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, calls = server.parts.trainer, []
    step = trainer.optim_step

    def second_fails(policy: str, params: AdamParams) -> dict[str, float]:
        calls.append(params)
        if len(calls) == 2:
            raise TrainerError("the gradient is not finite")
        return step(policy, params)

    monkeypatch.setattr(trainer, "optim_step", second_fails)
    before = await server.logprobs()
    minibatches = [Minibatch(indices=(0,)), Minibatch(indices=(0,))]
    with pytest.raises(TrainerError, match=r"minibatch 1 of 2: .*not finite; those before it were applied"):
        await server.client.train_step([datum()], minibatches, LossConfig(name="ppo"), FAST)
    assert not np.array_equal(await server.logprobs(), before)
    assert (await server.client.state())["version"] == 0


async def test_a_publish_without_training_changes_nothing_and_says_so(server: Server) -> None:
    before = await server.engine_logprobs()
    result = await server.client.publish()
    assert result["version"] == 1
    assert not result["changed"]
    np.testing.assert_allclose(await server.engine_logprobs(), before, atol=1e-5)


async def test_publish_drains_or_aborts_and_resubmits(server: Server) -> None:
    for mode, version in (("drain", 0), ("abort", 2)):
        params = SamplingParams(max_tokens=200, stop_token_ids=())
        running = [asyncio.create_task(server.client.sample(PROMPT, params, request_id=f"{mode}{n}")) for n in range(4)]
        await asyncio.to_thread(wait_until, lambda: len(server.worker._running) == 4)
        await server.client.publish(mode)
        for number, result in enumerate(await asyncio.gather(*running)):
            assert result.request_id == f"{mode}{number}"
            assert [v for v, _ in result.samples[0].versions] == [version]
    with pytest.raises(InvalidRequestError, match="continue"):
        await server.client.publish("continue")


async def test_save_and_load_restore_the_policy_and_publish_it(server: Server) -> None:
    client = server.client
    saved = await client.save("first")
    assert saved["path"].endswith("/first@0")
    assert (saved["name"], saved["version"]) == ("first", 0)
    assert saved["manifest"]["files"]
    before = await server.logprobs()
    await client.train_step([datum()], [Minibatch(indices=(0,))], LossConfig(name="ppo"), FAST)
    assert not np.array_equal(await server.logprobs(), before)
    trained = await server.logprobs()
    assert (await client.save("first"))["version"] == 1
    assert (await client.load("first@0"))["version"] == 2
    np.testing.assert_array_equal(await server.logprobs(), before)
    np.testing.assert_allclose(await server.engine_logprobs(), before, atol=0.01)
    await client.load("first")  # the one saved last
    np.testing.assert_array_equal(await server.logprobs(), trained)
    with pytest.raises(CheckpointError, match="no checkpoint 'first@7'") as error:
        await client.load("first@7")
    assert "first@1, first@0" in error.value.hint


async def test_a_save_is_copied_to_the_storage_and_loaded_from_there_when_this_node_has_it_not(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    remote, root = tmp_path / "remote", tmp_path / "runs"
    storage = Storage(f"file://{remote}", root)

    def stored(parts: Parts) -> Parts:
        return replace(parts, storage=storage)

    async with serving(tiny_model_dir, root / "ann/job-1/checkpoints", change=stored) as server:
        saved, before = await server.client.save("first"), await server.logprobs()
        assert [c.name for c in storage.checkpoints(root / "ann/job-1/checkpoints")] == ["first"]
        await server.client.train_step([datum()], [Minibatch(indices=(0,))], LossConfig(name="ppo"), FAST)
        shutil.rmtree(saved["path"])
        await server.client.load("first")
        np.testing.assert_array_equal(await server.logprobs(), before)
        shutil.rmtree(remote)
        remote.touch()  # the storage is away
        with pytest.raises(CheckpointError, match="is whole on this node, but was not copied") as error:
            await server.client.save("second")
        assert "save it again" in error.value.hint
        await server.client.load("second")
        remote.unlink()
        await server.client.save("second")
        assert [c.name for c in storage.checkpoints(root / "ann/job-1/checkpoints")] == ["second"]


@pytest.mark.parametrize(
    ("kind", "lora", "lora_serving"),
    [("transformers", None, "merge"), ("transformers", LORA, "merge"), ("vllm", LORA, "adapter")],
)
async def test_a_policy_starts_from_a_checkpoints_weights_as_version_0_with_a_new_optimizer(
    tiny_model_dir: Path, tmp_path: Path, kind: str, lora: LoraConfig | None, lora_serving: str
) -> None:
    async with serving(tiny_model_dir, tmp_path / "a", lora=lora) as server:
        for _ in range(2):
            await server.client.train_step([datum()], [Minibatch(indices=(0,))], LossConfig(name="ppo"), FAST)
        saved, trained = await server.client.save("final"), await server.logprobs()
    started = serving(tiny_model_dir, tmp_path / "b", kind=kind, lora=lora, lora_serving=lora_serving, create=False)
    async with started as server:
        spec = {"lora": None if lora is None else lora.model_dump(), "checkpoint": saved["path"]}
        with pytest.raises(InvalidRequestError, match="start checkpoint cannot be named here"):
            await server.client.command("create", spec)
        server.worker.submit([CommandWork("p:c:create", "p", "create", spec)])  # as the scheduler does
        await asyncio.to_thread(wait_until, lambda: server.worker._state.policies)
        assert server.worker._state.policies["p"].version == 0
        np.testing.assert_array_equal(await server.logprobs(), trained)
        np.testing.assert_allclose(await server.engine_logprobs(), trained, atol=0.01)
        await server.client.train_step([datum()], [Minibatch(indices=(0,))], LossConfig(name="ppo"), FAST)
        assert (await server.client.save("first"))["version"] == 1
        assert [c.step for c in checkpoints(tmp_path / "b")] == [1]


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "x" * 101, 7])
async def test_a_checkpoint_name_is_one_safe_path_component(server: Server, name: Any) -> None:
    with pytest.raises(InvalidRequestError, match="not a checkpoint name"):
        await server.client.command("save", {"name": name})


async def test_policies_begin_and_end(tiny_model_dir: Path, tmp_path: Path) -> None:
    async with serving(tiny_model_dir, tmp_path, create=False) as server:
        with pytest.raises(NotFoundError):
            await server.client.sample(PROMPT, SamplingParams(max_tokens=1))
        with pytest.raises(NotFoundError):
            await server.client.publish()
        await server.client.command("create", {})
        with pytest.raises(ConflictError):
            await server.client.command("create", {})
        await server.client.sample(PROMPT, SamplingParams(max_tokens=1))
        await server.client.command("delete", {})
        with pytest.raises(NotFoundError):
            await server.client.sample(PROMPT, SamplingParams(max_tokens=1))


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
        patch.setattr(engine, "add", lambda _: 1 / 0)
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
        patch.setattr(server.parts.trainer, "optim_step", lambda *_: 1 / 0)
        with pytest.raises(TrainerError, match="division by zero"):
            await server.client.optim_step(FAST)
    await server.client.publish()


async def test_a_worker_that_cannot_be_built_says_why() -> None:
    def build() -> Parts:
        raise EngineError("no memory")

    with pytest.raises(EngineError, match="no memory"):
        await asyncio.to_thread(Worker(build).start, START_S)


def test_every_command_that_the_front_admits_can_be_executed() -> None:
    assert set(_COMMANDS) == COMMANDS


async def test_a_prompt_that_does_not_fit_is_an_error_of_its_request_only(server: Server) -> None:
    with pytest.raises(InvalidRequestError):
        await server.client.sample([5] * 300, SamplingParams(max_tokens=4))
    await server.client.sample(PROMPT, SamplingParams(max_tokens=1))


async def test_health_is_answered_while_the_worker_computes(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(server.parts.trainer, "forward", lambda *_, **__: {"logprobs": release.wait(30) and []})
    busy = asyncio.create_task(server.client.forward([datum()]))
    async with httpx.AsyncClient(base_url=server.endpoint) as http:
        started = time.monotonic()
        assert (await http.get("/health")).json() == {"status": "ok"}
        assert time.monotonic() - started < 5
    release.set()
    await busy


async def test_losing_the_worker_is_a_typed_error_for_what_runs_and_what_comes(server: Server) -> None:
    running = asyncio.create_task(server.client.sample(PROMPT, SamplingParams(max_tokens=250)))
    await asyncio.to_thread(wait_until, lambda: server.worker._running)
    await asyncio.to_thread(server.worker.stop)
    with pytest.raises(ServerLostError):
        await running
    with pytest.raises(ServerLostError):
        await server.client.publish()
