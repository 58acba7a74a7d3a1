"""The checkpoint that is written before a job is ended: when somebody stops it, or it reaches a limit."""

from functools import partial

from opentinker.config.job import KINDS
from opentinker.errors import OpenTinkerError
from opentinker.scheduler.hosting import known_job, policy_of
from opentinker.scheduler.job_moves import JobMoves
from opentinker.scheduler.journal import Journal
from opentinker.scheduler.launcher import Launcher
from opentinker.scheduler.named_tasks import NamedTasks
from opentinker.scheduler.records import Job
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
        """End a job after a checkpoint of its policy, if it has something to save."""
        if KINDS[job.kind].trains and job.state is JobState.RUNNING:
            self._tasks.spawn(f"save:{job.id}", partial(self._save_and_end, job, state, cause))
        else:
            self._moves.end(job, state, cause)

    async def _save_and_end(self, job: Job, state: JobState, cause: str) -> None:
        self._store.save(self._journal.event(job.id, "stopping", cause))
        self._journal.announce(job.id, "stopping", cause=cause)
        try:
            policy = policy_of(self._store, job.id)
            assert policy is not None
            await self._launcher.save(policy.server_id, policy.id, NAME)
            saved = f"its weights are in checkpoint '{NAME}'"
        except OpenTinkerError as error:
            saved = f"no checkpoint could be written: {error.detail}"
        job = known_job(self._store, job.id)
        if job.state is JobState.RUNNING:  # nothing else ended it meanwhile
            self._moves.end(job, state, f"{cause}; {saved}")
