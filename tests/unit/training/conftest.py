"""A policy that lives in memory and really learns: ten logits, one per digit, trained by policy gradient."""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from opentinker.client.messages import (
    AdamParams,
    CriticStep,
    Datum,
    FloatArray,
    LossConfig,
    Minibatch,
    Sample,
    SampleResult,
    SamplingParams,
    TokenScore,
)
from opentinker.config.job import RLJobConfig
from opentinker.env.environment import Action, Environment, StepResult
from opentinker.training.recorder import Recorder

sys.path.insert(0, str(Path(__file__).parents[1] / "multiagent"))  # coordinators for tests are there
sys.path.insert(0, str(Path(__file__).parent))
STOP = 0
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def tokenizer_files() -> dict[str, bytes]:
    """A byte-level tokenizer with one token per byte, and a ChatML-like template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|end|>": STOP, "<|start|>": 1, **{letter: i + 2 for i, letter in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.add_special_tokens(["<|end|>", "<|start|>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    config = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    return {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}


class BanditPolicy:
    """Says one digit. `calls` records what the loop asked for."""

    policy = "own"

    def __init__(self) -> None:
        self.files = tokenizer_files()
        tokenizer = Tokenizer.from_str(self.files["tokenizer.json"].decode())
        self.digits = [tokenizer.token_to_id(str(d)) for d in range(10)]
        self.logits = np.zeros(10)
        self.version = 0
        self.calls: list[str] = []
        self.batches: list[tuple[Sequence[Datum], Sequence[Minibatch]]] = []
        self.optimizers: list[AdamParams] = []
        self.losses: list[LossConfig] = []
        self.critics: list[CriticStep] = []
        self.value = 0.0
        """What its critic says of every state."""
        self.broken: Exception | None = None
        self.saved: dict[str, np.ndarray] = {}
        self.drivers: dict[str, Any] = {}
        self.kept: dict[str, int | None] = {}

    async def info(self) -> dict[str, Any]:
        self.calls.append("info")
        if self.broken:
            raise self.broken
        return {"stop_token_ids": [STOP], "max_model_len": 200}

    async def tokenizer_files(self) -> dict[str, bytes]:
        return self.files

    async def sample(self, prompt: Any, params: SamplingParams, *, request_id: str, deadline_s: float) -> SampleResult:
        await asyncio.sleep(0)
        if self.broken:
            raise self.broken
        logprobs = self.logprobs()
        digit = int(np.random.default_rng(params.seed).choice(10, p=np.exp(logprobs)))
        sample = Sample(
            np.array([self.digits[digit], STOP], np.int32),
            np.array([logprobs[digit], 0.0], np.float32),
            "stop",
            ((self.version, 2),),
        )
        return SampleResult(request_id, (sample,), params)

    async def forward(
        self, data: Sequence[Datum], *, compute: Sequence[TokenScore], temperature: float
    ) -> dict[TokenScore, list[FloatArray]]:
        """Its own logprobs; the reference is a policy that has learnt nothing."""
        self.calls.append(f"forward {' '.join(compute)}")
        tables = {
            "logprobs": self.logprobs(),
            "reference_logprobs": np.full(10, -np.log(10)),
            "values": np.full(10, self.value),
        }
        known = {token: digit for digit, token in enumerate(self.digits)}
        return {
            name: [
                np.array([tables[name][known[t]] if t in known else 0.0 for t in datum.targets], np.float32) * datum.weights
                for datum in data
            ]
            for name in compute
        }

    async def train_step(
        self,
        data: Sequence[Datum],
        minibatches: Sequence[Minibatch],
        loss: LossConfig,
        optimizer: AdamParams,
        *,
        critic: CriticStep | None = None,
        publish: bool = True,
    ) -> dict[str, Any]:
        self.calls.append("train_step")
        if critic is not None:
            self.critics.append(critic)
        self.batches.append((data, minibatches))
        self.optimizers.append(optimizer)
        self.losses.append(loss)
        reports = []
        for minibatch in minibatches:
            gradient, tokens = np.zeros(10), 0.0
            for datum in (data[i] for i in minibatch.indices):
                tokens += float(datum.weights.sum())
                for token, advantage in zip(datum.targets, datum.arrays["advantages"], strict=True):
                    if advantage and token in self.digits:
                        gradient += (
                            minibatch.factor * advantage * (np.eye(10)[self.digits.index(token)] - np.exp(self.logprobs()))
                        )
            report: dict[str, Any] = {}
            if critic is None or not critic.alone:
                self.logits += optimizer.learning_rate * gradient
                metrics = {"tokens": tokens, "mismatch_kl_sum": 0.001 * tokens, "ratio_max": 1.01, "clipped_sum": 0.0}
                report = {"loss": 0.0, "metrics": metrics, "grad_norm": float(np.linalg.norm(gradient))}
            if critic is not None:
                report["critic"] = self.train_critic([data[i] for i in minibatch.indices])
            reports.append(report)
        self.version += publish
        return {"minibatches": reports, "version": self.version, "publish": {"seconds": 0.0} if publish else None}

    def train_critic(self, data: Sequence[Datum]) -> dict[str, Any]:
        returns = np.concatenate([datum.arrays["returns"][datum.weights != 0] for datum in data])
        loss = float(np.mean((returns - self.value) ** 2) / 2)
        self.value += 0.3 * float(returns.mean() - self.value)
        return {"loss": loss, "metrics": {"tokens": float(len(returns)), "value_clipped_sum": 0.0}, "grad_norm": 1.0}

    async def save(self, name: str, *, driver: Any = None, keep_last: int | None = None) -> dict[str, Any]:
        self.calls.append(f"save {name}")
        self.saved[name] = self.logits.copy()
        self.drivers[name] = driver
        self.kept[name] = keep_last
        return {"path": f"/checkpoints/{name}", "name": name, "version": self.version, "manifest": {}}

    async def load(self, name: str) -> dict[str, Any]:
        self.calls.append(f"load {name}")
        name = name.rpartition("/")[2].partition("@")[0]
        self.logits = self.saved[name].copy()
        self.version += 1
        return {"version": self.version, "driver": self.drivers.get(name)}

    def logprobs(self) -> np.ndarray:
        return self.logits - np.log(np.exp(self.logits).sum())


class Seven(Environment):
    """The right answer is always 7."""

    @classmethod
    def held_out_tasks(cls) -> list[Any]:
        return [{"question": i} for i in range(6)]

    def reset(self, task: Any) -> str:
        return "Which digit do I think of?"

    def step(self, action: Action) -> StepResult:
        exact = float(action.text.strip() == "7")
        return StepResult(reward=exact, done=True, metrics={"exact": exact})


def job_config(**changes: Any) -> RLJobConfig:
    """A small, fast job; `changes` replace whole sections."""
    sections: dict[str, Any] = {
        "base_model": "bandit",
        "environment": {"name": "seven"},
        "algorithm": {"group_size": 8},
        "sampling": {"max_tokens": 4},
        "rollout": {"groups_per_step": 8, "max_turns": 1},
        "evaluation": {"samples_per_task": 8},
        "training": {"optimizer": {"learning_rate": 2.0}},
    }
    return RLJobConfig.model_validate(sections | changes)


@pytest.fixture
def policy() -> BanditPolicy:
    return BanditPolicy()


@pytest.fixture
def seven() -> type[Environment]:
    return Seven


@pytest.fixture
def make_config() -> Any:
    return job_config


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(tmp_path / "run", job_config().model_dump(mode="json"))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes drivers that reach a place without a network."""
    from apart_tools import reach

    return lambda place: reach(monkeypatch, place)


@pytest.fixture
def make_drivers(policy: Any, make_config: Any, tmp_path: Path) -> Any:
    from apart_tools import Digits, Drivers

    return lambda environment=Digits, **changes: Drivers(type(policy), make_config, tmp_path, environment, **changes)
