"""What jobs ask for, what nodes have and what is held: the words of placement, as pure values."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from opentinker.config.resources import Resources
from opentinker.config.server import ServerConfig
from opentinker.errors import ConfigError
from opentinker.scheduler.settings import NodeType


class Demand(NamedTuple):
    """What one bundle occupies, on one node. `gpus` is a whole number, or a fraction of one GPU."""

    gpus: float = 0
    cpu_slots: int = 0

    @property
    def shares_gpu(self) -> bool:
        return 0 < self.gpus < 1

    def __str__(self) -> str:
        parts = [count(self.gpus, "GPU")] if self.gpus else []
        return " and ".join(parts + ([count(self.cpu_slots, "CPU slot")] if self.cpu_slots else []))


Request = tuple[Demand, ...]
"""The bundles of a job. They start together or not at all; each is on one node, and two may be on the same."""


@dataclass(frozen=True)
class Node:
    """What a node has in all. `cpus` are its cores: they are shared out among its slots, not scheduled."""

    id: str
    name: str
    gpus: int
    cpu_slots: int
    cpus: int = 1
    gpu_groups: tuple[tuple[int, ...], ...] = ()
    """Indexes of GPUs that are close to each other (NVLink, NUMA); empty where that is unknown."""
    address: str = ""
    """The IP address at which the cluster's other nodes reach it."""
    raylet_port: int = 0


@dataclass(frozen=True)
class Allocation:
    """A demand that is held on a node."""

    node_id: str
    demand: Demand
    gpus: tuple[int, ...] = ()
    """Indexes of its GPUs, once they are known; Ray chooses them."""


@dataclass(frozen=True)
class Placement:
    """`starts`: job -> where, bundle by bundle. `waits`: job -> what it waits for. Every queued job is in exactly one."""

    starts: Mapping[str, tuple[Allocation, ...]]
    waits: Mapping[str, str]


def roles_of(resources: Resources, nodes: Sequence[Node], ranks: int = 1, parts: int = 1) -> tuple[tuple[str, Demand], ...]:
    """(role, demand) of each bundle that a job asks for, whose trainer has so many ranks and whose engine so many parts;
    colocated, its one bundle plays both roles."""
    if resources.layout == "split":
        wanted = {"trainer": _amount(resources.roles["trainer"].gpus, nodes, ranks, ranks)}
        wanted["rollout"] = _amount(resources.roles["rollout"].gpus, nodes, parts, 1)
        return tuple((name, wanted[name]) for name, role in resources.roles.items() for _ in range(role.replicas))
    return (("trainer and rollout", _amount(resources.gpus, nodes, max(ranks, parts), ranks)),)


def _amount(gpus: float | None, nodes: Sequence[Node], wanted_gpus: int, cpu_slots: int) -> Demand:
    if gpus is None:
        gpus = wanted_gpus if any(node.gpus for node in nodes) else 0
    return Demand(gpus=gpus) if gpus else Demand(cpu_slots=cpu_slots)


def demand_of(
    resources: Resources, present: Sequence[Node], kinds: Sequence[NodeType] = (), *, ranks: int = 1, parts: int = 1
) -> Demand:
    """What a colocated job's server occupies, resolved against the cluster: its nodes, and the kinds that can be added. Each of
    the trainer's `ranks` has a GPU or a CPU slot; each of the engine's `parts` a GPU, which may be a rank's, or the threads of
    the slots together.

    Raises:
        ConfigError: no node could ever hold it.
    """
    nodes = [*present, *addable(kinds)]
    ((_, demand),) = roles_of(resources, nodes, ranks, parts)
    if not any(node.gpus >= demand.gpus and node.cpu_slots >= demand.cpu_slots for node in nodes):
        largest = max((node.gpus if demand.gpus else node.cpu_slots for node in nodes), default=0)
        unit = "GPU" if demand.gpus else "CPU slot"
        raise ConfigError(
            f"the job asks for {demand} on one node; the largest node of this cluster has {count(largest, unit)}",
            hint=f"lower {_wishes(demand, ranks, parts)}"
            if demand.gpus or ranks > 1
            else "start the cluster with CPU slots, or ask for a GPU",
        )
    return demand


def _wishes(demand: Demand, ranks: int, parts: int) -> str:
    """The keys that ask for so much."""
    if demand.gpus > max(ranks, parts):
        return "resources.gpus (0 = a CPU slot)"
    keys = {"trainer.ranks": ranks, "engine.tensor_parallel": parts if demand.gpus else 1}
    return " and ".join(key for key, number in keys.items() if number > 1) or "resources.gpus (0 = a CPU slot)"


def free_on(nodes: Sequence[Node], held: Sequence[Allocation]) -> dict[str, Demand]:
    """Free GPUs and CPU slots by node id. A node that shrank below what is held on it has 0 free."""
    free = {node.id: [float(node.gpus), node.cpu_slots] for node in nodes}
    for allocation in held:
        if allocation.node_id in free:
            free[allocation.node_id][0] -= allocation.demand.gpus
            free[allocation.node_id][1] -= allocation.demand.cpu_slots
    return {node_id: Demand(max(0.0, round(gpus, 4)), max(0, int(slots))) for node_id, (gpus, slots) in free.items()}


def addable(kinds: Sequence[NodeType], nodes: Sequence[Node] = (), most: int = 64) -> list[Node]:
    """Empty nodes as they can be added to these, at most `most` of a kind. A node counts as one of the kinds by its size."""
    present = Counter((node.gpus, node.cpu_slots) for node in nodes)
    return [
        Node(f"addable-{number}.{copy}", "a node that can be added", kind.gpus, kind.cpu_slots)
        for number, kind in enumerate(kinds)
        for copy in range(min(most, kind.max - present[kind.gpus, kind.cpu_slots]))
    ]


def parse_groups(label: str) -> tuple[tuple[int, ...], ...]:
    """GPU groups of a node label such as "0-3.4-7"; none if it is not of that form."""
    matches = [re.fullmatch(r"(\d{1,4})-(\d{1,4})", part) for part in label.split(".")]
    return tuple(tuple(range(int(m[1]), int(m[2]) + 1)) for m in matches if m) if all(matches) else ()


def threads_for(node: Node, demand: Demand) -> int:
    """Compute threads of a server: its share of the node's cores."""
    share = demand.gpus / node.gpus if demand.gpus else demand.cpu_slots / max(1, node.cpu_slots)
    return max(1, int(node.cpus * share))


def server_config(config: ServerConfig, demand: Demand) -> ServerConfig:
    """The server's config for what it was given: of a shared GPU, the engine takes its fraction of the share only."""
    if not demand.shares_gpu:
        return config
    engine = config.engine.model_copy(update={"memory_fraction": config.engine.memory_fraction * demand.gpus})
    return config.model_copy(update={"engine": engine})


def count(number: float, noun: str) -> str:
    """The number with its noun, such as "3 GPUs"."""
    return f"{number:g} {noun}{'' if number <= 1 and number else 's'}"
