"""The checkpoint that is written before a job is ended: when somebody stops it, or it reaches a limit."""

import asyncio
from functools import partial

from opentinker.config.job import KINDS
from opentinker.errors import OpenTinkerError
from opentinker.scheduler.hosting import hosts_of, known_job
from opentinker.scheduler.job_moves import JobMoves
from opentinker.scheduler.journal import Journal
from opentinker.scheduler.launcher import Launcher
from opentinker.scheduler.named_tasks import NamedTasks
from opentinker.scheduler.records import Job, Policy, Server
from opentinker.scheduler.states import JobState
from opentinker.scheduler.store import JobStore

NAME = "stopped"
"""What it is called."""


class LastCheckpoints:
    def __init__(self, store: JobStore, launcher: Launcher, journal: Journal, moves: JobMoves, tasks: NamedTasks) -> None:
        self._store = store
        self._launcher = launcher
        self._journal = journal
        self._moves = moves
        self._tasks = tasks

    def end(self, job: Job, state: JobState, cause: str) -> None:
        """End a job after a checkpoint of its policies, on all its servers, if it has something to save."""
        if KINDS[job.kind].trains and job.state is JobState.RUNNING:
            self._tasks.spawn(f"save:{job.id}", partial(self._save_and_end, job, state, cause))
        else:
            self._moves.end(job, state, cause)

    async def _save_and_end(self, job: Job, state: JobState, cause: str) -> None:
        self._store.save(self._journal.event(job.id, "stopping", cause))
        self._journal.announce(job.id, "stopping", cause=cause)
        try:
            own, *others = hosts_of(self._store, job.id)
            ends = await asyncio.gather(*(self._save(host) for host in others), return_exceptions=True)
            if failed := [end for end in ends if end is not None]:
                raise failed[0]
            await self._save(own)  # last, as a run does: when it is there, those of the others are
            saved = f"its weights are in checkpoint '{NAME}'"
        except OpenTinkerError as error:
            saved = f"no checkpoint could be written: {error.detail}"
        job = known_job(self._store, job.id)
        if job.state is JobState.RUNNING:  # nothing else ended it meanwhile
            self._moves.end(job, state, f"{cause}; {saved}")

    async def _save(self, host: tuple[Server, Policy]) -> None:
        server, policy = host
        await self._launcher.save(server.id, policy.id, NAME)
