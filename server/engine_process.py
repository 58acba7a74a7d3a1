"""The process of an engine that is split from its trainer, as a plain class that a launcher wraps into a Ray actor. Importing
this loads no Ray."""

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opentinker.config.base import parse_config
from opentinker.config.server import LoraConfig, ServerConfig
from opentinker.logfile import write_to
from opentinker.process_group import own_process_group
from opentinker.server.moved import bring_log


class EngineProcess:
    """A rollout engine. A threaded actor: `collect` blocks a thread of its own."""

    def __init__(
        self,
        config: dict[str, Any],
        lora: dict[str, Any] | None,
        job_id: str,
        log_path: str,
        storage: Mapping[str, str] | None = None,
    ) -> None:
        """`config` holds the fields of `ServerConfig`; `lora` those of `LoraConfig` if the policy will be an adapter. What this
        process prints and logs is appended to `log_path`; `storage` as the worker's."""
        own_process_group()
        bring_log(storage, Path(log_path))  # the worker tells if it could not be brought
        write_to(Path(log_path), job=job_id, process="engine")
        self._config = parse_config(ServerConfig, config)
        self._lora = None if lora is None else parse_config(LoraConfig, lora)
        self._loaded = threading.Event()
        self._starting = threading.Lock()
        self._info: Any = None

    def start(self, timeout_s: float) -> Any:
        """Load the engine, once; its `EngineInfo`.

        Raises:
            UnknownModelError, EngineError: the model cannot be loaded.
            DeadlineError: it is not loaded after `timeout_s`.
        """
        with self._starting:
            if self._info is None:
                self._info = self._start(timeout_s)
        return self._info

    def _start(self, timeout_s: float) -> Any:
        # Torch and transformers load here, in the actor, and not with this module.
        from opentinker.server.engine.host import EngineHost
        from opentinker.server.loading import load_engine
        from opentinker.server.models import resolve_model

        model_dir = resolve_model(self._config.base_model)
        self._host = EngineHost(lambda: load_engine(model_dir, self._config, self._lora))
        info = self._host.start(timeout_s)
        self._loaded.set()
        return info

    def submit(self, messages: Sequence[Any]) -> None:
        self._host.submit(messages)

    def collect(self, timeout_s: float) -> list[Any]:
        return self._host.collect(timeout_s) if self._loaded.wait(timeout_s) else []

    def describe(self) -> dict[str, Any]:
        return {"pid": os.getpid()}

    def stop(self) -> None:
        """End the compute thread. An engine that is still loading has none to end in order: kill its process."""
        if self._loaded.is_set():
            self._host.stop()
