"""Kill a run with SIGKILL at random moments, let it resume, and compare with a run that was never interrupted, bit for bit.

Usage: python tests/scenarios/exact_resume.py [--runs 4] [--steps 6] [--kinds lora full sft league] [--seed 0]
       ... --kinds vllm-lora vllm-full      on vLLM: one run records its samples, all others are given them
       ... --on-ray [--kill worker driver]  as a submitted job on a cluster; only the one process is killed
       ... --own --kinds lora full sft preference agents   driven by a user's process, which is killed and started again
Server and driver live in one process, which is killed as a whole; what goes on is a new server and a new driver on the run's
folder. On a cluster the scheduler starts them anew (`scheduling.max_restarts`). The engine is the transformers one with
`deterministic`, but for vLLM; the environment answers after random pauses, so that nothing may depend on the order of
arrival. The last line says how far apart the parameters and moments of the two final checkpoints
are; the exit code is 1 unless that is nothing at all.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tiny_model import build_tiny_model

TESTS = Path(__file__).parents[1]
CHILD_S = 170.0
ENVIRONMENT = '''
import random
import time

from opentinker.env.environment import Action, Environment, StepResult
from opentinker.multiagent.environment import MultiAgentEnvironment, MultiStepResult
from opentinker.multiagent.protocol import Alternating


class Counting(Environment):
    """Two turns; a letter earns a little. Answers come late, each time differently."""

    @classmethod
    def make_task(cls, seed):
        return {"number": seed % 100}

    @classmethod
    def held_out_tasks(cls):
        return [{"number": number} for number in range(2)]

    def reset(self, task):
        self.turns = 0
        time.sleep(random.uniform(0.0, 0.01))
        return f"The number is {task['number']}"

    def step(self, action: Action):
        self.turns += 1
        time.sleep(random.uniform(0.0, 0.01))
        reward = sum(letter in "aeiou" for letter in action.text) / 10
        return StepResult(observation="What is next?", reward=reward, done=self.turns == 2)


class Vowels(MultiAgentEnvironment):
    """Whoever says more vowels wins."""

    agents = ("black", "white")
    protocol = Alternating()

    @classmethod
    def held_out_tasks(cls):
        return [{"number": number} for number in range(2)]

    def reset(self, task):
        self.said = {}
        time.sleep(random.uniform(0.0, 0.01))
        return {name: f"{name} {task}" for name in self.agents}

    def step(self, agent, action: Action):
        self.said[agent] = sum(letter in "aeiou" for letter in action.text)
        if agent == "black":
            return MultiStepResult()
        ahead = self.said["black"] - self.said["white"]
        return MultiStepResult({"black": ahead, "white": -ahead}, done=True)
'''


def config_of(kind: str, model: Path, steps: int) -> dict[str, Any]:
    """A job that takes a second a step or less."""
    engine: dict[str, Any] = {"kind": "transformers", "deterministic": True, "max_model_len": 256}
    if kind.startswith("vllm"):
        engine = {"kind": "vllm", "max_model_len": 256, "cache_gib": 0.1}
    shared = {
        "base_model": str(model),
        "engine": engine,
        "trainer": {"dtype": "float32"},
        "training": {"steps": steps, "save_every": 2, "keep_last": 1, "seed": 3, "optimizer": {"learning_rate": 1e-2}},
    }
    if kind == "sft":
        shared["training"]["batch_size"] = 4
        data = {"train": {"name": "chat.jsonl"}, "held_out": {"name": "chat.jsonl", "limit": 2}}
        return {**shared, "kind": "sft", "data": data, "evaluation": {"every": 3}}
    pool = {"of": "black", "strategy": "pfsp", "every": 1, "size": 3, "slots": 2}
    league = {"environment": {"name": "counting.py:Vowels"}, "agents": {"black": {}, "white": {"pool": pool}}}
    return {
        **shared,
        "kind": "rl",
        "lora": {"rank": 4} if kind.endswith("lora") or kind == "league" else None,
        **(league if kind == "league" else {"environment": {"name": "counting.py:Counting"}}),
        "algorithm": {"group_size": 4},
        "sampling": {"max_tokens": 10},
        "rollout": {"groups_per_step": 2, "max_turns": 2},
        "evaluation": {"at_start": False, "every": 3, "max_tasks": 2, "samples_per_task": 2},
    }


def prepare(folder: Path) -> None:
    """The model, the environment and the examples that the runs share."""
    build_tiny_model(folder / "model")
    (folder / "counting.py").write_text(ENVIRONMENT)
    rows = [{"prompt": f"What is {n} + {n}?", "completion": f"The answer is {2 * n}."} for n in range(12)]
    (folder / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))


async def serve_and_drive(folder: Path, config: dict[str, Any], run_dir: Path, *, resume: bool) -> None:
    """A server and its driver, to the run's end. On vLLM the first run records its samples, and all later ones replay them."""
    from recorded_engine import RecordedEngine

    from opentinker.config.job import parse_job
    from opentinker.errors import from_problem
    from opentinker.server.front import create_app
    from opentinker.server.listener import Listener
    from opentinker.server.loading import load_parts, server_info
    from opentinker.server.state import Parts
    from opentinker.server.worker import InProcessWorker, Worker
    from opentinker.training.run import run_rl_job, run_sft_job

    job = parse_job(config)
    server = job.server()
    recording = folder / f"{'full' if job.lora is None else 'lora'}-samples.jsonl"

    def build() -> Parts:
        parts = load_parts(Path(job.base_model), server, job.lora, run_dir / "checkpoints")
        if server.engine.kind != "vllm":
            return parts
        return replace(parts, engine=RecordedEngine(parts.engine, recording, replay=recording.exists()))

    worker = Worker(build)
    parts = await asyncio.to_thread(worker.start, CHILD_S)
    app = create_app(InProcessWorker(worker), {"p": "secret"}, server_info(Path(job.base_model), server, parts))
    listener = Listener(app, "127.0.0.1")
    endpoint = await listener.start()
    spec = {"lora": None if job.lora is None else job.lora.model_dump(), "seed": job.policy_seed}
    created = app.state.front.dispatcher.command("p", 0, b"", "create", spec)
    await created.wait(CHILD_S)
    if created.problem is not None:
        raise from_problem(created.problem)
    drive = run_sft_job if job.kind == "sft" else run_rl_job
    try:
        await asyncio.to_thread(
            drive,
            config,
            endpoint=endpoint,
            token="secret",
            policy="p",
            run_dir=run_dir,
            code_dir=folder,
            resume=resume,
        )
    finally:
        await listener.stop()
        await asyncio.to_thread(worker.stop)


def start(folder: Path, kind: str, run_dir: Path, steps: int, *, resume: bool) -> "subprocess.Popen[bytes]":
    """A process of its own that serves and drives."""
    log = run_dir.with_suffix(".log").open("ab")
    words = [sys.executable, __file__, "--child", str(folder), kind, str(run_dir), str(steps), str(int(resume))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS.parent), os.environ.get("PYTHONPATH")]))}
    return subprocess.Popen(words, stdout=log, stderr=log, env=environment)


def finish(process: "subprocess.Popen[bytes]", run_dir: Path) -> None:
    if process.wait(CHILD_S) != 0:
        raise RuntimeError(f"a run failed:\n{run_dir.with_suffix('.log').read_text()[-3000:]}")


def rows_of(run_dir: Path) -> int:
    try:
        return (run_dir / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def kill_after(process: "subprocess.Popen[bytes]", run_dir: Path, rows: int, pause_s: float) -> bool:
    """Kill the run a while after it wrote that many rows; whether it was still running."""
    deadline = time.monotonic() + CHILD_S
    while process.poll() is None and rows_of(run_dir) < rows and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(pause_s)
    running = process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait(CHILD_S)
    return running


def difference(one: Path, other: Path) -> float:
    """The largest difference between the parameters and moments of two runs' final checkpoints, one of each policy."""
    import numpy as np
    from safetensors.numpy import load_file

    states = []
    for run_dir in (one, other):
        found = sorted((run_dir / "checkpoints").glob("final@*"))
        states.append({f"{n} {k}": v for n, f in enumerate(found) for k, v in load_file(f / "optimizer.safetensors").items()})
    if states[0].keys() != states[1].keys():
        return float("inf")
    return max(float(np.abs(states[0][n].astype(np.float64) - states[1][n].astype(np.float64)).max()) for n in states[0])


def in_one_process(folder: Path, kind: str, runs: int, steps: int, rng: random.Random) -> tuple[int, float]:
    """(how many of the runs were killed, how far the worst of them ended from one that was not)."""
    whole, kills, worst = folder / f"{kind}-whole", 0, 0.0
    finish(start(folder, kind, whole, steps, resume=False), whole)
    if kind.startswith("vllm"):
        again = folder / f"{kind}-replayed"
        finish(start(folder, kind, again, steps, resume=False), again)
        worst = difference(whole, again)
        print(f"{kind} replayed from its recording: max |difference| = {worst:g}", flush=True)
    for number in range(runs):
        cut = folder / f"{kind}-{number}"
        rows, pause_s = rng.randrange(1, steps), rng.uniform(0.0, 0.5)
        killed = kill_after(start(folder, kind, cut, steps, resume=False), cut, rows, pause_s)
        kills += killed
        if killed:
            finish(start(folder, kind, cut, steps, resume=True), cut)
        apart = difference(whole, cut)
        worst = max(worst, apart)
        print(f"{kind} run {number}: killed {pause_s:.2f} s after row {rows}, max |difference| = {apart:g}", flush=True)
    return kills, worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=4, help="interrupted runs of each kind")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--kinds", nargs="+", default=["lora", "full", "sft"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--on-ray", action="store_true", help="as jobs on a cluster of its own")
    parser.add_argument("--own", action="store_true", help="driven by a user's process, which alone is killed")
    parser.add_argument("--kill", nargs="+", choices=["worker", "driver"], default=["worker", "driver"], help="with --on-ray")
    arguments = parser.parse_args()
    rng, worst, kills, runs = random.Random(arguments.seed), 0.0, 0, 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        for kind in arguments.kinds:
            if arguments.on_ray:
                from resume_on_ray import on_ray

                killed, apart = on_ray(
                    folder, config_of(kind, folder / "model", arguments.steps), arguments.kill, arguments.runs, rng
                )
                runs += arguments.runs * len(arguments.kill)
            elif arguments.own:
                from resume_own import own

                killed, apart = own(folder, kind, arguments.runs, arguments.steps, rng)
                runs += arguments.runs
            else:
                killed, apart = in_one_process(folder, kind, arguments.runs, arguments.steps, rng)
                runs += arguments.runs
            kills, worst = kills + killed, max(worst, apart)
    print(f"exact resume: {kills} kill -9 in {runs} runs of {arguments.steps} steps, max |difference| = {worst:g}")
    sys.exit(worst != 0.0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child_folder, child_kind, child_run, child_steps, child_resume = sys.argv[2:]
        child_config = config_of(child_kind, Path(child_folder) / "model", int(child_steps))
        asyncio.run(serve_and_drive(Path(child_folder), child_config, Path(child_run), resume=child_resume == "1"))
    else:
        main()
