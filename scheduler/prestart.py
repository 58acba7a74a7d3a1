"""Asks a node's raylet to start a worker process before there is anything for it to do.

Ray does so by itself for tasks, and has no public call for it; the one that it uses is part of the raylet's own protocol.
"""

from collections.abc import Mapping
from typing import Any

import ray

RPC_S = 5.0


def prestart_process(address: str, runtime_env: Mapping[str, Any], keep_s: float) -> None:
    """Have the raylet at `address` (host:port) start a process that an actor with exactly this runtime environment will get; it
    ends after `keep_s` without one. Blocks, until the request was taken.

    Raises:
        Exception: of many kinds, when this version of Ray does it in another way, or the raylet does not answer.
    """
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
