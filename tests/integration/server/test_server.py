"""The whole job server on a tiny model: client, HTTP front, worker, a real engine and a real trainer."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from server_tools import FAST, LORA, PROMPT, REWARDED, START_S, Server, datum, serving, wait_until

from opentinker.client.messages import AdamParams, LossConfig, Minibatch, SamplingParams
from opentinker.client.policy import PolicyClient
from opentinker.config.server import LoraConfig
from opentinker.errors import (
    ConflictError,
    EngineError,
    InvalidRequestError,
    NotFoundError,
    ServerLostError,
    TrainerError,
    VersionNotServedError,
)
from opentinker.server.execute import _COMMANDS
from opentinker.server.protocol import COMMANDS
from opentinker.server.state import Parts
from opentinker.server.worker import Worker


@pytest.mark.parametrize(
    ("kind", "lora", "lora_serving", "layout"),
    [
        ("transformers", None, "merge", "colocated"),
        ("transformers", LORA, "merge", "colocated"),
        ("transformers", None, "merge", "split"),
        ("vllm", None, "merge", "colocated"),
        ("vllm", LORA, "merge", "colocated"),
        ("vllm", LORA, "adapter", "colocated"),
        ("vllm", None, "merge", "split"),
        ("vllm", LORA, "adapter", "split"),
    ],
)
async def test_training_raises_the_logprob_of_rewarded_tokens_and_the_engine_follows(
    tiny_model_dir: Path, tmp_path: Path, kind: str, lora: LoraConfig | None, lora_serving: str, layout: str
) -> None:
    async with serving(tiny_model_dir, tmp_path, kind=kind, lora=lora, lora_serving=lora_serving, layout=layout) as server:
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
            assert result["memory_bytes"] > 50_000_000
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
        # Two data are computed together here and one there: kernels may add in another order.
        now = await server.logprobs()
        np.testing.assert_allclose(scores["reference_logprobs"][0][-len(REWARDED) :], before, atol=1e-4)
        np.testing.assert_allclose(scores["logprobs"][0][-len(REWARDED) :], now, atol=1e-4)
        assert np.abs(np.subtract(now, before)).max() > 1e-2
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


async def test_a_minibatch_that_fails_after_others_were_applied_says_so(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, calls = server.parts.trainer, []
    step = trainer.optim_step

    def second_fails(policy: str, params: AdamParams, **_: object) -> dict[str, float]:
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
