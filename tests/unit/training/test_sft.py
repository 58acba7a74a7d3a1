"""Supervised fine-tuning: rows become data, steps follow each other, what cannot be trained on is named."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opentinker.client.messages import AdamParams, Datum, LossConfig, Minibatch
from opentinker.client.submission import prepare
from opentinker.config.job import SFTJobConfig, parse_job
from opentinker.env.adapters.chat import message_of
from opentinker.env.parsing import ToolCall, tool_calls
from opentinker.errors import ConfigError
from opentinker.training.conversations import conversation
from opentinker.training.recorder import Recorder
from opentinker.training.sft import SFTLoop
from opentinker.training.sft_report import render_sft_report, summarize_sft


class Unigram:
    """A policy of one distribution over bytes that cross entropy really trains."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.logits = np.zeros(300)
        self.version = 0
        self.calls: list[str] = []
        self.batches: list[list[list[int]]] = []
        self.rates: list[float] = []

    async def info(self) -> dict[str, Any]:
        return {"stop_token_ids": [0], "max_model_len": 120}

    async def tokenizer_files(self) -> dict[str, bytes]:
        return self.files

    def _logprobs(self) -> np.ndarray:
        return self.logits - np.log(np.exp(self.logits).sum())

    async def forward(self, data: Sequence[Datum], *, compute: Any, temperature: float) -> dict[str, list[np.ndarray]]:
        return {"logprobs": [(self._logprobs()[d.targets] * d.weights).astype(np.float32) for d in data]}

    async def train_step(
        self,
        data: Sequence[Datum],
        minibatches: Sequence[Minibatch],
        loss: LossConfig,
        optimizer: AdamParams,
        *,
        publish: bool = True,
    ) -> dict[str, Any]:
        assert loss.name == "cross_entropy"
        assert not publish
        self.batches.append([d.tokens.tolist() for d in data])
        self.rates.append(optimizer.learning_rate)
        [minibatch] = minibatches
        assert minibatch.factor == pytest.approx(1 / sum(d.weights.sum() for d in data))
        total, gradient = 0.0, np.zeros(300)
        for datum in data:
            for token, weight in zip(datum.targets, datum.weights, strict=True):
                total -= weight * self._logprobs()[token]
                gradient += weight * (np.eye(300)[token] - np.exp(self._logprobs()))
        self.logits += optimizer.learning_rate * minibatch.factor * gradient
        return {"minibatches": [{"loss": total * minibatch.factor, "metrics": {}, "grad_norm": 1.0}], "publish": None}

    async def publish(self, mode: str = "drain") -> dict[str, Any]:
        self.version += 1
        return {"version": self.version}

    async def save(self, name: str, *, driver: Any = None, keep_last: int | None = None) -> dict[str, Any]:
        self.driver = driver
        self.calls.append(f"save {name}@{self.version}")
        return {"path": f"/checkpoints/{name}", "version": self.version}

    async def load(self, name: str) -> dict[str, Any]:
        self.calls.append(f"load {name}")
        return {}


@pytest.fixture
def unigram(policy: Any) -> Unigram:
    return Unigram(policy.files)


def write(folder: Path, count: int = 12, **row: Any) -> Path:
    rows = [row or {"prompt": f"q{i}", "completion": "aab"} for i in range(count)]
    (folder / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def job(**changes: Any) -> SFTJobConfig:
    sections: dict[str, Any] = {
        "base_model": "unigram",
        "data": {"train": {"name": "chat.jsonl"}, "held_out": {"name": "chat.jsonl", "limit": 4}},
        "training": {"batch_size": 4, "optimizer": {"learning_rate": 5.0}},
    }
    return SFTJobConfig.model_validate(sections | changes)


async def start(policy: Unigram, folder: Path, config: SFTJobConfig | None = None, name: str = "run", **kept: Any) -> SFTLoop:
    config = config or job()
    recorder = Recorder(
        folder / name, config.model_dump(mode="json"), summarize=summarize_sft, render=render_sft_report, **kept
    )
    return await SFTLoop.connect(config, policy, recorder, folder)


async def test_the_loss_falls_in_training_and_on_held_out_rows(unigram: Unigram, tmp_path: Path) -> None:
    loop = await start(unigram, write(tmp_path))
    await loop.run(20)
    summary = loop._recorder.finish(wall_s=1.0, checkpoint=None)
    assert summary["loss_before"] == pytest.approx(np.log(300), rel=1e-3)
    assert summary["loss_after"] < 2.0
    assert (summary["steps"], summary["tokens_trained"], summary["dropped"]) == (20, 20 * 4 * 4, 0)
    rows = loop._recorder.rows
    assert [r["step"] for r in rows if r["kind"] == "sft_evaluation"] == [0, 20]
    assert unigram.version == 1, "what was learnt is sampled from afterwards"
    assert rows[1]["epoch"] == pytest.approx(4 / 12)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "held-out loss" in page
    assert "SFT · unigram" in page


async def test_with_learning_rate_zero_nothing_is_learnt(unigram: Unigram, tmp_path: Path) -> None:
    config = job(training={"batch_size": 4, "optimizer": {"learning_rate": 0.0}})
    loop = await start(unigram, write(tmp_path), config)
    await loop.run(5)
    summary = loop._recorder.finish(wall_s=1.0, checkpoint=None)
    assert summary["loss_before"] == summary["loss_after"]


async def test_a_resumed_run_goes_on_with_the_rows_that_come_next(unigram: Unigram, tmp_path: Path) -> None:
    config = job(evaluation={"at_start": False, "at_end": False})
    whole = await start(unigram, write(tmp_path), config)
    await whole.run(6)
    expected, unigram.batches = unigram.batches, []
    first = await start(unigram, tmp_path, config, "again")
    await first.run(2)
    resumed = await start(unigram, tmp_path, config, "again", resume_at=2)
    await resumed.resume(2)
    await resumed.run(4)
    assert unigram.batches == expected
    assert unigram.calls == ["load step-000002"]


async def test_a_checkpoint_is_published_first_so_that_it_has_a_version_of_its_own(unigram: Unigram, tmp_path: Path) -> None:
    config = job(training={"batch_size": 4, "save_every": 2})
    loop = await start(unigram, write(tmp_path), config)
    await loop.run(4)
    await loop.save("final")
    assert unigram.calls == ["save step-000002@1", "save step-000004@2", "save final@2"]


async def test_rows_that_are_too_long_are_left_out_and_counted_or_an_error(unigram: Unigram, tmp_path: Path) -> None:
    write(tmp_path, prompt="q" * 200, completion="a")
    loop = await start(unigram, tmp_path, job(data={"train": {"name": "chat.jsonl"}}))
    with pytest.raises(ConfigError, match="all examples of 3 steps in a row are longer"):
        await loop.run(5)
    assert [r["dropped"] for r in loop._recorder.rows] == [4, 4]
    assert unigram.batches == []
    strict = job(data={"train": {"name": "chat.jsonl"}, "overlong": "error"})
    with pytest.raises(ConfigError, match=r"has \d+ tokens, engine.max_model_len is 120"):
        await (await start(unigram, tmp_path, strict, "strict")).run(1)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"messages": [{"role": "user", "content": "hi"}]}, "no assistant turn to learn"),
        ({"messages": []}, "messages is empty or neither"),
        ({"messages": [{"role": "user", "content": [1]}]}, "content is not a text"),
        ({"messages": [{"role": "assistant", "content": None}]}, "content is not a text"),
        ({"messages": ["hi"]}, "which is no message"),
        ({"prompt": "q", "completion": 3}, "completion is empty or neither"),
        ({"prompt": "q"}, "completion is empty or neither"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "c"}]}]}, "tool call has no name"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "arguments of a call of f are no JSON object",
        ),
    ],
)
async def test_a_row_without_anything_to_learn_is_shown(unigram: Unigram, tmp_path: Path, row: Any, says: str) -> None:
    write(tmp_path, 2)
    with (tmp_path / "chat.jsonl").open("a") as file:
        file.write("\n" + json.dumps(row))
    config = job(data={"train": {"name": "chat.jsonl"}})
    with pytest.raises(ConfigError, match=f"row 3 of chat.jsonl cannot be trained on: .*{says}.*; it is "):
        await start(unigram, tmp_path, config)
    assert unigram.batches == []


async def test_a_template_that_cannot_mark_what_the_assistant_says_trains_nothing(unigram: Unigram, tmp_path: Path) -> None:
    config, good = job(evaluation={"at_start": False, "at_end": False}), unigram.files
    endless = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    before, unigram.files = unigram.logits.copy(), {**good, "chat_template.jinja": endless.encode()}
    with pytest.raises(ConfigError, match=r"cannot mark assistant tokens: .*names its stop tokens.*; it is"):
        await (await start(unigram, write(tmp_path), config)).run(1)
    assert unigram.batches == []
    np.testing.assert_array_equal(unigram.logits, before)
    unigram.files = good
    await (await start(unigram, tmp_path, config, "good")).run(1)
    assert len(unigram.batches) == 1


CALLS = [
    {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": "é\\n"}'}},
    {"function": {"name": "stop", "arguments": {"now": None}}},
]


@pytest.mark.parametrize("content", [None, "", "I add."])
def test_tool_calls_are_learnt_as_the_environments_read_them(content: str | None) -> None:
    turns = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": content, "tool_calls": CALLS, "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "2é"},
        {"role": "assistant", "content": "done"},
    ]
    messages, _, _ = conversation({"messages": turns})
    said = messages[1]["content"]
    assert isinstance(said, str)
    assert said.startswith(content or "<tool_call>")
    assert tool_calls(said).calls == [ToolCall("add", {"a": 2, "b": "é\n"}), ToolCall("stop", {})]
    assert messages[1]["reasoning_content"] == "hm"
    assert messages[2] == {"role": "tool", "content": "2é"}
    assert message_of({**turns[1], "tool_calls": CALLS})["content"] == said, "an adapter shows them alike"
    again = conversation({"messages": [turns[0], {**messages[1], "tool_calls": CALLS}]})[0]
    assert again[1]["content"] == said, "calls that are in the text already are not said twice"


async def test_tool_calls_reach_the_trained_tokens(unigram: Unigram, tmp_path: Path) -> None:
    write(
        tmp_path, messages=[{"role": "user", "content": "go"}, {"role": "assistant", "content": None, "tool_calls": CALLS[1:]}]
    )
    loop = await start(unigram, tmp_path, job(data={"train": {"name": "chat.jsonl"}}))
    rendered = loop._train.render(loop._train.rows.first(1))
    text = loop._train._renderer._renderer.tokenizer.decode(rendered.data[0].targets[rendered.data[0].weights > 0].tolist())
    assert '{"name": "stop", "arguments": {}}' in text


async def test_rows_of_another_shape_are_refused_with_what_they_have(unigram: Unigram, tmp_path: Path) -> None:
    write(tmp_path, question="q", answer="a")
    with pytest.raises(ConfigError, match="have answer, question: neither 'messages' nor 'prompt' and 'completion'"):
        await start(unigram, tmp_path)
    columns = {"prompt": "question", "completion": "answer"}
    await start(unigram, tmp_path, job(data={"train": {"name": "chat.jsonl", "columns": columns}}))


def test_both_shapes_of_rows_are_conversations() -> None:
    user, assistant = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    assert conversation({"messages": [user, assistant]}) == ([user, assistant], 0, [])
    assert conversation({"prompt": "q", "completion": "a"}) == ([user, assistant], 1, [])
    assert conversation({"prompt": [user, assistant, user], "completion": [assistant], "tools": "[]"})[1] == 3


def test_a_submitted_job_takes_its_files_along_and_is_checked_before(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "job.yaml").write_text("kind: sft\nbase_model: m\ndata: {train: {name: chat.jsonl}}\n")
    sent = prepare(tmp_path / "job.yaml")
    assert isinstance(sent.config, SFTJobConfig)
    assert sent.config.data.train.name == "train/chat.jsonl"
    assert list(sent.files) == ["train/chat.jsonl"]
    assert sent.config.default_name() == "chat"
    (tmp_path / "chat.jsonl").write_text('{"text": "hi"}\n')
    with pytest.raises(ConfigError, match="have text: neither"):
        prepare(tmp_path / "job.yaml")
    with pytest.raises(ConfigError, match=r"data.train: there is no file no.jsonl"):
        prepare(tmp_path / "job.yaml", ["data.train.name=no.jsonl"])


def test_the_kind_is_known_and_its_mistakes_are_explained() -> None:
    base = job().model_dump(mode="json")
    assert parse_job(base).driven
    with pytest.raises(ConfigError, match=r"unknown key 'data.trian'.*did you mean 'train'"):
        parse_job({**base, "data": {"trian": {"name": "x"}}})
