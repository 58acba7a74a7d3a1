"""Leases and limits by a clock that nobody sets. The store's times are Unix times, which somebody may."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from opentinker.scheduler.plan import JobView
from opentinker.scheduler.settings import Settings

FORGIVEN_S = 2.0
"""A longer pause between two looks is an outage of the scheduler's own."""

logger = logging.getLogger(__name__)


class JobClocks:
    """Leases start anew when the scheduler does: the store's `lease_expires_at` only says that there is one."""

    def __init__(self, settings: Settings, now: Callable[[], float], steady: Callable[[], float]) -> None:
        self._settings = settings
        self._now = now
        self._steady = steady
        self._leases: dict[str, float] = {}
        self._held_since: dict[str, float] = {}
        self._looked_at = time.monotonic()

    def renew_lease(self, job_id: str) -> None:
        """The job's client was heard of."""
        self._leases[job_id] = self._steady() + self._settings.lease_s

    def queued(self, job_id: str) -> None:
        """The job went back into the queue, and holds nothing."""
        self._held_since.pop(job_id, None)

    def ended(self, job_id: str) -> None:
        self._leases.pop(job_id, None)
        self._held_since.pop(job_id, None)

    def looked(self) -> None:
        """A look at the cluster is over."""
        self._looked_at = time.monotonic()

    def forgive_outage(self) -> None:
        """Time in which this process could not look, with its store away or itself stopped, renewed nobody's lease: it does
        not count."""
        missed_s = time.monotonic() - self._looked_at - self._settings.reconcile_s
        if missed_s > FORGIVEN_S:
            logger.warning("event=outage seconds=%.1f", missed_s)
            self._leases = {job_id: expires_at + missed_s for job_id, expires_at in self._leases.items()}

    def timed(self, job: JobView) -> JobView:
        """The job with its times by the steady clock, told in Unix time as that is now, however it was set meanwhile."""
        lease, since = job.lease_expires_at, job.holds_since
        if since is not None:
            now = self._steady()
            started = self._held_since.setdefault(job.id, now - max(0.0, self._now() - since))
            since = self._now() - (now - started)
        return replace(job, lease_expires_at=None if lease is None else self._lease_expires_at(job), holds_since=since)

    def _lease_expires_at(self, job: JobView) -> float:
        """In Unix time as it is now, however it was set meanwhile."""
        now = self._steady()
        return self._now() + self._leases.setdefault(job.id, now + self._settings.lease_s) - now
