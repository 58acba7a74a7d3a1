"""One job on two real servers, of which one trains an adapter and one full parameters: both agents learn, each on its own; when
one server is killed in the middle of the games, the job ends as a whole with a cause that names it, nothing of it stays, and
its run goes on in another job."""

import os
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

import opentinker as ot
from opentinker.client.messages import SamplingParams
from opentinker.errors import ConfigError, ServerLostError

SLOTS = 2


class Guess(ot.MultiAgentEnvironment):
    """Both say something at once, and earn by how long it is: black for long texts, white for short ones."""

    agents = ("black", "white")
    protocol = ot.Simultaneous()
    victim: ClassVar[int | None] = None
    """The process to kill when the next text is judged."""

    @classmethod
    def make_task(cls, seed: int) -> Any:
        return {"seed": seed}

    @classmethod
    def held_out_tasks(cls) -> Sequence[Any]:
        return []

    def reset(self, task: Any) -> Mapping[str, str]:
        return {name: f"{name}: say something" for name in self.agents}

    def step_together(self, actions: Mapping[str, ot.Action]) -> ot.MultiStepResult:
        if Guess.victim is not None:
            os.kill(Guess.victim, signal.SIGKILL)
            Guess.victim = None
        lengths = {name: len(action.text) for name, action in actions.items()}
        return ot.MultiStepResult({"black": float(lengths["black"]), "white": -float(lengths["white"])}, done=True)


@pytest.fixture(scope="module")
def two_slots(run_marker: str) -> Iterator[Any]:
    from opentinker.scheduler.cluster import EmbeddedCluster

    with tempfile.TemporaryDirectory() as folder:
        path, settings = Path(folder), {"probe_s": 0.2, "reconcile_s": 0.2}
        with EmbeddedCluster.start(
            path / "state", path / "runs", port=0, cpu_slots=SLOTS, gpus=0, settings=settings
        ) as running:
            yield running


def test_two_agents_learn_on_two_servers_and_the_death_of_one_ends_the_job_with_its_name(
    two_slots: Any, tiny_model_dir: Path, tmp_path: Path
) -> None:
    from opentinker.scheduler.processes import processes_of

    key = two_slots.key_path.read_text().strip()
    with ot.Client(two_slots.url, key) as client:
        with pytest.raises(ConfigError, match="the job's 3 servers start together and ask for 3 CPU slots"):
            client.create_job(str(tiny_model_dir), servers={"second": {}, "third": {}})
        job = create(client, tiny_model_dir)
        assert set(job.servers) == {"second"}
        assert job.servers["second"]["token"] != job.server["token"]
        assert job.servers["second"]["policy"] != job.server["policy"]
        held = [held for node in client.scheduler.cluster()["nodes"] for held in node["held"]]
        assert [(each["job"], each["cpu_slots"]) for each in held] == [(job.id, 1), (job.id, 1)]
        trainer = train(job, tmp_path / "run")
        trainer.fit(steps=2)
        rows = [row["agents"] for row in trainer._recorder.rows if row["kind"] == "agents_step"]
        assert [(row["black"]["version"], row["white"]["version"]) for row in rows] == [(1, 1), (2, 2)]
        for row in rows:
            for of_agent in row.values():
                assert of_agent["mismatch_kl_mean"] == pytest.approx(0.0, abs=1e-3), "each trainer sees what its engine saw"
        params = SamplingParams(max_tokens=2)
        for server in ("", "second"):
            sampled = job.run(lambda policy: policy.sample([5, 6, 7], params), server=server)
            assert sampled.samples[0].versions[0][0] == 2

        assert all(processes_of(mark) for mark in (job.id, f"{job.id}-second"))
        Guess.victim = int(job.record["servers"]["second"]["pid"])
        pid = Guess.victim
        with pytest.raises(ServerLostError) as lost:
            trainer.fit(steps=1)
        assert f"server 'second': the server's worker process (pid {pid}) died" in str(lost.value)
        assert job.state == "FAILED"
        assert free_slots_at_last(client) == SLOTS
        assert [processes_of(mark) for mark in (job.id, f"{job.id}-second")] == [[], []]

        other = create(client, tiny_model_dir)
        again = train(other, tmp_path / "run", resume=True)
        assert again.steps_done == 2
        named = client.scheduler.job(other.id)["config"]["checkpoints"][-2:]
        assert named == [f"admin/{job.id}/step-000002@2", f"admin/{job.id}/second/step-000002@2"]
        again.fit(steps=3)
        versions = [[each["version"] for each in row["agents"].values()] for row in again._recorder.rows]
        assert versions == [[1, 1], [2, 2], [3, 3]], "each server's policy goes on from its own checkpoint"
        other.complete()


def create(client: ot.Client, model: Path) -> ot.Job:
    """A job whose own server trains an adapter, and whose second one full parameters."""
    return client.create_job(
        str(model),
        lora=ot.LoraConfig(rank=4),
        engine=ot.EngineConfig(kind="transformers", max_model_len=256),
        trainer=ot.TrainerConfig(dtype="float32"),
        servers={"second": {"lora": None, "engine": {"max_model_len": 128}}},
    )


def train(job: ot.Job, run_dir: Path, **options: Any) -> ot.MultiAgentTrainer:
    """A trainer of black on the job's own server, and of white on its second."""
    return ot.MultiAgentTrainer(
        job,
        Guess,
        {"black": ot.AgentConfig(), "white": ot.AgentConfig(server="second")},
        ot.GRPO(group_size=4),
        optimizer=ot.AdamParams(learning_rate=1e-2),
        sampling=ot.SamplingConfig(max_tokens=6),
        rollout=ot.RolloutConfig(groups_per_step=2, max_turns=2),
        save_every=1,
        run_dir=run_dir,
        progress=False,
        **options,
    )


def free_slots_at_last(client: ot.Client) -> int:
    """The free slots, once nothing is held any more."""
    deadline = time.monotonic() + 60.0
    while True:
        nodes = client.scheduler.cluster()["nodes"]
        if not any(node["held"] for node in nodes):
            return int(sum(node["free_cpu_slots"] for node in nodes))
        assert time.monotonic() < deadline
        time.sleep(0.1)
