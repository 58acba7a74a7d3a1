"""What a server counts, in all and for each job that its clients name."""

from collections import OrderedDict
from dataclasses import asdict, dataclass, field
from typing import Any

MAX_JOBS = 1000
"""Of the jobs seen last."""


@dataclass
class Counts:
    """Since the server's start."""

    sessions: int = 0
    resets: int = 0
    steps: int = 0
    finalized: int = 0
    environment_errors: int = 0
    deadlines: int = 0
    refused: int = 0
    lost: int = 0
    """Sessions whose worker ended."""
    idle_closed: int = 0


@dataclass
class Statistics:
    """The whole and the jobs."""

    total: Counts = field(default_factory=Counts)
    jobs: "OrderedDict[str, Counts]" = field(default_factory=OrderedDict)

    def of(self, job: str) -> Counts:
        """A job's counts, to be added to."""
        counts = self.jobs.get(job)
        if counts is None:
            counts = self.jobs[job] = Counts()
            if len(self.jobs) > MAX_JOBS:
                self.jobs.popitem(last=False)
        return counts

    def document(self) -> dict[str, Any]:
        return {"total": asdict(self.total), "jobs": {job: asdict(counts) for job, counts in self.jobs.items() if job}}
