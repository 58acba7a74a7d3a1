"""A job in the split layout on a real cluster: trainer and engine are processes of their own; when the engine is killed,
whatever it does, the job ends with that cause and nothing of it stays."""

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray

import opentinker as ot
from opentinker.client.messages import AdamParams, LossConfig, Minibatch, SamplingParams
from opentinker.errors import ServerLostError, UnavailableError

WAIT_S = 60.0
SLOTS = 2


def datum() -> Any:
    import numpy as np

    from opentinker.client.messages import Datum, TokenChunk

    tokens, weights = np.arange(5, 13, dtype=np.int32), np.ones(7, np.float32)
    return Datum((TokenChunk(tokens[:-1]),), tokens[1:], {"weights": weights})


@pytest.fixture(scope="module")
def split_cluster(run_marker: str) -> Iterator[Any]:
    from opentinker.scheduler.cluster import EmbeddedCluster

    with tempfile.TemporaryDirectory() as folder:
        path, settings = Path(folder), {"probe_s": 0.2, "reconcile_s": 0.2}
        with EmbeddedCluster.start(
            path / "state", path / "runs", port=0, cpu_slots=SLOTS, gpus=0, settings=settings
        ) as running:
            yield running


@contextmanager
def split_job(cluster: Any, model: Path) -> Iterator[ot.Job]:
    with (
        ot.Client(cluster.url, cluster.key_path.read_text().strip()) as client,
        client.create_job(
            base_model=str(model),
            engine=ot.EngineConfig(kind="transformers", max_model_len=256),
            trainer=ot.TrainerConfig(dtype="float32"),
            resources=ot.Resources(layout="split"),
        ) as job,
    ):
        yield job


def engine_pid(job_id: str) -> int:
    """The process of the only split server's engine."""
    from opentinker.scheduler.processes import processes_of
    from opentinker.scheduler.ray_tools import NAMESPACE

    names = [entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True) if entry["name"].endswith(".engine")]
    (name,) = names
    pid = int(ray.get(ray.get_actor(name, namespace=NAMESPACE).describe.remote())["pid"])
    assert pid in {process.pid for process in processes_of(job_id)}
    return pid


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def train(job: ot.Job) -> None:
    """Two steps, after which the engine samples from what was learnt."""
    before = job.run(lambda policy: policy.forward([datum()]))["logprobs"][0].sum()
    for version in (1, 2):
        trained = job.run(
            lambda policy: policy.train_step(
                [datum()], [Minibatch(indices=(0,))], LossConfig(name="cross_entropy"), AdamParams(learning_rate=3e-3)
            )
        )
        assert trained["version"] == version
        assert trained["publish"]["changed"]
    assert job.run(lambda policy: policy.forward([datum()]))["logprobs"][0].sum() > before
    sampled = job.run(lambda policy: policy.sample([5, 6, 7], SamplingParams(max_tokens=4)))
    assert sampled.samples[0].versions[0][0] == 2
    assert job.record["server"]["cpu_slots"] == SLOTS


def test_a_split_job_trains_and_a_killed_engine_ends_it_with_that_cause_and_leaves_nothing(
    split_cluster: Any, tiny_model_dir: Path
) -> None:
    from opentinker.scheduler.processes import processes_of

    with split_job(split_cluster, tiny_model_dir) as job:
        pid = engine_pid(job.id)
        train(job)

        async def lose(policy: Any) -> None:
            """Sample and publish, and kill the engine amid both."""
            os.kill(pid, signal.SIGSTOP)  # so that it is surely done with neither when it dies
            sampled = asyncio.create_task(policy.sample([5, 6, 7], SamplingParams(max_tokens=200)))
            await asyncio.sleep(0.2)
            published = asyncio.create_task(policy.publish(mode="abort"))
            await asyncio.sleep(0.5)
            assert not sampled.done()
            assert not published.done()
            os.kill(pid, signal.SIGKILL)
            async with asyncio.timeout(WAIT_S):
                both = await asyncio.gather(sampled, published, return_exceptions=True)
            # The front may be gone, too, before it was asked for the answers: the job then says what it was.
            assert all(isinstance(error, ServerLostError | UnavailableError) for error in both), both
            raise next(error for error in both if isinstance(error, Exception))

        with pytest.raises(ServerLostError, match=rf"engine process \(pid {pid}\) died"):
            job.run(lose)
        until(lambda: job.state == "FAILED", "the job has failed")
        assert job.record["cause"] == f"the server's engine process (pid {pid}) died (killed, out of memory, or crashed)"
    until(lambda: processes_of(job.id) == [], "its processes are gone")
