"""`exact_resume.py --own`: a user's process drives an interactive job, is killed with SIGKILL, and is started again, in another
job, with the same program."""

import os
import random
import subprocess
import sys
from pathlib import Path

from exact_resume import TESTS, difference, finish, kill_after

from opentinker.scheduler.cluster import EmbeddedCluster

SLOTS = 2
LEASE_S = 8.0
PROGRAM = """
import sys
from pathlib import Path

import opentinker as ot
from counting import Counting, Vowels
from opentinker.config.sft import SFTEvaluationConfig

url, key, kind, model, run_dir, steps = sys.argv[1:]
run_dir = Path(run_dir)
adapter = None if kind in ("full", "sft") else ot.LoraConfig(rank=4)
optimizer = ot.AdamParams(learning_rate=1e-2)
shared = {"optimizer": optimizer, "save_every": 2, "seed": 3, "run_dir": run_dir, "resume": "auto", "progress": False}
episodes = {
    "sampling": ot.SamplingConfig(max_tokens=10),
    "rollout": ot.RolloutConfig(groups_per_step=2, max_turns=2),
    "evaluation": ot.EvaluationConfig(at_start=False, every=3, max_tasks=2, samples_per_task=2),
}
with ot.Client(url, key) as client, client.create_job(
    base_model=model,
    lora=adapter,
    engine=ot.EngineConfig(
        kind="transformers", deterministic=True, max_model_len=256, max_adapters=2 if kind == "agents" else 1
    ),
    trainer=ot.TrainerConfig(dtype="float32"),
    seed=3,
) as job:
    if kind == "sft":
        rows = [{"prompt": f"What is {n} + {n}?", "completion": f"The answer is {2 * n}."} for n in range(12)]
        trainer = ot.SFTTrainer(job, rows, rows[:2], batch_size=4, evaluation=SFTEvaluationConfig(every=3), **shared)
    elif kind == "preference":
        rows = [{"prompt": f"What is {n} + {n}?", "chosen": f"It is {2 * n}.", "rejected": "No idea."} for n in range(12)]
        trainer = ot.PreferenceTrainer(job, rows, rows[:2], batch_size=4, **shared)
    elif kind == "agents":
        agents = {"black": ot.AgentConfig(), "white": ot.AgentConfig()}
        trainer = ot.MultiAgentTrainer(job, Vowels, agents, ot.GRPO(group_size=4), **episodes, **shared)
    else:
        trainer = ot.RLTrainer(job, Counting, ot.GRPO(group_size=4), **episodes, **shared)
    trainer.fit(steps=int(steps))
    saved = [job.save("final")["path"]]
    if kind == "agents":
        white = Path(saved[0]).parent / "policies" / "white"
        [newest] = white.glob(f"step-{int(steps):06d}@*")
        saved.append(str(newest))
    (run_dir / "checkpoints").mkdir(exist_ok=True)
    for number, path in enumerate(saved):
        link = run_dir / "checkpoints" / f"final@{number}"
        link.unlink(missing_ok=True)  # this process may be killed after it was done, too
        link.symlink_to(path)
"""


def begin(folder: Path, url: str, key: str, kind: str, run_dir: Path, steps: int) -> "subprocess.Popen[bytes]":
    """The user's program, in a process of its own. It goes on with the run in its folder, if there is one."""
    program = folder / "drive.py"
    program.write_text(PROGRAM)
    log = run_dir.with_suffix(".log").open("ab")
    path = os.pathsep.join(filter(None, [str(TESTS.parent), str(folder), os.environ.get("PYTHONPATH")]))
    words = [sys.executable, str(program), url, key, kind, str(folder / "model"), str(run_dir), str(steps)]
    return subprocess.Popen(words, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": path})


def own(folder: Path, kind: str, runs: int, steps: int, rng: random.Random) -> tuple[int, float]:
    """(how many drivers were killed, how far the worst of their runs ended from one that was not)."""
    kills, worst = 0, 0.0
    settings = {"lease_s": LEASE_S}
    with EmbeddedCluster.start(
        folder / f"{kind}-state", folder / f"{kind}-runs", port=0, cpu_slots=SLOTS, settings=settings
    ) as cluster:
        access = cluster.url, cluster.key_path.read_text().strip()
        whole = folder / f"{kind}-own-whole"
        finish(begin(folder, *access, kind, whole, steps), whole)
        for number in range(runs):
            cut = folder / f"{kind}-own-{number}"
            rows, pause_s = rng.randrange(1, steps), rng.uniform(0.0, 0.5)
            killed = kill_after(begin(folder, *access, kind, cut, steps), cut, rows, pause_s)
            kills += killed
            if killed:
                finish(begin(folder, *access, kind, cut, steps), cut)
            apart = difference(whole, cut)
            worst = max(worst, apart)
            print(f"{kind} driver {number}: killed {pause_s:.2f} s after row {rows}, max |difference| = {apart:g}", flush=True)
    return kills, worst
