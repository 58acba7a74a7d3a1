"""A job as it is sent to the cluster to run there, from YAML or Python alike: its config, and its environment's folder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opentinker.client.code import environment_file, lacking, pack_files, pack_folder, relative_to_code
from opentinker.client.functions import (
    algorithm_file,
    check_algorithm,
    refuse_adapter_functions,
    with_algorithm_file,
)
from opentinker.client.task_files import check_example_files, check_task_files, named, task_files, travelling
from opentinker.config.base import apply_overrides, read_yaml
from opentinker.config.job import InferenceJobConfig, JobConfig, PreferenceJobConfig, RLJobConfig, SFTJobConfig, parse_job
from opentinker.env.deadline import context_with
from opentinker.env.secret_files import TokenFileError
from opentinker.errors import AuthenticationError, ConfigError, DeadlineError, UnavailableError
from opentinker.training.run import check_no_secrets, checked_environment

ASK_S = 5.0
"""A server of the environment that does not answer within this time cannot be asked from here."""
JobSource = JobConfig | Mapping[str, Any] | str | Path
"""A job's config, its fields, or a YAML file with them; without a kind it is `rl`."""


@dataclass(frozen=True)
class Submission:
    """What the cluster is sent."""

    config: JobConfig
    """The environment's path is relative to the folder that travels."""
    folder: Path | None
    """The folder of the environment's file; None for a built-in environment."""
    lacking: Sequence[str]
    """What the environment needs and this process does not have: packages, variables, a server that answers. The environment,
    or its tasks, are not checked here."""
    files: Mapping[str, Path] = field(default_factory=dict)
    """What travels if no folder does: files of tasks, examples or the algorithm's function, by their names there."""

    def fields(self) -> dict[str, Any]:
        return self.config.model_dump(mode="json")

    def code(self) -> bytes | None:
        """A zip of the folder or files. Raises: ConfigError when it is too large."""
        if self.folder is not None:
            return pack_folder(self.folder)
        return pack_files(self.files, what="the files that travel with the job, together") if self.files else None


def read_job(source: JobSource, overrides: Sequence[str] = ()) -> JobConfig:
    """The job of any kind that `source` and dotted overrides, such as `training.steps=10`, describe.

    Raises:
        ConfigError: see `read_yaml`, `apply_overrides` and `parse_job`.
    """
    if isinstance(source, JobConfig):
        return parse_job(apply_overrides(source.model_dump(mode="json"), overrides))
    values = source if isinstance(source, Mapping) else read_yaml(Path(source))
    return parse_job({"kind": "rl", **apply_overrides(values, overrides)})


def prepare(source: JobSource, overrides: Sequence[str] = ()) -> Submission:
    """What to send for a job. The files of its environment and its algorithm's function are looked for beside the YAML file or
    else in the current folder, and are imported here unless this process lacks what the environment needs.

    Raises:
        ConfigError: the config or the environment is wrong, or the job lives as long as its client.
    """
    job = read_job(source, overrides)
    if job.leased:
        raise ConfigError(
            f"this job of kind '{job.kind}' lives as long as its client renews the lease, so it cannot be submitted and left",
            hint=_instead(job),
        )
    beside = Path(source).parent if isinstance(source, str | Path) else Path()
    if isinstance(job, SFTJobConfig | PreferenceJobConfig):
        examples = task_files(job, beside, Path())
        check_example_files(job, examples)
        names = travelling(examples, None)
        return Submission(named(job, names), None, (), {names[key]: examples[key] for key in names})
    if not isinstance(job, RLJobConfig):
        return Submission(job, None, ())
    check_no_secrets(job)  # also where the environment itself is not checked here
    file = environment_file(job, beside)
    folder = file.parent if file else None
    if file is not None:
        job = relative_to_code(job, file)
    refuse_adapter_functions(job)
    folders = (*([folder] if folder else []), beside, Path())
    tasks, function = task_files(job, *folders), algorithm_file(job, *folders)
    files = {**tasks, **function}
    names = travelling(files, folder)
    job = with_algorithm_file(named(job, names), names)
    absent = lacking(job, file)
    if not absent:
        environment = checked_environment(with_algorithm_file(job, {key: str(path) for key, path in function.items()}), folder)
        refuse_adapter_functions(job, environment)
        check_algorithm(job, function)
        try:
            context_with(ASK_S).run(check_task_files, job, tasks, environment)
        except (UnavailableError, AuthenticationError, DeadlineError) as error:  # the cluster may reach it, and has the token
            absent = [f"the environment server's answer ({error.detail})"]
        except TokenFileError as error:
            absent = [f"the environment's token file ({error.detail})"]
    return Submission(job, folder, absent, {names[key]: files[key] for key in names})


def _instead(job: JobConfig) -> str:
    if isinstance(job, InferenceJobConfig):
        return "leave out `lease`: then it runs until it is ended or reaches a limit; from Python, `Client.serve` holds a lease"
    return (
        "create it from Python with `Client.create_job`; "
        "`opentinker submit` and `opentinker train` run kinds 'rl', 'sft' and 'preference'"
    )
