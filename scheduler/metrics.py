"""What Prometheus can scrape: the scheduler's own figures, and how fast the API answers."""

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from opentinker.scheduler.gpus import GpuUse
from opentinker.scheduler.placement import Demand, Node
from opentinker.scheduler.states import JobState

_WAIT_S = (0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 24 * 3600)
_START_S = (0.5, 1, 2, 5, 10, 20, 60, 120, 300, 900, 1800)
_PASS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_API_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)


class SchedulerMetrics:
    """Counts from this process's start; the gauges are read when somebody asks."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.queue_wait = Histogram(
            "opentinker_queue_wait_seconds",
            "From a job's submission to the decision to start it.",
            registry=self._registry,
            buckets=_WAIT_S,
        )
        self.server_start = Histogram(
            "opentinker_server_start_seconds",
            "From the decision to start a job to its server's first answer.",
            registry=self._registry,
            buckets=_START_S,
        )
        self.placement_pass = Histogram(
            "opentinker_placement_pass_seconds",
            "One look at the cluster and the decisions that followed.",
            registry=self._registry,
            buckets=_PASS_S,
        )
        self.lease_expiries = Counter("opentinker_lease_expiries", "Jobs whose client fell silent.", registry=self._registry)
        self.server_failures = Counter(
            "opentinker_server_failures", "Servers that did not start, or died.", registry=self._registry
        )
        self.jobs_ended = Counter("opentinker_jobs_ended", "Jobs that ended, by state.", ["state"], registry=self._registry)

    def exposition(
        self,
        counts: Mapping[JobState, int],
        nodes: Sequence[Node],
        free: Mapping[str, Demand],
        use: Mapping[str, Sequence[GpuUse]],
    ) -> str:
        """Everything in Prometheus' text format."""
        now = CollectorRegistry()
        now.register(_Gauges(list(_gauges(counts, nodes, free, use))))
        return (generate_latest(self._registry) + generate_latest(now)).decode()


class _Gauges(Collector):
    def __init__(self, families: Sequence[GaugeMetricFamily]) -> None:
        self._families = families

    def collect(self) -> Iterator[GaugeMetricFamily]:
        yield from self._families


def _gauges(
    counts: Mapping[JobState, int], nodes: Sequence[Node], free: Mapping[str, Demand], use: Mapping[str, Sequence[GpuUse]]
) -> Iterator[GaugeMetricFamily]:
    jobs = GaugeMetricFamily("opentinker_jobs", "Jobs in the store, by state.", labels=["state"])
    for state in JobState:
        jobs.add_metric([state], counts.get(state, 0))
    yield jobs
    for name, unit, attribute in (("gpus", "GPUs", "gpus"), ("cpu_slots", "CPU slots", "cpu_slots")):
        total = GaugeMetricFamily(f"opentinker_{name}", f"{unit} of each node.", labels=["node", "node_id"])
        held = GaugeMetricFamily(f"opentinker_{name}_allocated", f"{unit} that servers hold.", labels=["node", "node_id"])
        for node in nodes:
            has = getattr(node, attribute)
            total.add_metric([node.name, node.id], has)
            held.add_metric([node.name, node.id], has - getattr(free[node.id], attribute))
        yield total
        yield held
    labels = ["node", "node_id", "gpu"]
    busy = GaugeMetricFamily("opentinker_gpu_busy_ratio", "Share of time with a kernel running.", labels=labels)
    memory = GaugeMetricFamily("opentinker_gpu_memory_used_bytes", "GPU memory in use.", labels=labels)
    for node in nodes:
        for gpu in use.get(node.id, ()):
            where = [node.name, node.id, str(gpu.index)]
            busy.add_metric(where, gpu.busy)
            memory.add_metric(where, gpu.memory_used_bytes)
    yield busy
    yield memory


Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class ApiMetrics:
    """Requests by route template, and how long those took that did not ask to wait."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        labels = ["method", "route"]
        self._requests = Counter(
            "opentinker_api_requests", "Requests, by status.", [*labels, "status"], registry=self._registry
        )
        self._latency = Histogram(
            "opentinker_api_latency_seconds",
            "From request to the end of the answer; long polls and proxied requests are left out.",
            labels,
            registry=self._registry,
            buckets=_API_S,
        )

    def exposition(self) -> str:
        return generate_latest(self._registry).decode()

    def observe(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "unmatched" if "state" in scope else "refused")
        method = scope["method"] if scope["method"] in ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD") else "other"
        self._requests.labels(method, route, status).inc()
        if b"wait_s=" not in scope.get("query_string", b"") and not route.endswith("{path:path}"):
            self._latency.labels(method, route).observe(seconds)


class Measured:
    """Middleware that observes every request."""

    def __init__(self, app: App, metrics: ApiMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        status = 500

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            self._metrics.observe(scope, status, time.monotonic() - started)
