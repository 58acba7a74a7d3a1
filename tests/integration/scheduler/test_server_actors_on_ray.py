"""The server's two processes as Ray actors, as the scheduler launches them."""

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from opentinker.client.messages import AdamParams, SamplingParams
from opentinker.client.policy import PolicyClient
from opentinker.errors import DeadlineError, ServerLostError, TrainerError, UnavailableError, UnknownModelError
from opentinker.server.actors import FrontProcess, WorkerProcess
from opentinker.storage import Storage

ENGINE = {"kind": "transformers", "max_model_len": 256, "max_num_seqs": 16}
START_S = 120.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def worker_actor(base_model: str, checkpoints: Path, **storage: Any) -> Any:
    config = {"base_model": base_model, "engine": ENGINE, "dtype": "float32", "trainer": {"dtype": "float32"}}
    log = str(checkpoints / "server.log")
    return ray.remote(WorkerProcess).options(max_concurrency=16).remote(config, None, str(checkpoints), "job-1", log, **storage)


def written(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(name)
    return folder


async def test_the_actors_serve_a_policy_and_the_death_of_the_worker_is_a_typed_error(
    cluster: None, tiny_model_dir: Path, tmp_path: Path
) -> None:
    worker = worker_actor(str(tiny_model_dir), tmp_path)
    front = ray.remote(FrontProcess).remote(worker, {"p": "secret"}, "127.0.0.1", "job-1", str(tmp_path / "server.log"))
    address = await front.start.remote()
    client = PolicyClient(address["endpoint"], "secret", "p")
    with pytest.raises(UnavailableError, match="starting"):
        await client.info()
    info = await worker.start.remote(START_S)
    assert info["pid"] == (await worker.describe.remote())["pid"] != address["pid"]
    await front.attach.remote(info)
    assert (await client.info())["vocab_size"] == 512
    assert await front.create_policy.remote("p", {"seed": 1}, START_S) == {"policy": "p", "version": 0}
    assert await client.state() == {"policy": "p", "version": 0, "next_seq": 1}

    results = await asyncio.gather(*(client.sample([5, 6], SamplingParams(max_tokens=4)) for _ in range(20)))
    assert len(results) == 20
    assert (await client.publish())["version"] == 1
    health = await front.health.remote()
    assert (health["ok"], health["cause"], health["pid"]) == (True, "", address["pid"])
    assert health["idle_s"] < 120.0

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
    log = (tmp_path / "server.log").read_text()
    assert "job=job-1 process=front logger=opentinker.server.dispatch server lost cause=" in log

    await client.close()
    await front.stop.remote()
    assert not (await front.health.remote())["ok"]
    ray.kill(front)


async def test_a_worker_stops_and_an_unknown_model_is_a_typed_error(
    cluster: None, tiny_model_dir: Path, tmp_path: Path
) -> None:
    worker = worker_actor("nosuch-model", tmp_path)
    with pytest.raises(UnknownModelError, match="nosuch-model"):
        await worker.start.remote(START_S)
    ray.kill(worker)
    run_dir, remote = tmp_path / "runs/ann/job-1", Storage(f"file://{tmp_path}/remote", tmp_path / "runs")
    remote.put_folder(written(run_dir / "code", "env.py"))
    shutil.rmtree(run_dir)
    worker = worker_actor(str(tiny_model_dir), run_dir, storage={"url": remote.url, "root": str(remote.root)})
    await worker.start.remote(START_S)
    assert written(run_dir, "metrics.jsonl")
    await worker.stop.remote()
    assert (run_dir / "code/env.py").read_text() == "env.py"
    assert remote.read(run_dir / "metrics.jsonl") == b"metrics.jsonl"
    assert remote.read(run_dir / "server.log") is not None
    with pytest.raises(ServerLostError):
        await worker.submit.remote([])
    ray.kill(worker)


async def test_the_servers_log_has_what_its_error_points_to(cluster: None, tiny_model_dir: Path, tmp_path: Path) -> None:
    worker = worker_actor(str(tiny_model_dir), tmp_path)
    front = ray.remote(FrontProcess).remote(worker, {"p": "secret"}, "127.0.0.1", "job-1", str(tmp_path / "server.log"))
    address = await front.start.remote()
    await front.attach.remote(await worker.start.remote(START_S))
    await front.create_policy.remote("p", {"seed": 1}, START_S)
    client = PolicyClient(address["endpoint"], "secret", "p")
    await worker.__ray_call__.remote(_break_the_trainer)
    with pytest.raises(TrainerError, match="division by zero") as caught:
        await client.optim_step(AdamParams())
    assert "logs JOB --server" in caught.value.hint
    log = (tmp_path / "server.log").read_text()
    assert "level=ERROR job=job-1 process=worker logger=opentinker.server.compute_thread optim_step failed\nTraceback" in log
    assert "ZeroDivisionError: division by zero" in log
    await client.close()
    ray.kill(front)
    ray.kill(worker)


async def test_a_load_takes_as_long_as_it_is_told_and_no_longer(cluster: None, tiny_model_dir: Path, tmp_path: Path) -> None:
    worker = worker_actor(str(tiny_model_dir), tmp_path)
    with pytest.raises(DeadlineError, match=r"did not load within 0\.01 s"):
        await worker.start.remote(0.01)
    ray.kill(worker)


def _break_the_trainer(process: WorkerProcess) -> None:
    process._worker._state.parts.trainer.optim_step = lambda *_, **__: 1 / 0  # type: ignore[method-assign]
