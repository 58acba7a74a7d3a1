"""A reward curve of every algorithm on one fast task, with one budget, and of no learning at all for comparison.

Usage: python tests/benchmarks/algorithm_curves.py run NAME... --folder F [--steps 40]     (one process each; `all` for all)
       python tests/benchmarks/algorithm_curves.py draw --folder F --image docs/images/algorithms.png

The model is the tests' random Llama of 2 layers (0.1 million parameters), fully trained in float32; the engine is the one on
transformers, in this process, behind its HTTP front. An episode has two turns, and each earns half the share of digits in what
was said: the highest score is 1, and the model begins near 0.1. Tasks, seeds, groups per step, tokens per turn and the
learning rate are the same for all. `draw` prints the table of docs/algorithms.md.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tiny_model import build_tiny_model

TESTS = Path(__file__).parents[1]
START_S = 170.0
THRESHOLD = 0.8
ENVIRONMENT = '''
from opentinker.env.environment import Action, Environment, StepResult


class Digits(Environment):
    """Two turns; each earns the share of its answer that is digits, halved."""

    def __init__(self, reverse: bool = False):
        self.sign = -1.0 if reverse else 1.0

    @classmethod
    def make_task(cls, seed):
        return {"number": seed % 100}

    @classmethod
    def held_out_tasks(cls):
        return [{"number": number} for number in (7, 42)]

    def reset(self, task):
        self.turns = 0
        return f"What comes after {task['number']}?"

    def step(self, action: Action):
        self.turns += 1
        said = "".join(action.text.split())
        score = sum(c.isascii() and c.isdigit() for c in said) / max(len(said), 1) / 2
        return StepResult(observation="And then?", reward=self.sign * score, done=self.turns == 2)
'''
ADVANTAGES = '''
import numpy as np


def ranks(groups):
    """An advantage of the user's own: where an episode stands in its group, from -1 to 1."""
    result = []
    for group in groups:
        totals = np.array([e.sum() for e in group])
        place = (totals[:, None] > totals[None, :]).sum(1) - (totals[:, None] < totals[None, :]).sum(1)
        result.append([np.full_like(e, p / max(len(group) - 1, 1)) for e, p in zip(group, place, strict=True)])
    return result
'''
ALGORITHMS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("GRPO", {"kind": "grpo"}),
    "dr_grpo": ("Dr. GRPO", {"kind": "dr_grpo"}),
    "rloo": ("RLOO", {"kind": "rloo"}),
    "reinforce_pp": ("REINFORCE++", {"kind": "reinforce_pp"}),
    "dapo": ("DAPO", {"kind": "dapo"}),
    "gspo": ("GSPO", {"kind": "gspo"}),
    "cispo": ("CISPO", {"kind": "cispo"}),
    "ppo": ("PPO with a critic", {"kind": "ppo", "critic": {"learning_rate": 3e-3, "warmup_steps": 2}}),
    "turn": ("GRPO, credit per turn", {"kind": "grpo", "credit": "turn"}),
    "custom": ("yours: ranks in the group", {"kind": "custom", "function": "mine.py:ranks"}),
    "control": ("control: learning rate 0", {"kind": "grpo"}),
    "reversed": ("control: reward reversed", {"kind": "grpo"}),
}


def config_of(name: str, model: Path, steps: int) -> dict[str, Any]:
    """The job of one curve. Two tasks a step, run eight times each, in two minibatches."""
    algorithm = {"group_size": 8, "minibatches": 2, **ALGORITHMS[name][1]}
    return {
        "kind": "rl",
        "base_model": str(model),
        "lora": None,
        "engine": {"kind": "transformers", "max_model_len": 256, "max_num_seqs": 64},
        "trainer": {"dtype": "float32"},
        "environment": {"name": "digits.py:Digits", "args": {"reverse": name == "reversed"}},
        "algorithm": algorithm,
        "sampling": {"max_tokens": 3},
        "rollout": {"groups_per_step": 2, "max_turns": 2},
        "evaluation": {"samples_per_task": 16},
        "training": {"steps": steps, "seed": 1, "optimizer": {"learning_rate": 0.0 if name == "control" else 2e-3}},
    }


def prepare(folder: Path) -> Path:
    """The model, which is returned, the environment, and the user's function, in a folder."""
    (folder / "digits.py").write_text(ENVIRONMENT)
    (folder / "mine.py").write_text(ADVANTAGES)
    return build_tiny_model(folder / "model")


async def train(config: dict[str, Any], folder: Path, run_dir: Path) -> dict[str, Any]:
    """Serve and drive one job in this process; its summary. Rows are in `run_dir`."""
    from opentinker.config.job import parse_job
    from opentinker.errors import from_problem
    from opentinker.server.front import create_app
    from opentinker.server.listener import Listener
    from opentinker.server.loading import load_parts, server_info
    from opentinker.server.worker import InProcessWorker, Worker
    from opentinker.training.run import run_rl_job

    job = parse_job(config)
    server, model = job.server(), Path(job.base_model)
    worker = Worker(lambda: load_parts(model, server, job.lora, run_dir / "checkpoints"))
    parts = await asyncio.to_thread(worker.start, START_S)
    app = create_app(InProcessWorker(worker), {"p": "secret"}, server_info(model, server, parts))
    listener = Listener(app, "127.0.0.1")
    endpoint = await listener.start()
    spec = {
        "lora": None if job.lora is None else job.lora.model_dump(),
        "critic": None if job.policy_critic is None else job.policy_critic.model_dump(),
        "seed": job.policy_seed,
    }
    created = app.state.front.dispatcher.command("p", 0, b"", "create", spec)
    await created.wait(START_S)
    if created.problem is not None:
        raise from_problem(created.problem)
    try:
        return await asyncio.to_thread(
            run_rl_job, config, endpoint=endpoint, token="secret", policy="p", run_dir=run_dir, code_dir=folder
        )
    finally:
        await listener.stop()
        await asyncio.to_thread(worker.stop)


def run(names: list[str], folder: Path, steps: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        with tempfile.TemporaryDirectory() as made:
            code = Path(made)
            started = time.monotonic()
            summary = asyncio.run(train(config_of(name, prepare(code), steps), code, code / "run"))
            rows = [json.loads(line) for line in (code / "run" / "metrics.jsonl").read_text().splitlines()]
        curve = [(row["step"], abs(row["reward_mean"])) for row in rows if row["kind"] == "step"]
        held_out = [abs(row["reward_mean"]) for row in rows if row["kind"] == "evaluation"]
        tokens = sum(row["tokens_sampled"] for row in rows if row["kind"] == "step")
        result = {"curve": curve, "held_out": held_out, "tokens": tokens, "wall_s": summary["wall_s"]}
        (folder / f"{name}.json").write_text(json.dumps(result))
        print(f"{name}: held out {held_out[0]:.2f} -> {held_out[-1]:.2f} in {time.monotonic() - started:.0f} s", flush=True)


def smoothed(curve: list[tuple[int, float]], over: int = 3) -> list[tuple[int, float]]:
    """The mean over the last few steps at each."""
    return [
        (step, sum(v for _, v in curve[max(0, i - over + 1) : i + 1]) / min(i + 1, over)) for i, (step, _) in enumerate(curve)
    ]


def draw(folder: Path, image: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = {n: json.loads((folder / f"{n}.json").read_text()) for n in ALGORITHMS if (folder / f"{n}.json").exists()}
    columns = 4
    lines = -(-len(found) // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(11, 2.3 * lines + 0.4), sharex=True, sharey=True, squeeze=False)
    print(f"| `algorithm` | held out, before | after | steps to {THRESHOLD} | tokens sampled | wall, s |")
    print("|---|---|---|---|---|---|")
    for axis, (name, result) in zip(axes.flat, found.items(), strict=False):
        curve = [tuple(point) for point in result["curve"]]
        calm = smoothed(curve)
        axis.plot(*zip(*curve, strict=True), color="#9db4d3", linewidth=1)
        axis.plot(*zip(*calm, strict=True), color="#1f5fa8", linewidth=2)
        axis.axhline(THRESHOLD, color="#999999", linewidth=0.8, linestyle=":")
        axis.set_title(ALGORITHMS[name][0], fontsize=10, loc="left")
        axis.set_ylim(0, 1.02)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
        reached = next((str(step) for step, value in calm if value >= THRESHOLD), "-")
        before, after = result["held_out"][0], result["held_out"][-1]
        print(f"| `{name}` | {before:.2f} | {after:.2f} | {reached} | {result['tokens']:,} | {result['wall_s']:.0f} |")
    for axis in list(axes.flat)[len(found) :]:
        axis.axis("off")
    figure.supxlabel("training step", fontsize=10)
    figure.supylabel("mean score of the step's episodes", fontsize=10)
    figure.tight_layout()
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "draw"])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(ALGORITHMS)}; or all")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--image", type=Path, default=TESTS.parent / "docs" / "images" / "algorithms.png")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in (*ALGORITHMS, "all")]:
        parser.error(f"there is no {unknown[0]!r}; there are {', '.join(ALGORITHMS)}")
    if arguments.what == "run":
        chosen = [name for name in ALGORITHMS if name in arguments.names or "all" in arguments.names]
        run(chosen, arguments.folder, arguments.steps)
    else:
        draw(arguments.folder, arguments.image)


if __name__ == "__main__":
    sys.exit(main())
