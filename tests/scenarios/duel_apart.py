"""Two jobs train against each other: each has a driver and a server of its own, and an environment server coordinates them.

Usage: python tests/scenarios/duel_apart.py --kill     interactive jobs, driven by two processes of their users; the server of
                                                       one is killed within a game, and in another run within an update
       python tests/scenarios/duel_apart.py --resume   submitted jobs; the server of one is killed, both go on, and their ends
                                                       are compared with those of jobs that nobody killed, bit for bit
On one Ray cluster with a tiny model: black is an adapter, white trains the full parameters. Prints what each driver was told,
and after what time; the exit code is 1 unless the one that was not killed was told who is lost, and why, in less than the
barrier's timeout, and unless both ends are the same.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from exact_resume import difference

import opentinker as ot
from opentinker.scheduler.cluster import EmbeddedCluster

sys.path.insert(0, str(Path(__file__).parents[1]))

from tiny_model import build_tiny_model

AGENTS = ("black", "white")
WAIT_S = 120.0
BARRIER_S = 30.0
GAME = '''
import opentinker as ot


class LastDigit(ot.MultiAgentEnvironment):
    """Each says two words in turn; whoever's letters add up to the number with the larger last digit wins: what a model says
    that knows nothing earns sometimes more, sometimes less, and every step has something to learn."""

    agents = ("black", "white")
    protocol = ot.Alternating()
    version = "1"

    @classmethod
    def make_task(cls, seed):
        return {"number": seed % 100}

    @classmethod
    def held_out_tasks(cls):
        return [{"number": number} for number in range(2)]

    def reset(self, task):
        self.said = {name: "" for name in self.agents}
        self.turns = 0
        return {name: f"You are {name}. The number is {task['number']}" for name in self.agents}

    def step(self, agent, action):
        self.said[agent] += action.text
        self.turns += 1
        other = "white" if agent == "black" else "black"
        if self.turns < 4:
            return ot.MultiStepResult(observations={other: "What is next?"})
        digits = {name: sum(map(ord, text)) % 10 for name, text in self.said.items()}
        lead = (digits["black"] - digits["white"]) / 10
        return ot.MultiStepResult({"black": lead, "white": -lead}, done=True)
'''


def prepare(folder: Path) -> None:
    build_tiny_model(folder / "model")
    (folder / "last_digit.py").write_text(GAME)
    (folder / "token").write_text("the-token-of-this-scenario")


@contextmanager
def coordinator(folder: Path) -> Iterator[str]:
    """`opentinker env serve`; its address."""
    options = ["--port", "0", "--workers", "1", "--token-file", str(folder / "token")]
    command = [sys.executable, "-m", "opentinker", "env", "serve", f"{folder / 'last_digit.py'}:LastDigit", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None
        yield found[0]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


@contextmanager
def watching(url: str, folder: Path) -> Iterator[Callable[[str], dict[str, Any]]]:
    """What the coordinator says of a run, asked over one connection, as phases may last for milliseconds only."""
    headers = {"Authorization": f"Bearer {(folder / 'token').read_text()}"}
    with httpx.Client(base_url=url, headers=headers, timeout=30) as http:
        yield lambda run: next((one for one in http.get("/coordinator/runs").json()["runs"] if one["run"] == run), {})


def wait(until: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WAIT_S
    while not (found := until()):
        if time.monotonic() > deadline:
            raise TimeoutError("it did not happen")
        time.sleep(0.001)
    return found


def drive(url: str, key: str, place: str, folder: Path, agent: str, run: str, steps: int) -> None:
    """What a user's own program does: one agent, on a job of its own."""
    result: dict[str, Any] = {"agent": agent}
    with ot.Client(url, key) as client:
        job = client.create_job(
            str(folder / "model"),
            lora=ot.LoraConfig(rank=4) if agent == "black" else None,
            engine=ot.EngineConfig(kind="transformers", deterministic=True, max_model_len=256),
            trainer=ot.TrainerConfig(dtype="float32"),
        )
        print(json.dumps({"job": job.id, "worker": job.record["server"]["pid"]}), flush=True)
        trainer = ot.MultiAgentTrainer(
            job,
            place,
            {agent: ot.AgentConfig()},
            ot.GRPO(group_size=4, epochs=16),  # so that an update is long enough to be killed within
            coordinator=ot.CoordinatorConfig(run=run),
            sampling=ot.SamplingConfig(max_tokens=8),
            rollout=ot.RolloutConfig(groups_per_step=4, max_turns=3),
            evaluation=ot.EvaluationConfig(at_start=False, at_end=False),
            turns=ot.TurnsConfig(barrier_timeout_s=BARRIER_S),
            run_dir=folder / f"{run}-{agent}",
            progress=False,
        )
        try:
            trainer.fit(steps)
        except ot.OpenTinkerError as error:
            result |= {"error": error.code, "detail": error.detail, "at": time.time()}
    rows = [json.loads(line) for line in (folder / f"{run}-{agent}" / "metrics.jsonl").read_text().splitlines()]
    print(json.dumps(result | {"steps": max((row["step"] for row in rows), default=0)}), flush=True)


def killed(cluster: EmbeddedCluster, place: str, folder: Path, when: str) -> bool:
    """Two drivers; the worker of white's server is killed when the run is there. Whether black was told."""
    key = cluster.key_path.read_text().strip()
    drivers = {}
    for agent in AGENTS:
        command = [sys.executable, __file__, "--drive", cluster.url, key, place, str(folder), agent, when, "50"]
        drivers[agent] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    about = {}
    for agent, process in drivers.items():
        assert process.stdout is not None
        about[agent] = json.loads(process.stdout.readline())
        print(f"{when}: {agent} has {about[agent]}", flush=True)
    with watching(place, folder) as look:
        wait(lambda: look(when).get("moment") == when)
        os.kill(about["white"]["worker"], signal.SIGKILL)
        at = time.time()
        ended = wait(lambda: (found := look(when)).get("state") == "ended" and found)
    print(f"{when}: ended in {ended['moment']}: {ended['cause']}", flush=True)
    said = {}
    for agent, process in drivers.items():
        assert process.stdout is not None
        said[agent] = json.loads(process.communicate(timeout=WAIT_S)[0].splitlines()[-1])
        said[agent]["after_s"] = round(said[agent].pop("at", at) - at, 2)
        print(f"{when}: {json.dumps(said[agent])}", flush=True)
    black = said["black"]
    told = black.get("error") == "agent_lost" and "'white'" in black["detail"] and 0 <= black["after_s"] < BARRIER_S
    return told and ended["moment"] == when


def learnt_in(run_dir: Path, agent: str) -> int:
    """The steps in which an agent trained: a run that learns nothing proves nothing."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return sum(row["kind"] == "agents_step" and row["agents"][agent]["tokens_trained"] > 0 for row in rows)


def submitted(place: str, folder: Path, agent: str, run: str, steps: int) -> dict[str, Any]:
    token_file = str(folder / "token")
    return {
        "kind": "rl",
        "base_model": str(folder / "model"),
        "lora": {"rank": 4} if agent == "black" else None,
        "engine": {"kind": "transformers", "deterministic": True, "max_model_len": 256},
        "trainer": {"dtype": "float32"},
        "environment": {"name": place, "args": {"token_file": token_file}},
        "agents": {agent: {}},
        "coordinator": {"run": run, "token_file": token_file},
        "algorithm": {"group_size": 4},
        "sampling": {"max_tokens": 8},
        "rollout": {"groups_per_step": 4, "max_turns": 3},
        "evaluation": {"at_start": False, "max_tasks": 2, "samples_per_task": 2},
        "training": {"steps": steps, "save_every": 2, "optimizer": {"learning_rate": 1e-2}},
        "scheduling": {"max_restarts": 2},
    }


def resumed(cluster: EmbeddedCluster, place: str, folder: Path, steps: int) -> bool:
    """A pair of jobs that nobody kills, and one of which the server of white is killed; whether their ends are the same."""
    ended = ("COMPLETED", "FAILED", "CANCELLED")
    folders: dict[str, dict[str, Path]] = {}
    with ot.Client(cluster.url, cluster.key_path.read_text().strip()) as client:
        for run in ("whole", "cut"):
            jobs = {agent: client.submit(submitted(place, folder, agent, run, steps)).id for agent in AGENTS}
            if run == "cut":
                with watching(place, folder) as look:
                    wait(lambda: look("cut").get("moment") in ("update 3", "rollout 4"))
                    pid = int(client.scheduler.job(jobs["white"])["server"]["pid"])
                    os.kill(pid, signal.SIGKILL)
                    print(f"cut: killed white's server {pid} in {look('cut')['moment']}", flush=True)
            for agent, job_id in jobs.items():
                job = wait(lambda job_id=job_id: (j := client.scheduler.job(job_id))["state"] in ended and j)
                restarts = [e["detail"] for e in client.scheduler.events(job_id) if e["kind"] == "restarting"]
                print(f"{run}: {agent} is {job['state']} {job['cause'] or ''}; restarts: {restarts}", flush=True)
                if job["state"] != "COMPLETED":
                    return False
                folders.setdefault(run, {})[agent] = Path(job["run_dir"])
    learnt = {agent: learnt_in(folders["cut"][agent], agent) for agent in AGENTS}
    print(f"steps in which there was something to learn: {learnt}", flush=True)
    apart = {agent: difference(folders["whole"][agent], folders["cut"][agent]) for agent in AGENTS}
    print(f"max |difference| of parameters and moments: {apart}", flush=True)
    for agent in AGENTS:
        log = folders["cut"][agent] / "driver.log"
        for line in log.read_text().splitlines() if log.exists() else ():
            if "joins anew" in line:
                print(f"cut: {agent}'s driver: {line[:300]}", flush=True)
    return not any(apart.values()) and all(learnt.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--steps", type=int, default=6, help="of --resume")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ot-apart-") as name:
        folder = Path(name)
        prepare(folder)
        os.environ["OPENTINKER_ENV_TOKEN"] = (folder / "token").read_text()
        good = True
        with (
            coordinator(folder) as place,
            EmbeddedCluster.start(folder / "state", folder / "runs", port=0, cpu_slots=2) as cluster,
        ):
            if options.kill:
                for when in ("rollout 1", "update 1"):
                    good = killed(cluster, place, folder, when) and good
            if options.resume:
                good = resumed(cluster, place, folder, options.steps) and good
    print("good" if good else "NOT as it should be")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--drive"]:
        _, _, api, secret, where, base, who, which, count = sys.argv
        drive(api, secret, where, Path(base), who, which, int(count))
    else:
        main()
