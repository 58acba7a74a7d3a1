"""Functions that run on vLLM's workers, one per rank: new weights for the model, all at once or bucket by bucket."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from opentinker.errors import WeightSyncError
from opentinker.server.buckets import Arrivals, Bucket, BucketAck
from opentinker.server.carriers import Payload
from opentinker.server.device_carriers import IpcPayload, Joined, read_device_probe
from opentinker.server.device_groups import Invitation, join
from opentinker.server.digest import tensor_digest
from opentinker.server.engine.base import NamedTensors, WeightAck

_HEAD = "lm_head.weight"
_EMBEDDING = "embed_tokens.weight"
_UPDATE = "opentinker_update"
"""The attribute of a worker that holds the update under way."""


@dataclass
class _Update:
    arrivals: Arrivals
    expected: frozenset[str]
    reported: set[str] = field(default_factory=set)
    """What vLLM's loader says that it has written."""


def replace_weights(worker: Any, weights: NamedTensors) -> WeightAck:
    """Write `weights` into the worker's model in place."""
    model, tied = worker.get_model(), _is_tied(worker)
    expected = _expected(worker)
    digests: dict[str, str] = {}
    reported: set[str] = set()
    load = model.load_weights

    def load_and_note(stream: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        reported.update(load(stream))
        return reported

    # `reload_weights` logs what the loader wrote instead of returning it.
    model.load_weights = load_and_note
    try:
        worker.reload_weights(weights_iterator=_received(weights, digests, tied=tied, device=worker.device))
    finally:
        del model.load_weights
    _check_tied(digests, tied=tied)
    return _ack(model, digests, reported, expected)


def read_worker_probe(worker: Any, payload: Payload) -> bytes:
    """What the worker reads of a probe; empty where its memory is out of reach."""
    return read_device_probe(payload, worker.rank)


def join_group(worker: Any, invitation: Invitation) -> None:
    """Make the worker one of the ranks that the trainer broadcasts to, in place of those of an earlier group.

    Raises:
        WeightSyncError: the others do not come, or NCCL does not connect them.
    """
    Joined.replace(None)
    Joined.replace(join(invitation, worker.rank + 1, worker.device))


def begin_update(worker: Any, update: int) -> None:
    """Make the worker's model ready for buckets: `reload_weights` in steps."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    IpcPayload.let_go()  # of an update that was not brought to its end
    setattr(worker, _UPDATE, _Update(Arrivals(worker.rank, update), _expected(worker)))
    with set_current_vllm_config(worker.vllm_config):
        initialize_layerwise_reload(worker.get_model())


def take_bucket(worker: Any, bucket: Bucket, payload: Payload) -> BucketAck:
    """Write a bucket into the worker's model; what the worker received of it.

    Raises:
        WeightSyncError: it is not the one that was due, or not what was sent.
    """
    from vllm.config import set_current_vllm_config

    memory = payload.open(worker.rank)  # also of one that is refused: the sender may be bringing it to all ranks
    update: _Update = getattr(worker, _UPDATE)
    update.arrivals.admit(bucket)
    digests: dict[str, str] = {}
    tensors = _received(bucket.tensors(memory), digests, tied=_is_tied(worker), device=worker.device)
    with set_current_vllm_config(worker.vllm_config):
        update.reported.update(worker.get_model().load_weights(tensors))
    return update.arrivals.note(bucket, digests)


def finish_update(worker: Any, counts: Mapping[int, int]) -> WeightAck:
    """Bring an update to its end; what the worker has received in it.

    Raises:
        WeightSyncError: a bucket is missing.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    update: _Update = getattr(worker, _UPDATE)
    delattr(worker, _UPDATE)
    IpcPayload.let_go()
    update.arrivals.close(counts)
    runner, model = worker.model_runner, worker.get_model()
    with set_current_vllm_config(worker.vllm_config):
        finalize_layerwise_reload(model, runner.model_config)
    runner.reset_lora_state()
    runner.reset_encoder_cache()
    runner.reset_mm_cache()
    digests = dict(update.arrivals.digests)
    _check_tied(digests, tied=_is_tied(worker))
    return _ack(model, digests, update.reported, update.expected)


def _expected(worker: Any) -> frozenset[str]:
    # Adapter serving wraps layers; the loader knows their parameters by the unwrapped names.
    names = {name.replace(".base_layer.", ".") for name, _ in worker.get_model().named_parameters()}
    return frozenset(names | {_HEAD} if _is_tied(worker) else names)


def _is_tied(worker: Any) -> bool:
    return bool(worker.model_runner.model_config.hf_text_config.tie_word_embeddings)


def _received(
    weights: NamedTensors, digests: dict[str, str], *, tied: bool, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """The stream with its digests noted. A tied head is written with its embedding: on CPU vLLM keeps a repacked copy of
    it, which would stay stale."""
    for name, tensor in weights:
        # vLLM gathers a fused layer's parts before it writes; the sender may reuse its buffer meanwhile.
        copied = tensor.detach().to(device, copy=True)
        digests[name] = tensor_digest(copied)
        if tied and name == _HEAD:
            continue
        yield name, copied
        if tied and name.endswith(_EMBEDDING):
            yield _HEAD, copied


def _check_tied(digests: dict[str, str], *, tied: bool) -> None:
    """Note the head that was written with its embedding.

    Raises:
        WeightSyncError: a head came that differs from it.
    """
    embedding = next((name for name in digests if name.endswith(_EMBEDDING)), None)
    if tied and embedding and digests.setdefault(_HEAD, digests[embedding]) != digests[embedding]:
        raise WeightSyncError("the model ties its head to its embedding, but the two tensors that arrived differ")


def _ack(model: Any, digests: dict[str, str], reported: set[str], expected: frozenset[str]) -> WeightAck:
    packed = getattr(model, "packed_modules_mapping", {})
    written = frozenset(name for name in reported if all(part in digests for part in _parts(name, packed)))
    return WeightAck(digests, written, expected)


def _parts(name: str, packed: dict[str, list[str]]) -> list[str]:
    """The Hugging Face names that make up an engine parameter."""
    module, _, leaf = name.rpartition(".")
    parent, _, last = module.rpartition(".")
    return [f"{parent}.{part}.{leaf}" for part in packed[last]] if last in packed else []
