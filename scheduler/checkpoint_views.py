"""Checkpoints as the scheduler sees them: those of a job, and the one that a new job starts from."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from opentinker.checkpoint_marks import Marks, resolve, tags_of
from opentinker.checkpoints import Checkpoint, CheckpointRef, parse_ref, policy_root, versioned
from opentinker.config.job import JobConfig, parse_job
from opentinker.config.server import LoraConfig
from opentinker.errors import ConfigError, NotFoundError
from opentinker.scheduler.records import Job
from opentinker.storage import Storage, all_checkpoints, further_policies

_FULL = "agents of one server are adapters on its base model; train an adapter in the other job, too"


@dataclass(frozen=True)
class Start:
    """A checkpoint that a job's config names, and the job that it is of."""

    where: tuple[str, ...]
    """The field of the config, by the keys that lead to it."""
    ref: CheckpointRef
    source: Job

    @property
    def field(self) -> str:
        return ".".join(self.where)


def checkpoint_root(job: Job, policy: str | None = None) -> Path:
    """Where a job's server writes its checkpoints: those of its own policy, or of a further one."""
    return policy_root(Path(job.run_dir) / "checkpoints", policy)


def ref_of(job: Job, name: str, version: int | None, policy: str | None = None) -> CheckpointRef:
    return CheckpointRef(job.owner, job.id, name, version, policy)


def checkpoint_views(job: Job, storage: Storage | None) -> list[dict[str, Any]]:
    """What the API tells of the checkpoints of all policies of a job, newest first."""
    views = []
    for policy in (None, *further_policies(checkpoint_root(job), storage)):
        root = checkpoint_root(job, policy)
        if saved := all_checkpoints(root, storage):
            tags = Marks(root, storage).tags()
            views += [checkpoint_view(job, checkpoint, tags, policy) for checkpoint in saved]
    return sorted(views, key=lambda view: float(view["created_at"]), reverse=True)  # of equals, each policy's order stays


def checkpoint_view(job: Job, checkpoint: Checkpoint, tags: dict[str, str], policy: str | None = None) -> dict[str, Any]:
    """What the API tells of one, given the tags of all of its policy's; `policy` is None if that is the job's own."""
    return {
        "name": checkpoint.name,
        "version": checkpoint.version,
        "policy": policy,
        "ref": str(ref_of(job, checkpoint.name, checkpoint.version, policy)),
        "kind": checkpoint.kind,
        "base_model": parse_job(job.config).model_of_policy(policy),
        "step": checkpoint.step,
        "created_at": checkpoint.created_at,
        "bytes": checkpoint.bytes,
        "tags": tags_of(tags, checkpoint),
    }


def no_job(job_id: str) -> NotFoundError:
    """The one answer for a job that is not there and for one that is not the caller's."""
    return NotFoundError(f"no job {job_id!r}", hint="`opentinker ps` lists your jobs")


def start_source(ref: CheckpointRef, job: Job | None, may_name: str | None) -> Job:
    """The job whose checkpoint `ref` is. `may_name` is the user whose jobs the caller may name; None: everybody's.

    Raises:
        NotFoundError: there is no such job for this caller.
    """
    if job is None or may_name not in (None, job.owner) or ref.user not in (None, job.owner):
        raise no_job(ref.job)
    return job


def resolve_start(start: Start, config: JobConfig, storage: Storage | None) -> CheckpointRef:
    """The address of exactly one checkpoint, that `config`'s job can start from.

    Raises:
        ConfigError: there is none, or it does not fit the job.
        UnavailableError: the storage does not answer.
    """
    ref, source = start.ref, start.source
    root = checkpoint_root(source, ref.policy)
    saved = all_checkpoints(root, storage)
    found = resolve(saved, Marks(root, storage).tags(), ref.name, ref.version)
    if found is None:
        known = [versioned(c.name, c.version) for c in saved]
        whose = f"job {source.id}" if ref.policy is None else f"'{ref.policy}' of job {source.id}"
        hint = f"it has {', '.join(known[:10])}" if known else "it has none"
        if ref.policy is not None and parse_job(source.config).own_policy == ref.policy:
            hint = f"'{ref.policy}' has that job's own policy, whose checkpoints are {replace(ref, policy=None)}"
        raise ConfigError(f"{start.field}: {whose} has no checkpoint '{versioned(ref.name, ref.version)}'", hint=hint)
    exact = replace(ref, user=source.owner, name=found.name, version=found.version)
    _check_fit(start, str(exact), found, config)
    return exact


def _check_fit(start: Start, name: str, found: Checkpoint, config: JobConfig) -> None:
    theirs, field = parse_job(start.source.config), start.field
    model, fitting = theirs.model_of_policy(start.ref.policy), config.models_for_start(start.where)
    if model is not None and model not in fitting:
        here = "its server" if start.where[0] == "agents" else "this job"
        raise ConfigError(
            f"{field}: {name} was trained on the base model '{model}', {here} has '{', '.join(sorted(fitting))}'",
            hint=f"base_model: {model}",
        )
    if theirs.policy_head == "scalar" != config.policy_head:
        raise ConfigError(
            f"{field}: {name} is a reward model, which scores and samples nothing",
            hint="it is for jobs of kind 'preference' with loss.kind 'bradley_terry', or with head 'scalar'",
        )
    if not config.trains:
        return  # whatever it holds can be sampled from
    wanted, known = config.lora_of_start(start.where), theirs.lora_of_policy(start.ref.policy)
    if wanted != "any" and known != "any" and wanted != known:
        mine = "this job trains" if len(start.where) == 1 else f"{'.'.join(start.where[:-1])} has"
        raise ConfigError(
            f"{field}: {name} holds {_what(known)}, {mine} {_what(wanted)}",
            hint="give both the same lora" if known else "leave lora out" if mine == "this job trains" else _FULL,
        )
    if found.kind not in (kinds := config.kinds_for_start(start.where, model)):
        if wanted == "any":
            raise ConfigError(
                f"{field}: {name} is a checkpoint of kind '{found.kind}', "
                f"and policies of its base model are '{', '.join(kinds)}' here",
                hint="leave lora out" if found.kind == "full" else "give the server that is to load it a lora",
            )
        raise ConfigError(f"{field}: {name} is a checkpoint of kind '{found.kind}', which does not fit its own job's config")


def _what(lora: LoraConfig | None) -> str:
    if lora is None:
        return "full parameters"
    targets = lora.target_modules if isinstance(lora.target_modules, str) else ", ".join(lora.target_modules)
    return f"an adapter of rank {lora.rank} with alpha {lora.alpha:g} on {targets}"


def pin(config: dict[str, Any], where: tuple[str, ...], address: str) -> None:
    """Write an exact address into a resolved config, where it named a checkpoint."""
    place: Any = config
    for key in where[:-1]:
        place = place[int(key) if isinstance(place, list) else key]
    place[int(where[-1]) if isinstance(place, list) else where[-1]] = address


def start_folder(text: str, source: Job | None) -> str:
    """The folder that an address in a stored config means; "" if it is empty.

    Raises:
        ConfigError: the job it was of is not known any more.
    """
    if not text:
        return ""
    ref = parse_ref(text)
    if source is None:
        raise ConfigError(f"the checkpoint {ref}: there is no job {ref.job} any more")
    return str(checkpoint_root(source, ref.policy) / versioned(ref.name, ref.version))
