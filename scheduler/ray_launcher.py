"""A `Launcher` on Ray: one placement group per server; its worker on it; front and driver beside it without CPU demands, so
that they can never wait for a core that the job itself holds."""

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from opentinker.errors import DeadlineError, OpenTinkerError, ServerLostError, UnavailableError
from opentinker.scheduler.driver import LOG_NAME, DriverProcess
from opentinker.scheduler.imports import load
from opentinker.scheduler.launcher import DriverSpec, Launched, ServerSpec
from opentinker.scheduler.placement import Demand, Node, parse_groups, threads_for
from opentinker.scheduler.plan import DriverOutcome
from opentinker.scheduler.processes import JOB_VARIABLE, reap
from opentinker.scheduler.settings import Settings

CPU_SLOT = "cpu_slot"
"""The custom Ray resource that a node's CPU slots are."""
GPU_GROUPS = "opentinker.io/gpu-groups"
"""The Ray node label that names GPUs close to each other, such as 0-3.4-7."""
WORKER_THREADS = 16
_LOW_MEMORY = "low on memory"

logger = logging.getLogger(__name__)


@dataclass
class _Parts:
    """What exists of a server so far."""

    group: PlacementGroup
    worker: Any
    front: Any
    pids: dict[str, int] = field(default_factory=dict)
    gpus: tuple[int, ...] = ()
    """What Ray chose on the node; empty before it is known, and without GPUs."""


@dataclass
class _Driver:
    actor: Any
    pid: int | None = None


class RayLauncher:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._parts: dict[str, _Parts] = {}
        self._drivers: dict[str, _Driver] = {}

    async def nodes(self) -> list[Node]:
        return [_node(entry) for entry in await asyncio.to_thread(ray.nodes) if entry["Alive"]]

    async def launch(self, spec: ServerSpec) -> Launched:
        node = next((node for node in await self.nodes() if node.id == spec.node_id), None)
        if node is None:
            raise UnavailableError("the node died before the server started")
        parts = self._parts[spec.server_id] = self._create(spec, node)
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                return await self._start(spec, parts)
        except TimeoutError as error:
            raise DeadlineError(f"the server did not start within {self._settings.start_timeout_s:g} s") from error
        except RayActorError as error:
            which = "front" if error.actor_id == parts.front._actor_id.hex() else "worker"
            raise ServerLostError(
                _death(f"the server's {which} process", parts.pids.get(which), error, "while starting")
            ) from error
        except RayTaskError as error:
            raise _other_side(error) from error

    def _create(self, spec: ServerSpec, node: Node) -> _Parts:
        demand, worker_class, front_class = spec.demand, load(self._settings.worker_class), load(self._settings.front_class)
        amounts = {"GPU": demand.gpus} if demand.gpus else {CPU_SLOT: demand.cpu_slots}
        group = placement_group([amounts], strategy="STRICT_PACK", bundle_label_selector=[{"ray.io/node-id": node.id}])
        marker = {JOB_VARIABLE: spec.job_id}
        worker = (
            ray.remote(worker_class)
            .options(
                num_cpus=0,
                num_gpus=demand.gpus,
                resources={CPU_SLOT: demand.cpu_slots} if demand.cpu_slots else None,
                max_concurrency=WORKER_THREADS,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
                # Ray would give a process without a CPU demand one thread; these are the slot's share of the cores.
                runtime_env={"env_vars": {**marker, "OMP_NUM_THREADS": str(threads_for(node, demand))}},
            )
            .remote(spec.config, spec.lora, spec.checkpoint_root)
        )
        front = (
            ray.remote(front_class)
            .options(
                num_cpus=0,
                max_restarts=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
                runtime_env={"env_vars": marker},
            )
            .remote(worker, {spec.policy_id: spec.token}, self._settings.server_host)
        )
        return _Parts(group, worker, front)

    async def _start(self, spec: ServerSpec, parts: _Parts) -> Launched:
        await self._granted(parts.group, spec.demand)

        async def worker_up() -> dict[str, Any]:
            parts.pids["worker"] = int((await parts.worker.describe.remote())["pid"])
            if spec.demand.gpus:
                parts.gpus = tuple(await parts.worker.__ray_call__.remote(_gpu_indexes))
            info: dict[str, Any] = await parts.worker.start.remote()
            return info

        async def front_up() -> str:
            info = await parts.front.start.remote()
            parts.pids["front"] = int(info["pid"])
            return str(info["endpoint"])

        try:
            async with asyncio.TaskGroup() as both:
                worker, front = both.create_task(worker_up()), both.create_task(front_up())
        except* RayError as errors:
            raise errors.exceptions[0] from errors
        await parts.front.attach.remote(worker.result())
        policy = {"lora": spec.lora, "seed": spec.seed, "checkpoint": None}
        await parts.front.create_policy.remote(spec.policy_id, policy)
        return Launched(front.result(), parts.pids["worker"], parts.pids["front"])

    async def _granted(self, group: PlacementGroup, demand: Demand) -> None:
        patience_s = self._settings.placement_timeout_s
        if not await asyncio.to_thread(group.wait, patience_s):
            raise UnavailableError(
                f"Ray did not grant {demand} within {patience_s:g} s",
                hint="does something else use this node?",
            )

    def gpus_of(self, server_id: str) -> tuple[int, ...]:
        parts = self._parts.get(server_id)
        return () if parts is None else parts.gpus

    async def probe(self, server_id: str) -> str:
        parts = self._parts.get(server_id)
        if parts is None:
            return "its server is gone"
        front, answer = await self._ask(parts, "front", parts.front.health)
        # The worker is asked after the front: whatever the front saw of its death, this sees too, and it is the cause.
        worker, _ = await self._ask(parts, "worker", parts.worker.describe)
        if worker or front:
            return worker or front
        return "" if answer["ok"] else f"the server failed: {answer['cause']}"

    async def _ask(self, parts: _Parts, which: str, method: Any) -> tuple[str, dict[str, Any]]:
        """(fault, answer) of a liveness call."""
        process, pid = f"the server's {which} process", parts.pids[which]
        try:
            async with asyncio.timeout(self._settings.unresponsive_s):
                return "", await method.remote()
        except ActorUnavailableError:
            return "", {"ok": True}  # a connection broke; if the process is dead, the next probe hears of it
        except TimeoutError:
            return f"{process} (pid {pid}) did not respond for {self._settings.unresponsive_s:g} s", {}
        except RayActorError as error:
            return _death(process, pid, error), {}
        except RayTaskError as error:
            return f"{process} (pid {pid}) failed: {_other_side(error)}", {}

    async def drive(self, spec: DriverSpec) -> DriverOutcome:
        functions = {"rl": self._settings.rl_driver}
        actor = (
            ray.remote(DriverProcess)
            .options(
                num_cpus=0,
                max_restarts=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(spec.node_id, soft=False),
                runtime_env={"env_vars": {JOB_VARIABLE: spec.job_id}},
            )
            .remote(spec.job_id, spec.run_dir)
        )
        driver = self._drivers[spec.job_id] = _Driver(actor)
        try:
            driver.pid = int((await actor.describe.remote())["pid"])
            outcome = await actor.run.remote(
                functions[spec.kind], spec.config, spec.endpoint, spec.token, spec.policy_id, spec.run_dir, spec.code_dir
            )
        except RayActorError as error:
            return DriverOutcome(f"{_death('the driver process', driver.pid, error)}; see {LOG_NAME}")
        except RayTaskError as error:
            return DriverOutcome(f"the driver did not start: {_other_side(error)}")
        return DriverOutcome(outcome["cause"], outcome["code"])

    async def stop_driver(self, job_id: str) -> None:
        driver = self._drivers.pop(job_id, None)
        if driver is not None:
            await self._kill(driver.actor, on_its_way=driver.pid is None)

    async def stop_server(self, server_id: str, job_ids: list[str], node_id: str, *, graceful: bool) -> list[int]:
        parts = self._parts.get(server_id)
        if parts is not None:
            for which, actor in (("front", parts.front), ("worker", parts.worker)):
                if graceful:
                    await self._ask_to_stop(actor)
                await self._kill(actor, on_its_way=which not in parts.pids)
            remove_placement_group(parts.group)
        left = [pid for job_id in job_ids for pid in await self._reap(job_id, node_id)]
        if not left:
            self._parts.pop(server_id, None)
        return left

    async def _kill(self, actor: Any, *, on_its_way: bool) -> None:
        """Kill an actor. One whose process is still coming up is awaited first: Ray would forget the actor but keep the
        process, idle, and with the job's environment."""
        if on_its_way:
            try:
                async with asyncio.timeout(self._settings.arrival_timeout_s):
                    await actor.__ray_ready__.remote()
            except (TimeoutError, RayError) as error:
                logger.info("event=no_arrival actor=%s error=%s", actor, type(error).__name__)
        ray.kill(actor)

    async def _ask_to_stop(self, actor: Any) -> None:
        try:
            async with asyncio.timeout(self._settings.graceful_stop_s):
                await actor.stop.remote()
        except (TimeoutError, RayError) as error:
            logger.info("event=no_graceful_stop actor=%s error=%s", actor, type(error).__name__)

    async def _reap(self, job_id: str, node_id: str) -> list[int]:
        """On the node where the processes are; on this one if that node is no more."""
        limits = (self._settings.kill_after_s, self._settings.exit_timeout_s)
        here = ray.get_runtime_context().get_node_id()
        if node_id == here or node_id not in {node.id for node in await self.nodes()}:
            return await asyncio.to_thread(reap, job_id, *limits)
        task = ray.remote(reap).options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False))
        async with asyncio.timeout(sum(limits) + self._settings.placement_timeout_s):
            left: list[int] = await task.remote(job_id, *limits)
            return left


def _gpu_indexes(_: Any) -> list[int]:
    """Runs in the worker's process."""
    return [int(index) for index in ray.get_runtime_context().get_accelerator_ids()["GPU"]]


def _node(entry: dict[str, Any]) -> Node:
    has = entry["Resources"]
    return Node(
        id=entry["NodeID"],
        name=entry["NodeManagerHostname"],
        gpus=int(has.get("GPU", 0)),
        cpu_slots=int(has.get(CPU_SLOT, 0)),
        cpus=int(has.get("CPU", 1)),
        gpu_groups=parse_groups(entry.get("Labels", {}).get(GPU_GROUPS, "")),
    )


def _death(process: str, pid: int | None, error: RayActorError, when: str = "") -> str:
    why = "the node ran low on memory" if _LOW_MEMORY in str(error) else "killed, out of memory, or crashed"
    words = [process, f"(pid {pid})" if pid else "", "died", when, f"({why})"]
    return " ".join(word for word in words if word)


def _other_side(error: RayTaskError) -> OpenTinkerError:
    """The exception that was raised in the other process, as one of ours."""
    cause = error.cause
    if isinstance(cause, OpenTinkerError):
        return cause
    return OpenTinkerError(f"{type(cause).__name__}: {' '.join(str(cause).split())}")
