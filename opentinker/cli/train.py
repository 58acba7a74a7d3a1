"""`opentinker train`: the same job, driven by this process."""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from opentinker.cli.common import (
    DEFAULT_STATE_DIR,
    ConfigArgument,
    KeyOption,
    OverridesArgument,
    StateDirOption,
    UrlOption,
    err,
    out,
    read_driven_config,
    read_key,
    signals_as_interrupt,
)
from opentinker.client.client import Client
from opentinker.client.code import environment_file, lacking, relative_to_code
from opentinker.client.functions import algorithm_file, check_algorithm, with_adapter_functions, with_algorithm_file
from opentinker.client.local import find_cluster
from opentinker.client.reach import Connect
from opentinker.client.task_files import check_example_files, check_task_files, named, task_files
from opentinker.config.job import PreferenceJobConfig, RLJobConfig, SFTJobConfig
from opentinker.errors import CheckpointError, ConfigError
from opentinker.multiagent.models import ChatModel
from opentinker.training.own_run import OwnRun, going_on, policy_places
from opentinker.training.progress import Progress
from opentinker.training.run import checked_environment, run_preference_job, run_rl_job, run_sft_job

E = TypeVar("E", bound=SFTJobConfig | PreferenceJobConfig)
_DRIVERS = {RLJobConfig: run_rl_job, SFTJobConfig: run_sft_job, PreferenceJobConfig: run_preference_job}


def train(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    runs_dir: Annotated[Path, typer.Option(help="Where to write the run, as RUNS_DIR/JOB_ID.")] = Path("runs"),
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN_DIR",
            help="Go on with the run in this folder from its last checkpoint (training.save_every), in a new job. FILE has to "
            "say the same; training.steps may be more.",
        ),
    ] = None,
    connect: Annotated[
        Connect, typer.Option(help="The way to the job's server; 'auto' is direct where that answers.")
    ] = "auto",
    url: UrlOption = None,
    key: KeyOption = None,
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """Train from a YAML file with the loop, and the environment or the examples, in this process; the cluster hosts the model.

    Your environment's code does not leave this machine. Ctrl-C ends the job; --resume goes on with its run.
    """
    job = read_driven_config(config, overrides)
    code_dir = None
    if isinstance(job, RLJobConfig):
        job, code_dir = _checked_rl(job, config.parent)
    else:
        job = _checked_examples(job, config.parent)
    scheduling = job.scheduling
    if scheduling.max_restarts:
        err.print(
            "scheduling.max_restarts is left out: this process drives the job; start it again with --resume", soft_wrap=True
        )
        scheduling = scheduling.model_copy(update={"max_restarts": 0})
    fields = job.model_dump(mode="json")
    left = None if resume is None else OwnRun(resume, fields, True)  # before anything is waited for
    if left is not None and (left.step or 0) > job.training.steps:
        raise ConfigError(
            f"training.steps is {job.training.steps}, and the run in {resume} has done {left.step}", hint="give it more steps"
        )
    address, api_key = find_cluster(url, read_key(key), state_dir)
    with signals_as_interrupt(), Client(address, api_key, connect=connect) as client:
        err.print("waiting for a server")
        with nullcontext() if resume is None else going_on(resume):
            hosting = client.create_job(
                job.base_model,
                lora=job.lora,
                head=job.policy_head,
                critic=job.policy_critic,
                engine=job.engine,
                trainer=job.trainer,
                resources=job.resources,
                scheduling=scheduling,
                name=job.name,
                seed=job.training.seed,
                start_from=job.start_from,
                checkpoints=[
                    *(address for where, address in job.starts.items() if where != ("start_from",)),
                    *(left.addresses if left is not None else ()),
                ],
                servers={
                    name: server.model_copy(update={"critic": job.critic_on(name)})
                    for name, server in job.further_servers.items()
                },
            )
        with hosting as hosted:
            run_dir = runs_dir / hosted.id if resume is None else resume
            own = left or OwnRun(run_dir, fields)
            own.begin(hosted.record["owner"], hosted.id, policy_places(job) if isinstance(job, RLJobConfig) else None)
            drive = _DRIVERS[type(job)]
            further: dict[str, Any] = {"servers": hosted.servers} if hosted.servers else {}
            with Progress(job.name or job.default_name(), job.training.steps) as progress, hosted.explained():
                try:
                    summary = drive(
                        fields,
                        endpoint=hosted.server["endpoint"],
                        token=hosted.server["token"],
                        policy=hosted.server["policy"],
                        run_dir=run_dir,
                        code_dir=code_dir,
                        listeners=(progress,),
                        own=own,
                        **further,
                    )
                except BaseException as error:
                    if own.step is not None and not isinstance(error, CheckpointError):
                        err.print(f"step {own.step} is saved: --resume {run_dir} goes on from there", soft_wrap=True)
                    raise
            out.print(f"report: {summary['report']}", soft_wrap=True)
            out.print(f"checkpoint: {summary['checkpoint']}", soft_wrap=True)


def _checked_rl(job: RLJobConfig, folder: Path) -> tuple[RLJobConfig, Path | None]:
    """(the job as this process drives it, the folder of its environment's file)."""
    file = environment_file(job, folder)
    if file is not None:
        job = relative_to_code(job, file)
    code_dir = file.parent if file else None
    if absent := lacking(job, file):
        raise ConfigError(
            f"the environment runs in this process, which lacks {', '.join(absent)}",
            hint="install the packages here, and set the variables; or `opentinker submit`, where the cluster provides both",
        )
    for name, agent in job.agents.items():
        if agent.model is not None:
            ChatModel(name, agent.model)  # raises where its key is missing, before anything is waited for
    folders = (*([code_dir] if code_dir else []), folder, Path())
    tasks, function = task_files(job, *folders), algorithm_file(job, *folders)
    job = with_algorithm_file(job, {field: str(path) for field, path in function.items()})
    environment = checked_environment(job, code_dir)
    check_task_files(job, tasks, environment)
    check_algorithm(job, function)
    job = with_adapter_functions(job, environment, *folders)
    return named(job, {field: str(path) for field, path in tasks.items()}), code_dir


def _checked_examples(job: E, folder: Path) -> E:
    examples = task_files(job, folder, Path())
    check_example_files(job, examples)
    return named(job, {field: str(path) for field, path in examples.items()})
