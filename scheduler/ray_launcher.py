"""A `Launcher` on Ray: one placement group per server; its worker on it, and its engine, if that has a process of its own;
front and driver beside it without CPU demands, so that they can never wait for a core that the job itself holds."""

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from opentinker.errors import DeadlineError, ServerLostError, UnavailableError
from opentinker.scheduler.clearing import clear
from opentinker.scheduler.fronts import advertised, front_host
from opentinker.scheduler.gpus import GpuUse, own_gpu_indexes, read_gpu_use
from opentinker.scheduler.imports import load
from opentinker.scheduler.launcher import DriverSpec, Launched, NotPlacedError, Probe, ServerSpec
from opentinker.scheduler.placement import Allocation, Demand, Node, threads_for
from opentinker.scheduler.plan import DriverOutcome
from opentinker.scheduler.prestart import prestart_process
from opentinker.scheduler.processes import JOB_VARIABLE, end_idle
from opentinker.scheduler.ray_drivers import RayDrivers
from opentinker.scheduler.ray_tools import (
    CPU_SLOT,
    NICENESS,
    death,
    find_actor,
    find_group,
    kill_actor,
    lasting,
    living_nodes,
    on_node,
    other_side,
)
from opentinker.scheduler.settings import Settings
from opentinker.scheduler.warming import NextJob

WORKER_THREADS = 16
GPU_USE_S = 3.0
"""How long a node may take to tell how busy its GPUs are."""
REQUEST_S = 10.0
"""How long Ray may take to write down what its autoscaler is asked for."""

logger = logging.getLogger(__name__)


@dataclass
class _Parts:
    """What exists of a server."""

    group: PlacementGroup | None = None
    engine: Any = None
    """Only where it is split from the worker, which has the trainer."""
    worker: Any = None
    front: Any = None
    pids: dict[str, int] = field(default_factory=dict)
    gpus: tuple[int, ...] | None = None
    """What Ray chose on the node; None before it is known."""
    engine_gpus: tuple[int, ...] = ()


class RayLauncher:
    """Everything that it starts has a name and outlives this process, so that a restarted scheduler finds it again."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._parts: dict[str, _Parts] = {}
        self._drivers = RayDrivers(settings)

    async def nodes(self) -> list[Node]:
        return await living_nodes()

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
        beside = None if spec.rollout is None else next((n for n in nodes if n.id == spec.rollout.node_id), None)
        if node is None or (spec.rollout is not None and beside is None):
            raise NotPlacedError("the node died before the server started")
        parts = await self._known(spec.server_id)
        if parts.front is not None and parts.worker is None:  # the worker is always created first
            raise ServerLostError("the server's worker process died while the scheduler was down")
        if spec.rollout is not None and parts.worker is not None and parts.engine is None:  # and before it the engine
            raise ServerLostError("the server's engine process died while the scheduler was down")
        self._create(spec, node, beside, parts, front_host(self._settings.server_host, node, nodes))
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                launched = await self._start(spec, parts)
                return replace(launched, endpoint=advertised(launched.endpoint, node))
        except TimeoutError as error:
            raise DeadlineError(f"the server did not start within {self._settings.start_timeout_s:g} s") from error
        except RayActorError as error:
            actors = {"front": parts.front, "engine": parts.engine, "worker": parts.worker}
            which = next((n for n, a in actors.items() if a is not None and error.actor_id == a._actor_id.hex()), "worker")
            raise ServerLostError(
                death(f"the server's {which} process", parts.pids.get(which), error, "while starting")
            ) from error
        except RayTaskError as error:
            raise other_side(error) from error

    async def prestart(self, job: NextJob, keep_s: float) -> None:
        node = next((node for node in await self.nodes() if node.id == job.node_id), None)
        if node is not None:
            address = f"{node.address}:{node.raylet_port}"
            for runtime_env in (_worker_env(job.job_id, node, job.demand), _front_env(job.job_id)):
                await asyncio.to_thread(prestart_process, address, runtime_env, keep_s)

    async def forget(self, job_id: str, node_id: str) -> None:
        try:
            await on_node(node_id, end_idle, job_id, timeout_s=self._settings.placement_timeout_s)
        except NotPlacedError:  # the node is gone, and they with it
            return

    async def _known(self, server_id: str) -> _Parts:
        """What there is of a server, be it from an earlier life of the scheduler."""
        if server_id not in self._parts:
            group, engine, worker, front = await asyncio.gather(
                asyncio.to_thread(find_group, server_id),
                asyncio.to_thread(find_actor, f"{server_id}.engine"),
                asyncio.to_thread(find_actor, f"{server_id}.worker"),
                asyncio.to_thread(find_actor, f"{server_id}.front"),
            )
            self._parts.setdefault(server_id, _Parts(group, engine, worker, front))
        return self._parts[server_id]

    def _create(self, spec: ServerSpec, node: Node, beside: Node | None, parts: _Parts, host: str) -> None:
        """Create what is missing. `beside` is the node of an engine that is split from the worker."""
        demand, worker_class, front_class = spec.demand, load(self._settings.worker_class), load(self._settings.front_class)
        demands = [(node, demand)] + ([(beside, spec.rollout.demand)] if spec.rollout is not None and beside else [])
        if parts.group is None:
            parts.group = placement_group(
                [_amounts(each) for _, each in demands],
                strategy="STRICT_PACK" if len(demands) == 1 else "PACK",
                name=spec.server_id,
                lifetime="detached",
                bundle_label_selector=[{"ray.io/node-id": place.id} for place, _ in demands],
            )
        if parts.engine is None and len(demands) == 2:
            place, each = demands[1]
            parts.engine = (
                ray.remote(load(self._settings.engine_class))
                .options(
                    **lasting(f"{spec.server_id}.engine"),
                    num_cpus=0,
                    num_gpus=each.gpus,
                    resources={CPU_SLOT: each.cpu_slots} if each.cpu_slots else None,
                    max_concurrency=WORKER_THREADS,
                    max_restarts=0,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(parts.group, placement_group_bundle_index=1),
                    runtime_env=_worker_env(spec.mark or spec.job_id, place, each),
                )
                .remote(spec.config, spec.lora, spec.job_id, spec.log_path, **self._storage())
            )
        if parts.worker is None:
            engine = {"engine": parts.engine} if parts.engine is not None else {}
            parts.worker = (
                ray.remote(worker_class)
                .options(
                    **lasting(f"{spec.server_id}.worker"),
                    num_cpus=0,
                    num_gpus=demand.gpus,
                    resources={CPU_SLOT: demand.cpu_slots} if demand.cpu_slots else None,
                    max_concurrency=WORKER_THREADS,
                    max_restarts=0,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(parts.group, placement_group_bundle_index=0),
                    runtime_env=_worker_env(spec.mark or spec.job_id, node, demand),
                )
                .remote(spec.config, spec.lora, spec.checkpoint_root, spec.job_id, spec.log_path, **self._storage(), **engine)
            )
        if parts.front is None:
            parts.front = (
                ray.remote(front_class)
                .options(
                    **lasting(f"{spec.server_id}.front"),
                    num_cpus=0,
                    max_restarts=0,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
                    runtime_env=_front_env(spec.mark or spec.job_id),
                )
                .remote(
                    parts.worker,
                    {spec.policy_id: spec.token},
                    host,
                    spec.job_id,
                    spec.log_path,
                    **self._storage(),
                    **({"starts": spec.starts} if spec.starts else {}),
                    **({"taken": spec.taken} if spec.taken else {}),
                )
            )

    def _storage(self) -> dict[str, Any]:
        """What a server's processes are told of the storage, if there is one."""
        url = self._settings.remote_storage
        return {"storage": {"url": url, "root": str(self._settings.runs_dir)}} if url else {}

    async def _start(self, spec: ServerSpec, parts: _Parts) -> Launched:
        """Every step of it finds out that it was done before, so that it goes on where an earlier start was cut off."""
        assert parts.group is not None
        await self._granted(parts.group, *(spec.demand, *(() if spec.rollout is None else (spec.rollout.demand,))))

        async def engine_up() -> None:
            if parts.engine is not None:
                parts.pids["engine"] = int((await parts.engine.describe.remote())["pid"])
                try:
                    parts.engine_gpus = await self._gpus_of(parts.engine)
                except (TimeoutError, RayTaskError) as error:  # their memory is not waited for then
                    logger.warning("event=gpus_unknown server=%s error=%s", spec.server_id, type(error).__name__)
                await parts.engine.start.remote(self._settings.start_timeout_s)

        async def worker_up() -> dict[str, Any]:
            parts.pids["worker"] = int((await parts.worker.describe.remote())["pid"])
            try:
                await self._learn_gpus(parts)
            except (TimeoutError, RayTaskError) as error:  # the next probe asks again
                logger.warning("event=gpus_unknown server=%s error=%s", spec.server_id, type(error).__name__)
            info: dict[str, Any] = await parts.worker.start.remote(self._settings.start_timeout_s)
            return info

        async def front_up() -> str:
            info = await parts.front.start.remote()
            parts.pids["front"] = int(info["pid"])
            return str(info["endpoint"])

        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(engine_up())
                worker, front = both.create_task(worker_up()), both.create_task(front_up())
        except* RayError as errors:
            raise errors.exceptions[0] from errors
        await parts.front.attach.remote(worker.result())
        policy = {
            "lora": spec.lora,
            "head": spec.head,
            "critic": spec.critic,
            "seed": spec.seed,
            "checkpoint": spec.start_from or None,
        }
        await parts.front.create_policy.remote(spec.policy_id, policy, self._settings.start_timeout_s)
        return Launched(front.result(), parts.pids["worker"], parts.pids["front"], parts.engine_gpus)

    async def _granted(self, group: PlacementGroup, *demands: Demand) -> None:
        patience_s = self._settings.placement_timeout_s
        if not await asyncio.to_thread(group.wait, patience_s):
            raise NotPlacedError(
                f"Ray did not grant {' and '.join(map(str, demands))} within {patience_s:g} s",
                hint="does something else use this node?",
            )

    def gpus_of(self, server_id: str) -> tuple[int, ...]:
        parts = self._parts.get(server_id)
        return () if parts is None or parts.gpus is None else parts.gpus

    async def _learn_gpus(self, parts: _Parts) -> None:
        parts.gpus = await self._gpus_of(parts.worker)

    async def _gpus_of(self, actor: Any) -> tuple[int, ...]:
        async with asyncio.timeout(self._settings.unresponsive_s):
            return tuple(await actor.__ray_call__.remote(own_gpu_indexes))

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
        engine, _ = ("", {}) if parts.engine is None else await self._ask(parts, "engine", parts.engine.describe)
        if fault := engine or worker or front:
            return Probe(fault)
        if parts.gpus is None:  # a server of an earlier life of the scheduler
            try:
                await self._learn_gpus(parts)
            except (TimeoutError, RayError) as error:
                logger.warning("event=gpus_unknown server=%s error=%s", server_id, type(error).__name__)
        if not answer["ok"]:
            return Probe(f"the server failed: {answer['cause']}")
        return Probe(idle_s=self._drivers.idle_s(server_id, float(answer.get("idle_s", 0.0))))

    async def save(self, server_id: str, policy_id: str, name: str) -> None:
        patience_s = self._settings.last_checkpoint_s
        parts = await self._known(server_id)
        if parts.front is None:
            raise ServerLostError("its server is gone")
        try:
            async with asyncio.timeout(patience_s + self._settings.unresponsive_s):
                while True:
                    try:
                        await parts.front.save.remote(policy_id, name, patience_s)
                        break
                    except ActorUnavailableError:  # a connection broke; to save once more is to save the same
                        await asyncio.sleep(self._settings.probe_s)
        except TimeoutError as error:
            raise DeadlineError(f"the server did not answer within {patience_s:g} s") from error
        except RayActorError as error:
            raise ServerLostError(death("the server's front process", parts.pids.get("front"), error)) from error
        except RayTaskError as error:
            raise other_side(error) from error

    async def name_checkpoints(self, server_id: str, starts: Mapping[str, str]) -> None:
        parts = await self._known(server_id)
        if parts.front is None:
            raise ServerLostError("its server is gone")
        try:
            async with asyncio.timeout(self._settings.unresponsive_s):
                await parts.front.name_checkpoints.remote(dict(starts))
        except (TimeoutError, ActorUnavailableError) as error:
            raise UnavailableError("the job's server did not answer", hint="try again") from error
        except RayActorError as error:
            raise ServerLostError(death("the server's front process", parts.pids.get("front"), error)) from error
        except RayTaskError as error:
            raise other_side(error) from error

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
            return death(process, parts.pids.get(which), error), {}
        except RayTaskError as error:
            return f"{process} (pid {parts.pids.get(which)}) failed: {other_side(error)}", {}
        parts.pids[which] = int(answer["pid"])
        return "", answer

    async def drive(self, spec: DriverSpec) -> DriverOutcome:
        return await self._drivers.drive(spec)

    async def stop_driver(self, server_id: str) -> None:
        await self._drivers.stop(server_id)

    async def stop_server(self, server_id: str, marks: list[str], where: Sequence[Allocation], *, graceful: bool) -> str:
        parts = await self._known(server_id)
        for which, actor in (("front", parts.front), ("worker", parts.worker), ("engine", parts.engine)):
            if actor is None:
                continue
            if graceful:
                if which == "worker" and self._settings.remote_storage:
                    await self._ask_to_flush(actor)
                await self._ask_to_stop(actor)
            await kill_actor(actor, on_its_way=which not in parts.pids, arrival_timeout_s=self._settings.arrival_timeout_s)
        if parts.group is not None:
            remove_placement_group(parts.group)
        known = (parts.gpus or where[0].gpus, *(parts.engine_gpus or each.gpus for each in where[1:]))
        whole: dict[str, tuple[int, ...]] = {}
        for each, gpus in zip(where, known, strict=True):
            whole[each.node_id] = whole.get(each.node_id, ()) + (() if each.demand.shares_gpu else gpus)
        left = [text for node_id, gpus in whole.items() if (text := await self._clear(node_id, marks, gpus))]
        if not left:
            self._parts.pop(server_id, None)
        return "; ".join(left)

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

    async def _clear(self, node_id: str, marks: list[str], gpus: tuple[int, ...]) -> str:
        """On the node where the processes are; on this one if that node is no more."""
        settings = self._settings
        arguments = (marks, gpus, settings.kill_after_s, settings.exit_timeout_s, settings.gpu_free_bytes)
        patience_s = len(marks) * (settings.kill_after_s + settings.exit_timeout_s) + settings.exit_timeout_s
        try:
            timeout_s = patience_s + settings.placement_timeout_s
            left: str = await on_node(node_id, clear, *arguments, timeout_s=timeout_s)
        except NotPlacedError:  # nothing is left of its GPUs either
            left = await asyncio.to_thread(clear, marks, (), *arguments[2:])
        return left


def _amounts(demand: Demand) -> dict[str, float]:
    """A demand in Ray's words."""
    return {"GPU": demand.gpus} if demand.gpus else {CPU_SLOT: demand.cpu_slots}


def _worker_env(job_id: str, node: Node, demand: Demand) -> dict[str, Any]:
    # Ray would give a process without a CPU demand one thread; these are the slot's share of the cores.
    return {"env_vars": {JOB_VARIABLE: job_id, **NICENESS, "OMP_NUM_THREADS": str(threads_for(node, demand))}}


def _front_env(job_id: str) -> dict[str, Any]:
    return {"env_vars": {JOB_VARIABLE: job_id, **NICENESS}}
