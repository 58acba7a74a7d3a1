"""A whole job server in this process, on a real engine and a real trainer, and what its tests send it."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from opentinker.client.messages import AdamParams, Datum, FloatArray, SamplingParams, TokenChunk
from opentinker.client.policy import PolicyClient
from opentinker.config.server import EngineConfig, LoraConfig, ServerConfig, TrainerConfig
from opentinker.errors import from_problem
from opentinker.server.engine.host import EngineHost
from opentinker.server.engine.links import LocalLink
from opentinker.server.engine.remote import RemoteEngine
from opentinker.server.front import create_app
from opentinker.server.images import ImageStore
from opentinker.server.listener import Listener
from opentinker.server.loading import load_engine, load_parts, server_info
from opentinker.server.state import Parts
from opentinker.server.worker import InProcessWorker, Worker

PROMPT = [5, 6, 7, 8]
REWARDED = [11, 12, 13, 14]
LORA = LoraConfig(rank=8)
FAST = AdamParams(learning_rate=3e-3)
START_S = 120.0


@dataclass
class Server:
    client: PolicyClient
    worker: Worker
    parts: Parts
    endpoint: str

    async def logprobs(self) -> FloatArray:
        """The trainer's logprobs of the rewarded tokens."""
        return (await self.client.forward([datum()]))["logprobs"][0][-len(REWARDED) :]

    async def engine_logprobs(self) -> FloatArray:
        """The engine's."""
        result = await self.client.sample(PROMPT + REWARDED, SamplingParams(max_tokens=1), prompt_logprobs=True)
        assert result.prompt_logprobs is not None
        return result.prompt_logprobs[-len(REWARDED) :]


def datum(advantage: float = 1.0) -> Datum:
    tokens = np.asarray(PROMPT + REWARDED, np.int32)
    weights = np.asarray([0.0] * (len(PROMPT) - 1) + [1.0] * len(REWARDED), np.float32)
    behaviour = np.full(len(weights), -6.0, np.float32) * weights
    arrays = {"weights": weights, "advantages": advantage * weights, "behaviour_logprobs": behaviour}
    return Datum((TokenChunk(tokens[:-1]),), tokens[1:], arrays)


def wait_until(condition: Callable[[], Any], timeout_s: float = 30.0) -> None:
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.005)


@asynccontextmanager
async def serving(
    model_dir: Path,
    root: Path,
    *,
    kind: str = "transformers",
    max_model_len: int = 256,
    lora: LoraConfig | None = None,
    lora_serving: str = "merge",
    max_adapters: int = 1,
    seed: int = 0,
    create: bool = True,
    trains: bool = True,
    checkpoint: str | None = None,
    policy: Mapping[str, Any] | None = None,
    change: Callable[[Parts], Parts] = lambda parts: parts,
    starts: Mapping[str, str] | None = None,
    layout: str = "colocated",
    tensor_parallel: int = 1,
    ranks: int = 1,
) -> AsyncIterator[Server]:
    config = ServerConfig(
        base_model=str(model_dir),
        engine=EngineConfig.model_validate(
            {
                "kind": kind,
                "max_model_len": max_model_len,
                "max_num_seqs": 16,
                "cache_gib": 0.1,
                "lora_serving": lora_serving,
                "max_adapters": max_adapters,
                "tensor_parallel": tensor_parallel,
            }
        ),
        dtype="float32",
        trainer=TrainerConfig(dtype="float32", ranks=ranks) if trains else None,
    )
    host = EngineHost(lambda: load_engine(model_dir, config, lora)) if layout == "split" else None

    def connect(images: ImageStore | None) -> RemoteEngine:
        assert host is not None
        # Small buckets: also a tiny model then has several.
        return RemoteEngine(LocalLink(host), host.start(START_S), images=images, bucket_bytes=50_000)

    worker = Worker(lambda: change(load_parts(model_dir, config, lora, root, None if host is None else connect)))
    parts = await asyncio.to_thread(worker.start, START_S)
    app = create_app(InProcessWorker(worker), {"p": "secret"}, server_info(model_dir, config, parts), starts=starts)
    listener = Listener(app, "127.0.0.1")
    endpoint = await listener.start()
    client = PolicyClient(endpoint, "secret", "p")
    try:
        if create:
            spec = {
                "lora": None if lora is None else lora.model_dump(),
                "checkpoint": checkpoint,
                "seed": seed,
                **(policy or {}),
            }
            created = app.state.front.dispatcher.command("p", 0, b"", "create", spec)  # as the scheduler does
            await created.wait(START_S)
            if created.problem is not None:
                raise from_problem(created.problem)
        yield Server(client, worker, parts, endpoint)
    finally:
        await client.close()
        await listener.stop()
        await asyncio.to_thread(worker.stop)
        if host is not None:
            await asyncio.to_thread(host.stop)
