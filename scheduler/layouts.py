"""The bundles of a job by its layout: one for trainer and rollout engine together, or one for each of them."""

from collections.abc import Sequence
from typing import Protocol

from opentinker.config.job import JobConfig
from opentinker.config.resources import Resources
from opentinker.errors import ConfigError
from opentinker.scheduler.capacity import Capacity
from opentinker.scheduler.placement import Allocation, Demand, Node, Request, addable, count, demand_of, roles_of
from opentinker.scheduler.records import Server
from opentinker.scheduler.settings import NodeType


class Amounts(Protocol):
    """What a record says of the resources of its job: in all, and of those the rollout engine's own."""

    @property
    def gpus(self) -> float: ...
    @property
    def cpu_slots(self) -> int: ...
    @property
    def rollout_gpus(self) -> float: ...
    @property
    def rollout_cpu_slots(self) -> int: ...


def request_of(config: JobConfig, present: Sequence[Node], kinds: Sequence[NodeType] = ()) -> Request:
    """What a job's server occupies, resolved against the cluster: its nodes, and the kinds that can be added.

    Raises:
        ConfigError: the cluster could never hold it, or it is one that servers cannot do.
    """
    resources = _sized(config, [*present, *addable(kinds)])
    if resources.layout == "colocated":
        return (demand_of(resources, present, kinds, ranks=config.trainer_ranks),)
    _check_split(resources)
    nodes = [*present, *addable(kinds)]
    roles = roles_of(resources, nodes, config.trainer_ranks)
    request = tuple(demand for _, demand in roles)
    if not possible(request, nodes):
        wishes = " and ".join(f"{demand} for the {role}" for role, demand in roles)
        has = f"{count(sum(n.gpus for n in nodes), 'GPU')} and {count(sum(n.cpu_slots for n in nodes), 'CPU slot')}"
        raise ConfigError(
            f"the job asks for {wishes}, each on one node; this cluster has {has} on {count(len(nodes), 'node')}",
            hint="lower resources.trainer.gpus or resources.rollout.gpus (0 = a CPU slot), or use resources.layout=colocated",
        )
    return request


def _sized(config: JobConfig, nodes: Sequence[Node]) -> Resources:
    """With as many GPUs as a tensor-parallel engine has ranks, where there are GPUs and the job does not say."""
    resources, ranks = config.resources, config.engine.tensor_parallel
    if ranks == 1 or not any(node.gpus for node in nodes):
        return resources
    if resources.layout == "colocated":
        return resources if resources.gpus is not None else resources.model_copy(update={"gpus": ranks})
    rollout = resources.roles["rollout"]
    return (
        resources
        if rollout.gpus is not None
        else resources.model_copy(update={"rollout": rollout.model_copy(update={"gpus": ranks})})
    )


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


def bundles(amounts: Amounts) -> Request:
    """The bundles that a record stands for."""
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
