"""What hosts a job, as the store has it."""

from pathlib import Path

from opentinker.errors import NotFoundError
from opentinker.scheduler.records import Job, Policy, Server
from opentinker.scheduler.states import ServerState
from opentinker.scheduler.store import JobStore


def known_job(store: JobStore, job_id: str) -> Job:
    """A job that something in the store names."""
    job = store.job(job_id)
    assert job is not None
    return job


def hosts_of(store: JobStore, job_id: str) -> list[tuple[Server, Policy]]:
    """The job's present servers, its own first, with the policy that each began with; none while it has none."""
    hosts = [
        (server, policy)
        for server, policies in store.open_servers()
        for policy in policies
        if policy.job_id == job_id and server.state in (ServerState.STARTING, ServerState.READY)
    ]
    own_first = sorted(hosts, key=lambda host: host[0].name)
    return own_first if own_first and not own_first[0][0].name else []


def released(store: JobStore, job_id: str) -> bool:
    """Whether nothing of an ended job is left on the cluster."""
    servers = [store.server(policy.server_id) for policy in store.policies(job_id)]
    return all(server is None or server.state is ServerState.STOPPED for server in servers)


def server_folder(run_dir: Path, name: str) -> Path:
    """Where a server of a job writes its log: the run's folder, or below it one for each further server, so that what copies
    a server's folder from its node touches no other's."""
    return run_dir / "servers" / name if name else run_dir


def check_further(job: Job, name: str) -> None:
    """Raises: NotFoundError when the job has no server of that name beside its own."""
    names = [amounts.name for amounts in job.further]
    if name not in names:
        there = f"beside its own it has {', '.join(names)}" if names else "it has none beside its own"
        raise NotFoundError(f"job {job.id} has no server '{name}'", hint=there)


def process_mark(job_id: str, name: str) -> str:
    """What the processes of a job's server carry, so that they are found. The own one and the driver have the job's id."""
    return f"{job_id}-{name}" if name else job_id
