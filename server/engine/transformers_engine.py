"""A batched generation loop on a Hugging Face model, for machines without vLLM.

Axes: B = sequences of the batch, T = positions in it (left-padded), V = vocabulary.
"""

import random
from collections import OrderedDict, deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from opentinker.client.messages import (
    Chunk,
    FinishReason,
    FloatArray,
    ImageChunk,
    Sample,
    SampleRequest,
    SampleResult,
    TokenChunk,
    chunk_tokens,
    placed_images,
)
from opentinker.config.server import EngineConfig
from opentinker.errors import ContextOverflowError, EngineError, WeightSyncError
from opentinker.server.buckets import Bucket, BucketAck
from opentinker.server.carriers import Payload
from opentinker.server.device_carriers import read_device_probe
from opentinker.server.device_groups import Invitation
from opentinker.server.digest import tensor_digest
from opentinker.server.engine.base import AdapterId, LoraTensors, NamedTensors, WeightAck
from opentinker.server.engine.decode_batch import Batch, Pending, Row
from opentinker.server.engine.model_weights import ModelWeights
from opentinker.server.engine.sampling import effective_params, sample_seed, sampling_logprobs
from opentinker.server.images import ImageStore, sample_picture
from opentinker.server.trainer import lora
from opentinker.server.vision import auto_class, embed, image_features

_PREFILL_TOKENS = 8192
"""Prompt tokens, padding included, of one forward pass."""
_KEPT_IMAGES = 256
"""Images whose features are kept for the next turn."""


class TransformersEngine:
    """`RolloutEngine` on transformers. The same requests in the same order give the same tokens."""

    def __init__(
        self,
        model_dir: Path,
        config: EngineConfig,
        dtype: str,
        *,
        stop_token_ids: Sequence[int] = (),
        images: ImageStore | None = None,
    ) -> None:
        """Load the model on the GPU if there is one. `images` are those that requests may name.

        Raises:
            EngineError: the model cannot be loaded.
        """
        from tokenizers import Tokenizer
        from transformers import AutoConfig

        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            kind = auto_class(AutoConfig.from_pretrained(model_dir))
            model = kind.from_pretrained(model_dir, dtype=getattr(torch, dtype), attn_implementation="sdpa")
            self._tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        except Exception as error:
            # Both libraries raise whatever their parts do; `tokenizers` plain Exception.
            raise EngineError(f"cannot load the model in {model_dir}: {error}") from error
        self._model: Any = model.eval().requires_grad_(False).to(self._device)
        # By the names that they have before any layer holds adapters.
        self._weights = ModelWeights(self._model.named_parameters(remove_duplicate=False), self._device)
        self._serves_adapters = config.lora_serving == "adapter" or config.max_adapters > 1
        self._adapters: set[AdapterId] = set()
        self._pass = lora.AdapterPass()
        self._vocab_size: int = model.config.get_text_config().vocab_size
        self._max_model_len = config.max_model_len
        # Alone in its batch, without padding, a sequence is computed in the same way whenever it comes.
        self._max_num_seqs = 1 if config.deterministic else config.max_num_seqs
        self._stop_token_ids = tuple(stop_token_ids)
        self._seeds = random.Random(0)
        self._images = images
        self._features: OrderedDict[str, torch.Tensor] = OrderedDict()
        self._pending: dict[int, Pending] = {}
        self._waiting: deque[Row] = deque()
        self._batch: Batch | None = None
        self._version = 0
        self._broken = False
        if images is not None:
            self._prove(images)

    @property
    def version(self) -> int:
        return self._version

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    def add(self, request: SampleRequest, adapter: AdapterId | None = None) -> None:
        self._require_whole()
        self._require_held(adapter)
        params = effective_params(
            request,
            max_model_len=self._max_model_len,
            vocab_size=self._vocab_size,
            stop_token_ids=self._stop_token_ids,
        )
        version = self._version if adapter is None else adapter.version
        pending = Pending(request, params, chunk_tokens(request.prompt), placed_images(request.prompt), adapter, version)
        seed = self._seeds.getrandbits(62) if params.seed is None else params.seed
        rows = [Row(pending, index, random.Random(sample_seed(seed, index))) for index in range(request.n)]
        self._pending[id(pending)] = pending
        self._waiting.extend(rows)

    @torch.inference_mode()
    def step(self) -> list[SampleResult]:
        """One token for every running sequence. Waiting ones join when less than half of the places are taken."""
        running = len(self._batch.rows) if self._batch else 0
        if self._waiting and 2 * running < self._max_num_seqs:
            self._admit(self._max_num_seqs - running)
        if self._batch is None:
            return []
        batch = self._batch
        tokens_B = self._sample(batch)
        finished = {i: reason for i, row in enumerate(batch.rows) if (reason := self._finish_reason(row)) is not None}
        results = [r for i, reason in finished.items() if (r := self._collect(batch.rows[i], reason)) is not None]
        left = [i for i in range(len(batch.rows)) if i not in finished]
        if not left:
            self._batch = None
            return results
        if finished:
            batch.keep(left)
        self._decode(batch, tokens_B[left])
        return results

    def _admit(self, places: int) -> None:
        while self._waiting and places > 0:
            rows: list[Row] = []
            longest = 0
            while self._waiting and len(rows) < places:
                longest = max(longest, len(self._waiting[0].pending.prompt))
                if rows and longest * (len(rows) + 1) > _PREFILL_TOKENS:
                    break
                rows.append(self._waiting.popleft())
            places -= len(rows)
            fresh = self._prefill(rows)
            if self._batch is None:
                self._batch = fresh
            else:
                self._batch.join(fresh)

    def _prefill(self, rows: list[Row]) -> Batch:
        """Read the rows' prompts; equal prompts are read once."""
        from transformers import DynamicCache

        places: dict[tuple[object, ...], int] = {}
        prompts: list[Pending] = []
        for row in rows:
            if row.pending.request.prompt_logprobs and row.pending.prompt_logprobs is None:
                row.pending.prompt_logprobs = self._score(row.pending.request.prompt, row.pending.adapter)
            if places.setdefault(row.pending.key, len(prompts)) == len(prompts):
                prompts.append(row.pending)
        longest = max(len(p.prompt) for p in prompts)
        tokens = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros(len(prompts), longest, dtype=torch.long)
        placed = []
        for i, pending in enumerate(prompts):
            first = longest - len(pending.prompt)
            tokens[i, first:] = torch.from_numpy(pending.prompt.astype(np.int64))
            mask[i, first:] = 1
            placed += [(i * longest + first + start, image) for start, image in pending.images]
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        batch = Batch(rows, DynamicCache(), mask.to(self._device), torch.empty(0))
        adapters = [pending.adapter for pending in prompts]
        inputs = self._inputs(tokens.to(self._device), placed)
        batch.logits_B_V = self._forward(inputs, batch, positions.to(self._device), adapters)
        index = torch.tensor([places[row.pending.key] for row in rows], device=self._device)
        batch.mask_B_T, batch.logits_B_V = batch.mask_B_T[index], batch.logits_B_V[index]
        for layer in batch.cache.layers:
            layer.keys, layer.values = layer.keys[index], layer.values[index]
        return batch

    def _decode(self, batch: Batch, tokens_B: torch.Tensor) -> None:
        positions_B = batch.mask_B_T.sum(dim=1)
        batch.mask_B_T = pad(batch.mask_B_T, (0, 1), value=1)
        adapters = [row.pending.adapter for row in batch.rows]
        batch.logits_B_V = self._forward({"input_ids": tokens_B[:, None]}, batch, positions_B[:, None], adapters)

    def _inputs(self, tokens_B_T: torch.Tensor, placed: Sequence[tuple[int, ImageChunk]]) -> dict[str, torch.Tensor]:
        """What the model is given for these tokens; `placed` are (place in the flattened tokens, image)."""
        if not placed:
            return {"input_ids": tokens_B_T}
        assert self._images is not None, "only a store can have resolved the images of a request"
        features = self._features_of([image for _, image in placed])
        flat = embed(
            self._model.get_input_embeddings(), tokens_B_T.flatten(), placed, features, self._images.processor.token_id
        )
        return {"inputs_embeds": flat.view(*tokens_B_T.shape, -1)}

    def _features_of(self, images: Sequence[ImageChunk]) -> dict[str, torch.Tensor]:
        assert self._images is not None
        missing = [image for image in images if image.sha256 not in self._features]
        self._features |= image_features(self._model, self._images, missing)
        for image in images:
            self._features.move_to_end(image.sha256)
        features = {image.sha256: self._features[image.sha256] for image in images}
        while len(self._features) > _KEPT_IMAGES:
            self._features.popitem(last=False)
        return features

    def _forward(
        self,
        inputs: dict[str, torch.Tensor],
        batch: Batch,
        positions_B_T: torch.Tensor,
        adapters_B: Sequence[AdapterId | None],
    ) -> torch.Tensor:
        with self._under(adapters_B, positions_B_T.shape[1]):
            output = self._model(
                **inputs,
                attention_mask=batch.mask_B_T,
                position_ids=positions_B_T,
                past_key_values=batch.cache,
                use_cache=True,
                logits_to_keep=1,
            )
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _under(self, adapters_B: Sequence[AdapterId | None], tokens: int) -> AbstractContextManager[None]:
        """A pass in which each row, of so many tokens, uses its own adapter."""
        distinct = sorted({str(adapter) for adapter in adapters_B if adapter is not None})
        if not distinct or (len(distinct) == 1 and None not in adapters_B):
            return self._pass.using(distinct)
        slots = [-1 if adapter is None else distinct.index(str(adapter)) for adapter in adapters_B]
        return self._pass.using(distinct, torch.tensor(slots, device=self._device).repeat_interleave(tokens))

    def _sample(self, batch: Batch) -> torch.Tensor:
        """Draw a token for every row by inverting its distribution at one uniform number of the row's generator, so that
        a draw does not depend on who else is in the batch."""
        params = [row.pending.params for row in batch.rows]

        def per_row(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, device=self._device)

        temperature_B = per_row([p.temperature for p in params])
        top_k_B, top_p_B = per_row([p.top_k for p in params]), per_row([p.top_p for p in params])
        logprobs_B_V = sampling_logprobs(batch.logits_B_V, temperature_B, top_k_B, top_p_B)
        cumulative_B_V = logprobs_B_V.double().exp().cumsum(dim=-1)
        uniform_B = torch.tensor([row.generator.random() for row in batch.rows], dtype=torch.float64, device=self._device)
        drawn_B = torch.searchsorted(cumulative_B_V, uniform_B[:, None] * cumulative_B_V[:, -1:], right=True)[:, 0]
        tokens_B = torch.where(temperature_B == 0, logprobs_B_V.argmax(dim=-1), drawn_B)
        logprobs_B = logprobs_B_V.gather(1, tokens_B[:, None])[:, 0]
        for row, token, logprob in zip(batch.rows, tokens_B.tolist(), logprobs_B.tolist(), strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
        return tokens_B

    def _finish_reason(self, row: Row) -> FinishReason | None:
        params = row.pending.params
        if row.tokens[-1] in params.stop_token_ids:
            return "stop"
        if params.stop:
            text = self._tokenizer.decode(row.tokens)
            if any(stop in text for stop in params.stop):
                return "stop"
        return "length" if len(row.tokens) >= params.max_tokens else None

    def _collect(self, row: Row, reason: FinishReason) -> SampleResult | None:
        """Note a finished row; the result, if it was the last of its request."""
        pending = row.pending
        pending.samples[row.index] = Sample(
            tokens=np.asarray(row.tokens, np.int32),
            logprobs=np.asarray(row.logprobs, np.float32),
            finish_reason=reason,
            versions=((pending.version, len(row.tokens)),),
        )
        if len(pending.samples) < pending.request.n:
            return None
        del self._pending[id(pending)]
        samples = tuple(pending.samples[i] for i in range(pending.request.n))
        return SampleResult(pending.request.request_id, samples, pending.params, pending.prompt_logprobs)

    @torch.inference_mode()
    def _prove(self, images: ImageStore) -> None:
        """Compare a prompt that shows an image with the model's own forward pass.

        Raises:
            EngineError: this engine does not compute images as the model does (other positions, or other attention).
            ConfigError: the model's image processor does not belong to its vision tower.
        """
        ((sha256, ids),) = images.add([sample_picture(0)]).items()
        words = TokenChunk(np.array([token for token in range(9) if token != images.processor.token_id], np.int32))
        prompt = (words, ImageChunk(sha256, ids), words)
        mine = self._score(prompt)
        tokens = torch.from_numpy(chunk_tokens(prompt).astype(np.int64)).to(self._device)
        pixels = {key: value.to(self._device) for key, value in images.processed(sha256).pixels.items()}
        logits = self._model(input_ids=tokens[None], **pixels, use_cache=False).logits[0, :-1].float()
        own = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0].cpu().numpy()
        error = float(np.abs(mine[1:] - own)[-len(words.tokens) + 1 :].mean())
        if not error < (1e-3 if self._model.dtype == torch.float32 else 0.25):
            raise EngineError(
                f"this engine does not show images to {self._model.config.model_type} models as they see them: logprobs differ "
                f"by {error:.3g} on average",
                hint="set engine.kind=vllm",
            )

    def has_unfinished(self) -> bool:
        return bool(self._pending)

    def abort(self, request_ids: Collection[str]) -> list[SampleRequest]:
        stopped = {key: pending for key, pending in self._pending.items() if pending.request.request_id in request_ids}
        self._pending = {key: pending for key, pending in self._pending.items() if key not in stopped}
        self._waiting = deque(row for row in self._waiting if id(row.pending) not in stopped)
        if self._batch is not None:
            left = [i for i, row in enumerate(self._batch.rows) if id(row.pending) not in stopped]
            if not left:
                self._batch = None
            elif len(left) < len(self._batch.rows):
                self._batch.keep(left)
        return [pending.request for pending in stopped.values()]

    def abort_all(self) -> list[SampleRequest]:
        return self.abort({pending.request.request_id for pending in self._pending.values()})

    def prompt_logprobs(self, prompts: Sequence[Sequence[Chunk]], adapter: AdapterId | None = None) -> list[FloatArray]:
        self._require_whole()
        self._require_held(adapter)
        for prompt in prompts:
            length = sum(len(chunk.tokens) for chunk in prompt)
            if length >= self._max_model_len:
                raise ContextOverflowError(f"a prompt of {length} tokens exceeds a context of {self._max_model_len}")
        return [self._score(prompt, adapter) for prompt in prompts]

    @torch.inference_mode()
    def _score(self, prompt: Sequence[Chunk], adapter: AdapterId | None = None) -> FloatArray:
        tokens = torch.from_numpy(chunk_tokens(prompt).astype(np.int64)).to(self._device)
        inputs = self._inputs(tokens[None], placed_images(prompt))
        with self._under([adapter], len(tokens)):
            logits = self._model(**inputs, use_cache=False).logits[0, :-1].float()
        logprobs = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        return np.concatenate([np.zeros(1, np.float32), logprobs.cpu().numpy()])

    def update_weights(self, weights: NamedTensors, version: int) -> WeightAck:
        """See `RolloutEngine`; cached keys and values live only as long as a request.

        Raises:
            WeightSyncError: a tensor has no place or another shape, or tied tensors differ; the engine cannot be used until
                an update succeeds.
        """
        self.begin_update(0)
        self._weights.write(weights)
        return self._finished(version, self._weights.ack())

    @property
    def ranks(self) -> int:
        return 1

    def begin_update(self, update: int) -> None:
        self._require_idle("take weights")
        self._broken = True
        self._features.clear()
        for held in list(self._adapters):
            self.drop_adapter(held)
        self._weights.begin(update)

    def read_probes(self, payload: Payload) -> Sequence[bytes]:
        return [read_device_probe(payload, 0)]

    def join_group(self, invitation: Invitation) -> None:
        raise WeightSyncError("the engine 'transformers' joins no NCCL group", hint="set engine.kind=vllm")

    def take_bucket(self, bucket: Bucket, payload: Payload) -> Sequence[BucketAck]:
        return [self._weights.take(bucket, payload)]

    def finish_update(self, version: int, counts: Mapping[int, int]) -> Sequence[WeightAck]:
        return [self._finished(version, self._weights.finish(counts))]

    def _finished(self, version: int, ack: WeightAck) -> WeightAck:
        self._version = version
        self._broken = False
        return ack

    @torch.no_grad()
    def update_adapter(self, adapter: LoraTensors, at: AdapterId) -> WeightAck:
        if not self._serves_adapters:
            raise EngineError("this engine was not started with adapter serving", hint="set engine.lora_serving=adapter")
        self._require_whole()
        self.drop_adapter(at)
        placed = lora.place_adapter(self._model, self._pass, str(at), adapter)
        self._adapters.add(at)
        digests = {name: tensor_digest(tensor) for name, tensor in placed.items()}
        return WeightAck(digests, frozenset(placed), frozenset(adapter.tensors))

    def drop_adapter(self, at: AdapterId) -> None:
        if at in self._adapters:
            lora.remove_adapters(self._model, str(at))
            self._adapters.remove(at)

    def close(self) -> None:
        self.abort_all()
        self._model = None

    def _require_whole(self) -> None:
        if self._broken:
            raise EngineError("an update of the engine's weights failed half-way", hint="publish again, or start a new server")

    def _require_held(self, adapter: AdapterId | None) -> None:
        if adapter is not None and adapter not in self._adapters:
            raise EngineError(f"the engine does not hold version {adapter.version} of policy '{adapter.policy}'")

    def _require_idle(self, purpose: str) -> None:
        if self._pending:
            raise EngineError(f"the engine cannot {purpose} while {len(self._pending)} requests are running")
