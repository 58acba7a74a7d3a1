"""What a request to a job's server costs through the scheduler's address, against the direct way.

A real cluster with a real front; the stand-in worker answers at once, so what remains is the way there. Prints p50 and p99 of
one sample's round trip over one connection, and how many per second 32 clients get through.
Run: python tests/benchmarks/proxy_cost.py [--requests 300]
"""

import argparse
import asyncio
import os
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
CONCURRENT = 32
SETTINGS = {
    "worker_class": "proxy_cost:InstantWorker",
    "check_model": "proxy_cost:check_model",
}


class InstantWorker:
    """Answers every sample with the same 64 tokens."""

    def __init__(self, config: dict[str, Any], lora: dict[str, Any] | None, checkpoint_root: str) -> None:
        self._done: list[Any] = []

    def start(self) -> dict[str, Any]:
        return {"base_model": "instant", "tokenizer_files": {}}

    def describe(self) -> dict[str, Any]:
        return {"pid": os.getpid()}

    def submit(self, work: Any) -> None:
        from opentinker.server.protocol import Completion

        tokens, logprobs = np.arange(64, dtype=np.int32), np.zeros(64, np.float32)
        sample = {"tokens": tokens, "logprobs": logprobs, "finish_reason": "stop", "versions": [[64, 0]]}
        for item in work:
            self._done.append(Completion(item.operation, {"samples": [sample], "version": 0}))

    def collect(self, timeout_s: float) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        while not self._done and time.monotonic() < deadline:
            time.sleep(0.0005)
        done, self._done = self._done, []
        return done

    def stop(self) -> None:
        return


def check_model(name: str) -> None:
    return


async def round_trips(endpoint: str, server: dict[str, str], requests: int) -> tuple[float, float, float]:
    """(p50 ms, p99 ms, samples per second of `CONCURRENT` clients)."""
    from opentinker.client import wire
    from opentinker.client.http import HttpClient
    from opentinker.client.messages import SampleRequest, SamplingParams, TokenChunk

    http = HttpClient(endpoint, server["token"])
    run, number = uuid.uuid4().hex, iter(range(10**9))
    prompt = (TokenChunk(np.arange(256, dtype=np.int32)),)

    async def sample() -> float:
        request = SampleRequest(f"{run}-{next(number)}", prompt, SamplingParams(max_tokens=64), 1, False)
        started = time.monotonic()
        answer = await http.request(
            "POST", f"/v1/policies/{server['policy']}/sample", content=wire.pack(request.to_wire()), wait_s=20.0
        )
        assert answer["status"] == "done", answer
        return 1000.0 * (time.monotonic() - started)

    for _ in range(20):
        await sample()
    took = [await sample() for _ in range(requests)]

    async def client() -> None:
        for _ in range(requests // CONCURRENT + 1):
            await sample()

    started = time.monotonic()
    await asyncio.gather(*(client() for _ in range(CONCURRENT)))
    rate = (requests // CONCURRENT + 1) * CONCURRENT / (time.monotonic() - started)
    await http.close()
    return float(np.percentile(took, 50)), float(np.percentile(took, 99)), rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=300)
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    from opentinker.client.scheduler import SchedulerClient
    from opentinker.scheduler.cluster import EmbeddedCluster

    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedCluster.start(Path(folder, "state"), Path(folder, "runs"), port=0, cpu_slots=1, settings=SETTINGS) as cluster,
    ):
        client = SchedulerClient(cluster.url, cluster.key_path.read_text())
        job = client.submit({"kind": "interactive", "base_model": "instant"})
        while job["state"] != "RUNNING":
            job = client.job(job["id"], wait_s=10.0, state=job["state"])
            assert not job["cause"], job["cause"]
        server = job["server"]
        for _ in range(2):
            for name, endpoint in (("direct", server["endpoint"]), ("proxied", cluster.url + server["proxy"])):
                p50, p99, rate = asyncio.run(round_trips(endpoint, server, options.requests))
                print(
                    f"{name:8} p50 {p50:5.1f} ms   p99 {p99:5.1f} ms   {rate:5.0f} samples/s ({CONCURRENT} clients)", flush=True
                )
            client.heartbeat(job["id"])
        client.complete(job["id"])
        client.close()


if __name__ == "__main__":
    main()
