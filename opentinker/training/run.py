"""Run a whole job: what the cluster's driver actor and `opentinker train` call."""

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from opentinker.checkpoints import folders
from opentinker.client.policy import PolicyClient
from opentinker.config.base import parse_config
from opentinker.config.job import JobConfig, PreferenceJobConfig, RLJobConfig, SFTJobConfig
from opentinker.env.environment import Environment
from opentinker.env.load import load_environment
from opentinker.env.secret_files import TOKEN_VARIABLES, no_token
from opentinker.errors import AgentLostError, AgentStuckError, ConfigError, ConflictError, DeadlineError, OpenTinkerError
from opentinker.training.agents import AgentsLoop, check_agents
from opentinker.training.agents_report import render_agents_report, summarize_agents
from opentinker.training.arena import reference_players
from opentinker.training.metrics import Row, summarize
from opentinker.training.opponents import delete_made
from opentinker.training.own_run import OwnRun, going_on
from opentinker.training.preference import PreferenceLoop
from opentinker.training.preference_report import render_preference_report, summarize_preference
from opentinker.training.progress import row_line
from opentinker.training.recorder import Listener, Recorder, Summarize
from opentinker.training.report import Render, render_report
from opentinker.training.rl import RLLoop
from opentinker.training.sft import SFTLoop
from opentinker.training.sft_report import render_sft_report, summarize_sft
from opentinker.training.sinks.base import SafeSink
from opentinker.training.sinks.select import check_installed, close_all, make_sinks

logger = logging.getLogger(__name__)
J = TypeVar("J", bound=JobConfig)


class Loop(Protocol):
    """What the driver loops have in common."""

    @property
    def steps_done(self) -> int: ...

    async def resume(self, step: int) -> None: ...

    async def run(self, steps: int) -> None: ...

    async def evaluate(self) -> Row | None: ...

    async def save(self, name: str) -> dict[str, Any]: ...

    async def close(self) -> None: ...


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
    servers: Mapping[str, Mapping[str, str]] | None = None,
    own: OwnRun | None = None,
) -> dict[str, Any]:
    """Drive the job to its end; blocks. The summary, which is also in `run_dir` (see `Recorder`).

    `code_dir` is the folder that a `file.py:Class` environment is relative to. With `resume` the run in `run_dir` goes on
    from its last checkpoint, or starts anew if it has none. `servers` are those that the job has beside its own, by name:
    {"endpoint", "token", "policy"}. `own` is the run where the user's process drives it, and says itself where it goes on.

    Raises:
        ConfigError: the config or its environment is wrong.
        EpisodesFailedError: episodes keep failing.
        OpenTinkerError: what the server reports; UnavailableError when it is gone.
    """
    started = time.monotonic()
    job = parse_config(RLJobConfig, config)
    base_dir = Path(code_dir) if code_dir else None
    environment = checked_environment(job, base_dir)
    if job.agents:
        make = partial(_Run, job, job.training.steps, Path(run_dir), listeners, own=own)
        access = {"": {"endpoint": endpoint, "token": token, "policy": policy}, **(servers or {})}
        return _drive_agents(job, environment, make, access, base_dir, resume, started)
    client = PolicyClient(endpoint, token, policy)

    def connect(client: PolicyClient, recorder: Recorder) -> Awaitable[Loop]:
        return RLLoop.connect(job, environment, client, recorder, base_dir)

    run = _Run(job, job.training.steps, Path(run_dir), listeners, resume, summarize, render_report, own)
    return run.drive(client, connect, started)


def run_sft_job(
    config: Mapping[str, Any],
    *,
    endpoint: str,
    token: str,
    policy: str,
    run_dir: str | Path,
    code_dir: str | Path | None = None,
    listeners: tuple[Listener, ...] = (),
    resume: bool = False,
    own: OwnRun | None = None,
) -> dict[str, Any]:
    """As `run_rl_job`, for supervised fine-tuning; files of examples are relative to `code_dir`.

    Raises:
        ConfigError: the config or its examples are wrong.
        OpenTinkerError: what the server reports; UnavailableError when it is gone.
    """
    started = time.monotonic()
    job = parse_config(SFTJobConfig, config)
    run = _Run(job, job.training.steps, Path(run_dir), listeners, resume, summarize_sft, render_sft_report, own)
    client = PolicyClient(endpoint, token, policy)
    return run.drive(client, _on_examples(SFTLoop.connect, job, code_dir), started)


def run_preference_job(
    config: Mapping[str, Any],
    *,
    endpoint: str,
    token: str,
    policy: str,
    run_dir: str | Path,
    code_dir: str | Path | None = None,
    listeners: tuple[Listener, ...] = (),
    resume: bool = False,
    own: OwnRun | None = None,
) -> dict[str, Any]:
    """As `run_sft_job`, for preference training.

    Raises:
        ConfigError: the config or its examples are wrong.
        CheckpointError: a run that goes on has lost what its policy is compared with.
        OpenTinkerError: what the server reports; UnavailableError when it is gone.
    """
    started = time.monotonic()
    job = parse_config(PreferenceJobConfig, config)
    run = _Run(job, job.training.steps, Path(run_dir), listeners, resume, summarize_preference, render_preference_report, own)
    client = PolicyClient(endpoint, token, policy)
    return run.drive(client, _on_examples(PreferenceLoop.connect, job, code_dir), started)


def _on_examples(
    connect: Callable[[J, PolicyClient, Recorder, Path | None], Awaitable[Loop]], job: J, code_dir: str | Path | None
) -> Callable[[PolicyClient, Recorder], Awaitable[Loop]]:
    """How a loop over examples begins."""
    base_dir = Path(code_dir) if code_dir else None
    return lambda client, recorder: connect(job, client, recorder, base_dir)


def _drive_agents(
    job: RLJobConfig,
    environment: type[Environment],
    make: Callable[[bool, Summarize, Render], "_Run"],
    access: Mapping[str, Mapping[str, str]],
    base_dir: Path | None,
    resume: bool,
    started: float,
) -> dict[str, Any]:
    """Drive a job of several agents; `access` is what clients of its servers take, by name, "" for its own. When the driver of
    other agents is lost, and this one's servers are not, it goes back to its checkpoints and joins anew, as often as the job
    may be restarted: its own scheduler may start that driver again. What it was told then stays the cause if it cannot join.
    When a server of its own hangs, there is nothing to go back to: the scheduler gives the job other servers."""
    rejoins, joined = 0, False
    told: OpenTinkerError | None = None
    while True:
        run = make(resume or rejoins > 0, summarize_agents, render_agents_report)
        clients = {name: PolicyClient(**fields) for name, fields in access.items()}
        own, further = clients[""], {name: client for name, client in clients.items() if name}

        async def connect(
            client: PolicyClient,
            recorder: Recorder,
            run: "_Run" = run,
            further: Mapping[str, PolicyClient] = further,
            again: bool = rejoins > 0,
        ) -> Loop:
            if again:
                await delete_made(job, {"": client, **further})  # they are made anew, from their checkpoints
            steps = run.steps_saved
            loop = await AgentsLoop.connect(job, environment, client, recorder, base_dir, servers=further, steps=steps)
            nonlocal joined
            joined = True
            return loop

        try:
            return run.drive(own, connect, started, others=list(further.values()))
        except OpenTinkerError as error:
            refused = not joined and isinstance(error, ConflictError | DeadlineError | AgentLostError)
            before = told if refused else None
            elsewhere = isinstance(error, AgentLostError) and not isinstance(error, AgentStuckError)
            again = elsewhere and rejoins < job.scheduling.max_restarts and saved_steps(run.folder)
            if not again:
                if before is None:
                    raise
                raise AgentLostError(f"{before.detail}; joining anew failed: {error.detail}", hint=before.hint) from error
            rejoins += 1
            told, joined = before or error, False
            logger.warning("joins anew (%d of %d): %s", rejoins, job.scheduling.max_restarts, error)


class _Run:
    """One run's folder, and the loop that fills it."""

    def __init__(
        self,
        job: JobConfig,
        steps: int,
        folder: Path,
        listeners: tuple[Listener, ...],
        resume: bool,
        summarize: Summarize,
        render: Render,
        own: OwnRun | None = None,
    ) -> None:
        """`own` says where a run goes on that no cluster drives; then `resume` is not looked at."""

        def log(row: Row) -> None:
            logger.info(row_line(row, steps))

        self.folder = folder
        self._steps = steps
        self._own = own
        self.steps_saved = own.steps if own is not None else saved_steps(folder) if resume else []
        """Those after which the run could go on."""
        self._step = max(self.steps_saved, default=None)
        resume_at = own.resume_at if own is not None else None if not resume else -1 if self._step is None else self._step
        fields = job.model_dump(mode="json")
        asked = getattr(job, "sinks", ())
        check_installed(asked)
        self._sinks: tuple[SafeSink, ...] = ()

        def shown(row: Row) -> None:
            for sink in self._sinks:
                sink(row)

        self._recorder = Recorder(
            folder,
            fields,
            listeners=(log, *listeners, shown),
            resume_at=resume_at,
            summarize=summarize,
            render=render,
            checkpoints=own,
        )
        self._sinks = make_sinks(asked, folder, fields, resume_at=resume_at)

    def drive(
        self,
        client: PolicyClient,
        connect: Callable[[PolicyClient, Recorder], Awaitable[Loop]],
        started: float,
        others: Sequence[PolicyClient] = (),
    ) -> dict[str, Any]:
        async def work() -> str:
            loop: Loop | None = None
            try:
                loop = await connect(client, self._recorder)
                with going_on(self.folder) if self._own and self._step is not None else nullcontext():
                    await loop.resume(self._step or 0)
                await loop.run(self._steps - loop.steps_done)
                return str((await loop.save("final"))["path"])
            finally:
                if loop is not None:
                    await loop.close()
                await asyncio.gather(*(each.close() for each in (client, *others)))

        checkpoint = None
        try:
            checkpoint = asyncio.run(work())
        finally:
            summary = self._recorder.finish(wall_s=time.monotonic() - started, checkpoint=checkpoint)
            close_all(self._sinks)
        return summary


def last_checkpoint(run_dir: Path) -> int | None:
    """The last step of which the run has a checkpoint; None if it has none. A checkpoint is whole or not there."""
    return max(saved_steps(run_dir), default=None)


def saved_steps(run_dir: Path) -> list[int]:
    """The steps of which the run has a checkpoint."""
    names = {name for name, _ in folders(run_dir / "checkpoints") if name.startswith("step-")}
    return [int(step) for name in names if (step := name.removeprefix("step-")).isdigit()]


def check_no_secrets(job: RLJobConfig) -> None:
    """A config is stored and shown, so that no part of it may hold what opens an environment's server. Asks no server.

    Raises:
        ConfigError: it has a token, or an address with a login.
    """
    for prefix, variable in TOKEN_VARIABLES.items():
        if job.environment.name.startswith(prefix) and "token" in job.environment.args:
            raise no_token("environment.args", variable)
    if job.environment.name.startswith(("http://", "https://")):
        load_environment(job.environment.name)  # looks at the addresses


def checked_environment(job: RLJobConfig, base_dir: Path | None = None) -> type[Environment]:
    """The job's environment class, after a check that its constructor takes the configured arguments, and that its agents and
    the reference players of an arena are there.

    Raises:
        EnvironmentLoadError: it, or a reference player, cannot be imported.
        ConfigError: the arguments do not fit, or an agent or player is not there.
    """
    check_no_secrets(job)
    environment = load_environment(job.environment.name, base_dir=base_dir)
    check_arguments(environment, job.environment.args)
    check_agents(job, environment)
    if job.arena is not None:
        reference_players(job.arena.references, environment, job.agents, base_dir)
    return environment


def check_arguments(environment: type[Environment], args: Mapping[str, Any]) -> None:
    """Raises: ConfigError when the environment's constructor does not take them."""
    try:
        inspect.signature(environment).bind(**args)
    except TypeError as error:
        raise ConfigError(f"environment.args: {environment.__name__} does not take them: {error}") from error
