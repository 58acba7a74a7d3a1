"""Drivers of submitted jobs are run, or found again, until they end; how they end is kept for the plan."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from opentinker.errors import ConfigError
from opentinker.scheduler.hosting import hosts_of
from opentinker.scheduler.journal import Journal
from opentinker.scheduler.launcher import DriverSpec, Launcher
from opentinker.scheduler.plan import DriverOutcome
from opentinker.scheduler.records import RESTARTING, Job
from opentinker.scheduler.server_care import ServerCare
from opentinker.scheduler.store import JobStore

_ECHOES = frozenset({"server_lost", "unavailable", "deadline_exceeded"})
"""Codes of driver errors that a server's death may have caused. Not that of a server that hangs: a look at it could take as
long as a server may be silent."""

logger = logging.getLogger(__name__)


class DriverCare:
    def __init__(
        self,
        store: JobStore,
        launcher: Launcher,
        servers: ServerCare,
        journal: Journal,
        token_of: Callable[[str], str],
        secrets_of: Callable[[Job], dict[str, tuple[str, str]]],
    ) -> None:
        self._store = store
        self._launcher = launcher
        self._servers = servers
        self._journal = journal
        self._token_of = token_of
        self._secrets_of = secrets_of
        self._outcomes: dict[str, DriverOutcome] = {}

    @property
    def outcomes(self) -> Mapping[str, DriverOutcome]:
        """By job, of the drivers that ended beside servers that are not gone yet."""
        return self._outcomes

    def forget(self, job_id: str) -> None:
        """The server of the job's driver is gone."""
        self._outcomes.pop(job_id, None)

    async def drive(self, job: Job) -> None:
        """Run a job's driver to its end. As a task it is called `driver:JOB`."""
        hosts = hosts_of(self._store, job.id)
        if not hosts:
            return  # it is being stopped
        (server, policy), *others = hosts
        spec = DriverSpec(
            job_id=job.id,
            server_id=server.id,
            node_id=server.node_id,
            kind=job.kind,
            config=job.config,
            endpoint=server.endpoint,
            policy_id=policy.id,
            token=self._token_of(policy.id),
            run_dir=job.run_dir,
            code_dir=str(Path(job.run_dir) / "code") if job.code_sha256 else None,
            resume=(job.id, RESTARTING) in self._store.event_counts([RESTARTING], [job.id]),
            servers={
                other.name: {"endpoint": other.endpoint, "token": self._token_of(its.id), "policy": its.id}
                for other, its in others
            },
        )
        try:
            spec = replace(spec, secrets=self._secrets_of(job))
        except ConfigError as error:
            spec = replace(spec, refusal=str(error))  # a secret is gone; a driver that runs has its value already
        try:
            outcome = await self._launcher.drive(spec)
        except Exception as error:
            logger.exception("event=drive_failed job=%s", job.id)
            outcome = DriverOutcome(f"the driver did not start: {type(error).__name__}: {' '.join(str(error).split())}")
        if outcome.lost or outcome.code in _ECHOES:
            await asyncio.gather(*(self._servers.check(host.id) for host, _ in hosts))
        self._outcomes[job.id] = outcome
        self._journal.wake()
