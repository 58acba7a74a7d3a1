"""One GRPO step through the whole product: client, HTTP, server, engine, trainer, publish.

Usage: python tests/benchmarks/grpo_step.py MODEL_DIR {full|lora} [STEPS] [ENGINE] [compile]
Shape: 8 prompts x 8 completions of at most 32 tokens, one optimizer step, bf16 weights. LoRA: rank 16, alpha 32, all linear
layers. `compile`: engine and trainer compile the model before the first step that counts. Prints one line per step after a
warm-up step: seconds in all (publish included) and tokens sampled, then the median.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import opentinker as ot
from opentinker.config.rl import EvaluationConfig
from opentinker.config.rollout import RolloutConfig, SamplingConfig
from opentinker.config.server import EngineConfig, TrainerConfig
from opentinker.scheduler.cluster import EmbeddedCluster


class Addition(ot.Environment):
    """The prompt of the comparison; any reward that varies: only time is compared."""

    @classmethod
    def make_task(cls, seed: int) -> Any:
        return [seed % 10, seed // 10 % 10]

    def reset(self, task: Any) -> str:
        return f"What is {task[0]} + {task[1]}? Answer with just the number."

    def step(self, action: ot.Action) -> ot.StepResult:
        return ot.StepResult(reward=float(len(action.text) % 7), done=True)


def main(model: str, mode: str, steps: int = 6, engine: str = "auto", compiled: str = "") -> None:
    folder = Path(tempfile.mkdtemp(prefix="ot-bench-"))
    with EmbeddedCluster.start(folder / "state", folder / "runs", port=0) as cluster:
        key = cluster.key_path.read_text().strip()
        with (
            ot.Client(cluster.url, key) as client,
            client.create_job(
                base_model=model,
                lora=ot.LoraConfig(rank=16, alpha=32.0) if mode == "lora" else None,
                engine=EngineConfig.model_validate({"kind": engine, "max_model_len": 256, "enforce_eager": not compiled}),
                trainer=TrainerConfig(compile=bool(compiled)),
            ) as job,
        ):
            trainer = ot.RLTrainer(
                job,
                environment=Addition,
                algorithm=ot.GRPO(group_size=8),
                optimizer=ot.AdamParams(learning_rate=1e-5),
                sampling=SamplingConfig(max_tokens=32),
                rollout=RolloutConfig(groups_per_step=8, max_turns=1),
                evaluation=EvaluationConfig(at_start=False, at_end=False),
                run_dir=folder / "run",
                progress=False,
            )
            trainer.fit(1)
            seconds = []
            for _ in range(steps):
                trainer.fit(1)
                row = json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[-1])
                seconds.append(row["step_s"])
                parts = " ".join(f"{name} {row[name]:.2f}" for name in ("rollout_s", "train_s", "publish_s"))
                parts += f" computed {row['tokens_computed']} of {row['tokens_in_passes']} tokens"
                print(f"step_s {row['step_s']:.2f} tokens {row['tokens_sampled']} {parts}", flush=True)
    print(f"median_step_s {statistics.median(seconds):.2f} mode {mode}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *(int(a) for a in sys.argv[3:4]), *sys.argv[4:6])
