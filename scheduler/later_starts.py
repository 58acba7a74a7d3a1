"""Checkpoints that a job comes to name while it runs, so that its policies may load them: those of a run that goes on in it."""

import asyncio
import copy
from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakValueDictionary

from opentinker.config.job import InteractiveJobConfig, parse_job
from opentinker.errors import ConflictError, NotFoundError
from opentinker.scheduler.checkpoint_care import CheckpointCare
from opentinker.scheduler.checkpoint_views import start_folder
from opentinker.scheduler.launcher import Launcher
from opentinker.scheduler.records import Job
from opentinker.scheduler.states import JobState
from opentinker.scheduler.store import JobStore
from opentinker.scheduler.submission import Submissions


class LaterStarts:
    def __init__(self, store: JobStore, launcher: Launcher, submissions: Submissions, checkpoints: CheckpointCare) -> None:
        self._store = store
        self._launcher = launcher
        self._submissions = submissions
        self._checkpoints = checkpoints
        self._under_way: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By job, as long as anybody holds it."""

    async def name(self, job_id: str, addresses: Sequence[str], may_name: str) -> list[str]:
        """See `SchedulerService.name_checkpoints`. What is named twice is held once."""
        async with self._under_way.setdefault(job_id, asyncio.Lock()):
            folders: dict[str, str] = {}
            for address in addresses:
                ref, folder = await self._name(job_id, address, may_name)
                folders[ref] = folder
            self._running(job_id)
            for server, policies in self._store.open_servers():
                if any(policy.job_id == job_id for policy in policies):
                    await self._launcher.name_checkpoints(server.id, folders)
            return list(folders)

    async def _name(self, job_id: str, address: str, may_name: str) -> tuple[str, str]:
        """(the exact address, the folder) of a checkpoint that is now held, and part of the job's config."""
        job = self._running(job_id)
        known = _named(job)
        place = len(known)
        config = parse_job({**copy.deepcopy(job.config), "checkpoints": [*known, address]})
        start = await self._submissions.find_start(("checkpoints", str(place)), address, config, job.owner, may_name)
        ref, folder = str(start.ref), start_folder(str(start.ref), start.source)
        if ref in known:
            return ref, folder
        await self._checkpoints.hold_later(job_id, place, start, config)
        now = self._running(job_id)
        self._store.save(replace(now, config={**now.config, "checkpoints": [*_named(now), ref]}))
        return ref, folder

    def _running(self, job_id: str) -> Job:
        job = self._store.job(job_id)
        if job is None:
            raise NotFoundError(f"no job {job_id!r}")
        if job.kind != InteractiveJobConfig.model_fields["kind"].default:
            raise ConflictError(
                f"job {job_id} is of kind '{job.kind}': it loads what its config names",
                hint="only jobs of kind 'interactive', whose client drives them, load other jobs' checkpoints later",
            )
        if job.state is not JobState.RUNNING:
            raise ConflictError(f"job {job_id} is {job.state}: it has no server that could load a checkpoint")
        return job


def _named(job: Job) -> list[str]:
    return list(job.config.get("checkpoints", ()))
