"""What the split layout gains and costs beside the colocated one, through the whole product on one machine.

Usage: python tests/benchmarks/split_overlap.py MODEL_DIR [ROUNDS] [ENGINE]
Each layout has all cores: colocated in one process, split half of them in each of two. Per round: one train step with a
publish and 16 samples of 32 tokens, first one after the other, then at once. Prints medians per layout, then the ratios
split / colocated of publish, of both in turn and of both at once. On one machine with few cores the two compete; the gain is
for devices of their own.
"""

import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import opentinker as ot
from opentinker.client.messages import AdamParams, Datum, LossConfig, Minibatch, SamplingParams, TokenChunk
from opentinker.client.policy import PolicyClient
from opentinker.scheduler.cluster import EmbeddedCluster

SAMPLES, TOKENS = 16, 32


def data() -> list[Datum]:
    tokens = [np.random.default_rng(i).integers(5, 400, 129).astype(np.int32) for i in range(8)]
    return [Datum((TokenChunk(t[:-1]),), t[1:], {"weights": np.ones(128, np.float32)}) for t in tokens]


async def train(policy: PolicyClient) -> dict[str, Any]:
    batch = data()
    minibatch = Minibatch(indices=tuple(range(len(batch))))
    return await policy.train_step(batch, [minibatch], LossConfig(name="cross_entropy"), AdamParams(learning_rate=1e-6))


async def sample(policy: PolicyClient) -> None:
    params = SamplingParams(max_tokens=TOKENS)
    await asyncio.gather(*(policy.sample([5, 6, 7, 8 + i], params) for i in range(SAMPLES)))


async def measure(policy: PolicyClient) -> dict[str, float]:
    started = time.monotonic()
    trained = await train(policy)
    await sample(policy)
    in_turn = time.monotonic() - started
    started = time.monotonic()
    step = asyncio.create_task(train(policy))
    await asyncio.sleep(0.05)  # the samples come after the step
    await sample(policy)
    sampled = time.monotonic() - started
    await step
    both = time.monotonic() - started
    return {"publish": trained["publish"]["seconds"], "in_turn": in_turn, "at_once": both, "samples_answered": sampled}


def run(model: str, layout: str, rounds: int, engine: str) -> dict[str, float]:
    folder = Path(tempfile.mkdtemp(prefix="ot-bench-"))
    slots = 2 if layout == "split" else 1
    with EmbeddedCluster.start(folder / "state", folder / "runs", port=0, cpu_slots=slots, gpus=0) as cluster:
        key = cluster.key_path.read_text().strip()
        with (
            ot.Client(cluster.url, key) as client,
            client.create_job(
                base_model=model,
                engine=ot.EngineConfig.model_validate({"kind": engine, "max_model_len": 256}),
                resources=ot.Resources(layout="split") if layout == "split" else ot.Resources(),
            ) as job,
        ):
            job.run(measure)
            found = [job.run(measure) for _ in range(rounds)]
    median = {name: round(statistics.median(row[name] for row in found), 3) for name in found[0]}
    print(json.dumps({"layout": layout, **median}), flush=True)
    return median


def main(model: str, rounds: int = 5, engine: str = "auto") -> None:
    colocated, split = (run(model, layout, rounds, engine) for layout in ("colocated", "split"))
    print(json.dumps({"split / colocated": {name: round(split[name] / colocated[name], 2) for name in split}}))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:3]), *sys.argv[3:4])
