"""Asks a node's raylet to start a worker process before there is anything for it to do.

Ray does so by itself for tasks, and has no public call for it; the one that it uses is part of the raylet's own protocol.
"""

from collections.abc import Mapping
from typing import Any

import ray

from opentinker.scheduler.warming import NoPrestartError

RPC_S = 5.0


def prestart_process(address: str, runtime_env: Mapping[str, Any], keep_s: float) -> None:
    """Have the raylet at `address` (host:port) start a process that an actor with exactly this runtime environment will get; it
    ends after `keep_s` without one. Blocks, until the request was taken.

    Raises:
        NoPrestartError: this version of Ray does it in another way.
        Exception: of many kinds, when the raylet does not answer.
    """
    try:
        _ask(address, runtime_env, keep_s)
    except (ImportError, AttributeError) as error:
        raise NoPrestartError(f"{type(error).__name__}: {error}") from error
    except Exception as error:
        if _code(error) == "UNIMPLEMENTED":
            raise NoPrestartError(f"its raylet does not know the request: {error}") from error
        raise


def _ask(address: str, runtime_env: Mapping[str, Any], keep_s: float) -> None:
    from google.protobuf import json_format
    from ray._private.grpc_utils import init_grpc_channel
    from ray._private.utils import get_runtime_env_info
    from ray.core.generated import common_pb2, node_manager_pb2, node_manager_pb2_grpc, runtime_environment_pb2
    from ray.runtime_env import RuntimeEnv

    text = get_runtime_env_info(RuntimeEnv(**runtime_env), is_job_runtime_env=False, serialize=True)
    request = node_manager_pb2.PrestartWorkersRequest(
        language=common_pb2.Language.PYTHON,
        num_workers=1,
        keep_alive_duration_secs=int(keep_s),
        job_id=bytes.fromhex(ray.get_runtime_context().get_job_id()),
        runtime_env_info=json_format.Parse(text, runtime_environment_pb2.RuntimeEnvInfo()),
    )
    channel = init_grpc_channel(address)
    try:
        node_manager_pb2_grpc.NodeManagerServiceStub(channel).PrestartWorkers(request, timeout=RPC_S)
    finally:
        channel.close()


def _code(error: Exception) -> str:
    """The name of a gRPC error's status; empty for others."""
    code = getattr(error, "code", None)
    return str(getattr(code(), "name", "")) if callable(code) else ""
