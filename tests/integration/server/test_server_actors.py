"""The server's two processes as Ray actors, as the scheduler launches them."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from opentinker.client.messages import SamplingParams
from opentinker.client.policy import PolicyClient
from opentinker.errors import ServerLostError, UnavailableError, UnknownModelError
from opentinker.server.actors import FrontProcess, WorkerProcess

ENGINE = {"kind": "transformers", "max_model_len": 256, "max_num_seqs": 16}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def worker_actor(base_model: str, checkpoints: Path) -> Any:
    config = {"base_model": base_model, "engine": ENGINE, "trainer": {"dtype": "float32"}}
    return ray.remote(WorkerProcess).options(max_concurrency=16).remote(config, None, str(checkpoints))


async def test_the_actors_serve_a_policy_and_the_death_of_the_worker_is_a_typed_error(
    cluster: None, tiny_model_dir: Path, tmp_path: Path
) -> None:
    worker = worker_actor(str(tiny_model_dir), tmp_path)
    front = ray.remote(FrontProcess).remote(worker, {"p": "secret"}, "127.0.0.1")
    address = await front.start.remote()
    client = PolicyClient(address["endpoint"], "secret", "p")
    with pytest.raises(UnavailableError, match="starting"):
        await client.info()
    info = await worker.start.remote()
    assert info["pid"] == (await worker.describe.remote())["pid"] != address["pid"]
    await front.attach.remote(info)
    assert (await client.info())["vocab_size"] == 512
    assert await front.create_policy.remote("p", {"seed": 1}) == {"policy": "p", "version": 0}
    assert await client.state() == {"policy": "p", "version": 0, "next_seq": 1}

    results = await asyncio.gather(*(client.sample([5, 6], SamplingParams(max_tokens=4)) for _ in range(20)))
    assert len(results) == 20
    assert (await client.publish())["version"] == 1
    assert await front.health.remote() == {"ok": True, "cause": ""}

    running = asyncio.create_task(client.sample([5, 6], SamplingParams(max_tokens=250), n=16))
    await asyncio.sleep(0.2)
    os.kill(info["pid"], signal.SIGKILL)
    with pytest.raises(ServerLostError, match="died"):
        await running
    with pytest.raises(ServerLostError):
        await client.publish()
    health = await front.health.remote()
    assert not health["ok"]
    assert "died" in health["cause"]

    await client.close()
    await front.stop.remote()
    assert not (await front.health.remote())["ok"]
    ray.kill(front)


async def test_a_worker_stops_and_an_unknown_model_is_a_typed_error(
    cluster: None, tiny_model_dir: Path, tmp_path: Path
) -> None:
    worker = worker_actor("nosuch-model", tmp_path)
    with pytest.raises(UnknownModelError, match="nosuch-model"):
        await worker.start.remote()
    ray.kill(worker)
    worker = worker_actor(str(tiny_model_dir), tmp_path)
    await worker.start.remote()
    await worker.stop.remote()
    with pytest.raises(ServerLostError):
        await worker.submit.remote([])
    ray.kill(worker)
