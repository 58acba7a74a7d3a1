"""One policy learns gomoku against its own past on one server, and is then measured against where it began.

Usage: python tests/scenarios/league.py [--steps 20] [--strategy pfsp] [--learning-rate 5e-3]
A tiny model imitates random legal moves first; black begins from there, white is a pool of black's past versions. Prints the
pool step by step; the exit code is 1 unless the members' weights on disk never changed, the pool kept to its size, its first
member stayed, and black does better against that one, in its own seat, than it began.
"""

import argparse
import asyncio
import hashlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from duel import LORA, Terse, serving, warm_model

from opentinker.config.base import parse_config
from opentinker.config.job import RLJobConfig
from opentinker.env.load import load_environment
from opentinker.training.agents import AgentsLoop
from opentinker.training.recorder import Recorder

EVERY, SIZE, SLOTS = 4, 4, 2


def job(steps: int, strategy: str, learning_rate: float) -> RLJobConfig:
    return parse_config(
        RLJobConfig,
        {
            "base_model": "unused",
            "lora": LORA.model_dump(),
            "environment": {"name": "unused"},
            "agents": {
                "black": {},
                "white": {"pool": {"of": "black", "strategy": strategy, "every": EVERY, "size": SIZE, "slots": SLOTS}},
            },
            "engine": {"max_model_len": 512},
            "algorithm": {"group_size": 8, "credit": "turn", "discount": 0.3},
            "sampling": {"max_tokens": 4},
            "rollout": {"groups_per_step": 8, "max_turns": 6},
            "evaluation": {"max_tasks": 32, "samples_per_task": 4},
            "training": {"steps": steps, "optimizer": {"learning_rate": learning_rate}},
        },
    )


def members_on_disk(folder: Path) -> dict[str, str]:
    """Checkpoint -> digest of its adapter."""
    return {
        path.parent.name: hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        for path in sorted(folder.glob("pool-*/adapter_model.safetensors"))
    }


async def main(steps: int, strategy: str, learning_rate: float, warm_steps: int) -> bool:
    config, seen = job(steps, strategy, learning_rate), dict[str, str]()
    with tempfile.TemporaryDirectory(prefix="ot-league-") as name:
        folder = Path(name)
        warm = await warm_model(folder, warm_steps)
        async with serving(
            warm, folder / "checkpoints", lora=LORA, lora_serving="adapter", max_adapters=1 + SLOTS, max_model_len=512
        ) as server:
            recorder = Recorder(folder / "run", config.model_dump(mode="json"))
            loop = await AgentsLoop.connect(config, load_environment(Terse), server.client, recorder)
            begun, unchanged = time.monotonic(), True
            await loop.evaluate()
            for _ in range(steps):
                row = await loop.step()
                pool: Any = row["pools"]["white"]
                rates = {step: round(rate, 2) for step, rate in pool["win_rates"].items()}
                reward = row["agents"]["black"]["reward_mean"]
                print(
                    f"step {row['step']:2}: black {reward:+.2f}, drawn {json.dumps(pool['drawn'])}, "
                    f"won {pool['score']:.2f}, win rates {json.dumps(rates)}",
                    flush=True,
                )
                there = members_on_disk(folder / "checkpoints")
                unchanged = unchanged and all(seen.get(checkpoint, digest) == digest for checkpoint, digest in there.items())
                seen |= there
            await loop.evaluate()
            print(f"{steps} steps in {time.monotonic() - begun:.0f} s", flush=True)
            before, after = (row["agents"]["black"] for row in recorder.rows if row["kind"] == "agents_evaluation")
            shown = [f"{row['reward_mean']:+.3f} (+-{row['reward_ci']:.3f})" for row in (before, after)]
            print(f"held-out reward against the first member: {' -> '.join(shown)}")
            left = loop._opponents.pools["white"].pool.members
            await loop.close()
            verdicts = {
                "members never changed": unchanged and len(set(seen.values())) == len(seen),
                "the pool kept to its size, on the server and on disk": len(left) == SIZE and len(there) <= SIZE + 1,
                "its first member stayed": left[0].step == 0,
                "black does better against the first than it began": after["reward_mean"] > before["reward_mean"],
            }
    print(json.dumps(verdicts))
    return all(verdicts.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--strategy", choices=["latest", "uniform", "pfsp"], default="pfsp")
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--warm-steps", type=int, default=12)
    options = parser.parse_args()
    sys.exit(0 if asyncio.run(main(options.steps, options.strategy, options.learning_rate, options.warm_steps)) else 1)
