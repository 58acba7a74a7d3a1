"""Drivers of submitted jobs as Ray actors, and the installation of what they require before."""

import asyncio
import functools
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from opentinker.config.job import parse_job
from opentinker.errors import ConfigError
from opentinker.scheduler.driver import LOG_NAME, DriverProcess, begin_log, came_up
from opentinker.scheduler.launcher import DriverSpec, NotPlacedError
from opentinker.scheduler.packages import INSTALL_LOG_NAME, PackageInstaller, requirements_of
from opentinker.scheduler.plan import DriverOutcome
from opentinker.scheduler.processes import JOB_VARIABLE, WITHHELD
from opentinker.scheduler.ray_tools import NICENESS, death, find_actor, kill_actor, lasting, on_node, other_side
from opentinker.scheduler.settings import Settings


@dataclass
class _Driver:
    actor: Any
    arrived: bool
    """Its process is up."""
    pid: int | None = None


class RayDrivers:
    """At most one per server. Like all that a launcher starts, they outlive the scheduler's process and are found again."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._drivers: dict[str, _Driver] = {}
        self._at_work: dict[str, float] = {}
        """By server with a driver: since when that is up; infinity while it is not."""

    def idle_s(self, server_id: str, idle_s: float) -> float:
        """How long a server was idle, of which its front says `idle_s`: it has nothing to do while its driver's packages are
        installed, and that is nobody's idleness."""
        since = self._at_work.get(server_id)
        return idle_s if since is None else max(0.0, min(idle_s, time.monotonic() - since))

    async def drive(self, spec: DriverSpec) -> DriverOutcome:
        name = f"{spec.server_id}.driver"
        self._at_work.setdefault(spec.server_id, math.inf)
        actor = await asyncio.to_thread(find_actor, name)
        try:
            arrived = actor is not None or await self._came_up(spec)
        except (TimeoutError, RayError, NotPlacedError) as error:
            return DriverOutcome(f"the driver's node does not answer: {type(error).__name__}", lost=True)
        if arrived:
            self._at_work[spec.server_id] = time.monotonic()
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
                    **lasting(name),
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
                **({"servers": spec.servers} if spec.servers else {}),
            }
            # The driver runs once, however often it is asked.
            function = self._settings.drivers[spec.kind]
            call = functools.partial(actor.run.remote, function, spec.config, arguments, spec.secrets, spec.refusal)
            outcome = await _insist(call, self._settings.probe_s)
        except RayActorError as error:
            return DriverOutcome(f"{death('the driver process', driver.pid, error)}; see {LOG_NAME}", lost=True)
        except RayTaskError as error:
            return DriverOutcome(f"the driver did not start: {other_side(error)}")
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
        actor = await asyncio.to_thread(find_actor, name)
        arrived = actor is not None and (Path(spec.run_dir) / INSTALL_LOG_NAME).exists()
        if actor is None:
            actor = (
                ray.remote(PackageInstaller)
                .options(
                    **lasting(name),
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
            answer = {"python": "", "cause": f"the environment's requirements were not installed: {other_side(error)}"}
        except RayActorError as error:
            return DriverOutcome(death("the installer's process", installer.pid, error), lost=True)
        except RayError as error:
            return DriverOutcome(f"the installer did not start: {type(error).__name__}", lost=True)
        ray.kill(actor)
        if answer["cause"]:
            await self._there(spec, begin_log, Path(spec.run_dir))
            return DriverOutcome(f"{answer['cause']}; see {LOG_NAME}")
        return answer["python"]

    async def stop(self, server_id: str) -> None:
        self._at_work.pop(server_id, None)
        driver = self._drivers.pop(server_id, None)
        if driver is not None:
            await kill_actor(driver.actor, on_its_way=not driver.arrived, arrival_timeout_s=self._settings.arrival_timeout_s)
            return
        for which in ("driver", "installer"):
            if (actor := await asyncio.to_thread(find_actor, f"{server_id}.{which}")) is not None:
                ray.kill(actor)

    async def _came_up(self, spec: DriverSpec) -> bool:
        """Whether a driver that is gone ever was there; a node that is busy is asked again, as long as a server may be silent.

        Raises: as `on_node`.
        """
        deadline = time.monotonic() + self._settings.unresponsive_s
        while True:
            try:
                return bool(await self._there(spec, came_up, Path(spec.run_dir), spec.server_id))
            except (TimeoutError, RayError):
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(self._settings.probe_s)

    async def _there(self, spec: DriverSpec, function: Callable[..., Any], *arguments: Any) -> Any:
        return await on_node(spec.node_id, function, *arguments, timeout_s=self._settings.placement_timeout_s)


async def _insist(call: Callable[[], Awaitable[dict[str, str]]], pause_s: float) -> dict[str, str]:
    """The answer of an actor that can be asked again when a connection broke; if it is dead, Ray says so then."""
    while True:
        try:
            return await call()
        except ActorUnavailableError:
            await asyncio.sleep(pause_s)


def _driver_env(job_id: str) -> dict[str, Any]:
    """Ray's runtime environment of a process that runs a user's code."""
    return {"env_vars": {JOB_VARIABLE: job_id, **NICENESS, **dict.fromkeys(WITHHELD, "")}}
