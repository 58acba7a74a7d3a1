"""`opentinker demo`: train a small language model on this machine, from nothing to a report."""

import json
import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import opentinker
from opentinker.cli.common import (
    DEFAULT_STATE_DIR,
    StateDirOption,
    connected,
    err,
    out,
    read_driven_config,
    signals_as_interrupt,
    uninterrupted,
)
from opentinker.cli.follow import follow
from opentinker.client.scheduler import SchedulerClient
from opentinker.config.job import RLJobConfig
from opentinker.training.progress import Progress

RUN_VARIABLE = "OPENTINKER_RUN"
"""Marks every process that a demo starts, so that one can prove that none is left. It changes no behaviour."""
CONFIGS = Path(opentinker.__file__).parent / "configs"


class Engine(StrEnum):
    """The rollout engines to choose from."""

    VLLM = "vllm"
    TRANSFORMERS = "transformers"


class DemoEnvironment(StrEnum):
    """The environments that a demo config is shipped for."""

    ARITHMETIC = "arithmetic"
    GUESS_NUMBER = "guess_number"


def demo(
    lora: Annotated[bool, typer.Option("--lora", help="Train a LoRA adapter instead of all parameters.")] = False,
    engine: Annotated[Engine | None, typer.Option(help="Rollout engine. Default: vLLM where it is installed.")] = None,
    env: Annotated[DemoEnvironment, typer.Option(help="Environment to train on.")] = DemoEnvironment.ARITHMETIC,
    seed: Annotated[int, typer.Option(min=0, help="Seed of tasks, sampling and initialisation.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps.")] = None,
    learning_rate: Annotated[float | None, typer.Option(min=0.0, help="Learning rate; with 0 nothing is learnt.")] = None,
    base_model: Annotated[str | None, typer.Option(help="Another model: a known name or a directory.")] = None,
    runs_dir: Annotated[Path, typer.Option(help="Where to write the run, if the demo starts its own cluster.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as one JSON object on the last line.")] = False,
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """Train a small language model by reinforcement learning, and show that it learnt.

    Uses the cluster that runs on this machine, or starts one for the time being and stops it at the end.
    """
    started = time.monotonic()
    os.environ.setdefault(RUN_VARIABLE, uuid.uuid4().hex)
    config = demo_config(
        env, lora=lora, engine=engine, seed=seed, steps=steps, learning_rate=learning_rate, base_model=base_model
    )
    console = err if as_json else out
    with signals_as_interrupt(), _cluster(state_dir, runs_dir, console) as client:
        summary = _run(client, config, console)
    summary["wall_s"] = time.monotonic() - started
    console.print(headline(env, summary), soft_wrap=True)
    console.print(f"report: {summary['report']}", soft_wrap=True)
    if as_json:
        print(json.dumps(summary), flush=True)


def demo_config(
    environment: str,
    *,
    lora: bool = False,
    engine: str | None = None,
    seed: int = 0,
    steps: int | None = None,
    learning_rate: float | None = None,
    base_model: str | None = None,
) -> RLJobConfig:
    """The shipped config of an environment with the demo's options applied."""
    options = {
        "training.seed": seed,
        "engine.kind": engine,
        "training.steps": steps,
        "training.optimizer.learning_rate": learning_rate,
        "base_model": json.dumps(base_model) if base_model else None,
    }
    overrides = [f"{key}={value}" for key, value in options.items() if value is not None]
    job = read_driven_config(CONFIGS / f"{environment}{'-lora' if lora else ''}.yaml", overrides)
    assert isinstance(job, RLJobConfig)
    return job


def headline(environment: str, summary: dict[str, Any]) -> str:
    """The run in one line."""
    measure = "exact" if summary["exact_after"] is not None else "reward"
    before, after = (_two_digits(summary[f"{measure}_{when}"]) for when in ("before", "after"))
    interval = f" (+-{summary['exact_ci']:.2f})" if summary["exact_ci"] is not None else ""
    return (
        f"{environment}: held-out {measure} {before} -> {after}{interval} "
        f"in {summary['steps']} steps, {summary['wall_s'] / 60:.1f} min"
    )


@contextmanager
def _cluster(state_dir: Path, runs_dir: Path, console: Console) -> Iterator[SchedulerClient]:
    from opentinker.scheduler.cluster import EmbeddedCluster
    from opentinker.scheduler.state_dir import StateDir

    if (record := StateDir(state_dir).running()) is not None:
        console.print(f"using the cluster at {record['url']}", soft_wrap=True)
        with connected(None, None, state_dir) as client:
            yield client
        return
    console.print("starting a cluster")
    # A state folder of its own: what an earlier run left behind must not come back to life in this one.
    with tempfile.TemporaryDirectory(prefix="opentinker-demo-") as folder:
        cluster = EmbeddedCluster.start(
            state_dir=Path(folder), runs_dir=runs_dir.resolve(), host="127.0.0.1", port=0, cpu_slots=1, gpus=None
        )
        try:
            # SIGTERM again: Ray has set a handler of its own.
            with signals_as_interrupt(), connected(None, None, Path(folder)) as client:
                yield client
        finally:
            with uninterrupted():
                cluster.stop()


def _run(client: SchedulerClient, config: RLJobConfig, console: Console) -> dict[str, Any]:
    job = client.submit(config.model_dump(mode="json"))
    try:
        with Progress(config.name, config.training.steps, console=console) as progress:
            done = follow(client, job["id"], progress)
    except KeyboardInterrupt:
        with uninterrupted():
            client.cancel(job["id"])
        raise
    summary: dict[str, Any] = json.loads((Path(done["run_dir"]) / "summary.json").read_text())
    return summary


def _two_digits(value: float | None) -> str:
    return "?" if value is None else f"{value:.2f}"
