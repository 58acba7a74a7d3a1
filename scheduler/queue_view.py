"""The jobs as a plan sees them, kept between looks: what has to be parsed is parsed once per job, not at every look."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from opentinker.config.base import parse_config
from opentinker.config.job import KINDS
from opentinker.config.resources import Scheduling
from opentinker.errors import ConfigError
from opentinker.scheduler.fairshare import UsageLedger, cost_of
from opentinker.scheduler.layouts import whole
from opentinker.scheduler.placement import Demand
from opentinker.scheduler.plan import JobView
from opentinker.scheduler.queueing import Policy
from opentinker.scheduler.quotas import policy_of
from opentinker.scheduler.records import RESTARTING, RETURNED, STOP_REQUESTED, Job, LiveJob
from opentinker.scheduler.settings import Settings
from opentinker.scheduler.states import JobState
from opentinker.scheduler.store import JobStore

_FORGOTTEN_HALF_LIVES = 10
"""After these, a use counts less than a thousandth."""
MAX_RETURNS = 5
"""How often a job goes back into the queue because the place that it was given was gone; then it is no accident."""
_COUNTED = (RESTARTING, RETURNED, STOP_REQUESTED)
_FEW = 50
"""More unknown jobs than these are read in one query rather than one by one."""


class QueueView:
    """Job views and usage over a store. The reconciler tells it what starts and what ends; the rest it reads."""

    def __init__(self, store: JobStore, settings: Settings, now: float) -> None:
        self._store = store
        self._settings = settings
        self._views: dict[str, JobView] = {}
        self._ledger = UsageLedger(settings.usage_half_life_s)
        for use in store.past_use(now - _FORGOTTEN_HALF_LIVES * settings.usage_half_life_s):
            self._ledger.charge(use.owner, cost_of([Demand(use.gpus, use.cpu_slots)]), use.begin, use.end)

    @property
    def policy(self) -> Policy:
        """How the cluster is shared now."""
        return policy_of(self._settings, self._store.users())

    def jobs(self) -> list[JobView]:
        """Jobs that have not ended, in the order of their submission."""
        rows = self._store.live_queue()
        unknown = [row.id for row in rows if row.id not in self._views]
        configs = self._configs(unknown) if unknown else {}
        counts = self._store.event_counts(_COUNTED, unknown if len(unknown) <= _FEW else None) if unknown else {}
        views = [self._view(row, configs, counts) for row in rows]
        self._views = {view.id: view for view in views}
        return views

    def usage(self, now: float) -> dict[str, float]:
        """Decayed usage by owner of jobs that have ended."""
        return self._ledger.usage(now)

    def started(self, job_id: str, now: float) -> None:
        """The job was given its resources."""
        if (view := self._views.get(job_id)) is not None:
            self._views[job_id] = replace(view, state=JobState.STARTING, holds_since=now)

    def stopping(self, job_id: str, cause: str) -> None:
        """Somebody asked for the job's end with a checkpoint, and the store knows it."""
        if (view := self._views.get(job_id)) is not None:
            self._views[job_id] = replace(view, stopping=cause)

    def released(self, job: Job, now: float) -> None:
        """The job, given as it was before, has ended, or goes back into the queue."""
        view = self._views.pop(job.id, None)
        if job.state is not JobState.QUEUED:
            since = view.holds_since if view is not None else self._store.holding_since(job.id)
            if since is not None:
                self._ledger.charge(job.owner, cost_of([Demand(job.gpus, job.cpu_slots)]), since, now)

    def _view(self, row: LiveJob, configs: dict[str, dict[str, Any]], counts: Mapping[tuple[str, str], int]) -> JobView:
        view = self._views.get(row.id)
        if view is not None and view.state is row.state and view.lease_expires_at == row.lease_expires_at:
            return view
        if view is not None:
            since = None if row.state is JobState.QUEUED else view.holds_since
            return replace(view, state=row.state, lease_expires_at=row.lease_expires_at, holds_since=since)
        config = configs[row.id]
        scheduling = scheduling_of(config)
        return JobView(
            id=row.id,
            state=row.state,
            request=whole(row),
            lease_expires_at=row.lease_expires_at,
            owner=row.owner,
            priority=scheduling.priority,
            time_limit_s=scheduling.time_limit_s,
            submitted_at=row.created_at,
            holds_since=None if row.state is JobState.QUEUED else self._store.holding_since(row.id),
            idle_limit_s=scheduling.idle_limit_s,
            idle_end=_idle_end(config.get("kind"), leased=row.lease_expires_at is not None),
            restarts_left=scheduling.max_restarts - counts.get((row.id, RESTARTING), 0),
            returns_left=MAX_RETURNS - counts.get((row.id, RETURNED), 0),
            saves=_saves(config.get("kind")),
            stopping=self._store.last_detail(row.id, STOP_REQUESTED) if (row.id, STOP_REQUESTED) in counts else "",
        )

    def _configs(self, unknown: Sequence[str]) -> dict[str, dict[str, Any]]:
        jobs = self._store.live_jobs() if len(unknown) > _FEW else [self._store.job(job_id) for job_id in unknown]
        return {job.id: job.config for job in jobs if job is not None}


def _saves(kind: Any) -> bool:
    return kind in KINDS and KINDS[kind].trains


def _idle_end(kind: Any, *, leased: bool) -> JobState:
    """How a job ends whose server has nothing to do: its driver hangs, its client forgot it, or all is done."""
    if kind in KINDS and KINDS[kind].driven:
        return JobState.FAILED
    return JobState.CANCELLED if leased else JobState.COMPLETED


def scheduling_of(config: dict[str, Any]) -> Scheduling:
    """The `scheduling` section of a stored config. Jobs of other versions may have none, or one that this version refuses;
    starting them says so, and until then they queue like any other."""
    try:
        return parse_config(Scheduling, config.get("scheduling", {}))
    except ConfigError:
        return Scheduling()
