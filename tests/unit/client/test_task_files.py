"""Files of tasks travel with a submitted job, under names that its driver finds again."""

import io
import zipfile
from pathlib import Path

import pytest

from opentinker.client.submission import prepare
from opentinker.config.job import RLJobConfig
from opentinker.errors import ConfigError

OWN = """
import opentinker as ot

class Own(ot.Environment):
    task_columns = ("question",)

    def reset(self, task):
        return task["question"]

    def step(self, action):
        return ot.StepResult(done=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "t.jsonl").write_text('{"question": "why?"}\n')
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "own.py").write_text(OWN)
    (tmp_path / "code" / "t.jsonl").write_text('{"answer": "because"}\n')
    return tmp_path


def config(folder: Path, environment: str, **tasks: str) -> Path:
    lines = ["base_model: m", "environment:", f"  name: {environment}"]
    lines += [f"  {field}: {{name: {name}}}" for field, name in tasks.items()]
    (folder / "job.yaml").write_text("\n".join(lines))
    return folder / "job.yaml"


def names(code: bytes | None) -> list[str]:
    assert code is not None
    return zipfile.ZipFile(io.BytesIO(code)).namelist()


def test_with_a_built_in_environment_the_files_alone_travel(folder: Path) -> None:
    sent = prepare(config(folder, "arithmetic", train_tasks="data/t.jsonl", held_out_tasks="data/t.jsonl"))
    assert isinstance(sent.config, RLJobConfig)
    assert sent.config.environment.train_tasks is not None
    assert sent.config.environment.train_tasks.name == "train_tasks/t.jsonl"
    assert names(sent.code()) == ["held_out_tasks/t.jsonl", "train_tasks/t.jsonl"]


def test_a_dataset_by_name_stays_what_it_is_and_nothing_travels(folder: Path) -> None:
    sent = prepare(config(folder, "arithmetic", train_tasks="openai/gsm8k"))
    assert isinstance(sent.config, RLJobConfig)
    assert sent.config.environment.train_tasks is not None
    assert sent.config.environment.train_tasks.name == "openai/gsm8k"
    assert sent.code() is None


def test_what_cannot_work_is_refused_before_it_waits_in_a_queue(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"held_out_tasks: there is no file data/no.csv .looked in "):
        prepare(config(folder, "arithmetic", held_out_tasks="data/no.csv"))
    with pytest.raises(ConfigError, match=r"data/t.jsonl is not in the environment's folder"):
        prepare(config(folder, "code/own.py:Own", train_tasks="data/t.jsonl"))
    with pytest.raises(ConfigError, match=r"no column 'question': they have answer"):
        prepare(config(folder, "code/own.py:Own", train_tasks="t.jsonl"))
    (folder / "code" / "t.jsonl").write_text('{"question": "?"}\n')
    sent = prepare(config(folder, "code/own.py:Own", train_tasks="t.jsonl"))
    assert names(sent.code()) == ["own.py", "t.jsonl"]
