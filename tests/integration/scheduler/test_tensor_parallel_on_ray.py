"""A colocated job whose engine has several parts and whose trainer several ranks, on a real cluster: it trains and samples, and
when a part is killed the job ends with that cause and nothing of it stays."""

import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import opentinker as ot
from opentinker.client.messages import AdamParams, Datum, LossConfig, Minibatch, SamplingParams, TokenChunk
from opentinker.errors import ServerLostError

WAIT_S = 60.0
SLOTS = 2
TOKENS = np.arange(5, 13, dtype=np.int32)


def parts_of(job_id: str) -> list[int]:
    from opentinker.scheduler.processes import processes_of

    def title(pid: int) -> str:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()

    return [process.pid for process in processes_of(job_id) if title(process.pid).startswith("VLLM::Worker")]


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_parts_and_ranks_are_one_job_and_a_killed_part_ends_it_with_that_cause(tiny_model_dir: Path, run_marker: str) -> None:
    from opentinker.scheduler.cluster import EmbeddedCluster
    from opentinker.scheduler.processes import processes_of

    datum = Datum((TokenChunk(TOKENS[:-1]),), TOKENS[1:], {"weights": np.ones(7, np.float32)})
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedCluster.start(
            Path(folder, "state"),
            Path(folder, "runs"),
            port=0,
            cpu_slots=SLOTS,
            gpus=0,
            settings={"probe_s": 0.2, "reconcile_s": 0.2},
        ) as cluster,
        ot.Client(cluster.url, cluster.key_path.read_text().strip()) as client,
        client.create_job(
            base_model=str(tiny_model_dir),
            engine=ot.EngineConfig(kind="vllm", max_model_len=256, cache_gib=0.1, tensor_parallel=2),
            trainer=ot.TrainerConfig(dtype="float32", ranks=2),
        ) as job,
    ):
        assert job.record["server"]["cpu_slots"] == SLOTS
        parts = parts_of(job.id)
        assert len(parts) == 2
        for version in (1, 2):
            trained = job.run(
                lambda policy: policy.train_step(
                    [datum] * 2, [Minibatch(indices=(0, 1))], LossConfig(name="cross_entropy"), AdamParams(learning_rate=3e-3)
                )
            )
            assert trained["version"] == version
            assert trained["publish"]["drift"] < 1e-4
        scored = job.run(lambda policy: policy.sample(TOKENS.tolist(), SamplingParams(max_tokens=1), prompt_logprobs=True))
        assert scored.samples[0].versions == ((2, 1),)
        own = job.run(lambda policy: policy.forward([datum]))["logprobs"][0]
        assert np.abs(scored.prompt_logprobs[1:] - own).mean() < 1e-4
        os.kill(parts[0], signal.SIGKILL)
        with pytest.raises(ServerLostError, match=r"rank 0 of 2 of the engine \(pid \d+\) was killed by SIGKILL"):
            job.run(lambda policy: policy.sample([5, 6, 7], SamplingParams(max_tokens=4)))
        until(lambda: job.state == "FAILED", "the job has failed")
        assert "rank 0 of 2 of the engine" in job.record["cause"]
        until(lambda: not processes_of(job.id), "its processes are gone")
