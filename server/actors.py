"""The processes of a server, as plain classes that a launcher wraps into Ray actors. Importing this loads no Ray."""

import asyncio
import hashlib
import os
import threading
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from opentinker.client.messages import IntArray, PolicySpec, validate
from opentinker.client.wire import pack
from opentinker.config.base import parse_config
from opentinker.config.server import EngineConfig, LoraConfig, ServerConfig
from opentinker.errors import DeadlineError, NotFoundError, OpenTinkerError, ServerLostError, from_problem
from opentinker.logfile import write_to
from opentinker.process_group import own_process_group
from opentinker.server.front import Front, create_app
from opentinker.server.listener import Listener
from opentinker.server.moved import bring_log, bring_run
from opentinker.server.operations import Operation
from opentinker.server.protocol import Completion, Work
from opentinker.storage import Mirror, Storage, open_storage

CALL_S = 60.0
"""How long the worker's actor may take to accept or hand over work; its methods never compute."""
UPLOAD_S = 300.0
"""Images are decoded before an upload is answered."""


class WorkerProcess:
    """Engine and trainer. A threaded actor: `collect` blocks a thread of its own."""

    def __init__(
        self,
        config: dict[str, Any],
        lora: dict[str, Any] | None,
        checkpoint_root: str,
        job_id: str,
        log_path: str,
        storage: Mapping[str, str] | None = None,
        engine: Any = None,
    ) -> None:
        """`config` holds the fields of `ServerConfig`; `lora` those of `LoraConfig` if the policy will be an adapter. What this
        process prints and logs is appended to `log_path`. `storage`, {"url", "root"}, is where the job's files are copied.
        `engine` is the Ray handle of an `EngineProcess`, if the engine is split from the trainer."""
        own_process_group()
        self._no_log = bring_log(storage, Path(log_path))
        write_to(Path(log_path), job=job_id, process="worker")
        self._config = parse_config(ServerConfig, config)
        self._lora = None if lora is None else parse_config(LoraConfig, lora)
        self._checkpoint_root = Path(checkpoint_root)
        self._run_dir = Path(log_path).parent
        self._storage_at = storage
        self._engine = engine
        self._mirror: Mirror | None = None
        self._loaded = threading.Event()
        self._starting = threading.Lock()
        self._info: dict[str, Any] | None = None

    def start(self, timeout_s: float) -> dict[str, Any]:
        """Load everything, once; what clients may know of it.

        Raises:
            UnknownModelError, EngineError: the model cannot be loaded.
            UnavailableError: it could not be brought here; another time or node may do better.
            DeadlineError: it is not loaded after `timeout_s`.
        """
        with self._starting:
            if self._info is None:
                self._info = self._start(timeout_s)
        return self._info

    def _start(self, timeout_s: float) -> dict[str, Any]:
        # Torch and transformers load here, in the actor, and not with this module.
        from opentinker.server.loading import load_parts, server_info
        from opentinker.server.models import resolve_model
        from opentinker.server.worker import Worker

        started = time.monotonic()
        storage = open_storage(**self._storage_at) if self._storage_at else None
        if storage is not None:
            self._follow(storage)
        model_dir = resolve_model(self._config.base_model)
        connect = None if self._engine is None else partial(_connected, self._engine, timeout_s, self._config.engine)
        self._worker = Worker(
            lambda: replace(load_parts(model_dir, self._config, self._lora, self._checkpoint_root, connect), storage=storage)
        )
        parts = self._worker.start(timeout_s)
        self._loaded.set()
        return server_info(model_dir, self._config, parts) | {"pid": os.getpid(), "seconds": time.monotonic() - started}

    def _follow(self, storage: Storage) -> None:
        """Bring here what the job left there, for its driver to find, and copy from now on what its processes write."""
        if self._no_log is not None:
            raise self._no_log  # the log that began here would be copied over the longer one
        bring_run(storage, self._run_dir)
        self._mirror = Mirror(storage, self._run_dir)
        self._mirror.start()

    def submit(self, work: Sequence[Work]) -> None:
        self._worker.submit(work)

    def upload(self, images: Sequence[bytes]) -> dict[str, IntArray]:
        """Takes a thread of the actor for as long as the images are decoded, and waits for no work."""
        return self._worker.upload(images)

    def collect(self, timeout_s: float) -> list[Completion]:
        # The front collects from its own start on, which is not after the worker's.
        return self._worker.collect(timeout_s) if self._loaded.wait(timeout_s) else []

    def describe(self) -> dict[str, Any]:
        return {"pid": os.getpid()}

    def flush(self) -> None:
        """Copy to the storage what is not there yet of the job's files, of which its driver has written the last."""
        if self._mirror is not None:
            self._mirror.sync()

    def stop(self) -> None:
        """End the compute thread. A worker that is still loading has none to end in order: kill its process."""
        try:
            if self._loaded.is_set():
                self._worker.stop()
        finally:
            if self._mirror is not None:
                self._mirror.close()


def _connected(handle: Any, timeout_s: float, config: EngineConfig, images: Any) -> Any:
    """The engine in the actor, when it has loaded."""
    from opentinker.server.engine.links import RayLink
    from opentinker.server.engine.remote import RemoteEngine
    from opentinker.server.loading import device

    link = RayLink(handle)
    return RemoteEngine(
        link,
        link.start(timeout_s),
        images=images,
        bucket_bytes=config.bucket_mib << 20,
        device=device(),
        weight_carrier=config.weight_carrier,
    )


class FrontProcess:
    """The HTTP front of one worker. An async actor: all methods share one event loop with the HTTP server."""

    def __init__(
        self,
        worker_handle: Any,
        tokens: Mapping[str, str],
        host: str,
        job_id: str,
        log_path: str,
        storage: Mapping[str, str] | None = None,
        starts: Mapping[str, str] | None = None,
        taken: Sequence[str] = (),
    ) -> None:
        """`worker_handle` is the Ray handle of a `WorkerProcess`; `tokens` is policy -> token; `log_path` and `storage` as the
        worker's; `starts` is address -> folder of other jobs' checkpoints that policies may load; `taken` are the names of the
        policies that the job's further servers begin with."""
        own_process_group()
        bring_log(storage, Path(log_path))  # the worker tells if it could not be brought
        write_to(Path(log_path), job=job_id, process="front")
        app = create_app(RayWorker(worker_handle), tokens, starts=starts, taken=taken)
        self._front: Front = app.state.front
        self._listener = Listener(app, host)
        self._starting = asyncio.Lock()
        self._endpoint: str | None = None

    async def start(self) -> dict[str, Any]:
        """Bind a port, once, and answer on it; `/v1` answers 503 until `attach`. {"endpoint", "pid"}."""
        async with self._starting:
            if self._endpoint is None:
                self._endpoint = await self._listener.start()
        return {"endpoint": self._endpoint, "pid": os.getpid()}

    async def attach(self, info: Mapping[str, Any]) -> None:
        """Open `/v1`; `info` is what the worker's `start` returned."""
        self._front.attach(info)

    async def create_policy(self, policy: str, spec: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Run the policy's command 0, `create`, and wait for it.

        Raises:
            OpenTinkerError: the command's own error.
            DeadlineError: it is not done after `timeout_s`.
        """
        args = validate(PolicySpec, spec).model_dump()
        digest = hashlib.blake2b(pack(args), digest_size=16).digest()
        operation = self._front.dispatcher.command(policy, 0, digest, "create", args)
        return await _result(operation, timeout_s, f"policy {policy} was not created")

    async def save(self, policy: str, name: str, timeout_s: float) -> dict[str, Any]:
        """Write a checkpoint for the cluster, whatever the policy's client does meanwhile, and one of each further policy that
        was ever trained; the policy's own.

        Raises:
            OpenTinkerError: the error of one of the commands, when all have ended.
            DeadlineError: they are not done after `timeout_s`.
        """
        return await save_all(self._front, policy, name, timeout_s)

    async def name_checkpoints(self, starts: Mapping[str, str]) -> None:
        """Let policies load further checkpoints of other jobs: address -> folder."""
        self._front.name_checkpoints(starts)

    async def health(self) -> dict[str, Any]:
        """{"ok", "cause", "pid", "idle_s"}: whether requests are answered, and why not; for how long there were none."""
        lost = self._front.dispatcher.lost
        if lost is None and not self._listener.alive:
            lost = ServerLostError("the HTTP server ended; its log says why")
        idle_s = self._front.dispatcher.idle_s
        return {"ok": lost is None, "cause": "" if lost is None else str(lost), "pid": os.getpid(), "idle_s": idle_s}

    async def stop(self) -> None:
        """Fail what is pending and close the port."""
        await self._front.dispatcher.stop()
        await self._listener.stop()


async def save_all(front: Front, policy: str, name: str, timeout_s: float) -> dict[str, Any]:
    """See `FrontProcess.save`."""
    policies = [policy, *front.policies.further_to_save]
    operations = [front.dispatcher.aside(each, "save", {"name": name}) for each in policies]
    failure = f"checkpoint '{name}' was not written"
    ends = await asyncio.gather(*(_result(o, timeout_s, failure) for o in operations), return_exceptions=True)
    for each, end in zip(policies, ends, strict=True):
        # A further one whose weights its own client has deleted has none to save.
        if isinstance(end, BaseException) and (each == policy or not isinstance(end, NotFoundError)):
            raise end
    saved = ends[0]
    assert not isinstance(saved, BaseException)
    return saved


async def _result(operation: Operation, timeout_s: float, failure: str) -> dict[str, Any]:
    await operation.wait(timeout_s)
    if operation.status == "pending":
        raise DeadlineError(f"{failure} within {timeout_s:.0f} s")
    if operation.problem is not None:
        raise from_problem(operation.problem)
    result: dict[str, Any] = operation.result
    return result


class RayWorker:
    """A `WorkerClient` for a `WorkerProcess` in a Ray actor; the actor's death becomes a `ServerLostError`."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def submit(self, work: Sequence[Work]) -> None:
        await self._call(self._handle.submit.remote(list(work)), CALL_S)

    async def upload(self, images: Sequence[bytes]) -> dict[str, IntArray]:
        tokens: dict[str, IntArray] = await self._call(self._handle.upload.remote(list(images)), UPLOAD_S)
        return tokens

    async def collect(self, timeout_s: float) -> list[Completion]:
        completions: list[Completion] = await self._call(self._handle.collect.remote(timeout_s), timeout_s + CALL_S)
        return completions

    async def _call(self, answer: Awaitable[Any], timeout_s: float) -> Any:
        from ray.exceptions import RayActorError, RayTaskError

        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise ServerLostError(f"the server's worker did not answer within {timeout_s:.0f} s") from None
        except RayActorError as error:
            raise ServerLostError(f"the server's worker died: {error}") from error
        except RayTaskError as error:
            if isinstance(error.cause, OpenTinkerError):
                raise error.cause from error
            raise
