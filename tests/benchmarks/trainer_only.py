"""What the trainer alone does: tokens and floating-point operations per second, and memory, without engine, server or Ray.

Usage: python tests/benchmarks/trainer_only.py MODEL_DIR [REPEATS] [LAYERS]
       python tests/benchmarks/trainer_only.py MODEL_DIR memory TOKENS {again|keep} [LAYERS]
The second measures the memory of one pass, as the first does in processes of its own. LAYERS: of the model whose memory is
measured, which has random weights; by default as many as the model has.

Shape: 4 prompts of 96 tokens x 8 completions of 32, loss on the completions, bf16 weights, full parameters, one forward and
backward pass over all of it:
  shared    the product: packs in which each prompt is computed once
  prefix    the same, and the prompts have their first 64 tokens in common
  compiled  as shared, with trainer.compile; what that took at first is printed before
  packed    the product with prompts that all differ: packs, no padding, nothing shared
  padded    plain transformers: sequences padded to the longest, logits of all positions, micro-batches of 8

tokens/s counts the tokens of the data (prompt and completion of each sequence), however often they were computed. FLOP/s counts
what was computed, 6 per token and weight of a matrix, without attention. The ceiling is a large bf16 matrix product in the same
process. Then the peak memory of a pass over one sequence, beside weights, gradients and optimizer state, with and without
activation checkpointing. Times are for comparison within one run only; where something else runs on the machine, the ratio by
processor time says more than the one by the clock.
"""

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from opentinker.client.messages import Datum, LossConfig, PolicySpec, TokenChunk
from opentinker.config.server import TrainerConfig
from opentinker.server.trainer.packing import pack_data
from opentinker.server.trainer.trainer import TorchTrainer

GROUPS, SIZE, PROMPT, COMPLETION = 4, 8, 96, 32
COMMON = 64
PACK_TOKENS = TrainerConfig().pack_tokens
LOSS = LossConfig(name="cross_entropy")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_data(vocabulary: int, *, shared: bool, common: int = 0) -> list[Datum]:
    rng = np.random.default_rng(0)
    data = []
    beginning = rng.integers(3, vocabulary, common)
    for _ in range(GROUPS):
        prompt = np.concatenate([beginning, rng.integers(3, vocabulary, PROMPT - common)])
        for _ in range(SIZE):
            own = prompt if shared else rng.integers(3, vocabulary, PROMPT)
            tokens = np.concatenate([own, rng.integers(3, vocabulary, COMPLETION)]).astype(np.int32)
            weights = (np.arange(len(tokens) - 1) >= PROMPT - 1).astype(np.float32)
            data.append(Datum((TokenChunk(tokens[:-1]),), tokens[1:], {"weights": weights}))
    return data


def peak_of(run: Callable[[], object]) -> int:
    """Bytes that a pass adds to the process's (or the device's) peak."""
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew at what is resident now
    before = resident("VmRSS")
    run()
    return max(resident("VmHWM") - before, 0)


def resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def ceiling() -> float:
    """FLOP/s of a bf16 matrix product."""
    size = 8192 if DEVICE == "cuda" else 1536
    a, b = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    a @ b
    return 2.0 * size**3 / min(seconds(lambda: a @ b) for _ in range(5))


def product(model_dir: Path, **config: Any) -> TorchTrainer:
    trainer = TorchTrainer(model_dir, TrainerConfig.model_validate(config), device=DEVICE)
    trainer.create_policy("p", PolicySpec())
    return trainer


def trained(trainer: TorchTrainer, data: list[Datum]) -> Callable[[], object]:
    def run() -> None:
        trainer.forward_backward("p", data, LOSS, 1e-3)
        trainer._policies["p"].optimizer.clear_gradients()

    return run


def padded(model: Any, data: list[Datum]) -> Callable[[], object]:
    def run() -> None:
        for start in range(0, len(data), SIZE):
            part = data[start : start + SIZE]
            longest = max(len(d) for d in part)
            tokens, targets = torch.zeros(2, len(part), longest, dtype=torch.int64, device=DEVICE)
            weights = torch.zeros(len(part), longest, device=DEVICE)
            mask = torch.zeros(len(part), longest, dtype=torch.int64, device=DEVICE)
            for row, datum in enumerate(part):
                tokens[row, : len(datum)] = torch.from_numpy(datum.tokens.astype(np.int64))
                targets[row, : len(datum)] = torch.from_numpy(datum.targets.astype(np.int64))
                weights[row, : len(datum)] = torch.from_numpy(datum.weights)
                mask[row, : len(datum)] = 1
            logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
            logprobs = torch.log_softmax(logits.float(), -1).gather(2, targets[..., None])[..., 0]
            (-1e-3 * (logprobs * weights).sum()).backward()
        for parameter in model.parameters():
            parameter.grad = None

    return run


def speed(model_dir: Path, repeats: int) -> None:
    trainer = product(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).to(DEVICE)
    text = model.config.get_text_config()
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name)
    head = text.vocab_size * text.hidden_size
    shared, apart = (make_data(text.vocab_size, shared=s) for s in (True, False))
    alike = make_data(text.vocab_size, shared=True, common=COMMON)
    compiled = trained(product(model_dir, compile=True), shared)
    print(f"compiled in {seconds(compiled):.0f} s", flush=True)
    sizes = {
        name: (sum(len(pack) for pack in packs), sum(len(pack.rows_N) for pack in packs))
        for name, packs in (
            ("shared", pack_data(shared, PACK_TOKENS)),
            ("prefix", pack_data(alike, PACK_TOKENS)),
            ("compiled", pack_data(shared, PACK_TOKENS)),
            ("packed", pack_data(apart, PACK_TOKENS)),
        )
    }
    whole = len(shared) * max(len(d) for d in shared)
    sizes["padded"] = (whole, whole)  # logits of every position
    runs = {
        "shared": trained(trainer, shared),
        "prefix": trained(trainer, alike),
        "compiled": compiled,
        "packed": trained(trainer, apart),
        "padded": padded(model, shared),
    }
    peaks = {}
    for name, run in runs.items():
        run()
        peaks[name] = peak_of(run)
    taken: dict[str, list[float]] = {name: [] for name in runs}
    processor: dict[str, list[float]] = {name: [] for name in runs}
    most = []
    for _ in range(repeats):  # in turn, so that whatever else runs slows all alike
        most.append(ceiling())
        for name, run in runs.items():
            before = time.process_time()
            taken[name].append(seconds(run))
            processor[name].append(time.process_time() - before)
    top = statistics.median(most)
    print(f"device {DEVICE} threads {torch.get_num_threads()} ceiling {top / 1e12:.3f} TFLOP/s (bf16 matrix product)")
    tokens = sum(len(d) for d in shared)
    slowest, busiest = statistics.median(taken["padded"]), statistics.median(processor["padded"])
    for name, (rows, targets) in sizes.items():
        median = statistics.median(taken[name])
        flops = 6.0 * (matrices * rows + head * targets) / median
        print(
            f"{name:8} tokens/s {tokens / median:8.0f}  computed tokens {rows:6}  TFLOP/s {flops / 1e12:.3f} "
            f"({flops / top:4.0%} of ceiling)  peak {peaks[name] / 2**20:6.0f} MiB  {slowest / median:.2f}x padded, "
            f"{busiest / statistics.median(processor[name]):.2f}x by processor time",
            flush=True,
        )


def memory(model_dir: Path, tokens: int, again: bool, layers: int | None) -> None:
    """Print the peak of one pass over one sequence, as JSON."""
    config = AutoConfig.from_pretrained(model_dir)
    with tempfile.TemporaryDirectory() as folder:
        config.max_position_embeddings = max(config.max_position_embeddings, tokens + 1)
        if layers is not None:
            config.num_hidden_layers = layers
            if getattr(config, "layer_types", None):
                config.layer_types = config.layer_types[:layers]
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        trainer = product(Path(folder), activation_checkpointing=again, pack_tokens=1 << 20)
    rng = np.random.default_rng(0)

    def data(length: int) -> list[Datum]:
        ids = rng.integers(3, config.vocab_size, length + 1).astype(np.int32)
        return [Datum((TokenChunk(ids[:-1]),), ids[1:], {"weights": np.ones(length, np.float32)})]

    trained(trainer, data(64))()  # the gradients' buffers
    run = trained(trainer, data(tokens))
    result = {"tokens": tokens, "again": again, "layers": config.num_hidden_layers, "vocabulary": config.vocab_size}
    result |= {
        "peak_mib": round(peak_of(run) / 2**20),
        "rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }
    print(json.dumps(result))


def main(model_dir: str, repeats: int = 3, layers: int | None = None) -> None:
    speed(Path(model_dir), repeats)
    for tokens in (4096, 16384):
        for kept in ("keep", "again"):
            command = [sys.executable, __file__, model_dir, "memory", str(tokens), kept]
            command += [] if layers is None else [str(layers)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                print(f"{tokens} tokens, {kept}: {done.stderr.strip().splitlines()[-1]}")
                continue
            row = json.loads(done.stdout.splitlines()[-1])
            logits = 4 * tokens * row["vocabulary"] / 2**20
            how = "layers computed again" if row["again"] else "everything kept"
            print(
                f"{tokens:6} tokens, {row['layers']} layers, {how:21}: peak {row['peak_mib']:6} MiB beside weights and state "
                f"(float32 logits alone would be {logits:.0f} MiB)",
                flush=True,
            )


if __name__ == "__main__":
    if len(sys.argv) > 2 and sys.argv[2] == "memory":
        memory(Path(sys.argv[1]), int(sys.argv[3]), sys.argv[4] == "again", int(sys.argv[5]) if len(sys.argv) > 5 else None)
    else:
        main(sys.argv[1], *(int(argument) for argument in sys.argv[2:4]))
