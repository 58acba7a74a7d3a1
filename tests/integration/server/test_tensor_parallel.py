"""A tensor-parallel engine beside a trainer of several ranks, as a colocated job has them: each part of the engine, and each
rank but the first, is a process of its own."""

import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server_tools import FAST, LORA, PROMPT, Server, datum, serving, wait_until

from opentinker.client.messages import LossConfig, Minibatch, SamplingParams
from opentinker.config.server import EngineConfig, LoraConfig
from opentinker.errors import EngineError, ServerLostError, WeightSyncError
from opentinker.server.buckets import Bucket, BucketAck, Ledger
from opentinker.server.carriers import SharedCarrier, SharedPayload
from opentinker.server.engine import vllm_adapters, vllm_engine, vllm_ranks
from opentinker.server.engine.base import LoraTensors, WeightAck
from opentinker.server.engine.select import create_engine
from opentinker.server.engine.vllm_engine import VllmEngine
from opentinker.server.state import Parts

BOTH: dict[str, Any] = {"kind": "vllm", "tensor_parallel": 2, "ranks": 2}


@dataclass
class Said:
    """What the parts of the engine said of the updates that they took."""

    acks: list[BucketAck] = field(default_factory=list)
    ends: list[Sequence[WeightAck]] = field(default_factory=list)

    def buckets(self) -> Counter[int]:
        """How many each part acknowledged."""
        return Counter(ack.rank for ack in self.acks)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Said:
    noted = Said()
    acknowledge, close = Ledger.acknowledge, Ledger.close

    def note(ledger: Ledger, bucket: Bucket, acks: Sequence[BucketAck]) -> None:
        noted.acks.extend(acks)
        acknowledge(ledger, bucket, acks)

    def note_end(ledger: Ledger, acks: Sequence[WeightAck]) -> WeightAck:
        noted.ends.append(acks)
        return close(ledger, acks)

    monkeypatch.setattr(Ledger, "acknowledge", note)
    monkeypatch.setattr(Ledger, "close", note_end)
    return noted


def small_buckets(parts: Parts) -> Parts:
    """Also a tiny model then has several."""
    assert isinstance(parts.engine, VllmEngine)
    assert parts.engine._updates is not None
    parts.engine._updates._bucket_bytes = 50_000
    return parts


async def train(server: Server, version: int, lora: LoraConfig | None) -> None:
    """A step, after which both sides compute the same, under the next version, and other than before."""
    before = await server.engine_logprobs()
    trained = await server.client.train_step(
        [datum()] * 3, [Minibatch(indices=(0, 1, 2))], LossConfig(name="cross_entropy"), FAST
    )
    assert trained["version"] == version
    assert trained["publish"]["changed"]
    sampled = await server.client.sample(PROMPT, SamplingParams(max_tokens=8, seed=version))
    assert sampled.samples[0].versions == ((version, 8),)
    engine = await server.engine_logprobs()
    assert np.abs(await server.logprobs() - engine).mean() < 1e-4
    assert engine.sum() > before.sum(), "what was rewarded is likelier now"


def processes(server: Server) -> list[int]:
    """The parts of the engine, and the ranks of the trainer beside the first."""
    engine: Any = server.parts.engine
    trainer: Any = server.parts.training
    return [*(worker.proc.pid for worker in engine._engine.model_executor.workers), *trainer.pids]


def gone(pids: Sequence[int]) -> Callable[[], bool]:
    def check() -> bool:
        states = [Path(f"/proc/{pid}/stat") for pid in pids]
        return not any(stat.exists() and ") Z " not in stat.read_text() for stat in states)

    return check


async def test_both_parts_take_full_weights_bucket_by_bucket_and_a_changed_one_is_found(
    tiny_model_dir: Path, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tiny_model_dir, tmp_path, change=small_buckets, **BOTH) as server:
        pids = processes(server)
        assert len(pids) == 3
        for version in (1, 2):
            said.acks.clear()
            await train(server, version, None)
            buckets = said.buckets()
            assert buckets[0] == buckets[1] > 1
            sent = server.worker._state.hosted("p").digests
            for rank in range(2):
                assert {n: d for ack in said.acks if ack.rank == rank for n, d in ack.digests.items()} == sent
                assert said.ends[-1][rank].digests == sent
                assert not said.ends[-1][rank].missing

        def changed(carrier: SharedCarrier, nbytes: int) -> SharedPayload:
            carrier.room(nbytes)[-1] ^= 1
            return payload(carrier, nbytes)

        payload = SharedCarrier.payload
        monkeypatch.setattr(SharedCarrier, "payload", changed)
        with pytest.raises(WeightSyncError, match=r"engine rank 0 got '.*' changed, in bucket 0 of trainer rank 0"):
            await server.client.publish()
        with pytest.raises(WeightSyncError, match="changed, in bucket 0"):
            await server.client.sample(PROMPT, SamplingParams(max_tokens=2))
    wait_until(gone(pids))


async def test_both_parts_serve_versions_of_an_adapter_and_one_that_dies_costs_the_server(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    async with serving(tiny_model_dir, tmp_path, lora=LORA, lora_serving="adapter", **BOTH) as server:
        pids = processes(server)
        for version in (1, 2):
            await train(server, version, LORA)
        older = await server.client.sample(PROMPT, SamplingParams(max_tokens=2), version=1)
        assert older.samples[0].versions == ((1, 2),)
        os.kill(pids[1], signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(ServerLostError, match=rf"rank 1 of 2 of the engine \(pid {pids[1]}\) was killed by SIGKILL"):
                await server.client.sample(PROMPT, SamplingParams(max_tokens=2))
    wait_until(gone(pids))


async def test_an_adapter_that_one_part_does_not_take_leaves_nothing_on_the_other(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_the_first(worker: Any, adapter: LoraTensors, number: int) -> WeightAck:
        if worker.rank == 1:
            raise EngineError("this part has no room")
        return vllm_adapters.add_adapter(worker, adapter, number)

    async with serving(tiny_model_dir, tmp_path, lora=LORA, lora_serving="adapter", **(BOTH | {"ranks": 1})) as server:
        with monkeypatch.context() as patch:
            patch.setattr(vllm_engine, "add_adapter", by_the_first)
            for _ in range(3):  # as often as there are slots, and once more
                with pytest.raises(EngineError, match="this part has no room"):
                    await server.client.publish()
        assert (await server.client.publish())["version"] == 4
        await train(server, 5, LORA)


def test_a_part_that_fails_at_its_start_is_a_clear_error(tiny_model_dir: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"")
    config = EngineConfig(kind="vllm", max_model_len=128, cache_gib=0.02, tensor_parallel=2)
    with pytest.raises(EngineError, match="vLLM cannot start") as caught:
        create_engine(folder, config, "float32", lora=None, stop_token_ids=(2,))
    assert "opentinker logs JOB --server" in caught.value.hint


async def test_a_part_that_hangs_while_it_takes_an_adapter_costs_the_server(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tiny_model_dir, tmp_path, lora=LORA, lora_serving="adapter", **(BOTH | {"ranks": 1})) as server:
        engine: Any = server.parts.engine
        pids = [worker.proc.pid for worker in engine._engine.model_executor.workers]
        monkeypatch.setattr(vllm_ranks, "CALL_S", 2.0)
        os.kill(pids[1], signal.SIGSTOP)
        for _ in range(2):
            with pytest.raises(ServerLostError, match="2 ranks of the engine failed: no answer to 'add_adapter' within 2 s"):
                await server.client.publish()
    wait_until(gone(pids))
