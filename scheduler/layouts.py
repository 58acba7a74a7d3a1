"""The bundles of a job by its layout: one for trainer and rollout engine together, or one for each of them."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from opentinker.config.job import JobConfig
from opentinker.config.resources import Resources
from opentinker.errors import ConfigError
from opentinker.scheduler.capacity import Capacity
from opentinker.scheduler.placement import Allocation, Demand, Node, Request, addable, count, demand_of, roles_of
from opentinker.scheduler.records import Server, ServerAmounts
from opentinker.scheduler.settings import NodeType


class Amounts(Protocol):
    """What a record says of the resources of a server: in all, and of those the rollout engine's own."""

    @property
    def gpus(self) -> float: ...
    @property
    def cpu_slots(self) -> int: ...
    @property
    def rollout_gpus(self) -> float: ...
    @property
    def rollout_cpu_slots(self) -> int: ...


class Gang(Amounts, Protocol):
    """The same of a job: in all, of those its own server's rollout engine's, and its further servers'."""

    @property
    def further(self) -> tuple[ServerAmounts, ...]: ...


def requests_of(config: JobConfig, present: Sequence[Node], kinds: Sequence[NodeType] = ()) -> dict[str, Request]:
    """What each of a job's servers occupies, its own first, as `request_of`.

    Raises:
        ConfigError: the cluster could never hold them all at once, or they cannot be so; it names the server.
    """
    requests = {}
    for name, part in config.parts.items():
        try:
            requests[name] = request_of(part, present, kinds)
        except ConfigError as error:
            if not name:
                raise
            hint = error.hint
            for key in ("resources.", "trainer.ranks", "engine.tensor_parallel"):
                hint = hint.replace(key, f"servers.{name}.{key}")
            raise ConfigError(f"servers.{name}: {error.detail}", hint=hint) from error
    nodes = [*present, *addable(kinds)]
    together = tuple(demand for request in requests.values() for demand in request)
    if len(requests) > 1 and not possible(together, nodes):
        wishes = ", ".join(
            f"{' and '.join(map(str, request))} for {f'server {name!r}' if name else 'its own server'}"
            for name, request in requests.items()
        )
        raise ConfigError(
            f"the job's {len(requests)} servers start together and ask for {total(together)}: {wishes}, each on one node; "
            f"this cluster has {_size(nodes)}",
            hint="let agents share a server as adapters, lower what the servers ask for (resources, servers.NAME.resources), "
            "or add nodes",
        )
    return requests


def request_of(config: JobConfig, present: Sequence[Node], kinds: Sequence[NodeType] = ()) -> Request:
    """What the own server of a job occupies, resolved against the cluster: its nodes, and the kinds that can be added.

    Raises:
        ConfigError: the cluster could never hold it, or it is one that servers cannot do.
    """
    resources, parts = config.resources, config.engine.tensor_parallel
    if resources.layout == "colocated":
        return (demand_of(resources, present, kinds, ranks=config.trainer_ranks, parts=parts),)
    _check_split(resources)
    nodes = [*present, *addable(kinds)]
    roles = roles_of(resources, nodes, config.trainer_ranks, parts)
    request = tuple(demand for _, demand in roles)
    if not possible(request, nodes):
        wishes = " and ".join(f"{demand} for the {role}" for role, demand in roles)
        raise ConfigError(
            f"the job asks for {wishes}, each on one node; this cluster has {_size(nodes)}",
            hint="lower resources.trainer.gpus or resources.rollout.gpus (0 = a CPU slot), or use resources.layout=colocated",
        )
    return request


def _size(nodes: Sequence[Node]) -> str:
    gpus, slots = sum(n.gpus for n in nodes), sum(n.cpu_slots for n in nodes)
    return f"{count(gpus, 'GPU')} and {count(slots, 'CPU slot')} on {count(len(nodes), 'node')}"


def _check_split(resources: Resources) -> None:
    for name, role in resources.roles.items():
        if role.replicas > 1:
            raise ConfigError(
                f"resources.{name}.replicas: {role.replicas} replicas are not served yet; a job has one trainer and one engine",
                hint=f"give the {name} more GPUs on one node with resources.{name}.gpus",
            )


def possible(request: Request, nodes: Sequence[Node]) -> bool:
    """Whether the nodes could hold all bundles at once, with nothing else on them."""
    return bool(nodes) and Capacity(nodes, ()).place(request) is not None


def total(request: Sequence[Demand]) -> Demand:
    """What the bundles are together."""
    return Demand(round(sum(demand.gpus for demand in request), 4), sum(demand.cpu_slots for demand in request))


def further_amounts(requests: Mapping[str, Request]) -> tuple[ServerAmounts, ...]:
    """What a record keeps of the servers beside the job's own."""
    return tuple(ServerAmounts(name, *total(request), *total(request[1:])) for name, request in requests.items() if name)


def gang(job: Gang) -> dict[str, Request]:
    """The bundles of each of a job's servers, its own first. All of them start together or not at all."""
    others = total([Demand(each.gpus, each.cpu_slots) for each in job.further])
    own = ServerAmounts(
        "", round(job.gpus - others.gpus, 4), job.cpu_slots - others.cpu_slots, job.rollout_gpus, job.rollout_cpu_slots
    )
    return {amounts.name: bundles(amounts) for amounts in (own, *job.further)}


def whole(job: Gang) -> Request:
    """All of a job's bundles, server by server."""
    return tuple(demand for request in gang(job).values() for demand in request)


def bundles(amounts: Amounts) -> Request:
    """The bundles of a server."""
    rollout = Demand(amounts.rollout_gpus, amounts.rollout_cpu_slots)
    if rollout == Demand():
        return (Demand(amounts.gpus, amounts.cpu_slots),)
    return (Demand(round(amounts.gpus - rollout.gpus, 4), amounts.cpu_slots - rollout.cpu_slots), rollout)


def held_by(server: Server, gpus: tuple[int, ...] = ()) -> tuple[Allocation, ...]:
    """What a server holds, and where; `gpus` are the indexes of the first bundle's."""
    first, *rest = bundles(server)
    return (
        Allocation(server.node_id, first, gpus or server.gpu_indexes),
        *(Allocation(server.rollout_node_id, demand, server.rollout_gpu_indexes) for demand in rest),
    )
