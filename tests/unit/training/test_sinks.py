"""Sinks get what a run measures, once, and cannot hurt it. The real packages, offline; where one is missing, it is skipped."""

import importlib.util
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from opentinker.config.base import parse_config
from opentinker.config.job import RLJobConfig
from opentinker.config.sinks import MlflowConfig, TensorBoardConfig, TrackioConfig, WandbConfig, secrets_of
from opentinker.errors import ConfigError
from opentinker.training.sinks import base, select
from opentinker.training.sinks.base import SafeSink, scalars
from opentinker.training.sinks.select import SinkState, make_sinks

JOB = {"base_model": "m", "environment": {"name": "arithmetic"}}


def step(number: int, reward: float = 0.5) -> dict[str, Any]:
    return {"kind": "step", "step": number, "reward_mean": reward, "env": {"exact": 0.25}, "learning_rate": None, "at": 7.0}


def evaluation(number: int) -> dict[str, Any]:
    return {"kind": "evaluation", "step": number, "reward_mean": 0.75, "pass_at": {"4": 0.5}}


def needs(package: str) -> Any:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed here")


def feed(config: Any, folder: Path, rows: list[dict[str, Any]], *, resume_at: int | None = None) -> None:
    """One life of a run."""
    (sink,) = make_sinks((config,), folder, {"kind": "rl", "base_model": "m"}, resume_at=resume_at)
    for row in rows:
        sink(row)
    sink.close()
    assert sink.failed == ""


def two_lives(config: Any, folder: Path) -> None:
    """A run that dies after step 3 and goes on from the checkpoint of step 2."""
    feed(config, folder, [evaluation(0), step(1), step(2), evaluation(2), step(3)])
    feed(config, folder, [{"kind": "resumed", "step": 2}, step(3), step(4), evaluation(4)], resume_at=2)


class Kept:
    """A sink that keeps what it gets, or fails."""

    def __init__(self, failures: int = 0) -> None:
        self.got: list[tuple[int, dict[str, float]]] = []
        self.failures = failures
        self.closed = False

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self.failures:
            self.failures -= 1
            raise SystemExit("no network")
        self.got.append((step, dict(values)))

    def close(self) -> None:
        self.closed = True


def test_a_row_becomes_its_numbers_below_where_they_are_from() -> None:
    assert scalars(step(1)) == {"train/reward_mean": 0.5, "train/env/exact": 0.25}
    assert scalars(evaluation(1)) == {"evaluation/reward_mean": 0.75, "evaluation/pass_at/4": 0.5}
    assert scalars({"kind": "resumed", "step": 2}) == {}


def test_a_sink_that_fails_now_and_then_costs_rows_there_and_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept(failures=2)
    sink = SafeSink("x", lambda: kept, lambda *_: True)
    for number in range(1, 5):
        sink(step(number))
    sink.close()
    assert [number for number, _ in kept.got] == [3, 4]
    assert kept.closed
    assert sink.failed == "SystemExit: no network"
    assert sum("event=sink_failed sink=x" in record.message for record in caplog.records) == 1


def test_a_sink_that_cannot_be_opened_is_given_up() -> None:
    tried: list[int] = []

    def open_sink() -> Kept:
        tried.append(1)
        raise OSError("no route")

    sink = SafeSink("x", open_sink, lambda *_: True)
    for number in range(1, 10):
        sink(step(number))
    sink.close()
    assert len(tried) == base.FAILURES
    assert sink.failed == "OSError: no route"


def test_a_sink_that_hangs_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "CLOSE_S", 0.05)
    monkeypatch.setattr(base, "WAITING_ROWS", 3)
    release = threading.Event()

    class Hanging(Kept):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            release.wait(60.0)

    sink = SafeSink("x", Hanging, lambda *_: True)
    for number in range(1, 10):
        sink(step(number))
    sink.close()
    assert sink.dropped >= 5
    assert "too slow" in sink.failed
    release.set()


def test_no_step_is_given_twice_whatever_dies_when(tmp_path: Path) -> None:
    first = SinkState(tmp_path / "s", anew=True)
    assert [first.seen("step", 1), first.seen("step", 2), first.seen("evaluation", 2)] == [True, True, True]
    again = SinkState(tmp_path / "s", anew=False)
    assert (again.id, again.resumed) == (first.id, True)
    assert [again.seen("step", 2), again.seen("evaluation", 2), again.seen("step", 3)] == [False, False, True]
    anew = SinkState(tmp_path / "s", anew=True)
    assert anew.id != first.id
    assert anew.seen("step", 1)


def test_a_package_that_is_missing_is_named_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="'wandb' needs the package wandb") as error:
        make_sinks((WandbConfig(),), tmp_path / "run", {}, resume_at=None)
    assert "pip install wandb" in error.value.hint
    assert not (tmp_path / "run").exists()


def test_sinks_are_named_shortly_or_with_their_fields() -> None:
    job = parse_config(RLJobConfig, {**JOB, "sinks": ["tensorboard", {"kind": "wandb", "api_key_secret": "wandb-key"}]})
    assert job.sinks == (TensorBoardConfig(), WandbConfig(api_key_secret="wandb-key"))
    assert secrets_of(job.sinks) == {"WANDB_API_KEY": "wandb-key"}
    assert parse_config(RLJobConfig, job.model_dump(mode="json")) == job
    with pytest.raises(ConfigError, match="sinks"):
        parse_config(RLJobConfig, {**JOB, "sinks": ["tensorbord"]})
    with pytest.raises(ConfigError, match="sinks"):
        parse_config(RLJobConfig, {**JOB, "sinks": [{"kind": "wandb", "projekt": "x"}]})


@needs("tensorboard")
def test_tensorboard_reads_back_each_step_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    two_lives(TensorBoardConfig(), tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/reward_mean")] == [(n, 0.5) for n in (1, 2, 3, 4)]
    assert [e.step for e in events.Scalars("evaluation/reward_mean")] == [0, 2, 4]


@needs("wandb")
def test_wandb_writes_offline_under_one_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    run = tmp_path / "run"
    two_lives(WandbConfig(mode="offline"), run)
    state = json.loads((run / "wandb-sinks.json").read_text())
    files = list(run.glob(f"wandb/offline-run-*-{state['id']}/run-{state['id']}.wandb"))
    assert files, "what `wandb sync` sends"
    assert all(file.stat().st_size > 0 for file in files)


@needs("mlflow")
def test_mlflow_keeps_one_run_with_each_step_once(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    two_lives(MlflowConfig(), tmp_path / "run")
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/run/mlflow.db")
    experiment = client.get_experiment_by_name("opentinker")
    [run] = client.search_runs([experiment.experiment_id])
    assert run.data.tags["mlflow.runName"] == "run"
    history = client.get_metric_history(run.info.run_id, "train/reward_mean")
    assert sorted((m.step, m.value) for m in history) == [(n, 0.5) for n in (1, 2, 3, 4)]


@needs("trackio")
def test_trackio_keeps_one_run_with_each_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sqlite3

    from trackio import sqlite_storage, utils

    for module in (sqlite_storage, utils):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio", raising=False)
    two_lives(TrackioConfig(), tmp_path / "run")
    [database] = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select run_name, step, metrics from metrics").fetchall()
    assert len({name for name, _, _ in rows}) == 1
    trained = [step for _, step, values in rows if "train/reward_mean" in json.loads(values)]
    assert sorted(trained) == [1, 2, 3, 4]
