"""A `Launcher` on Ray: one placement group per server; its worker on it; front and driver beside it without CPU demands, so
that they can never wait for a core that the job itself holds."""

import asyncio
import functools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from opentinker.config.job import parse_job
from opentinker.errors import ConfigError, DeadlineError, OpenTinkerError, ServerLostError
from opentinker.scheduler.clearing import clear
from opentinker.scheduler.driver import LOG_NAME, DriverProcess, begin_log, came_up
from opentinker.scheduler.fronts import advertised, front_host
from opentinker.scheduler.gpus import GpuUse, own_gpu_indexes, read_gpu_use
from opentinker.scheduler.imports import load
from opentinker.scheduler.launcher import DriverSpec, Launched, NotPlacedError, Probe, ServerSpec
from opentinker.scheduler.packages import INSTALL_LOG_NAME, PackageInstaller, requirements_of
from opentinker.scheduler.placement import Allocation, Demand, Node, parse_groups, threads_for
from opentinker.scheduler.plan import DriverOutcome
from opentinker.scheduler.prestart import prestart_process
from opentinker.scheduler.processes import JOB_VARIABLE, WITHHELD
from opentinker.scheduler.settings import Settings
from opentinker.scheduler.warming import NextJob

NAMESPACE = "opentinker"
"""Ray's name space of the scheduler and all that it starts."""
CPU_SLOT = "cpu_slot"
"""The custom Ray resource that a node's CPU slots are."""
GPU_GROUPS = "opentinker.io/gpu-groups"
"""The Ray node label that names GPUs close to each other, such as 0-3.4-7."""
WORKER_THREADS = 16
GPU_USE_S = 3.0
"""How long a node may take to tell how busy its GPUs are."""
REQUEST_S = 10.0
"""How long Ray may take to write down what its autoscaler is asked for."""
_LOW_MEMORY = "low on memory"
_NODE_DIED = "node has died"

logger = logging.getLogger(__name__)


@dataclass
class _Parts:
    """What exists of a server."""

    group: PlacementGroup | None = None
    worker: Any = None
    front: Any = None
    pids: dict[str, int] = field(default_factory=dict)
    gpus: tuple[int, ...] | None = None
    """What Ray chose on the node; None before it is known."""


@dataclass
class _Driver:
    actor: Any
    arrived: bool
    """Its process is up."""
    pid: int | None = None


class RayLauncher:
    """Everything that it starts has a name and outlives this process, so that a restarted scheduler finds it again."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._parts: dict[str, _Parts] = {}
        self._drivers: dict[str, _Driver] = {}
        self._at_work: dict[str, float] = {}
        """By server with a driver: since when that is up; infinity while it is not."""

    async def nodes(self) -> list[Node]:
        return [_node(entry) for entry in await asyncio.to_thread(ray.nodes) if entry["Alive"]]

    async def request_nodes(self, bundles: Sequence[Demand]) -> None:
        async with asyncio.timeout(REQUEST_S):
            await asyncio.to_thread(request_resources, bundles=[_amounts(demand) for demand in bundles])

    def is_here(self, node_id: str) -> bool:
        return bool(node_id == ray.get_runtime_context().get_node_id())

    async def gpu_use(self, node_ids: Collection[str] | None = None) -> dict[str, list[GpuUse]]:
        nodes = [node.id for node in await self.nodes() if node.gpus and (node_ids is None or node.id in node_ids)]
        uses = await asyncio.gather(*(self._gpu_use_of(node_id) for node_id in nodes))
        return {node_id: use for node_id, use in zip(nodes, uses, strict=True) if use}

    async def _gpu_use_of(self, node_id: str) -> list[GpuUse]:
        try:
            async with asyncio.timeout(GPU_USE_S):
                if node_id == ray.get_runtime_context().get_node_id():
                    return await asyncio.to_thread(read_gpu_use)
                there = NodeAffinitySchedulingStrategy(node_id, soft=False)
                use: list[GpuUse] = await ray.remote(read_gpu_use).options(num_cpus=0, scheduling_strategy=there).remote()
                return use
        except (TimeoutError, RayError) as error:
            logger.info("event=no_gpu_use node=%s error=%s", node_id, type(error).__name__)
            return []

    async def launch(self, spec: ServerSpec) -> Launched:
        nodes = await self.nodes()
        node = next((node for node in nodes if node.id == spec.node_id), None)
        if node is None:
            raise NotPlacedError("the node died before the server started")
        parts = await self._known(spec.server_id)
        if parts.front is not None and parts.worker is None:  # the worker is always created first
            raise ServerLostError("the server's worker process died while the scheduler was down")
        self._create(spec, node, parts, front_host(self._settings.server_host, node, nodes))
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                launched = await self._start(spec, parts)
                return replace(launched, endpoint=advertised(launched.endpoint, node))
        except TimeoutError as error:
            raise DeadlineError(f"the server did not start within {self._settings.start_timeout_s:g} s") from error
        except RayActorError as error:
            which = "front" if error.actor_id == parts.front._actor_id.hex() else "worker"
            raise ServerLostError(
                _death(f"the server's {which} process", parts.pids.get(which), error, "while starting")
            ) from error
        except RayTaskError as error:
            raise _other_side(error) from error

    async def prestart(self, job: NextJob, keep_s: float) -> None:
        node = next((node for node in await self.nodes() if node.id == job.node_id), None)
        if node is not None:
            address = f"{node.address}:{node.raylet_port}"
            for runtime_env in (_worker_env(job.job_id, node, job.demand), _front_env(job.job_id)):
                await asyncio.to_thread(prestart_process, address, runtime_env, keep_s)

    async def forget(self, job_id: str, node_id: str) -> None:
        await self._clear(node_id, [job_id], ())

    async def _known(self, server_id: str) -> _Parts:
        """What there is of a server, be it from an earlier life of the scheduler."""
        if server_id not in self._parts:
            group, worker, front = await asyncio.gather(
                asyncio.to_thread(_find_group, server_id),
                asyncio.to_thread(_find_actor, f"{server_id}.worker"),
                asyncio.to_thread(_find_actor, f"{server_id}.front"),
            )
            self._parts.setdefault(server_id, _Parts(group, worker, front))
        return self._parts[server_id]

    def _create(self, spec: ServerSpec, node: Node, parts: _Parts, host: str) -> None:
        """Create what is missing."""
        demand, worker_class, front_class = spec.demand, load(self._settings.worker_class), load(self._settings.front_class)
        if parts.group is None:
            parts.group = placement_group(
                [_amounts(demand)],
                strategy="STRICT_PACK",
                name=spec.server_id,
                lifetime="detached",
                bundle_label_selector=[{"ray.io/node-id": node.id}],
            )
        if parts.worker is None:
            parts.worker = (
                ray.remote(worker_class)
                .options(
                    **_lasting(f"{spec.server_id}.worker"),
                    num_cpus=0,
                    num_gpus=demand.gpus,
                    resources={CPU_SLOT: demand.cpu_slots} if demand.cpu_slots else None,
                    max_concurrency=WORKER_THREADS,
                    max_restarts=0,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(parts.group, placement_group_bundle_index=0),
                    runtime_env=_worker_env(spec.job_id, node, demand),
                )
                .remote(spec.config, spec.lora, spec.checkpoint_root, spec.job_id, spec.log_path, **self._storage())
            )
        if parts.front is None:
            parts.front = (
                ray.remote(front_class)
                .options(
                    **_lasting(f"{spec.server_id}.front"),
                    num_cpus=0,
                    max_restarts=0,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
                    runtime_env=_front_env(spec.job_id),
                )
                .remote(parts.worker, {spec.policy_id: spec.token}, host, spec.job_id, spec.log_path, **self._storage())
            )

    def _storage(self) -> dict[str, Any]:
        """What a server's processes are told of the storage, if there is one."""
        url = self._settings.remote_storage
        return {"storage": {"url": url, "root": str(self._settings.runs_dir)}} if url else {}

    async def _start(self, spec: ServerSpec, parts: _Parts) -> Launched:
        """Every step of it finds out that it was done before, so that it goes on where an earlier start was cut off."""
        assert parts.group is not None
        await self._granted(parts.group, spec.demand)

        async def worker_up() -> dict[str, Any]:
            parts.pids["worker"] = int((await parts.worker.describe.remote())["pid"])
            await self._learn_gpus(parts)
            info: dict[str, Any] = await parts.worker.start.remote(self._settings.start_timeout_s)
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
        policy = {"lora": spec.lora, "seed": spec.seed, "checkpoint": spec.start_from or None}
        await parts.front.create_policy.remote(spec.policy_id, policy, self._settings.start_timeout_s)
        return Launched(front.result(), parts.pids["worker"], parts.pids["front"])

    async def _granted(self, group: PlacementGroup, demand: Demand) -> None:
        patience_s = self._settings.placement_timeout_s
        if not await asyncio.to_thread(group.wait, patience_s):
            raise NotPlacedError(
                f"Ray did not grant {demand} within {patience_s:g} s",
                hint="does something else use this node?",
            )

    def gpus_of(self, server_id: str) -> tuple[int, ...]:
        parts = self._parts.get(server_id)
        return () if parts is None or parts.gpus is None else parts.gpus

    async def _learn_gpus(self, parts: _Parts) -> None:
        async with asyncio.timeout(self._settings.unresponsive_s):
            parts.gpus = tuple(await parts.worker.__ray_call__.remote(own_gpu_indexes))

    async def probe(self, server_id: str) -> Probe:
        parts = await self._known(server_id)
        if parts.worker is None and parts.front is None:
            return Probe("its server is gone")
        for which, actor in (("worker", parts.worker), ("front", parts.front)):
            if actor is None:
                return Probe(f"the server's {which} process died while the scheduler was down")
        front, answer = await self._ask(parts, "front", parts.front.health)
        # The worker is asked after the front: whatever the front saw of its death, this sees too, and it is the cause.
        worker, _ = await self._ask(parts, "worker", parts.worker.describe)
        if worker or front:
            return Probe(worker or front)
        if parts.gpus is None:  # a server of an earlier life of the scheduler
            try:
                await self._learn_gpus(parts)
            except (TimeoutError, RayError) as error:
                logger.warning("event=gpus_unknown server=%s error=%s", server_id, type(error).__name__)
        if not answer["ok"]:
            return Probe(f"the server failed: {answer['cause']}")
        idle_s = float(answer.get("idle_s", 0.0))
        if (since := self._at_work.get(server_id)) is not None:
            # A server has nothing to do while its driver's packages are installed; that is nobody's idleness.
            idle_s = max(0.0, min(idle_s, time.monotonic() - since))
        return Probe(idle_s=idle_s)

    async def save(self, server_id: str, policy_id: str, name: str) -> None:
        patience_s = self._settings.last_checkpoint_s
        parts = await self._known(server_id)
        if parts.front is None:
            raise ServerLostError("its server is gone")
        try:
            async with asyncio.timeout(patience_s + self._settings.unresponsive_s):
                await parts.front.save.remote(policy_id, name, patience_s)
        except TimeoutError as error:
            raise DeadlineError(f"the server did not answer within {patience_s:g} s") from error
        except RayActorError as error:
            raise ServerLostError(_death("the server's front process", parts.pids.get("front"), error)) from error
        except RayTaskError as error:
            raise _other_side(error) from error

    async def _ask(self, parts: _Parts, which: str, method: Any) -> tuple[str, dict[str, Any]]:
        """(fault, answer) of a liveness call."""
        process = f"the server's {which} process"
        try:
            async with asyncio.timeout(self._settings.unresponsive_s):
                answer: dict[str, Any] = await method.remote()
        except ActorUnavailableError:
            return "", {"ok": True}  # a connection broke; if the process is dead, the next probe hears of it
        except TimeoutError:
            pid = parts.pids.get(which)
            return f"{process} (pid {pid}) did not respond for {self._settings.unresponsive_s:g} s", {}
        except RayActorError as error:
            return _death(process, parts.pids.get(which), error), {}
        except RayTaskError as error:
            return f"{process} (pid {parts.pids.get(which)}) failed: {_other_side(error)}", {}
        parts.pids[which] = int(answer["pid"])
        return "", answer

    async def drive(self, spec: DriverSpec) -> DriverOutcome:
        name = f"{spec.server_id}.driver"
        self._at_work.setdefault(spec.server_id, math.inf)
        actor = await asyncio.to_thread(_find_actor, name)
        try:
            arrived = bool(await self._on_node(spec.node_id, came_up, Path(spec.run_dir), spec.server_id))
        except (TimeoutError, RayError, NotPlacedError) as error:
            return DriverOutcome(f"the driver's node does not answer: {type(error).__name__}", lost=True)
        if actor is None and arrived:
            return DriverOutcome(f"the driver process died while the scheduler was down; see {LOG_NAME}", lost=True)
        if actor is None and spec.refusal:
            return DriverOutcome(spec.refusal, ConfigError.code)
        if actor is None:
            installed = await self._install(spec)
            if isinstance(installed, DriverOutcome):
                return installed
            python = installed
            actor = (
                ray.remote(DriverProcess)
                .options(
                    **_lasting(name),
                    num_cpus=0,
                    max_restarts=0,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(spec.node_id, soft=False),
                    # Empty from the very start: the environment that a process was born with stays readable in /proc.
                    runtime_env={**_driver_env(spec.job_id), **({"py_executable": python} if python else {})},
                )
                .remote(spec.job_id, spec.server_id, spec.run_dir)
            )
        driver = self._drivers[spec.server_id] = _Driver(actor, arrived)
        try:
            # A driver at work answers neither of these before it is done, and then at once.
            driver.pid = int((await actor.describe.remote())["pid"])
            driver.arrived = True
            self._at_work[spec.server_id] = time.monotonic()
            arguments = {
                "endpoint": spec.endpoint,
                "token": spec.token,
                "policy": spec.policy_id,
                "run_dir": spec.run_dir,
                "code_dir": spec.code_dir,
                "resume": spec.resume,
            }
            # The driver runs once, however often it is asked.
            function = self._settings.drivers[spec.kind]
            call = functools.partial(actor.run.remote, function, spec.config, arguments, spec.secrets, spec.refusal)
            outcome = await _insist(call, self._settings.probe_s)
        except RayActorError as error:
            return DriverOutcome(f"{_death('the driver process', driver.pid, error)}; see {LOG_NAME}", lost=True)
        except RayTaskError as error:
            return DriverOutcome(f"the driver did not start: {_other_side(error)}")
        except RayError as error:  # its node went before it came up
            return DriverOutcome(f"the driver did not start: {type(error).__name__}", lost=True)
        return DriverOutcome(outcome["cause"], outcome["code"])

    async def _install(self, spec: DriverSpec) -> str | DriverOutcome:
        """The interpreter with what the job requires, or "" for the cluster's own; or how the job ends without, with the log in
        order."""
        code_dir = None if spec.code_dir is None else Path(spec.code_dir)
        requirements = requirements_of(parse_job(spec.config), code_dir)
        if not requirements:
            return ""
        name = f"{spec.server_id}.installer"
        actor = await asyncio.to_thread(_find_actor, name)
        arrived = actor is not None and (Path(spec.run_dir) / INSTALL_LOG_NAME).exists()
        if actor is None:
            actor = (
                ray.remote(PackageInstaller)
                .options(
                    **_lasting(name),
                    num_cpus=0,
                    max_restarts=0,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(spec.node_id, soft=False),
                    runtime_env=_driver_env(spec.job_id),
                )
                .remote(spec.job_id, spec.run_dir)
            )
        installer = self._drivers[spec.server_id] = _Driver(actor, arrived)
        timeout_s = self._settings.install_timeout_s
        try:
            # One that is at work answers only when it is done, so this covers what an earlier life of the scheduler began.
            async with asyncio.timeout(timeout_s + self._settings.arrival_timeout_s + self._settings.placement_timeout_s):
                if not arrived:
                    installer.pid = int((await actor.describe.remote())["pid"])
                    installer.arrived = True
                answer: dict[str, str] = await _insist(
                    lambda: actor.install.remote(requirements, timeout_s), self._settings.probe_s
                )
        except TimeoutError:
            answer = {"python": "", "cause": f"the environment's requirements were not installed within {timeout_s:g} s"}
        except RayTaskError as error:
            answer = {"python": "", "cause": f"the environment's requirements were not installed: {_other_side(error)}"}
        except RayActorError as error:
            return DriverOutcome(_death("the installer's process", installer.pid, error), lost=True)
        except RayError as error:
            return DriverOutcome(f"the installer did not start: {type(error).__name__}", lost=True)
        ray.kill(actor)
        if answer["cause"]:
            await self._on_node(spec.node_id, begin_log, Path(spec.run_dir))
            return DriverOutcome(f"{answer['cause']}; see {LOG_NAME}")
        return answer["python"]

    async def stop_driver(self, server_id: str) -> None:
        self._at_work.pop(server_id, None)
        driver = self._drivers.pop(server_id, None)
        if driver is not None:
            await self._kill(driver.actor, on_its_way=not driver.arrived)
            return
        for which in ("driver", "installer"):
            if (actor := await asyncio.to_thread(_find_actor, f"{server_id}.{which}")) is not None:
                ray.kill(actor)

    async def stop_server(self, server_id: str, job_ids: list[str], where: Allocation, *, graceful: bool) -> str:
        parts = await self._known(server_id)
        for which, actor in (("front", parts.front), ("worker", parts.worker)):
            if actor is None:
                continue
            if graceful:
                if which == "worker" and self._settings.remote_storage:
                    await self._ask_to_flush(actor)
                await self._ask_to_stop(actor)
            await self._kill(actor, on_its_way=which not in parts.pids)
        if parts.group is not None:
            remove_placement_group(parts.group)
        whole = () if where.demand.shares_gpu else parts.gpus or where.gpus
        left = await self._clear(where.node_id, job_ids, whole)
        if not left:
            self._parts.pop(server_id, None)
        return left

    async def _kill(self, actor: Any, *, on_its_way: bool) -> None:
        """Kill an actor. One whose process may still be coming up is awaited first: Ray would forget the actor but keep
        the process, idle, and with the job's environment."""
        if on_its_way:
            try:
                async with asyncio.timeout(self._settings.arrival_timeout_s):
                    await actor.__ray_ready__.remote()
            except (TimeoutError, RayError) as error:
                logger.info("event=no_arrival actor=%s error=%s", actor, type(error).__name__)
        ray.kill(actor)

    async def _ask_to_flush(self, worker: Any) -> None:
        """The driver is gone, and its last files are only on the worker's node."""
        try:
            async with asyncio.timeout(self._settings.flush_s):
                await worker.flush.remote()
        except (TimeoutError, RayError) as error:
            logger.warning("event=not_flushed actor=%s error=%s", worker, type(error).__name__)

    async def _ask_to_stop(self, actor: Any) -> None:
        try:
            async with asyncio.timeout(self._settings.graceful_stop_s):
                await actor.stop.remote()
        except (TimeoutError, RayError) as error:
            logger.info("event=no_graceful_stop actor=%s error=%s", actor, type(error).__name__)

    async def _clear(self, node_id: str, job_ids: list[str], gpus: tuple[int, ...]) -> str:
        """On the node where the processes are; on this one if that node is no more."""
        settings = self._settings
        arguments = (job_ids, gpus, settings.kill_after_s, settings.exit_timeout_s, settings.gpu_free_bytes)
        patience_s = len(job_ids) * (settings.kill_after_s + settings.exit_timeout_s) + settings.exit_timeout_s
        try:
            left: str = await self._on_node(node_id, clear, *arguments, patience_s=patience_s)
        except NotPlacedError:  # nothing is left of its GPUs either
            left = await asyncio.to_thread(clear, job_ids, (), *arguments[2:])
        return left

    async def _on_node(self, node_id: str, function: Callable[..., Any], *arguments: Any, patience_s: float = 0.0) -> Any:
        """What a function gives in a process of that node, within `patience_s` and what Ray takes to start one.

        Raises:
            NotPlacedError: the node is no more.
            TimeoutError, RayError: it did not answer.
        """
        if node_id == ray.get_runtime_context().get_node_id():
            return await asyncio.to_thread(function, *arguments)
        if node_id not in {node.id for node in await self.nodes()}:
            raise NotPlacedError("the node is gone")
        there = NodeAffinitySchedulingStrategy(node_id, soft=False)
        async with asyncio.timeout(patience_s + self._settings.placement_timeout_s):
            return await ray.remote(function).options(num_cpus=0, scheduling_strategy=there).remote(*arguments)


def _amounts(demand: Demand) -> dict[str, float]:
    """A demand in Ray's words."""
    return {"GPU": demand.gpus} if demand.gpus else {CPU_SLOT: demand.cpu_slots}


def _worker_env(job_id: str, node: Node, demand: Demand) -> dict[str, Any]:
    # Ray would give a process without a CPU demand one thread; these are the slot's share of the cores.
    return {"env_vars": {JOB_VARIABLE: job_id, "OMP_NUM_THREADS": str(threads_for(node, demand))}}


def _front_env(job_id: str) -> dict[str, Any]:
    return {"env_vars": {JOB_VARIABLE: job_id}}


def _lasting(name: str) -> dict[str, Any]:
    """Actor options: found by its name, and not ended with the process that created it."""
    return {"name": name, "namespace": NAMESPACE, "lifetime": "detached"}


async def _insist(call: Callable[[], Awaitable[dict[str, str]]], pause_s: float) -> dict[str, str]:
    """The answer of an actor that can be asked again when a connection broke; if it is dead, Ray says so then."""
    while True:
        try:
            return await call()
        except ActorUnavailableError:
            await asyncio.sleep(pause_s)


def _driver_env(job_id: str) -> dict[str, Any]:
    """Ray's runtime environment of a process that runs a user's code."""
    return {"env_vars": {JOB_VARIABLE: job_id, **dict.fromkeys(WITHHELD, "")}}


def _find_actor(name: str) -> Any:
    """A living actor, or None."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def _find_group(name: str) -> PlacementGroup | None:
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


def _death(process: str, pid: int | None, error: RayActorError, when: str = "") -> str:
    why = "killed, out of memory, or crashed"
    if _LOW_MEMORY in str(error):
        why = "the node ran low on memory"
    elif _NODE_DIED in str(error):
        why = "its node left the cluster, or was lost"
    words = [process, f"(pid {pid})" if pid else "", "died", when, f"({why})"]
    return " ".join(word for word in words if word)


def _other_side(error: RayTaskError) -> OpenTinkerError:
    """The exception that was raised in the other process, as one of ours."""
    cause = error.cause
    if isinstance(cause, OpenTinkerError):
        return cause
    return OpenTinkerError(f"{type(cause).__name__}: {' '.join(str(cause).split())}")
