"""A tensor-parallel engine takes a publish: each rank, a process of its own, acknowledges every bucket with its digests.

Usage: python tests/scenarios/tensor_parallel.py [RANKS]
Builds a tiny model, starts vLLM on so many ranks, sends it other weights and an adapter, and compares its logprobs with the
model's own before and after. About 20 s on two cores; it is no test because each rank takes seconds to start.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

PROMPT = list(range(5, 25))
START_S = 300.0


def own_logprobs(model: Any) -> Any:
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)
    return logits.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0].numpy()


def main(ranks: int = 2) -> None:
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model
    from tiny_model import build_tiny_model
    from transformers import AutoModelForCausalLM

    from opentinker.client.messages import TokenChunk
    from opentinker.config.server import EngineConfig, LoraConfig
    from opentinker.server.buckets import BucketAck, Ledger
    from opentinker.server.engine.base import AdapterId, LoraTensors
    from opentinker.server.engine.host import EngineHost, HostedEngine
    from opentinker.server.engine.links import LocalLink
    from opentinker.server.engine.remote import RemoteEngine
    from opentinker.server.engine.vllm_engine import VllmEngine

    folder = build_tiny_model(Path(tempfile.mkdtemp(prefix="ot-tp-")))
    config = EngineConfig(kind="vllm", max_model_len=256, max_num_seqs=8, cache_gib=0.1, tensor_parallel=ranks)
    host = EngineHost(lambda: HostedEngine(VllmEngine(folder, config, "float32", lora=LoraConfig(rank=8))))
    engine = RemoteEngine(LocalLink(host), host.start(START_S), bucket_bytes=50_000)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = (TokenChunk(np.asarray(PROMPT, np.int32)),)
    acknowledged: list[BucketAck] = []
    note = Ledger.acknowledge

    def acknowledge(self: Ledger, bucket: Any, acks: Sequence[BucketAck]) -> None:
        acknowledged.extend(acks)
        note(self, bucket, acks)

    Ledger.acknowledge = acknowledge  # type: ignore[method-assign]
    try:
        first = own_logprobs(model)
        print(f"started on {engine.info.ranks} ranks; largest difference {_difference(engine, prompt, first):.2g}")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
        ack = engine.update_weights(model.named_parameters(remove_duplicate=False), 1)
        second = own_logprobs(model)
        buckets = {rank: sum(ack.rank == rank for ack in acknowledged) for rank in range(ranks)}
        print(
            f"published {len(ack.digests)} tensors; buckets acknowledged by each rank: {buckets}; missing: {len(ack.missing)}"
        )
        print(f"largest difference after: {_difference(engine, prompt, second):.2g}; moved by {abs(second - first).max():.2g}")
        assert len(set(buckets.values())) == 1
        assert buckets[0] > 1
        assert not ack.missing
        assert _difference(engine, prompt, second) < 1e-3 < abs(second - first).max()
        adapted = get_peft_model(model, PeftConfig(r=8, lora_alpha=16, target_modules="all-linear"))
        tensors = {}
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.05)
                tensors[name.replace(".default", "")] = parameter.detach()
        at = AdapterId("p", 1)
        ack = engine.update_adapter(LoraTensors(8, 16.0, tuple(adapted.peft_config["default"].target_modules), tensors), at)
        third = own_logprobs(adapted)
        print(f"adapter of {len(tensors)} tensors: largest difference {_difference(engine, prompt, third, at):.2g}")
        assert not ack.missing
        assert _difference(engine, prompt, third, at) < 1e-3
    finally:
        engine.close()
        host.stop()
    print("ok")


def _difference(engine: Any, prompt: Any, own: Any, at: Any = None) -> float:
    return float(abs(engine.prompt_logprobs([prompt], at)[0][1:] - own).max())


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
