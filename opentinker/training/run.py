"""Run a whole RL job: what the cluster's driver actor and `opentinker train` call."""

import asyncio
import inspect
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opentinker.checkpoints import folders
from opentinker.client.policy import PolicyClient
from opentinker.config.base import parse_config
from opentinker.config.job import RLJobConfig
from opentinker.env.environment import Environment
from opentinker.env.load import load_environment
from opentinker.errors import ConfigError
from opentinker.training.metrics import Row
from opentinker.training.progress import row_line
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
    resume: bool = False,
) -> dict[str, Any]:
    """Drive the job to its end; blocks. The summary, which is also in `run_dir` (see `Recorder`).

    `code_dir` is the folder that a `file.py:Class` environment is relative to. With `resume` the run in `run_dir` goes on
    from its last checkpoint, or starts anew if it has none.

    Raises:
        ConfigError: the config or its environment is wrong.
        EpisodesFailedError: episodes keep failing.
        OpenTinkerError: what the server reports; UnavailableError when it is gone.
    """
    started = time.monotonic()
    job = parse_config(RLJobConfig, config)
    base_dir = Path(code_dir) if code_dir else None
    environment = checked_environment(job, base_dir)

    def log(row: Row) -> None:
        logger.info(row_line(row, job.training.steps))

    step = last_checkpoint(Path(run_dir)) if resume else None
    resume_at = None if not resume else -1 if step is None else step
    recorder = Recorder(Path(run_dir), job.model_dump(mode="json"), listeners=(log, *listeners), resume_at=resume_at)

    async def drive() -> str:
        client = PolicyClient(endpoint, token, policy)
        try:
            loop = await RLLoop.connect(job, environment, client, recorder, base_dir)
            await loop.resume(step or 0)
            await loop.run(job.training.steps - loop.steps_done)
            return str((await client.save("final"))["path"])
        finally:
            await client.close()

    checkpoint = None
    try:
        checkpoint = asyncio.run(drive())
    finally:
        summary = recorder.finish(wall_s=time.monotonic() - started, checkpoint=checkpoint)
    return summary


def last_checkpoint(run_dir: Path) -> int | None:
    """The last step of which the run has a checkpoint; None if it has none. A checkpoint is whole or not there."""
    names = {name for name, _ in folders(run_dir / "checkpoints") if name.startswith("step-")}
    return max((int(step) for name in names if (step := name.removeprefix("step-")).isdigit()), default=None)


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
