"""What hosts a job, as the store has it."""

from opentinker.scheduler.records import Job, Policy
from opentinker.scheduler.states import ServerState
from opentinker.scheduler.store import JobStore


def known_job(store: JobStore, job_id: str) -> Job:
    """A job that something in the store names."""
    job = store.job(job_id)
    assert job is not None
    return job


def policy_of(store: JobStore, job_id: str) -> Policy | None:
    """The policy on the job's present server; None if it has none."""
    for server, policies in store.open_servers():
        for policy in policies:
            if policy.job_id == job_id and server.state in (ServerState.STARTING, ServerState.READY):
                return policy
    return None


def released(store: JobStore, job_id: str) -> bool:
    """Whether nothing of an ended job is left on the cluster."""
    servers = [store.server(policy.server_id) for policy in store.policies(job_id)]
    return all(server is None or server.state is ServerState.STOPPED for server in servers)
