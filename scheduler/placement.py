"""Who starts where, and in words why the others wait. Pure functions over what nodes have and what is held."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opentinker.config.job import Resources
from opentinker.errors import ConfigError


@dataclass(frozen=True)
class Demand:
    """What a job's server occupies, on one node."""

    gpus: int = 0
    cpu_slots: int = 0

    def __str__(self) -> str:
        parts = [_count(self.gpus, "GPU")] if self.gpus else []
        return " and ".join(parts + ([_count(self.cpu_slots, "CPU slot")] if self.cpu_slots else []))


@dataclass(frozen=True)
class Node:
    """What a node has in all. `cpus` are its cores: they are shared out among its slots, not scheduled."""

    id: str
    name: str
    gpus: int
    cpu_slots: int
    cpus: int = 1


@dataclass(frozen=True)
class Allocation:
    """A demand that is held on a node."""

    node_id: str
    demand: Demand


@dataclass(frozen=True)
class Placement:
    """`starts`: job -> where, in queue order. `waits`: job -> what it waits for. Every queued job is in exactly one."""

    starts: Mapping[str, Allocation]
    waits: Mapping[str, str]


def demand_of(resources: Resources, nodes: Sequence[Node]) -> Demand:
    """What a job asks for, resolved against the cluster.

    Raises:
        ConfigError: no node could ever hold it.
    """
    gpus = resources.gpus
    if gpus is None:
        gpus = 1 if any(node.gpus for node in nodes) else 0
    demand = Demand(gpus=gpus) if gpus else Demand(cpu_slots=1)
    if not any(_fits(node, demand) for node in nodes):
        largest = max((node.gpus if gpus else node.cpu_slots for node in nodes), default=0)
        unit = "GPU" if gpus else "CPU slot"
        raise ConfigError(
            f"the job asks for {demand} on one node; the largest node of this cluster has {_count(largest, unit)}",
            hint="lower resources.gpus (0 = a CPU slot)" if gpus else "start the cluster with CPU slots, or ask for a GPU",
        )
    return demand


def free_on(nodes: Sequence[Node], held: Sequence[Allocation]) -> dict[str, Demand]:
    """Free GPUs and CPU slots by node id. A node that shrank below what is held on it has 0 free."""
    return {
        node.id: Demand(
            gpus=max(0, node.gpus - sum(a.demand.gpus for a in held if a.node_id == node.id)),
            cpu_slots=max(0, node.cpu_slots - sum(a.demand.cpu_slots for a in held if a.node_id == node.id)),
        )
        for node in nodes
    }


def place(nodes: Sequence[Node], held: Sequence[Allocation], queue: Sequence[tuple[str, Demand]]) -> Placement:
    """First come, first served, strictly: nobody overtakes a job that does not fit yet. A job goes to the node that it
    leaves fullest, so that large gaps stay whole."""
    free = free_on(nodes, held)
    starts: dict[str, Allocation] = {}
    waits: dict[str, str] = {}
    for job_id, demand in queue:
        if waits:
            waits[job_id] = f"its turn: {_count(len(waits), 'job')} ahead in the queue"
            continue
        fitting = [node for node in nodes if _fits(free[node.id], demand)]
        if not fitting:
            waits[job_id] = _shortage(demand, free, nodes)
            continue
        node = min(fitting, key=lambda n: (free[n.id].gpus, free[n.id].cpu_slots, n.id))
        left = free[node.id]
        free[node.id] = Demand(left.gpus - demand.gpus, left.cpu_slots - demand.cpu_slots)
        starts[job_id] = Allocation(node.id, demand)
    return Placement(starts, waits)


def threads_for(node: Node, demand: Demand) -> int:
    """Compute threads of a server: its share of the node's cores."""
    share = demand.gpus / node.gpus if demand.gpus else demand.cpu_slots / max(1, node.cpu_slots)
    return max(1, int(node.cpus * share))


def _fits(has: Node | Demand, demand: Demand) -> bool:
    return has.gpus >= demand.gpus and has.cpu_slots >= demand.cpu_slots


def _shortage(demand: Demand, free: Mapping[str, Demand], nodes: Sequence[Node]) -> str:
    unit = "GPU" if demand.gpus else "CPU slot"
    most = max((f.gpus if demand.gpus else f.cpu_slots for f in free.values()), default=0)
    where = "free" if len(nodes) == 1 else f"free on any of {_count(len(nodes), 'node')}"
    return f"{demand}: {most or 'no'} {unit}{'' if most == 1 else 's'} {where}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
