"""Ways from a worker to its engine: within this process, or to a Ray actor."""

from collections.abc import Sequence
from typing import Any

from opentinker.errors import OpenTinkerError, ServerLostError
from opentinker.server.engine.host import EngineHost
from opentinker.server.engine.messages import Answer, EngineInfo, Message

CALL_S = 60.0
"""How long the engine's actor may take to accept messages or to hand over answers; its methods never compute."""


class LocalLink:
    """An `EngineLink` to a host in this process."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host

    def send(self, messages: Sequence[Message]) -> None:
        self._host.submit(messages)

    def collect(self, timeout_s: float) -> Sequence[Answer]:
        return self._host.collect(timeout_s)


class RayLink:
    """An `EngineLink` to an `EngineProcess` in a Ray actor; the actor's death becomes a `ServerLostError`."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def start(self, timeout_s: float) -> EngineInfo:
        """What the engine is, when it has loaded.

        Raises:
            OpenTinkerError: the error with which it does not load.
            ServerLostError: its process died, or it has not loaded after `timeout_s`.
        """
        info: EngineInfo = self._get(self._handle.start.remote(timeout_s), timeout_s + CALL_S)
        return info

    def send(self, messages: Sequence[Message]) -> None:
        # The actor's methods run in threads: only by waiting for each call is their order sure.
        self._get(self._handle.submit.remote(list(messages)), CALL_S)

    def collect(self, timeout_s: float) -> Sequence[Answer]:
        answers: list[Answer] = self._get(self._handle.collect.remote(timeout_s), timeout_s + CALL_S)
        return answers

    def _get(self, reference: Any, timeout_s: float) -> Any:
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

        try:
            return ray.get(reference, timeout=timeout_s)
        except GetTimeoutError:
            raise ServerLostError(f"the server's engine process did not answer within {timeout_s:.0f} s") from None
        except RayActorError as error:
            raise ServerLostError(f"the server's engine process died: {first_line(error)}") from error
        except RayTaskError as error:
            if isinstance(error.cause, OpenTinkerError):
                raise error.cause from error
            raise


def first_line(error: BaseException) -> str:
    """The first line of what an exception says."""
    return str(error).strip().partition("\n")[0]
