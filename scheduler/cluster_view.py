"""The cluster at a glance: nodes, who holds what, how busy it is, and who waits. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from opentinker.scheduler.gpus import GpuUse
from opentinker.scheduler.layouts import held_by, total
from opentinker.scheduler.placement import Demand, Node, free_on
from opentinker.scheduler.records import Job, Server
from opentinker.scheduler.states import JobState

QUEUE_SHOWN = 50
"""Waiting jobs in the view, from the head of the queue."""


def cluster_view(
    nodes: Sequence[Node],
    servers: Sequence[tuple[Server, Sequence[Job]]],
    queue: Iterable[Job],
    counts: Mapping[JobState, int],
    use: Mapping[str, Sequence[GpuUse]],
    waiting_for: Callable[[Job], str],
    sees: Callable[[Job], bool],
    unhealthy: Mapping[str, str],
) -> dict[str, Any]:
    """{"nodes", "queue", "queued", "running"}. `servers` are those that hold something, with their jobs; of a job that the
    caller does not see (`sees`), only the owner and the amounts are told. `unhealthy`: by server, why it stays."""
    free = free_on(nodes, [allocation for server, _ in servers for allocation in held_by(server)])
    return {
        "nodes": [
            _node(node, free[node.id], [s for s in servers if _is_on(s[0], node)], use.get(node.id, ()), sees, unhealthy)
            for node in nodes
        ],
        "queue": [_waiting(job, waiting_for(job), sees(job)) for job in queue],
        "queued": counts.get(JobState.QUEUED, 0),
        "running": counts.get(JobState.STARTING, 0) + counts.get(JobState.RUNNING, 0),
    }


def _node(
    node: Node,
    free: Demand,
    servers: Sequence[tuple[Server, Sequence[Job]]],
    use: Sequence[GpuUse],
    sees: Callable[[Job], bool],
    unhealthy: Mapping[str, str],
) -> dict[str, Any]:
    return {
        "id": node.id,
        "name": node.name,
        "gpus": node.gpus,
        "free_gpus": free.gpus,
        "cpu_slots": node.cpu_slots,
        "free_cpu_slots": free.cpu_slots,
        "held": [_held(server, node, job, sees(job), unhealthy.get(server.id, "")) for server, jobs in servers for job in jobs],
        "gpu_use": [asdict(gpu) for gpu in use],
    }


def _is_on(server: Server, node: Node) -> bool:
    return node.id in (server.node_id, server.rollout_node_id)


def _held(server: Server, node: Node, job: Job, seen: bool, unhealthy: str) -> dict[str, Any]:
    here = total([allocation.demand for allocation in held_by(server) if allocation.node_id == node.id])
    return {
        **_who(job, seen),
        "unhealthy": unhealthy,
        "server_state": server.state,
        "gpus": here.gpus,
        "cpu_slots": here.cpu_slots,
        "since": job.started_at or job.created_at,
    }


def _waiting(job: Job, why: str, seen: bool) -> dict[str, Any]:
    return {
        **_who(job, seen),
        "gpus": job.gpus,
        "cpu_slots": job.cpu_slots,
        "since": job.created_at,
        "waiting_for": why if seen else "",
    }


def _who(job: Job, seen: bool) -> dict[str, Any]:
    return {
        "job": job.id if seen else None,
        "name": job.name if seen else "",
        "kind": job.kind,
        "owner": job.owner,
        "state": job.state,
    }
