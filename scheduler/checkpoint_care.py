"""What users do to checkpoints: tags, deletion; and the hold of a job that starts from one."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from opentinker.checkpoint_marks import Marks, check_tag, resolve, tags_of
from opentinker.checkpoint_names import joined_policy, split_policy
from opentinker.checkpoints import Checkpoint, CheckpointRef, find, parse_name, versioned
from opentinker.config.job import JobConfig, parse_job
from opentinker.errors import CheckpointError, ConflictError, NotFoundError
from opentinker.retention import remove
from opentinker.scheduler.checkpoint_views import Start, checkpoint_root, checkpoint_view, ref_of, resolve_start
from opentinker.scheduler.records import Job
from opentinker.scheduler.storage_calls import StorageCalls
from opentinker.scheduler.store import JobStore
from opentinker.storage import Storage, all_checkpoints

WITHIN_S = 60.0
"""How long the storage may take."""
STEP = "step-"
PLAYING = ("pool-", "arena-")
"""How checkpoints are called that an open job loads again, so that past versions play."""
T = TypeVar("T")


class CheckpointCare:
    """Everything that is asked of a disk or the storage runs in threads; the store is read on the event loop."""

    def __init__(self, store: JobStore, storage: Storage | None, storage_calls: StorageCalls) -> None:
        self._store = store
        self._storage = storage
        self._storage_calls = storage_calls
        self._accepting: set[str] = set()
        """Jobs whose hold is there, and that the store does not know yet."""

    async def tag(self, job: Job, name: str, tag: str) -> dict[str, Any]:
        """Give a checkpoint a tag, which another one of the job loses; the checkpoint's view.

        Raises:
            NotFoundError: the job has no such checkpoint.
            InvalidRequestError, ConflictError: the tag cannot be given.
            UnavailableError: the storage is away; nothing was changed.
        """
        return await self._run(partial(self._tag, job, name, tag))

    async def untag(self, job: Job, tag: str) -> None:
        """Raises: NotFoundError, UnavailableError."""
        await self._run(partial(self._untag, job, tag))

    async def delete(self, job: Job, name: str) -> CheckpointRef:
        """Delete one checkpoint, here and in the storage; which one it was.

        Raises:
            NotFoundError: the job has no such checkpoint.
            ConflictError: it has a tag, an open job starts from it, or the job itself may go on from it.
            CheckpointError: the disk refuses.
            UnavailableError: the storage is away.
        """
        policy = split_policy(name)[0]
        chosen = await self._run(partial(self._chosen, job, name))
        folder, ref = versioned(chosen.name, chosen.version), ref_of(job, chosen.name, chosen.version, policy)
        open_jobs = {live.id: parse_job(live.config).starts.values() for live in self._store.live_jobs()}
        if users := sorted(id_ for id_, starts in open_jobs.items() if str(ref) in starts):
            raise ConflictError(f"{ref} is what job {users[0]} starts from", hint="delete it when that job has ended")
        marks = Marks(checkpoint_root(job, policy), self._storage)
        for mark in (h for h, held in (await self._run(marks.holds)).items() if held == folder):
            if not {mark.partition("~")[0]} & {*self._accepting, *open_jobs}:
                await self._run(partial(marks.release, mark))
        if not await self._run(partial(self._delete, job, policy, chosen, not job.state.ended)):
            raise ConflictError(f"a job is being submitted that starts from {ref}", hint="delete it when that job has ended")
        return ref

    async def hold(self, job_id: str, starts: Sequence[Start], config: JobConfig) -> None:
        """Before a job is accepted that starts from checkpoints: from now on they are not deleted. `accepted` has to follow.

        Raises:
            ConfigError: one was deleted meanwhile.
            UnavailableError: the storage does not answer.
        """
        self._accepting.add(job_id)
        held = 0
        try:
            for place, start in enumerate(starts):
                await self._run(partial(self._hold, holder(job_id, place), start, config))
                held += 1
        except BaseException:
            await self.accepted(job_id, starts[:held], failed=True)
            raise

    async def accepted(self, job_id: str, starts: Sequence[Start], *, failed: bool) -> None:
        """The store knows the job now, or never will."""
        self._accepting.discard(job_id)
        for place, start in enumerate(starts if failed else ()):
            release = partial(Marks(_root(start), self._storage).release, holder(job_id, place))
            if self._storage is None:
                await asyncio.to_thread(release)
            else:
                self._storage_calls.later(release)

    async def hold_later(self, job_id: str, place: int, start: Start, config: JobConfig) -> None:
        """As `hold`, for a job that runs and comes to name one more checkpoint, the `place`-th.

        Raises: as `hold`.
        """
        await self._run(partial(self._hold, holder(job_id, place), start, config))

    async def _run(self, work: Callable[[], T]) -> T:
        if self._storage is None:
            return await asyncio.to_thread(work)
        return await self._storage_calls.run(work, WITHIN_S)

    def _hold(self, holder: str, start: Start, config: JobConfig) -> None:
        marks = Marks(_root(start), self._storage)
        marks.hold(holder, versioned(start.ref.name, start.ref.version))
        try:
            resolve_start(start, config, self._storage)  # whoever deletes it now sees the hold
        except BaseException:
            marks.release(holder)
            raise

    def _tag(self, job: Job, name: str, tag: str) -> dict[str, Any]:
        policy, name = split_policy(name)
        marks = Marks(checkpoint_root(job, policy), self._storage)
        saved = self._saved(job, policy)
        chosen = _named(job, policy, saved, marks.tags(), name)
        marks.tag(check_tag(tag, saved), versioned(chosen.name, chosen.version))
        return checkpoint_view(job, chosen, marks.tags(), policy)

    def _untag(self, job: Job, tag: str) -> None:
        policy, tag = split_policy(tag)
        marks = Marks(checkpoint_root(job, policy), self._storage)
        known = marks.tags()
        if tag not in known or not marks.untag(tag):
            has = f"it has {', '.join(sorted(known))}" if known else "it has none"
            raise NotFoundError(f"{_whose(job, policy)} has no tag '{tag[:100]}'", hint=has)

    def _chosen(self, job: Job, name: str) -> Checkpoint:
        policy, name = split_policy(name)
        return _named(job, policy, self._saved(job, policy), {}, name)  # a tag is no way to delete what it protects

    def _delete(self, job: Job, policy: str | None, chosen: Checkpoint, is_open: bool) -> bool:
        root, saved = checkpoint_root(job, policy), self._saved(job, policy)
        ref = ref_of(job, chosen.name, chosen.version, policy)
        if given := tags_of(Marks(root, self._storage).tags(), chosen):
            hint = f"opentinker checkpoint untag {job.id} {joined_policy(policy, given[0])}"
            raise ConflictError(f"{ref} has the tag '{given[0]}'", hint=hint)
        if is_open and find(saved, chosen.name) == chosen and chosen.name in self._resumable(job, policy, saved):
            raise ConflictError(f"{ref} is what its job would go on from", hint="delete it when the job has ended")
        if is_open and chosen.name.startswith(PLAYING):
            raise ConflictError(f"{ref} may play in its job's games", hint="delete it when the job has ended")
        try:
            return remove(root, versioned(chosen.name, chosen.version), self._storage)
        except OSError as error:
            raise CheckpointError(f"cannot delete {ref}: {error.strerror}") from error

    def _resumable(self, job: Job, policy: str | None, saved: Sequence[Checkpoint]) -> set[str]:
        """The names of the steps that a job would go on from: a policy's last, and the last of the job's own, which is saved
        after all others."""
        own = saved if policy is None else self._saved(job, None)
        steps = [[c.name for c in known if c.name.startswith(STEP)] for known in (saved, own)]
        return {max(names) for names in steps if names}

    def _saved(self, job: Job, policy: str | None) -> list[Checkpoint]:
        return all_checkpoints(checkpoint_root(job, policy), self._storage)


def holder(job_id: str, place: int) -> str:
    """What the hold of a job is called, of the checkpoint that it names at a place: a job may hold several of one policy."""
    return job_id if place == 0 else f"{job_id}~{place}"


def _root(start: Start) -> Path:
    return checkpoint_root(start.source, start.ref.policy)


def _whose(job: Job, policy: str | None) -> str:
    return f"job {job.id}" if policy is None else f"policy '{policy}' of job {job.id}"


def _named(job: Job, policy: str | None, saved: list[Checkpoint], tags: dict[str, str], name: str) -> Checkpoint:
    found = resolve(saved, tags, *parse_name(name))
    if found is None:
        known = [versioned(c.name, c.version) for c in saved]
        hint = f"it has {', '.join(known[:10])}" if known else "it has none"
        raise NotFoundError(f"{_whose(job, policy)} has no checkpoint '{name}'", hint=hint)
    return found
