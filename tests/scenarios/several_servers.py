"""Two agents of one submitted job learn on two servers, with base models of their own: one an adapter, one full parameters. One
server is killed with SIGKILL amid the games, or amid the updates; or it hangs, stopped with SIGSTOP, as its update begins.

Usage: python tests/scenarios/several_servers.py [--steps 5] [--only rollout update failed hung]
With `max_restarts: 1` the job has to end as one that was not interrupted, bit for bit, on both servers; without, it has to fail
with a cause that names the server, its agent and what became of it, and leave no process. The exit code is 1 unless all of it
holds.
"""

import argparse
import json
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from exact_resume import TESTS, rows_of
from resume_on_ray import ENDED, Site

import opentinker as ot
from opentinker.scheduler.cluster import EmbeddedCluster
from opentinker.scheduler.processes import processes_of

BARRIER_S = 10.0
GAME = '''
import json
import os
import random
import threading
import time
from pathlib import Path

import numpy as np

import opentinker as ot

ORDER = Path({order!r})


def obey(when):
    """Kill, or stop, what the scenario asks for, if it is to happen now."""
    try:
        order = json.loads(ORDER.read_text())
    except FileNotFoundError:
        return
    if order["when"] == when:
        ORDER.unlink()
        threading.Timer(order["after_s"], os.kill, (order["pid"], order["signal"])).start()


class Talk(ot.MultiAgentEnvironment):
    """Two turns each; vowels pay for black, other letters for white. Answers come late, each time differently."""

    agents = ("black", "white")
    protocol = ot.Alternating()

    @classmethod
    def make_task(cls, seed):
        return {{"number": seed % 100}}

    @classmethod
    def held_out_tasks(cls):
        return [{{"number": number}} for number in range(2)]

    def reset(self, task):
        self.turns = 0
        return {{name: f"The number is {{task['number']}}" for name in self.agents}}

    def step(self, agent, action):
        obey("rollout")
        time.sleep(random.uniform(0.0, 0.01))
        self.turns += 1
        vowels = sum(letter in "aeiou" for letter in action.text) / 10
        reward = vowels if agent == "black" else 1 - vowels
        return ot.MultiStepResult({{agent: reward}}, {{agent: "What is next?"}}, done=self.turns == 4)


def scores(batch):
    """White's advantages, which are asked for when its update begins."""
    obey("update")
    found = []
    for group in batch:
        returns = np.array([rewards.sum() for rewards in group])
        found.append([np.full_like(rewards, score - returns.mean()) for rewards, score in zip(group, returns)])
    return found
'''


def config_of(folder: Path, steps: int) -> dict[str, Any]:
    return {
        "kind": "rl",
        "name": "two servers",
        "base_model": str(folder / "model"),
        "lora": {"rank": 4},
        "engine": {"kind": "transformers", "deterministic": True, "max_model_len": 256},
        "trainer": {"dtype": "float32"},
        "servers": {"second": {"base_model": str(folder / "other"), "lora": None}},
        "environment": {"name": "game.py:Talk"},
        "agents": {
            "black": {},
            "white": {"server": "second", "algorithm": {"kind": "custom", "function": "game.py:scores", "group_size": 4}},
        },
        "algorithm": {"group_size": 4},
        "sampling": {"max_tokens": 8},
        "rollout": {"groups_per_step": 2, "max_turns": 4},
        "evaluation": {"at_start": False, "every": 3, "max_tasks": 2, "samples_per_task": 2},
        "training": {"steps": steps, "save_every": 2, "keep_last": 1, "seed": 3, "optimizer": {"learning_rate": 1e-2}},
    }


def build_models(folder: Path) -> None:
    sys.path.insert(0, str(TESTS))
    import conftest

    conftest.build_tiny_model(folder / "model")
    conftest.build_tiny_model(folder / "other", seed=1, layers=3)


def cut(site: Site, folder: Path, job_id: str, when: str, rows: int, by: signal.Signals = signal.SIGKILL) -> int:
    """Have the second server killed, or whatever `by` does to it, in the step after `rows`; its pid."""
    job = site.wait(job_id, lambda job: job["state"] in ENDED or rows_of(Path(job["run_dir"])) >= rows)
    if job["state"] in ENDED:
        raise RuntimeError(f"job {job_id} is {job['state']}: {job['cause']}")
    pid = int(job["servers"]["second"]["pid"])
    partial = folder / "order.partial"
    after_s = 0.1 if when == "update" and by is signal.SIGKILL else 0.0
    partial.write_text(json.dumps({"when": when, "pid": pid, "signal": by, "after_s": after_s}))
    partial.rename(folder / "order.json")
    return pid


def difference(one: Path, other: Path) -> float:
    """The largest difference between the parameters and moments of two policies' final checkpoints."""
    import numpy as np
    from safetensors.numpy import load_file

    states = [load_file(next(root.glob("final@*")) / "optimizer.safetensors") for root in (one, other)]
    if states[0].keys() != states[1].keys():
        return float("inf")
    return max(float(np.abs(states[0][n].astype(np.float64) - states[1][n].astype(np.float64)).max()) for n in states[0])


def apart(whole: Path, other: Path) -> float:
    white = [run_dir / "checkpoints" / "policies" / "white" for run_dir in (whole, other)]
    return max(difference(whole / "checkpoints", other / "checkpoints"), difference(*white))


def resumed(
    site: Site, folder: Path, config: dict[str, Any], whole: Path, when: str, by: signal.Signals = signal.SIGKILL
) -> bool:
    job_id = site.submit({**config, "scheduling": {"max_restarts": 1}})
    pid = cut(site, folder, job_id, when, 3, by)
    run_dir = site.completed(job_id)
    restarts = site.restarts(job_id)
    worst = apart(whole, run_dir)
    print(
        f"{by.name} {pid} amid the {when}: restarted for {restarts}; max |difference| on both servers = {worst:g}", flush=True
    )
    died = f"server 'second' (white): the server's worker process (pid {pid}) died"
    words = died if by is signal.SIGKILL else "'white' on server 'second' held up the others in update "
    return worst == 0.0 and [words in cause for cause in restarts] == [True]


def failed(site: Site, folder: Path, config: dict[str, Any], when: str) -> bool:
    job_id = site.submit(config)
    pid = cut(site, folder, job_id, when, 1)
    job = site.wait(job_id, lambda job: not (folder / "order.json").exists() or job["state"] in ENDED)
    began = time.monotonic()
    job = site.wait(job_id, lambda job: job["state"] in ENDED)
    took_s = time.monotonic() - began
    site.wait(job_id, lambda job: job["server"] is None and not job["servers"])
    left = [*processes_of(job_id), *processes_of(f"{job_id}-second")]
    print(f"SIGKILL {pid} amid the {when}: {job['state']} after {took_s:.1f} s: {job['cause']}; left: {left}", flush=True)
    words = f"server 'second' (white): the server's worker process (pid {pid}) died"
    return job["state"] == "FAILED" and words in job["cause"] and not left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=["rollout", "update", "failed", "hung"])
    arguments = parser.parse_args()
    right = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_models(folder)
        (folder / "counting.py").write_text("")  # what `Site` copies
        (folder / "chat.jsonl").write_text("")
        config = config_of(folder, arguments.steps)
        settings = {"probe_s": 0.5, "reconcile_s": 0.2}
        with EmbeddedCluster.start(
            folder / "state", folder / "runs", port=0, cpu_slots=2, gpus=0, settings=settings
        ) as cluster:
            client = ot.Client(cluster.url, cluster.key_path.read_text().strip())
            site = Site(client, folder)
            (folder / "project" / "game.py").write_text(GAME.format(order=str(folder / "order.json")))
            kinds = [kind for kind in ("rollout", "update") if kind in arguments.only]
            if kinds or "hung" in arguments.only:
                began = time.monotonic()
                whole = site.completed(site.submit(config))
                print(f"whole run: {arguments.steps} steps in {time.monotonic() - began:.0f} s, its start included", flush=True)
            for when in kinds:
                right &= resumed(site, folder, config, whole, when)
            if "hung" in arguments.only:
                patient = {**config, "turns": {"barrier_timeout_s": BARRIER_S}}
                right &= resumed(site, folder, patient, whole, "update", signal.SIGSTOP)
            if "failed" in arguments.only:
                for when in ("rollout", "update"):
                    right &= failed(site, folder, config, when)
            client.close()
    print("several servers:", "all of it held" if right else "NOT as it has to be")
    sys.exit(not right)


if __name__ == "__main__":
    main()
