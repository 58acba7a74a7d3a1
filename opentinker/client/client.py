"""The user's front door: a client of a cluster, and the jobs it creates."""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from opentinker.client.ending import Ending
from opentinker.client.local import find_cluster
from opentinker.client.policy import PolicyClient
from opentinker.client.reach import Connect, choose_endpoint
from opentinker.client.scheduler import ENDED, SchedulerClient
from opentinker.client.submitted import SubmittedJob
from opentinker.client.sync import SyncRunner
from opentinker.config.job import JobConfig, parse_job
from opentinker.config.resources import Resources, Scheduling
from opentinker.config.server import Dtype, EngineConfig, LoraConfig, TrainerConfig
from opentinker.config.servers import FurtherServerConfig
from opentinker.errors import (
    AuthenticationError,
    ConfigError,
    ConflictError,
    DeadlineError,
    JobFailedError,
    NotFoundError,
    OpenTinkerError,
    RateLimitedError,
    ServerLostError,
    UnavailableError,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")

_SUSPICIOUS = (UnavailableError, DeadlineError, ServerLostError, NotFoundError, AuthenticationError)
"""Errors of a policy call that may mean that the server is gone."""

CLOSE_S = 15.0
"""How long each thing that a job's work has left open may take to close."""


class Client:
    """A connection to a cluster. Leaving the `with` ends the jobs that it created and that still run, not those that it
    submitted."""

    def __init__(
        self, url: str | None = None, api_key: str | None = None, *, timeout_s: float = 30.0, connect: Connect = "auto"
    ) -> None:
        """`url` and `api_key` default to the cluster on this machine (see `find_cluster`). `connect` is the way to job servers:
        'direct' to their own addresses, by 'proxy' through the cluster's, or 'auto': direct where that answers.

        Raises:
            UnavailableError: no url is given and no cluster runs here.
            AuthenticationError: no key is known for the url.
        """
        url, key = find_cluster(url, api_key)
        self.scheduler = SchedulerClient(url, key, timeout_s=timeout_s)
        self._connect: Connect = connect
        self._jobs: list[Job] = []
        self._submitted: list[SubmittedJob] = []

    def create_job(
        self,
        base_model: str,
        *,
        lora: LoraConfig | None = None,
        critic: LoraConfig | None = None,
        head: Literal["lm", "scalar"] = "lm",
        engine: EngineConfig | None = None,
        trainer: TrainerConfig | None = None,
        resources: Resources | None = None,
        scheduling: Scheduling | None = None,
        name: str = "",
        seed: int = 0,
        start_from: str = "",
        checkpoints: Sequence[str] = (),
        servers: Mapping[str, FurtherServerConfig | Mapping[str, Any]] | None = None,
        start_timeout_s: float = 1800.0,
    ) -> "Job":
        """Submit an interactive job and wait until its server is up. Time in the cluster's queue counts.

        `servers` are further ones beside its own, by name, each with a policy of its own; what one does not say is the job's.
        They start together or not at all: `servers={"second": {"base_model": "qwen2.5-0.5b", "lora": None}}`.

        `start_from` is the address of a checkpoint whose weights the policy starts from, such as `job-46b60ae170/guess-v1`.
        `checkpoints` are the addresses of others that further policies may take their weights from, such as agents' with
        `AgentConfig(checkpoint=...)`. `critic` puts one beside the policy, for `PPO`; with head 'scalar' the policy is a reward
        model.

        Raises:
            ConfigError: the arguments do not make a job.
            UnknownModelError: the cluster does not know the model.
            JobFailedError: the server could not be started.
            DeadlineError: it is not up after `start_timeout_s`; the job is cancelled.
        """
        config = _job(
            "interactive",
            base_model=base_model,
            lora=lora,
            critic=critic,
            head=head,
            engine=engine,
            trainer=trainer,
            resources=resources,
            scheduling=scheduling,
            name=name,
            seed=seed,
            start_from=start_from,
            checkpoints=tuple(checkpoints),
            servers=servers,
        )
        return self._open(config, start_timeout_s)

    def serve(
        self,
        base_model: str,
        *,
        engine: EngineConfig | None = None,
        dtype: Dtype = "bfloat16",
        resources: Resources | None = None,
        scheduling: Scheduling | None = None,
        name: str = "",
        start_from: str = "",
        start_timeout_s: float = 1800.0,
    ) -> "Job":
        """Submit an inference job that lives as long as this client, and wait until its server is up: a model to sample from,
        without a trainer. `job.run(lambda policy: policy.sample(...))` asks it. With `start_from` it serves the weights of that
        checkpoint.

        Raises: as `create_job`.
        """
        config = _job(
            "inference",
            base_model=base_model,
            engine=engine,
            dtype=dtype,
            resources=resources,
            scheduling=scheduling,
            name=name,
            start_from=start_from,
            lease=True,
        )
        return self._open(config, start_timeout_s)

    def submit(self, config: JobConfig | Mapping[str, Any] | str | Path, *, overrides: Sequence[str] = ()) -> SubmittedJob:
        """Submit a job that the cluster runs by itself, of kind `rl` or `inference`, as `opentinker submit` does: `config` is a
        config, its fields, or a YAML file with them, and `overrides` are dotted, such as `training.steps=10`. An environment
        given as path/to/file.py:Class travels with its folder. Leaving the client does not end the job.

        Raises:
            ConfigError: the config or its environment is wrong, or the job lives as long as its client.
            UnknownModelError: the cluster does not know the model.
        """
        from opentinker.client.submission import prepare  # it loads what runs episodes, and other clients need not

        sent = prepare(config, overrides)
        if sent.lacking:
            logger.warning("the environment is not checked before the job runs: %s missing here", ", ".join(sent.lacking))
        record = self.scheduler.submit(sent.fields(), code=sent.code())
        job = SubmittedJob(self.scheduler, sent.config, record, connect=self._connect)
        self._submitted.append(job)
        return job

    def _open(self, config: JobConfig, start_timeout_s: float) -> "Job":
        job = Job(self.scheduler, config, self.scheduler.submit(config.model_dump(mode="json")), connect=self._connect)
        self._jobs.append(job)
        try:
            job.wait_until_running(start_timeout_s)
        except BaseException:
            job.cancel()
            raise
        return job

    def close(self) -> None:
        for job in self._jobs:
            job.cancel()
        for submitted in self._submitted:
            submitted.close()
        self.scheduler.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _job(kind: str, **fields: Any) -> JobConfig:
    """With the defaults of what is None. Raises: ConfigError."""
    return parse_job({"kind": kind, **{name: value for name, value in fields.items() if value is not None}})


class Job:
    """A job of this client's: a policy on a server that is its own until the job ends.

    A thread renews the lease; when the process dies, the lease expires and the cluster takes the server back.
    """

    def __init__(
        self,
        scheduler: SchedulerClient,
        config: JobConfig,
        record: dict[str, Any],
        *,
        connect: Connect = "auto",
    ) -> None:
        self.config = config
        self.id: str = record["id"]
        self._scheduler = scheduler
        self._record = record
        self._connect: Connect = connect
        self._endpoints: dict[str, str] = {}
        self._sync = SyncRunner()
        self._policies: dict[str, PolicyClient] = {}
        self._beside: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._closed = threading.Event()
        self._ending = Ending()
        self._heart = threading.Thread(target=self._beat, name=f"lease-{self.id}", daemon=True)
        self._heart.start()

    @property
    def state(self) -> str:
        """The job's state when the cluster was last heard."""
        return str(self._record["state"])

    @property
    def record(self) -> dict[str, Any]:
        """The job as the scheduler last described it."""
        return self._record

    @property
    def server(self) -> dict[str, str]:
        """Where the policy is: endpoint, policy, token. The endpoint is the way that was found when the job started."""
        return self._access(self._record["server"])

    @property
    def servers(self) -> dict[str, dict[str, str]]:
        """The same of each server beside the job's own, by name."""
        return {name: self._access(server) for name, server in self._record.get("servers", {}).items()}

    def _access(self, server: dict[str, Any]) -> dict[str, str]:
        if server["endpoint"] not in self._endpoints:
            self._endpoints[server["endpoint"]] = choose_endpoint(server, self._scheduler.url, self._connect)
        return {"endpoint": self._endpoints[server["endpoint"]], "policy": server["policy"], "token": server["token"]}

    def wait_until_running(self, timeout_s: float) -> None:
        """Raises: JobFailedError, DeadlineError."""
        deadline = time.monotonic() + timeout_s
        while self.state != "RUNNING":
            left = deadline - time.monotonic()
            if left <= 0:
                waiting = self._record.get("waiting_for")
                raise DeadlineError(
                    f"job {self.id} is not running after {timeout_s:.0f} s", hint=f"waiting: {waiting}" if waiting else ""
                )
            self._saw(self._scheduler.job(self.id, wait_s=min(left, 20.0), state=self.state))
            self._raise_if_ended(JobFailedError)
        _ = self.server, self.servers  # the way there is looked for now, not within somebody's event loop

    def client_of(self, server: str = "") -> PolicyClient:
        """The client of the policy that a server of the job began with, for async work that `run` runs; "" is the job's own.

        Raises:
            ConfigError: the job has no such server.
        """
        if server not in self._policies:
            access = self.servers | {"": self.server}
            if server not in access:
                known = f"it has {', '.join(self.servers)}" if self.servers else "it has none beside its own"
                raise ConfigError(f"job {self.id} has no server '{server}'", hint=known)
            self._policies[server] = PolicyClient(**access[server])
        return self._policies[server]

    def run(self, work: Callable[[PolicyClient], Awaitable[T]], *, server: str = "") -> T:
        """Run async work on the job's policy from synchronous code, on the job's event loop; with `server`, on that of this one
        of its further servers. When the job ends meanwhile, so does the work.

        Raises:
            ConfigError: the job has no such server.
            ServerLostError: the job's server died meanwhile; the detail is the scheduler's cause.
        """
        if self._closed.is_set():
            raise ConflictError(f"job {self.id} has ended")

        async def connected() -> T:
            return await work(self.client_of(server))

        with self.explained():
            return self._sync.run(self._ending.during(connected()))

    def at_end(self, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Have this called on the job's event loop before the job is released: it closes what its work has begun there."""
        self._beside.append(close)

    def create_policy(self, lora: LoraConfig, *, name: str = "", seed: int = 0) -> PolicyClient:
        """Another policy on the job's server; see `PolicyClient.create_policy`. Its calls are for `run`:

        critic = job.create_policy(LoraConfig(rank=8), name="critic")
        job.run(lambda _: critic.sample(prompt, params))
        """
        return self.run(lambda policy: policy.create_policy(lora, name=name, seed=seed))

    def delete_policy(self, policy: str) -> None:
        """Free everything of a policy that `create_policy` made, by its name."""
        self.run(lambda own: own.delete_policy(policy))

    def save(self, name: str, *, keep_last: int | None = None) -> dict[str, Any]:
        """Checkpoint the policy under `name` on the cluster: {"path", "name", "version", "manifest", "pruned"}; for
        `keep_last` see `PolicyClient.save`."""
        return self.run(lambda policy: policy.save(name, keep_last=keep_last))

    def load(self, name: str) -> dict[str, Any]:
        """Restore weights and optimizer from this job's checkpoint `name`, the newest of that name, `name@version`, or a tag;
        or from another job's, by its address, such as `job-46b60ae170/final`: {"version", "driver"}.

        Raises:
            ConfigError, NotFoundError: there is no such checkpoint, or it does not fit this job.
            CheckpointError: it is corrupt.
        """
        chosen = self.name_checkpoints([name])[0] if "/" in name else name
        return self.run(lambda policy: policy.load(chosen))

    def name_checkpoints(self, addresses: Sequence[str]) -> list[str]:
        """Let the policies of this job load checkpoints of other jobs, as if `create_job(checkpoints=...)` had named them;
        their exact addresses.

        Raises: ConfigError, NotFoundError, ConflictError, UnavailableError.
        """
        return self._scheduler.name_checkpoints(self.id, addresses)

    def complete(self) -> None:
        """End the job in order; its server stops. Does nothing on a job that has ended."""
        self._end(self._scheduler.complete)

    def cancel(self) -> None:
        """End the job as cancelled; its server stops. Does nothing on a job that has ended."""
        self._end(self._scheduler.cancel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.complete() if kind is None else self.cancel()

    def _saw(self, record: dict[str, Any]) -> None:
        """Take the scheduler's word; an answer that was overtaken by the end of the job is stale."""
        if self.state not in ENDED:
            self._record = record
        if self.state in ENDED:
            self._ending.tell(self._account())

    def _account(self) -> str:
        """How the job ended."""
        return f"job {self.id} is {self.state}: {self._record.get('cause') or 'no cause is known'}"

    def _end(self, tell: Callable[[str], dict[str, Any]]) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        try:
            for close in [*self._beside, *(policy.close for policy in self._policies.values())]:
                self._close(close)
        finally:
            self._sync.close()
            if self.state not in ENDED:
                self._tell(tell)

    def _close(self, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """What cannot be closed does not keep the job's hardware."""
        try:
            self._sync.run(asyncio.wait_for(close(), CLOSE_S))
        except Exception as error:
            logger.warning("job=%s something of its work did not close: %r", self.id, error)

    def _tell(self, tell: Callable[[str], dict[str, Any]]) -> None:
        try:
            self._saw(tell(self.id))
        except ConflictError:
            self._saw(self._scheduler.job(self.id))
        except (UnavailableError, DeadlineError) as error:
            logger.warning("job=%s could not be ended (%s); its lease will expire", self.id, error)

    def _beat(self) -> None:
        lease_s = float(self._record.get("lease_s") or 30.0)
        # Several beats may fail, each by its full timeout, before the lease is in danger.
        while not self._closed.wait(lease_s / 6):
            try:
                record = self._scheduler.heartbeat(self.id, timeout_s=max(lease_s / 6, 0.5))
            except (UnavailableError, DeadlineError, RateLimitedError) as error:
                logger.warning("job=%s heartbeat failed: %s", self.id, error)
                continue
            except OpenTinkerError as error:
                logger.error("job=%s the lease is lost: %s", self.id, error)
                return
            self._saw(record)
            if self.state in ENDED:
                return

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn a failed call to a dead server into the scheduler's account of what happened."""
        try:
            yield
        except _SUSPICIOUS as error:
            deadline = time.monotonic() + 15.0
            while self.state not in ENDED and (left := deadline - time.monotonic()) > 0:
                self._saw(self._scheduler.job(self.id, wait_s=left, state=self.state))
            self._raise_if_ended(ServerLostError, error)
            raise

    def _raise_if_ended(self, kind: type[JobFailedError], cause: BaseException | None = None) -> None:
        if self.state in ENDED:
            lost = kind if self.state == "FAILED" else JobFailedError
            raise lost(self._account(), hint=f"`opentinker logs {self.id}` has more") from cause
