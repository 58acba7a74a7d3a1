"""How busy the cluster's GPUs are, read seldom."""

import asyncio
import math
import time
from collections.abc import Sequence

from opentinker.scheduler.gpus import GpuUse
from opentinker.scheduler.launcher import Launcher
from opentinker.scheduler.placement import Node
from opentinker.scheduler.settings import Settings
from opentinker.scheduler.store import JobStore

GPU_USE_FRESH_S = 1.0


class GpuUseReader:
    def __init__(self, store: JobStore, launcher: Launcher, settings: Settings) -> None:
        self._store = store
        self._launcher = launcher
        self._settings = settings
        self._reading = asyncio.Lock()
        self._read: dict[str, list[GpuUse]] = {}
        self._until = -math.inf

    async def read(self, nodes: Sequence[Node]) -> dict[str, list[GpuUse]]:
        """Read at most once a second, however many ask."""
        if not any(node.gpus for node in nodes):
            return {}
        async with self._reading:
            if time.monotonic() >= self._until:
                # To Ray a node that is asked is a node at work: the autoscaler would never see an idle one.
                used = {s.node_id for s, _ in self._store.open_servers()} if self._settings.autoscale else None
                self._read = await self._launcher.gpu_use(used)
                self._until = time.monotonic() + GPU_USE_FRESH_S
            return self._read
