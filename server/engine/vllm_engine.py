"""vLLM in this process: its scheduler and kernels, stepped by the caller's thread."""

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from opentinker.client.messages import (
    Chunk,
    FloatArray,
    Sample,
    SampleRequest,
    SampleResult,
    SamplingParams,
)
from opentinker.config.server import EngineConfig, LoraConfig
from opentinker.errors import (
    ConfigError,
    DeadlineError,
    EngineError,
    InvalidRequestError,
    OpenTinkerError,
    ServerLostError,
    WeightSyncError,
)
from opentinker.server.buckets import Bucket, BucketAck, merged
from opentinker.server.carriers import InlinePayload, Payload, SharedCarrier
from opentinker.server.device_groups import Invitation
from opentinker.server.engine.base import AdapterId, LoraTensors, NamedTensors, WeightAck
from opentinker.server.engine.sampling import effective_params
from opentinker.server.engine.sleeping import Event, Sleeper
from opentinker.server.engine.vllm_adapters import adapted_modules, add_adapter, remove_adapter
from opentinker.server.engine.vllm_ranks import Beside, attempt, limit_calls, lost, starting, values
from opentinker.server.engine.vllm_requests import Prompts, vllm_params
from opentinker.server.engine.vllm_update import (
    begin_update,
    finish_update,
    join_group,
    read_worker_probe,
    replace_weights,
    take_bucket,
)
from opentinker.server.images import ImageStore
from opentinker.server.updates import Updates
from opentinker.server.ways import Kind, first_device, kinds_to_try

T = TypeVar("T")
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM allocates adapter memory for."""
_BATCHED_TOKENS = 2048
"""Tokens of one forward pass on CPU."""


@dataclass
class _Pending:
    """A request in the engine: one vLLM request per sample, so that each has a seed of its own."""

    request: SampleRequest
    params: SamplingParams
    version: int
    samples: dict[int, Sample] = field(default_factory=dict)
    prompt_logprobs: FloatArray | None = None


class VllmEngine:
    """`RolloutEngine` on vLLM, for CPU and CUDA. The caller is its only thread."""

    def __init__(
        self,
        model_dir: Path,
        config: EngineConfig,
        dtype: str,
        *,
        lora: LoraConfig | None = None,
        stop_token_ids: Sequence[int] = (),
        images: ImageStore | None = None,
        sleeps: bool = False,
        trainer_device: str | None = None,
    ) -> None:
        """Load the model; `lora` is given if vLLM's own adapter serving is wanted; `images` are those that requests may name.
        With `sleeps` it can give its memory up; see `sleeper`. `trainer_device`, "cpu" or "cuda", is that of the trainer
        beside it, if there is one, from which it then gets weights.

        Raises:
            EngineError: vLLM cannot start with this model and these limits.
            ConfigError: `config.weight_carrier` does not reach several ranks from there.
        """
        ranks = config.tensor_parallel
        kinds: tuple[Kind, ...] = ("host",)
        if ranks > 1 and trainer_device is not None:
            kinds = kinds_to_try(config.weight_carrier, trainer_device, trainer_device, shared=True)
        _prepare_environment()
        from vllm import EngineArgs, LLMEngine
        from vllm.platforms import current_platform

        arguments: dict[str, Any] = {}
        self._largest_rank = 0
        if current_platform.is_cpu():
            arguments |= {
                "kv_cache_memory_bytes": int(config.cache_gib * 2**30),
                "block_size": 32,
                # vLLM 0.32 rewinds a seeded request's generator after a partial prefill; a CPU generator cannot.
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(config.max_model_len, _BATCHED_TOKENS),
            }
        else:
            arguments["gpu_memory_utilization"] = config.memory_fraction
        if ranks > 1:
            arguments |= {"tensor_parallel_size": ranks, "distributed_executor_backend": "mp"}
        if sleeps:
            if not current_platform.is_sleep_mode_available():
                raise EngineError(f"vLLM has no sleep mode on {current_platform.device_type}", hint="set engine.sleep=off")
            arguments["enable_sleep_mode"] = True
        if images is not None:
            arguments["mm_processor_cache_gb"] = 0  # what it would hold, the store holds
        if lora is not None:
            # Room for all that may be held, so that any of them share a batch and vLLM never evicts one.
            slots = config.max_adapters * config.kept_versions
            self._largest_rank = next(r for r in _LORA_RANKS if r >= lora.rank)
            arguments |= {"enable_lora": True, "max_loras": slots, "max_cpu_loras": slots, "max_lora_rank": self._largest_rank}
            # Without it vLLM wraps the output head too, and then fails to score prompts. Policies may differ in their targets.
            adapted = lora if config.max_adapters == 1 else lora.model_copy(update={"target_modules": "all-linear"})
            arguments["lora_target_modules"] = adapted_modules(model_dir, adapted)
        start = partial(starting, ranks, on_cpu=current_platform.is_cpu(), compiles=not config.enforce_eager)
        try:
            with start() if ranks > 1 else nullcontext():
                self._engine = LLMEngine.from_engine_args(
                    EngineArgs(
                        model=str(model_dir),
                        dtype=dtype,
                        max_model_len=config.max_model_len,
                        max_num_seqs=config.max_num_seqs,
                        enforce_eager=config.enforce_eager,
                        enable_prefix_caching=True,
                        logprobs_mode="processed_logprobs",
                        disable_log_stats=True,
                        use_tqdm_on_load=False,
                        async_scheduling=False,
                        seed=0,
                        **arguments,
                    )
                )
        except Exception as error:  # of a rank's process it raises no type of its own, and not what the rank met
            where = "; the server's log says what a rank met: `opentinker logs JOB --server`" if ranks > 1 else ""
            hint = f"see engine.max_model_len, engine.memory_fraction and engine.cache_gib{where}"
            raise EngineError(f"vLLM cannot start: {error}", hint=hint) from error
        # vLLM compiles small helpers even so: 10 s at the first token, and a C++ compiler would have to be there.
        eager = config.enforce_eager and current_platform.is_cpu()
        self._compilation = partial(torch.compiler.set_stance, "force_eager") if eager else nullcontext
        self._max_model_len = config.max_model_len
        self._vocab_size: int = self._engine.vllm_config.model_config.get_vocab_size()
        self._stop_token_ids = tuple(stop_token_ids)
        self._images = images
        self._prompts = Prompts(self._engine.renderer, images)
        self._serves_adapters = lora is not None
        self._adapters: dict[AdapterId, Any] = {}
        self._adapters_served = 0
        self._version = 0
        self._pending: dict[int, _Pending] = {}
        self._ended: list[SampleResult] = []
        """Ended while prompts were scored; the next step hands them out."""
        self._added = 0
        self._ranks = ranks
        self.sleeper = Sleeper(self, torch.cuda.empty_cache) if sleeps else None
        """Has the engine give its memory up, if it was started for that."""
        self._beside: Beside | None = None
        self._updates: Updates | None = None
        self._relay: SharedCarrier | None = None
        if ranks > 1:
            limit_calls(self._engine.model_executor)
            self._beside, self._relay = Beside(self), SharedCarrier()
            weights_from = first_device(trainer_device or "cpu")
            self._updates = Updates(self._beside, ranks, weights_from, kinds, bucket_bytes=config.bucket_mib << 20)
        self._broken = False
        self._closed = False

    @property
    def version(self) -> int:
        return self._version

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    def add(self, request: SampleRequest, adapter: AdapterId | None = None) -> None:
        self._add(request, adapter)

    def _add(self, request: SampleRequest, adapter: AdapterId | None) -> int:
        """The key that the request goes by here."""
        self._require_whole()
        if self.sleeper is not None:
            self.sleeper.require_awake()
        served = self._held(adapter)
        params = effective_params(
            request,
            max_model_len=self._max_model_len,
            vocab_size=self._vocab_size,
            stop_token_ids=self._stop_token_ids,
        )
        from vllm.exceptions import VLLMClientError

        key = self._added
        self._added += 1
        prompt = self._prompts(request.prompt)
        names = [f"{key}:{index}" for index in range(request.n)]
        try:
            each = [vllm_params(params, i, prompt_logprobs=request.prompt_logprobs and i == 0) for i in range(request.n)]
            for name, sample_params in zip(names, each, strict=True):
                self._engine.add_request(name, prompt, sample_params, lora_request=served)
        except Exception as error:
            self._engine.abort_request(names)
            if isinstance(error, VLLMClientError | ValueError):
                raise InvalidRequestError(f"vLLM refuses the request: {error}") from error
            raise
        self._pending[key] = _Pending(request, params, self._version if adapter is None else adapter.version)
        return key

    def step(self) -> list[SampleResult]:
        ended, self._ended = self._ended, []
        return ended + [result for _, result in self._advance()]

    def _advance(self) -> list[tuple[int, SampleResult]]:
        """One step of vLLM's: the requests that are now complete, by their keys."""
        if not self._pending:
            return []
        try:
            with self._compilation(), self._exchange():
                outputs = self._engine.step()
        except ServerLostError:
            raise
        except Exception as error:
            # vLLM promises no exception type, and its state after one is unknown.
            raise EngineError(f"vLLM failed: {error}") from error
        results = [found for output in outputs if output.finished and (found := self._collect(output)) is not None]
        if self._pending and not self._engine.has_unfinished_requests():
            # Whoever waits for them would wait for ever.
            raise EngineError(f"vLLM has nothing left to do, but {len(self._pending)} requests have no answer")
        return results

    def _collect(self, output: Any) -> tuple[int, SampleResult] | None:
        """Note one finished sample; the request's key and result, if it was its last."""
        key, index = (int(part) for part in output.request_id.split(":"))
        pending = self._pending[key]
        completion = output.outputs[0]
        tokens = np.asarray(completion.token_ids, np.int32)
        pending.samples[index] = Sample(
            tokens=tokens,
            logprobs=np.asarray(completion.logprobs.logprobs, np.float32),
            finish_reason="stop" if completion.finish_reason == "stop" else "length",
            versions=((pending.version, len(tokens)),),
        )
        if output.prompt_logprobs is not None:
            pending.prompt_logprobs = np.asarray([0.0, *output.prompt_logprobs.logprobs], np.float32)
        if len(pending.samples) < pending.request.n:
            return None
        del self._pending[key]
        samples = tuple(pending.samples[i] for i in range(pending.request.n))
        return key, SampleResult(pending.request.request_id, samples, pending.params, pending.prompt_logprobs)

    def has_unfinished(self) -> bool:
        return bool(self._pending or self._ended)

    def abort(self, request_ids: Collection[str]) -> list[SampleRequest]:
        return self._abort([key for key, pending in self._pending.items() if pending.request.request_id in request_ids])

    def abort_all(self) -> list[SampleRequest]:
        self._ended = []
        return self._abort(list(self._pending))

    def _abort(self, keys: Sequence[int]) -> list[SampleRequest]:
        stopped = [(key, self._pending.pop(key)) for key in keys]
        self._engine.abort_request([f"{key}:{index}" for key, pending in stopped for index in range(pending.request.n)])
        return [pending.request for _, pending in stopped]

    def prompt_logprobs(self, prompts: Sequence[Sequence[Chunk]], adapter: AdapterId | None = None) -> list[FloatArray]:
        mine: dict[int, int] = {}
        found: dict[int, FloatArray] = {}
        try:
            for number, prompt in enumerate(prompts):
                params = SamplingParams(max_tokens=1, temperature=0.0)
                request = SampleRequest(str(number), tuple(prompt), params, prompt_logprobs=True)
                mine[self._add(request, adapter)] = number
            while len(found) < len(mine):
                for key, result in self._advance():
                    if key not in mine:
                        self._ended.append(result)
                        continue
                    assert result.prompt_logprobs is not None
                    found[mine[key]] = result.prompt_logprobs
        except BaseException:
            self._abort([key for key in mine if key in self._pending])  # their results must not turn up among others'
            raise
        return [found[number] for number in range(len(prompts))]

    def suspend(self, level: int) -> None:
        """Give the GPU's memory up; `sleeper` knows when."""
        with self._exchange():
            self._engine.sleep(level)

    def resume(self, tags: tuple[str, ...]) -> None:
        """Get memory of these kinds back."""
        with self._exchange():
            self._engine.wake_up(list(tags))

    def _tell(self, event: Event) -> None:
        if self.sleeper is not None:
            self.sleeper.tell(event)

    @property
    def ranks(self) -> int:
        return self._ranks

    def update_weights(self, weights: NamedTensors, version: int) -> WeightAck:
        """See `RolloutEngine`.

        Raises:
            WeightSyncError: vLLM does not take one of the tensors; the engine cannot be used any more.
        """
        self._require_idle("take weights")
        if self._updates is not None:
            return self._update_in_buckets(self._updates, weights, version)
        # vLLM takes its layers apart while it reloads, and cannot put them together again after an error.
        self._tell(Event.BEGIN_UPDATE)
        self._broken = True
        try:
            (ack,) = self._on_workers(replace_weights, weights)
        except BaseException:
            self._tell(Event.UPDATE_FAILED)
            raise
        self._updated(version)
        return ack

    def _update_in_buckets(self, updates: Updates, weights: NamedTensors, version: int) -> WeightAck:
        """Give weights to ranks that are processes of their own."""
        try:
            return updates.send(weights, version)
        except DeadlineError as error:  # a call is still under way, whose answer would be taken for the next one's
            raise lost(self._engine.model_executor, error) from error
        except BaseException:
            if self._broken:
                self._tell(Event.UPDATE_FAILED)
            raise

    def begin_update(self, update: int) -> None:
        self._require_idle("take weights")
        self._tell(Event.BEGIN_UPDATE)
        self._broken = True
        self._on_workers(begin_update, update)

    def read_probes(self, payload: Payload) -> Sequence[bytes]:
        return self._on_workers(read_worker_probe, payload)

    def join_group(self, invitation: Invitation) -> None:
        self._on_workers(join_group, invitation)

    def take_bucket(self, bucket: Bucket, payload: Payload) -> Sequence[BucketAck]:
        if self._relay is not None and isinstance(payload, InlinePayload):
            # It came from another machine: once from here on, and not once for each rank.
            self._relay.room(bucket.nbytes).copy_(payload.open()[: bucket.nbytes])
            payload = self._relay.payload(bucket.nbytes)
        return self._on_workers(take_bucket, bucket, payload)

    def finish_update(self, version: int, counts: Mapping[int, int]) -> Sequence[WeightAck]:
        acks = self._on_workers(finish_update, dict(counts))
        self._updated(version)
        return acks

    def _updated(self, version: int) -> None:
        self._tell(Event.UPDATED)
        self._broken = False
        for held in list(self._adapters):
            self.drop_adapter(held)
        self._drop_cache()
        self._version = version

    def update_adapter(self, adapter: LoraTensors, at: AdapterId) -> WeightAck:
        if not self._serves_adapters:
            raise EngineError("this engine was not started with adapter serving", hint="set engine.lora_serving=adapter")
        self._require_whole()
        if adapter.rank > self._largest_rank:
            raise ConfigError(
                f"an adapter of rank {adapter.rank} is larger than this server takes: it was started for {self._largest_rank}",
                hint="the rank of the job's own lora sets the limit for all its policies",
            )
        from vllm.lora.request import LoRARequest

        self.drop_adapter(at)
        # Ids and names are never used twice: vLLM's caches of keys and values know an adapter by them.
        number = self._adapters_served = self._adapters_served + 1
        sent = adapter.on_host() if self._ranks > 1 else adapter
        try:
            ack = merged(self._on_workers(add_adapter, sent, number))
        except ServerLostError:
            raise
        except Exception:
            self._on_workers(remove_adapter, number)  # other ranks may have taken it, or this one a part of it
            raise
        self._adapters[at] = LoRARequest(f"adapter-{number}", number, lora_path="in memory")
        return ack

    def drop_adapter(self, at: AdapterId) -> None:
        if (served := self._adapters.pop(at, None)) is not None:
            self._on_workers(remove_adapter, served.lora_int_id)

    def close(self) -> None:
        if self._closed:
            return
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self._closed = True
        self._tell(Event.CLOSE)
        self.abort_all()
        self._engine.engine_core.shutdown()
        for part in (self._updates, self._beside, self._relay):
            if part is not None:
                part.close()
        del self._engine
        cleanup_dist_env_and_memory()

    def _require_whole(self) -> None:
        if self._broken:
            raise EngineError("an update of the engine's weights failed half-way", hint="start a new server")

    def _held(self, adapter: AdapterId | None) -> Any:
        """What vLLM knows the adapter by; None for the base weights."""
        if adapter is not None and adapter not in self._adapters:
            raise EngineError(f"the engine does not hold version {adapter.version} of policy '{adapter.policy}'")
        return None if adapter is None else self._adapters[adapter]

    def _require_idle(self, purpose: str) -> None:
        self._require_whole()
        if self._pending:
            raise EngineError(f"the engine cannot {purpose} while {len(self._pending)} requests are running")

    def _drop_cache(self) -> None:
        if not self._engine.reset_prefix_cache():
            raise WeightSyncError("vLLM did not drop the keys and values of the old weights")
        if self._images is not None:
            with self._exchange():
                self._engine.reset_encoder_cache()

    def _on_workers(self, function: Callable[..., T], *arguments: Any) -> list[T]:
        """What the function, of a vLLM worker and the arguments, returns on each rank."""
        from vllm.exceptions import VLLMError

        try:
            if self._ranks == 1:
                answers: list[T] = self._engine.collective_rpc(function, args=arguments)
                return answers
            with self._exchange():
                return values(self._engine.collective_rpc(partial(attempt, function), args=arguments))
        except OpenTinkerError:
            raise
        except (VLLMError, ValueError, RuntimeError, KeyError, AssertionError, AttributeError) as error:
            raise WeightSyncError(f"vLLM does not take these tensors: {error}") from error

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        """A call of vLLM's own, of which a rank's error is the end where there are several.

        Raises:
            EngineRanksLostError: that.
        """
        try:
            yield
        except OpenTinkerError:
            raise
        except Exception as error:
            if self._ranks > 1:
                raise lost(self._engine.model_executor, error) from error
            raise


def _prepare_environment() -> None:
    """vLLM is configured through the environment in part; it is read when vLLM is imported or started."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # It would override engine.cache_gib.
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
