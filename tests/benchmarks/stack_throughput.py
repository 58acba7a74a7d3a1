"""Rollouts through the whole stack against the bare engine, in one run.

Usage: python tests/benchmarks/stack_throughput.py [MODEL] [ENGINE] [ROUNDS]
64 prompts of 40 random tokens, 32 new tokens each. The bare engine runs in this process, then the same requests go through
client, HTTP, front, Ray and worker. Prints tokens/s of both (best of the rounds) and their ratio.
"""

import asyncio
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import opentinker as ot
from opentinker.client.messages import IntArray, SampleRequest, SamplingParams, TokenChunk
from opentinker.client.policy import PolicyClient
from opentinker.config.server import EngineConfig

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 64, 40, 32


def prompts(round_: int) -> list[IntArray]:
    rng = np.random.default_rng(round_)
    return [rng.integers(1000, 20000, PROMPT_TOKENS, dtype=np.int32) for _ in range(PROMPTS)]


def params(index: int) -> SamplingParams:
    return SamplingParams(max_tokens=NEW_TOKENS, seed=index)


def bare(model: str, engine_config: EngineConfig, rounds: int) -> float:
    import os

    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    from opentinker.server.engine.select import create_engine
    from opentinker.server.models import resolve_model, stop_token_ids

    path = resolve_model(model)
    engine = create_engine(path, engine_config, "bfloat16", lora=None, stop_token_ids=stop_token_ids(path))
    best = 0.0
    for round_ in range(rounds + 1):
        started, tokens = time.perf_counter(), 0
        for i, prompt in enumerate(prompts(round_)):
            engine.add(SampleRequest(f"{round_}-{i}", (TokenChunk(prompt),), params(i)))
        while engine.has_unfinished():
            tokens += sum(len(s.tokens) for result in engine.step() for s in result.samples)
        if round_:
            best = max(best, tokens / (time.perf_counter() - started))
    engine.close()
    return best


def stack(model: str, engine_config: EngineConfig, rounds: int) -> float:
    from opentinker.scheduler.cluster import EmbeddedCluster

    folder = Path(tempfile.mkdtemp(prefix="ot-bench-"))

    async def measure(policy: PolicyClient) -> float:
        best = 0.0
        for round_ in range(rounds + 1):
            started = time.perf_counter()
            results = await asyncio.gather(*(policy.sample(prompt, params(i)) for i, prompt in enumerate(prompts(round_))))
            tokens = sum(len(s.tokens) for r in results for s in r.samples)
            if round_:
                best = max(best, tokens / (time.perf_counter() - started))
        return best

    with EmbeddedCluster.start(folder / "state", folder / "runs", port=0) as cluster:
        key = cluster.key_path.read_text().strip()
        with ot.Client(cluster.url, key) as client:
            started = time.perf_counter()
            with client.create_job(base_model=model, engine=engine_config) as job:
                print(f"submit_to_running_s {time.perf_counter() - started:.1f}")
                return job.run(measure)


def main(model: str = "smollm2-135m", engine: str = "auto", rounds: int = 3) -> None:
    config = EngineConfig.model_validate({"kind": engine, "max_model_len": 256})
    through_stack = stack(model, config, rounds)
    alone = bare(model, config, rounds)
    print(f"bare_tokens_per_s {alone:.0f} stack_tokens_per_s {through_stack:.0f} ratio {through_stack / alone:.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:3], *(int(a) for a in sys.argv[3:4]))
