"""What the parts of the launcher share about Ray: names, nodes, functions on a node, ends of actors, and errors in words."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import ray
from ray._private.ray_constants import RAY_WORKER_NICENESS
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, get_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from opentinker.errors import OpenTinkerError
from opentinker.scheduler.launcher import NotPlacedError
from opentinker.scheduler.placement import Node, parse_groups

NAMESPACE = "opentinker"
"""Ray's name space of the scheduler and all that it starts."""
CPU_SLOT = "cpu_slot"
"""The custom Ray resource that a node's CPU slots are."""
GPU_GROUPS = "opentinker.io/gpu-groups"
"""The Ray node label that names GPUs close to each other, such as 0-3.4-7."""
NICENESS = {RAY_WORKER_NICENESS: "15"}
"""Ray's default for its workers, said to each process of a job: they would inherit the scheduler's own."""
_LOW_MEMORY = "low on memory"
_NODE_DIED = "node has died"

logger = logging.getLogger(__name__)


async def living_nodes() -> list[Node]:
    return [_node(entry) for entry in await asyncio.to_thread(ray.nodes) if entry["Alive"]]


async def on_node(node_id: str, function: Callable[..., Any], *arguments: Any, timeout_s: float) -> Any:
    """What a function gives in a process of that node, within `timeout_s`.

    Raises:
        NotPlacedError: the node is no more.
        TimeoutError, RayError: it did not answer.
    """
    if node_id == ray.get_runtime_context().get_node_id():
        return await asyncio.to_thread(function, *arguments)
    if node_id not in {node.id for node in await living_nodes()}:
        raise NotPlacedError("the node is gone")
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    async with asyncio.timeout(timeout_s):
        return await ray.remote(function).options(num_cpus=0, scheduling_strategy=there).remote(*arguments)


async def kill_actor(actor: Any, *, on_its_way: bool, arrival_timeout_s: float) -> None:
    """Kill an actor. One whose process may still be coming up is awaited first: Ray would forget the actor but keep
    the process, idle, and with the job's environment."""
    if on_its_way:
        try:
            async with asyncio.timeout(arrival_timeout_s):
                await actor.__ray_ready__.remote()
        except (TimeoutError, RayError) as error:
            logger.info("event=no_arrival actor=%s error=%s", actor, type(error).__name__)
    ray.kill(actor)


def lasting(name: str) -> dict[str, Any]:
    """Actor options: found by its name, and not ended with the process that created it."""
    return {"name": name, "namespace": NAMESPACE, "lifetime": "detached"}


def find_actor(name: str) -> Any:
    """A living actor, or None."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def find_group(name: str) -> PlacementGroup | None:
    try:
        return get_placement_group(name)
    except ValueError:
        return None


def _node(entry: dict[str, Any]) -> Node:
    has = entry["Resources"]
    return Node(
        id=entry["NodeID"],
        name=entry["NodeManagerHostname"],
        gpus=int(has.get("GPU", 0)),
        cpu_slots=int(has.get(CPU_SLOT, 0)),
        cpus=int(has.get("CPU", 1)),
        gpu_groups=parse_groups(entry.get("Labels", {}).get(GPU_GROUPS, "")),
        address=entry["NodeManagerAddress"],
        raylet_port=int(entry["NodeManagerPort"]),
    )


def death(process: str, pid: int | None, error: RayActorError, when: str = "") -> str:
    why = "killed, out of memory, or crashed"
    if _LOW_MEMORY in str(error):
        why = "the node ran low on memory"
    elif _NODE_DIED in str(error):
        why = "its node left the cluster, or was lost"
    words = [process, f"(pid {pid})" if pid else "", "died", when, f"({why})"]
    return " ".join(word for word in words if word)


def other_side(error: RayTaskError) -> OpenTinkerError:
    """The exception that was raised in the other process, as one of ours."""
    cause = error.cause
    if isinstance(cause, OpenTinkerError):
        return cause
    return OpenTinkerError(f"{type(cause).__name__}: {' '.join(str(cause).split())}")
