"""Jobs that are driven by the user's own process."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from e2e_tools import LEASE_S, SLOTS, Cluster, opentinker, wait_until

import opentinker as ot
from opentinker.client.messages import SamplingParams

_CHILD = """
import sys
import opentinker as ot
from opentinker.config.server import TrainerConfig
from games import {environment}

with ot.Client({url!r}, {key!r}) as client:
    with client.create_job(base_model={model!r}, engine=ot.EngineConfig(kind="transformers", max_model_len=128),
                           trainer=TrainerConfig(dtype="float32")) as job:
        print(job.id, flush=True)
        ot.RLTrainer(job, environment={environment}, sampling=ot.SamplingConfig(max_tokens=6), run_dir="run").fit(steps=1000)
"""


class Echo(ot.Environment):
    @classmethod
    def held_out_tasks(cls) -> list[Any]:
        return [{"question": i} for i in range(2)]

    def reset(self, task: Any) -> str:
        return "Say something."

    def step(self, action: ot.Action) -> ot.StepResult:
        return ot.StepResult(reward=float(len(action.text)), done=True)


class Slow(Echo):
    def step(self, action: ot.Action) -> ot.StepResult:
        time.sleep(0.5)
        return super().step(action)


@pytest.fixture
def create_job(cluster: Cluster, tiny_model_dir: Path) -> Callable[..., Any]:
    def create(client: ot.Client, **changes: Any) -> ot.Job:
        arguments: dict[str, Any] = {
            "base_model": str(tiny_model_dir),
            "engine": ot.EngineConfig(kind="transformers", max_model_len=128),
            "trainer": ot.TrainerConfig(dtype="float32"),
        }
        return client.create_job(**(arguments | changes))

    return create


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., ot.RLTrainer]:
    def make(job: ot.Job, environment: type[ot.Environment]) -> ot.RLTrainer:
        return ot.RLTrainer(
            job,
            environment=environment,
            algorithm=ot.GRPO(group_size=4),
            sampling=ot.SamplingConfig(max_tokens=6),
            rollout=ot.RolloutConfig(groups_per_step=2),
            evaluation=ot.EvaluationConfig(samples_per_task=2),
            run_dir=tmp_path / "run",
            progress=False,
        )

    return make


def slots_in_use(cluster: Cluster) -> int:
    return SLOTS - sum(node["free_cpu_slots"] for node in cluster.client.cluster()["nodes"])


def test_the_ten_lines_train_save_and_release(cluster: Cluster, create_job, make_trainer) -> None:
    with ot.Client(cluster.url, cluster.key) as client:
        with create_job(client, lora=ot.LoraConfig(rank=4)) as job:
            trainer = make_trainer(job, Echo)
            assert trainer.fit(steps=2)["steps"] == 2
            saved = job.save("echo-v1")
            assert any(Path(saved["path"]).iterdir())
            assert trainer.fit(steps=1)["steps"] == 3
            assert job.load("echo-v1")["version"] == 4
        assert job.state == "COMPLETED"
    wait_until(lambda: slots_in_use(cluster) == 0, 60, "the job's slot is free")


def test_a_job_starts_from_what_another_one_learnt(cluster: Cluster, create_job, make_trainer) -> None:
    def logprobs(job: ot.Job) -> list[float]:
        """Of a fixed text, by the version that the job's engine samples from now."""
        result = job.run(lambda policy: policy.sample([5, 6, 7, 8], SamplingParams(max_tokens=1), prompt_logprobs=True))
        return [float(value) for value in result.prompt_logprobs[1:]]

    with ot.Client(cluster.url, cluster.key) as client:
        with create_job(client) as teacher:
            fresh = logprobs(teacher)
            make_trainer(teacher, Echo).fit(steps=2)
            assert teacher.save("echo")["version"] == 2
            learnt = logprobs(teacher)
        (listed,) = client.scheduler.checkpoints(teacher.id)
        assert (listed["ref"], listed["step"]) == (f"admin/{teacher.id}/echo@2", 2)
        assert listed["bytes"] > 0
        with create_job(client, start_from=f"{teacher.id}/echo") as job:
            assert job.record["config"]["start_from"] == listed["ref"]
            assert job.run(lambda policy: policy.state())["version"] == 0
            assert logprobs(job) == learnt != fresh
    wait_until(lambda: slots_in_use(cluster) == 0, 60, "the job's slot is free")


def test_a_client_that_reaches_the_scheduler_only_trains_through_it(cluster: Cluster, create_job, make_trainer) -> None:
    with ot.Client(cluster.url, cluster.key, connect="proxy") as client, create_job(client) as job:
        assert job.server["endpoint"].startswith(cluster.url)
        assert make_trainer(job, Echo).fit(steps=1)["steps"] == 1
        assert any(Path(job.save("by-proxy")["path"]).iterdir())
    assert job.state == "COMPLETED"
    wait_until(lambda: slots_in_use(cluster) == 0, 60, "the job's slot is free")


def test_a_server_that_dies_raises_a_typed_error_with_the_cause(cluster: Cluster, create_job, make_trainer) -> None:
    with (  # noqa: PT012
        pytest.raises(ot.ServerLostError) as caught,
        ot.Client(cluster.url, cluster.key) as client,
        create_job(client) as job,
    ):
        pid = job.record["server"]["pid"]
        threading.Timer(2.0, os.kill, (pid, signal.SIGKILL)).start()
        make_trainer(job, Slow).fit(steps=1000)
    assert "FAILED" in caught.value.detail
    assert cluster.client.job(job.id)["cause"] in caught.value.detail
    wait_until(lambda: slots_in_use(cluster) == 0, 60, "the job's slot is free")


@pytest.fixture
def child(cluster: Cluster, project: Path, tiny_model_dir: Path) -> Any:
    """A process that trains for ever, and its job's id."""
    code = _CHILD.format(environment="Slow", url=cluster.url, key=cluster.key, model=str(tiny_model_dir))
    process = subprocess.Popen([sys.executable, "-c", code], cwd=project, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


def test_a_client_that_is_killed_loses_its_job_when_the_lease_expires(cluster: Cluster, child) -> None:
    process, job_id = child
    assert cluster.client.job(job_id)["state"] == "RUNNING"
    time.sleep(1.5 * LEASE_S)
    assert cluster.client.job(job_id)["state"] == "RUNNING", "heartbeats keep the job while its client lives"
    process.kill()
    wait_until(lambda: cluster.client.job(job_id)["ended_at"] is not None, LEASE_S + 60, "the lease has expired")
    job = cluster.client.job(job_id)
    assert job["state"] == "CANCELLED"
    assert "lease" in job["cause"]
    wait_until(lambda: slots_in_use(cluster) == 0, 60, "the job's slot is free")


def test_ctrl_c_in_a_client_ends_its_job_at_once(cluster: Cluster, child) -> None:
    process, job_id = child
    process.send_signal(signal.SIGINT)
    process.wait(120)
    assert cluster.client.job(job_id)["state"] == "CANCELLED"
    wait_until(lambda: slots_in_use(cluster) == 0, 60, "the job's slot is free")


def test_the_same_config_trains_from_the_users_process(cluster: Cluster, project: Path) -> None:
    result = opentinker(
        "train", project / "job.yaml", "training.steps=1", "--state-dir", cluster.state_dir, "--runs-dir", project / "mine"
    )
    assert result.returncode == 0, result.stdout + result.stderr
    [run] = (project / "mine").iterdir()
    assert (run / "report.html").is_file()
    assert cluster.client.job(run.name)["state"] == "COMPLETED"
    wait_until(lambda: slots_in_use(cluster) == 0, 60, "the job's slot is free")


def test_rows_given_in_python_teach_before_the_rewards_do(cluster: Cluster, create_job, make_trainer, tmp_path: Path) -> None:
    with ot.Client(cluster.url, cluster.key) as client, create_job(client) as job:
        rows = [{"prompt": "Say something.", "completion": "aaa"}] * 4
        optimizer = ot.AdamParams(learning_rate=1e-2)
        taught = ot.SFTTrainer(job, rows, rows, batch_size=4, optimizer=optimizer, run_dir=tmp_path / "sft", progress=False)
        summary = taught.fit(steps=6)
        assert summary["loss_after"] < 0.6 * summary["loss_before"]
        assert job.run(lambda policy: policy.state())["version"] == 1
        make_trainer(job, Echo).fit(steps=1)
        [first, *_] = (tmp_path / "run" / "transcripts.jsonl").read_text().splitlines()
        assert "aa" in json.loads(first)["messages"][-1]["content"]
