"""Run a whole RL job: what the cluster's driver actor and `opentinker train` call."""

import asyncio
import inspect
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opentinker.client.policy import PolicyClient
from opentinker.config.base import parse_config
from opentinker.config.job import RLJobConfig
from opentinker.env.environment import Environment
from opentinker.env.load import load_environment
from opentinker.errors import ConfigError
from opentinker.training.metrics import Row
from opentinker.training.progress import evaluation_line, step_line
from opentinker.training.recorder import Listener, Recorder
from opentinker.training.rl import RLLoop

logger = logging.getLogger(__name__)


def run_rl_job(
    config: Mapping[str, Any],
    *,
    endpoint: str,
    token: str,
    policy: str,
    run_dir: str | Path,
    code_dir: str | Path | None = None,
    listeners: tuple[Listener, ...] = (),
) -> dict[str, Any]:
    """Drive the job to its end; blocks. The summary, which is also in `run_dir` (see `Recorder`).

    `code_dir` is the folder that a `file.py:Class` environment is relative to.

    Raises:
        ConfigError: the config or its environment is wrong.
        EpisodesFailedError: episodes keep failing.
        OpenTinkerError: what the server reports; UnavailableError when it is gone.
    """
    started = time.monotonic()
    job = parse_config(RLJobConfig, config)
    environment = checked_environment(job, Path(code_dir) if code_dir else None)

    def log(row: Row) -> None:
        logger.info(evaluation_line(row) if row["kind"] == "evaluation" else step_line(row, job.training.steps))

    recorder = Recorder(Path(run_dir), job.model_dump(mode="json"), listeners=(log, *listeners))

    async def drive() -> str:
        client = PolicyClient(endpoint, token, policy)
        try:
            loop = await RLLoop.connect(job, environment, client, recorder)
            await loop.run(job.training.steps)
            return str((await client.save("final"))["path"])
        finally:
            await client.close()

    checkpoint = None
    try:
        checkpoint = asyncio.run(drive())
    finally:
        summary = recorder.finish(wall_s=time.monotonic() - started, checkpoint=checkpoint)
    return summary


def checked_environment(job: RLJobConfig, base_dir: Path | None = None) -> type[Environment]:
    """The job's environment class, after a check that its constructor takes the configured arguments.

    Raises:
        EnvironmentLoadError: it cannot be imported.
        ConfigError: the arguments do not fit.
    """
    environment = load_environment(job.environment.name, base_dir=base_dir)
    try:
        inspect.signature(environment).bind(**job.environment.args)
    except TypeError as error:
        raise ConfigError(f"environment.args: {environment.__name__} does not take them: {error}") from error
    return environment
