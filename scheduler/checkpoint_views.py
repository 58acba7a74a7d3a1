"""Checkpoints as the scheduler sees them: those of a job, and the one that a new job starts from."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from opentinker.checkpoint_marks import Marks, resolve, tags_of
from opentinker.checkpoints import Checkpoint, CheckpointRef, parse_ref, policy_root, versioned
from opentinker.config.job import JobConfig, parse_job
from opentinker.config.server import LoraConfig
from opentinker.errors import ConfigError, NotFoundError
from opentinker.scheduler.records import Job
from opentinker.storage import Storage, all_checkpoints, further_policies


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
        "base_model": _base_model(job, policy),
        "step": checkpoint.step,
        "created_at": checkpoint.created_at,
        "bytes": checkpoint.bytes,
        "tags": tags_of(tags, checkpoint),
    }


def _base_model(job: Job, policy: str | None) -> str:
    """That of the server which has the policy. A job of other versions may have a config that this one refuses."""
    own, servers = str(job.config["base_model"]), job.config.get("servers") or {}
    if not servers or policy is None:
        return own
    server = ((job.config.get("agents") or {}).get(policy) or {}).get("server", policy)
    return str(servers.get(server, {}).get("base_model") or own)


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


def resolve_start(ref: CheckpointRef, source: Job, config: JobConfig, storage: Storage | None) -> CheckpointRef:
    """The address of exactly one checkpoint, that `config`'s job can start from.

    Raises:
        ConfigError: there is none, or it does not fit the job.
        UnavailableError: the storage does not answer.
    """
    root = checkpoint_root(source, ref.policy)
    saved = all_checkpoints(root, storage)
    found = resolve(saved, Marks(root, storage).tags(), ref.name, ref.version)
    if found is None:
        known = [versioned(c.name, c.version) for c in saved]
        raise ConfigError(
            f"start_from: job {source.id} has no checkpoint '{versioned(ref.name, ref.version)}'",
            hint=f"it has {', '.join(known[:10])}" if known else "it has none",
        )
    whole = parse_job(source.config)
    theirs = whole.parts[whole.server_of(ref.policy)]
    _check_fit(str(ref_of(source, found.name, found.version, ref.policy)), found, theirs, config)
    return replace(ref, user=source.owner, name=found.name, version=found.version)


def _check_fit(name: str, found: Checkpoint, theirs: JobConfig, config: JobConfig) -> None:
    if theirs.base_model != config.base_model:
        raise ConfigError(
            f"start_from: {name} was trained on the base model '{theirs.base_model}', this job has '{config.base_model}'",
            hint=f"base_model: {theirs.base_model}",
        )
    if theirs.policy_head == "scalar" != config.policy_head:
        raise ConfigError(
            f"start_from: {name} is a reward model, which scores and samples nothing",
            hint="it is for jobs of kind 'preference' with loss.kind 'bradley_terry', or with head 'scalar'",
        )
    if not config.trains:
        return  # whatever it holds can be sampled from
    if theirs.lora != config.lora:
        raise ConfigError(
            f"start_from: {name} holds {_what(theirs.lora)}, this job trains {_what(config.lora)}",
            hint="give this job the same lora as that one" if theirs.lora else "leave lora out",
        )
    if found.kind != ("full" if config.lora is None else "lora"):
        raise ConfigError(f"start_from: {name} is a checkpoint of kind '{found.kind}', which does not fit its own job's config")


def _what(lora: LoraConfig | None) -> str:
    if lora is None:
        return "full parameters"
    targets = lora.target_modules if isinstance(lora.target_modules, str) else ", ".join(lora.target_modules)
    return f"an adapter of rank {lora.rank} with alpha {lora.alpha:g} on {targets}"


def start_folder(text: str, source: Job | None) -> str:
    """The folder that a stored config's `start_from` means; "" if it has none.

    Raises:
        ConfigError: the job it was of is not known any more.
    """
    if not text:
        return ""
    ref = parse_ref(text)
    if source is None:
        raise ConfigError(f"start_from: there is no job {ref.job} any more")
    return str(checkpoint_root(source, ref.policy) / versioned(ref.name, ref.version))
