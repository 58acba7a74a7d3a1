"""Preference training: steps follow each other, the reference is the policy as the run begins, and what is measured is true."""

import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import opentinker as ot
from opentinker.client.messages import AdamParams, Datum, LossConfig, Minibatch
from opentinker.config.job import InteractiveJobConfig, PreferenceJobConfig
from opentinker.errors import CheckpointError, ConfigError
from opentinker.training.pair_rewards import score_pairs
from opentinker.training.preference import PreferenceLoop
from opentinker.training.preference_report import render_preference_report, summarize_preference
from opentinker.training.recorder import Recorder
from opentinker.training.references import FILE


class Bytes:
    """A policy of one distribution over bytes, and a reward model of one score for each; both really learn from pairs."""

    def __init__(self, files: dict[str, bytes], start: float = 0.0) -> None:
        self.files = files
        self.logits = np.zeros(300)
        self.logits[70] = start
        self.version = 0
        self.calls: list[str] = []
        self.batches: list[list[list[int]]] = []
        self.references: list[list[float]] = []

    async def info(self) -> dict[str, Any]:
        return {"stop_token_ids": [0], "max_model_len": 120}

    async def tokenizer_files(self) -> dict[str, bytes]:
        return self.files

    async def forward(self, data: Sequence[Datum], *, compute: Any, temperature: float) -> dict[str, list[np.ndarray]]:
        self.calls.append(f"forward {' '.join(compute)} of {len(data)}")
        tables = {"logprobs": _log_softmax(self.logits), "reference_logprobs": np.full(300, -np.log(300))}
        return {
            name: [
                (
                    _counts(d) @ self.logits * np.ones(len(d)) if name == "values" else tables[name][d.targets] * d.weights
                ).astype(np.float32)
                for d in data
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
        publish: bool = True,
    ) -> dict[str, Any]:
        assert not publish
        [minibatch] = minibatches
        assert minibatch.indices == tuple(range(len(data)))
        assert minibatch.factor == pytest.approx(2 / len(data))
        self.batches.append([d.tokens.tolist() for d in data])
        settings: Any = {"dpo": ot.DPO(beta=loss.beta), "ipo": ot.IPO(beta=loss.beta), "bradley_terry": ot.BradleyTerry()}
        self.references.append([float(d.arrays.get("reference_logprobs", np.zeros(1)).sum()) for d in data])
        scored = loss.name == "bradley_terry"
        outputs = (await self.forward(data, compute=["values" if scored else "logprobs"], temperature=1.0)).popitem()[1]
        scores = score_pairs(settings[loss.name], data, outputs)
        pull = 1 / (1 + np.exp(scores.margins))
        gradient = np.zeros(300)
        for pair, strength in enumerate(pull):
            chosen, rejected = data[2 * pair], data[2 * pair + 1]
            gradient += strength * (_counts(chosen) - _counts(rejected))
        self.logits += optimizer.learning_rate * minibatch.factor * gradient
        sums = {"correct_sum": scores.correct.sum(), "margin_sum": scores.margins.sum(), "pairs": len(data) / 2}
        rewards = {"chosen_reward_sum": scores.chosen.sum(), "rejected_reward_sum": scores.rejected.sum()}
        report = {"loss": float(scores.loss.mean()), "metrics": sums | rewards, "grad_norm": float(np.linalg.norm(gradient))}
        return {"minibatches": [report], "publish": None}

    async def publish(self, mode: str = "drain") -> dict[str, Any]:
        self.version += 1
        self.calls.append("publish")
        return {"version": self.version}

    async def save(self, name: str, **_: Any) -> dict[str, Any]:
        self.calls.append(f"save {name}@{self.version}")
        return {"path": f"/checkpoints/{name}", "version": self.version}

    async def load(self, name: str) -> dict[str, Any]:
        self.calls.append(f"load {name}")
        return {}

    def trained(self) -> list[str]:
        return [call for call in self.calls if not call.startswith("forward")]


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum())


def _counts(datum: Datum) -> np.ndarray:
    return np.bincount(datum.targets[datum.weights > 0], minlength=300).astype(float)


@pytest.fixture
def fresh(policy: Any) -> Bytes:
    return Bytes(policy.files)


def write(folder: Path, count: int = 12, name: str = "pairs.jsonl") -> Path:
    rows = [{"prompt": f"q{i}", "chosen": "a" * (1 + i % 3), "rejected": "b" * (1 + i % 2)} for i in range(count)]
    (folder / name).write_text("\n".join(map(json.dumps, rows)))
    return folder


def job(**changes: Any) -> PreferenceJobConfig:
    sections: dict[str, Any] = {
        "base_model": "bytes",
        "data": {"train": {"name": "pairs.jsonl"}, "held_out": {"name": "pairs.jsonl", "limit": 6}},
        "training": {"steps": 20, "batch_size": 4, "optimizer": {"learning_rate": 1.0}},
    }
    return PreferenceJobConfig.model_validate(sections | changes)


async def start(
    policy: Bytes, folder: Path, config: PreferenceJobConfig | None = None, name: str = "run", **kept: Any
) -> PreferenceLoop:
    config = config or job()
    fields = config.model_dump(mode="json")
    recorder = Recorder(folder / name, fields, summarize=summarize_preference, render=render_preference_report, **kept)
    return await PreferenceLoop.connect(config, policy, recorder, folder)


@pytest.mark.parametrize("kind", ["dpo", "ipo", "bradley_terry"])
async def test_held_out_pairs_come_to_be_told_apart(fresh: Bytes, tmp_path: Path, kind: str) -> None:
    loop = await start(fresh, write(tmp_path), job(loss={"kind": kind}))
    await loop.run(20)
    summary = loop._recorder.finish(wall_s=1.0, checkpoint=None)
    rows = [r for r in loop._recorder.rows if r["kind"] == "preference_evaluation"]
    assert [r["step"] for r in rows] == [0, 20]
    if kind != "bradley_terry":
        assert (summary["accuracy_before"], summary["margin_before"]) == (0.5, 0.0), "it is its own reference"
    if kind == "dpo":
        assert summary["loss_before"] == pytest.approx(np.log(2))
    assert summary["accuracy_after"] == 1.0
    assert summary["margin_after"] > 0
    assert summary["loss_after"] < summary["loss_before"]
    assert (summary["steps"], summary["pairs_trained"], summary["accuracy_ci"]) == (20, 80, 0.0)
    assert fresh.version == (0 if kind == "bradley_terry" else 1), "a reward model is not published: nothing samples from it"
    page = (tmp_path / "run" / "report.html").read_text()
    assert "held-out accuracy" in page
    assert {"dpo": "DPO · bytes", "ipo": "IPO · bytes", "bradley_terry": "reward model · bytes"}[kind] in page


async def test_with_learning_rate_zero_nothing_is_learnt(fresh: Bytes, tmp_path: Path) -> None:
    config = job(training={"steps": 3, "batch_size": 4, "optimizer": {"learning_rate": 0.0}})
    loop = await start(fresh, write(tmp_path), config)
    await loop.run(3)
    summary = loop._recorder.finish(wall_s=1.0, checkpoint=None)
    assert (summary["accuracy_after"], summary["margin_after"]) == (0.5, 0.0)


async def test_the_base_model_is_asked_in_each_step_where_it_is_what_the_run_begins_with(fresh: Bytes, tmp_path: Path) -> None:
    loop = await start(fresh, write(tmp_path))
    await loop.run(2)
    assert not (tmp_path / "run" / FILE).exists()
    asked = [call for call in fresh.calls if call.startswith("forward reference_logprobs of")]
    assert asked == ["forward reference_logprobs of 12", *["forward reference_logprobs of 8"] * 2]
    tokens = np.array(fresh.references) / -np.log(300)
    np.testing.assert_allclose(tokens, np.round(tokens), rtol=1e-5, err_msg="not the base model's logprobs of whole answers")
    assert tokens.min() == pytest.approx(2), "a letter and the end of the turn"


@pytest.mark.parametrize(
    "changes", [{}, {"start_from": "job-1/final"}, {"loss": {"kind": "dpo", "reference": "precomputed"}}], ids=str
)
async def test_what_was_trained_before_is_its_own_reference_to_the_end(policy: Any, tmp_path: Path, changes: Any) -> None:
    taught = Bytes(policy.files, start=3.0)
    before = _log_softmax(taught.logits.copy())
    loop = await start(taught, write(tmp_path), job(**changes))
    await loop.run(20)
    first = next(r for r in loop._recorder.rows if r["kind"] == "preference_evaluation")
    assert (first["accuracy"], first["margin"]) == (0.5, 0.0)
    reference = next(r for r in loop._recorder.rows if r["kind"] == "preference_reference")
    assert reference["answers"] == 24
    calls = [call for call in taught.calls if "reference_logprobs" in call]
    assert calls in ([], ["forward logprobs reference_logprobs of 4"])
    assert not np.allclose(_log_softmax(taught.logits), before)
    data = loop._train.render(loop._train.rows.first(1)).data
    assert loop._references is not None
    for datum in await loop._references.attach(data):
        np.testing.assert_allclose(
            datum.arrays["reference_logprobs"], before[datum.targets] * datum.weights, rtol=1e-6, err_msg="not as it began"
        )


async def test_only_what_the_run_will_see_is_computed_ahead(policy: Any, tmp_path: Path) -> None:
    config = job(training={"steps": 2, "batch_size": 2}, data={"train": {"name": "pairs.jsonl"}})
    loop = await start(Bytes(policy.files, start=3.0), write(tmp_path), config)
    await loop.run(2)
    assert loop._recorder.rows[0]["answers"] == 8


async def test_a_resumed_run_goes_on_with_the_next_rows_and_the_same_reference(policy: Any, tmp_path: Path) -> None:
    config = job(start_from="job-1/final", evaluation={"at_start": False, "at_end": False})
    whole = Bytes(policy.files, start=3.0)
    await (await start(whole, write(tmp_path), config)).run(6)
    broken = Bytes(policy.files, start=3.0)
    await (await start(broken, tmp_path, config, "again")).run(2)
    resumed = await start(broken, tmp_path, config, "again", resume_at=2)
    await resumed.resume(2)
    await resumed.run(4)
    assert broken.batches == whole.batches
    assert broken.references == whole.references
    assert broken.trained() == ["publish", "load step-000002", "publish"]


@pytest.mark.parametrize("damage", ["gone", "cut", "changed"])
async def test_a_run_that_has_lost_its_reference_does_not_go_on_without(policy: Any, tmp_path: Path, damage: str) -> None:
    config = job(start_from="job-1/final", evaluation={"at_start": False, "at_end": False})
    taught = Bytes(policy.files, start=3.0)
    await (await start(taught, write(tmp_path), config)).run(2)
    file = tmp_path / "run" / FILE
    if damage == "gone":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:200])
    else:
        (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "new", "chosen": "a", "rejected": "b"}))
    resumed = await start(taught, tmp_path, config, resume_at=2)
    await resumed.resume(2)
    with pytest.raises(CheckpointError, match="reference logprobs"):
        await resumed.run(4)
    assert len(taught.batches) == 2


async def test_a_checkpoint_is_published_first_but_for_a_reward_model(fresh: Bytes, tmp_path: Path) -> None:
    training = {"batch_size": 4, "save_every": 2}
    loop = await start(fresh, write(tmp_path), job(training=training))
    await loop.run(4)
    await loop.save("final")
    assert fresh.trained() == ["publish", "save step-000002@1", "publish", "save step-000004@2", "save final@2"]
    other = Bytes(fresh.files)
    scoring = await start(other, tmp_path, job(training=training, loss={"kind": "bradley_terry"}), "scoring")
    await scoring.run(4)
    await scoring.save("final")
    assert other.trained() == ["save step-000002@0", "save step-000004@0", "save final@0"]


async def test_pairs_that_are_all_too_long_end_the_job(fresh: Bytes, tmp_path: Path) -> None:
    row = {"prompt": "q" * 200, "chosen": "a", "rejected": "b"}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row))
    loop = await start(fresh, tmp_path, job(data={"train": {"name": "pairs.jsonl"}}))
    with pytest.raises(ConfigError, match="all examples of 3 steps in a row are longer"):
        await loop.run(5)
    held = await start(fresh, tmp_path, name="held")
    with pytest.raises(ConfigError, match="all 1 held-out pairs are too long or unusable"):
        await held.run(5)


class MemoryJob:
    """As much of a `Job` as a trainer uses."""

    def __init__(self, policy: Bytes, head: str = "lm", number: int = 1) -> None:
        from opentinker.client.sync import SyncRunner

        self.id, self.record = f"job-{number}", {"owner": "ann"}
        self.config = InteractiveJobConfig.model_validate({"base_model": "bytes", "head": head})
        self._sync, self._policy = SyncRunner(), policy
        self.closers: list[Callable[[], Awaitable[None]]] = []

    def name_checkpoints(self, addresses: list[str]) -> list[str]:
        return addresses

    def at_end(self, close: Callable[[], Awaitable[None]]) -> None:
        self.closers.append(close)

    def run(self, work: Any) -> Any:
        async def call() -> Any:
            return await work(self._policy)

        return self._sync.run(call())


def test_from_python_rows_train_a_policy_that_goes_on_learning(policy: Any, tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i}", "chosen": "a", "rejected": "b"} for i in range(8)]
    taught = Bytes(policy.files, start=3.0)
    trainer = ot.PreferenceTrainer(
        MemoryJob(taught),  # type: ignore[arg-type]
        rows,
        rows[:2],
        loss=ot.IPO(beta=0.2),
        batch_size=2,
        optimizer=AdamParams(learning_rate=1.0),
        run_dir=tmp_path / "run",
        progress=False,
    )
    first = trainer.fit(steps=2)
    second = trainer.fit(steps=4)
    assert (first["accuracy_before"], second["steps"], second["accuracy_after"]) == (0.5, 6, 1.0)
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == second


def test_a_run_from_python_goes_on_with_the_reference_that_it_began_with(policy: Any, tmp_path: Path) -> None:
    """Its policy had learnt something before, which no config says: the base model is not its reference."""
    rows = [{"prompt": f"q{i}", "chosen": "a", "rejected": "b"} for i in range(8)]
    taught = Bytes(policy.files, start=3.0)

    def trainer(number: int, rows: Any = rows, **options: Any) -> ot.PreferenceTrainer:
        job = MemoryJob(taught, number=number)
        return ot.PreferenceTrainer(job, rows, batch_size=2, save_every=1, progress=False, **options)  # type: ignore[arg-type]

    trainer(1, run_dir=tmp_path / "whole").fit(4)
    whole, taught = taught, Bytes(policy.files, start=3.0)
    trainer(1, run_dir=tmp_path / "run").fit(2)
    with pytest.raises(ConfigError, match=r"^train: the run in .* was given 8 rows, sha256 .*, and now it is 7 rows"):
        trainer(2, rows[:7], run_dir=tmp_path / "run", resume=True)
    assert trainer(2, run_dir=tmp_path / "run", resume=True).fit(4)["steps"] == 4
    assert "load ann/job-1/step-000002@2" in taught.calls
    assert (taught.batches, taught.references) == (whole.batches, whole.references)
    (tmp_path / "run" / FILE).unlink()
    with pytest.raises(CheckpointError, match="reference logprobs"):
        trainer(3, run_dir=tmp_path / "run", resume=True).fit(6)


def test_a_loss_that_the_jobs_head_cannot_have_is_refused(fresh: Bytes) -> None:
    with pytest.raises(ConfigError, match="'bradley_terry' trains a policy with head 'scalar'") as caught:
        ot.PreferenceTrainer(MemoryJob(fresh), [], loss=ot.BradleyTerry())  # type: ignore[arg-type]
    assert "head='scalar'" in caught.value.hint
