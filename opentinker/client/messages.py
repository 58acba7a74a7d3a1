"""What travels between client and server: data to train on, requests to sample, and their answers.

Axes: T = tokens of one datum or one sample.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from opentinker.errors import InvalidRequestError

M = TypeVar("M", bound=BaseModel)
StopString = Annotated[str, Field(min_length=1)]
"""Every text holds the empty string, so that one would end an answer before it begins."""
Finite = Annotated[float, Field(allow_inf_nan=False)]
IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

FLOAT_ARRAYS = (
    "weights",
    "advantages",
    "behaviour_logprobs",
    "proximal_logprobs",
    "reference_logprobs",
    "returns",
    "old_values",
    "margins",
)
"""Optional named arrays of a datum, float32[T], aligned to `targets`."""
TokenScore = Literal["logprobs", "reference_logprobs", "entropy", "values"]
"""What `forward` can compute of each weighted target:

- `logprobs`: its logprob under the policy.
- `reference_logprobs`: its logprob under the base model, as it was before any training.
- `entropy`: of the policy's whole distribution at its place, in nats.
- `values`: of a scalar head, at the state before the target: the critic's estimate, or a reward model's score.
"""
MAX_IMAGE_TOKENS = 1 << 16
_SHA256 = re.compile(r"[0-9a-f]{64}")
TOKEN_SCORES: tuple[TokenScore, ...] = get_args(TokenScore)


def _tokens(value: Any, what: str) -> IntArray:
    try:
        array = np.asarray(value)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise ValueError(f"shape {array.shape}, dtype {array.dtype}")
        if array.size and (array.min() < 0 or array.max() > np.iinfo(np.int32).max):
            raise ValueError("token ids outside int32")
        return array.astype(np.int32, copy=False)
    except (ValueError, TypeError) as error:
        raise InvalidRequestError(f"{what} must be a flat list of token ids: {error}") from error


@dataclass(frozen=True)
class TokenChunk:
    """A run of token ids, int32[T]."""

    tokens: IntArray

    def to_wire(self) -> dict[str, Any]:
        return {"kind": "tokens", "tokens": self.tokens}

    @classmethod
    def from_wire(cls, body: Mapping[str, Any]) -> Self:
        return cls(_tokens(body.get("tokens"), "a chunk's tokens"))


@dataclass(frozen=True)
class ImageChunk:
    """An image, by the SHA-256 (hex) of its encoded bytes, which travel apart and once: see `PolicyClient.upload`.

    `tokens` are the ids that the server expands it to, int32[T]. Only their number travels: to the receiver they are -1 until
    it has looked the image up.
    """

    sha256: str
    tokens: IntArray
    data: bytes | None = field(default=None, compare=False, repr=False)
    """The encoded bytes, with which a client can upload the image again."""

    def to_wire(self) -> dict[str, Any]:
        return {"kind": "image", "sha256": self.sha256, "count": len(self.tokens)}

    @classmethod
    def from_wire(cls, body: Mapping[str, Any]) -> Self:
        sha256, count = body.get("sha256"), body.get("count")
        if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
            raise InvalidRequestError("an image chunk needs 'sha256': the SHA-256 of the uploaded bytes, in 64 hex digits")
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_IMAGE_TOKENS:
            raise InvalidRequestError(
                "an image chunk needs 'count': how many tokens its upload was answered with", hint="POST .../images says it"
            )
        return cls(sha256, np.full(count, -1, np.int32))


Chunk = TokenChunk | ImageChunk
_CHUNKS: dict[str, type[TokenChunk] | type[ImageChunk]] = {"tokens": TokenChunk, "image": ImageChunk}


def chunks_from_wire(body: Any) -> tuple[Chunk, ...]:
    """Chunks from the wire; a bare list of token ids stands for one chunk (for curl)."""
    if isinstance(body, np.ndarray) or (isinstance(body, Sequence) and body and not isinstance(body[0], Mapping)):
        return (TokenChunk(_tokens(body, "tokens")),)
    if not isinstance(body, Sequence):
        raise InvalidRequestError("chunks must be a list")
    return tuple(_chunk_from_wire(chunk) for chunk in body)


def _chunk_from_wire(body: Any) -> Chunk:
    kind = body.get("kind") if isinstance(body, Mapping) else None
    if not isinstance(kind, str) or kind not in _CHUNKS:
        raise InvalidRequestError(f"unknown chunk kind {kind!r}", hint="this server takes chunks of kind 'tokens' and 'image'")
    return _CHUNKS[kind].from_wire(body)


def chunk_tokens(chunks: Sequence[Chunk]) -> IntArray:
    """All tokens of the chunks in order, int32[T]."""
    if len(chunks) == 1:
        return chunks[0].tokens
    return np.concatenate([c.tokens for c in chunks]) if chunks else np.zeros(0, np.int32)


def as_chunks(tokens: Sequence[int] | IntArray | Sequence[Chunk]) -> tuple[Chunk, ...]:
    """Chunks as they are, or token ids as one chunk."""
    if not isinstance(tokens, np.ndarray) and len(tokens) and isinstance(tokens[0], TokenChunk | ImageChunk):
        return tuple(chunk for chunk in tokens if isinstance(chunk, TokenChunk | ImageChunk))
    return (TokenChunk(np.asarray(tokens, np.int32)),)


def placed_images(chunks: Iterable[Chunk]) -> tuple[tuple[int, ImageChunk], ...]:
    """The images among the chunks, each with the position of its first token."""
    found, position = [], 0
    for chunk in chunks:
        if isinstance(chunk, ImageChunk):
            found.append((position, chunk))
        position += len(chunk.tokens)
    return tuple(found)


@dataclass(frozen=True)
class Datum:
    """One sequence to train on.

    `chunks` are the T input tokens; `targets` (int32[T]) the token that follows each of them (pre-shifted). The named
    arrays are float32[T], aligned to `targets`; `weights` is 1 where the target is in the loss and 0 elsewhere. A target that
    is part of an image is never in the loss.
    """

    chunks: tuple[Chunk, ...]
    targets: IntArray
    arrays: dict[str, FloatArray] = field(default_factory=dict)

    @property
    def tokens(self) -> IntArray:
        """Input tokens, int32[T]."""
        return chunk_tokens(self.chunks)

    @property
    def weights(self) -> FloatArray:
        return self.arrays["weights"]

    def __len__(self) -> int:
        return len(self.targets)

    def to_wire(self) -> dict[str, Any]:
        return {"chunks": [c.to_wire() for c in self.chunks], "targets": self.targets, **self.arrays}

    @classmethod
    def from_wire(cls, body: Any) -> Self:
        """Checks shapes, names and finiteness.

        Raises:
            InvalidRequestError: a length differs, a name is unknown, or a number is NaN or infinite.
        """
        if not isinstance(body, Mapping):
            raise InvalidRequestError("a datum must be an object")
        chunks = chunks_from_wire(body.get("chunks"))
        targets = _tokens(body.get("targets"), "targets")
        length = sum(len(c.tokens) for c in chunks)
        if len(targets) != length:
            raise InvalidRequestError(
                f"a datum has {length} tokens but {len(targets)} targets", hint="target t is the token that follows token t"
            )
        arrays = {}
        for name, value in body.items():
            if name in ("chunks", "targets"):
                continue
            if name not in FLOAT_ARRAYS:
                raise InvalidRequestError(f"unknown array {name!r} in a datum", hint=f"known: {', '.join(FLOAT_ARRAYS)}")
            try:
                array = np.asarray(value, np.float32)
            except (ValueError, TypeError) as error:
                raise InvalidRequestError(f"{name} must be a list of numbers: {error}") from error
            if array.shape != (length,):
                raise InvalidRequestError(
                    f"{name} has shape {array.shape}, the datum has {length} tokens", hint="one number for each target"
                )
            if not np.isfinite(array).all():
                raise InvalidRequestError(
                    f"{name} holds NaN or infinity; nothing was trained",
                    hint="look for what made it, such as a reward that is no number, or leave the datum out",
                )
            arrays[name] = array
        if "weights" not in arrays:
            raise InvalidRequestError("a datum needs 'weights': 1 where the target is in the loss, 0 elsewhere")
        for start, image in placed_images(chunks):
            if arrays["weights"][max(start - 1, 0) : start + len(image.tokens) - 1].any():
                raise InvalidRequestError(
                    f"the image at token {start} of a datum is in the loss: nobody sampled it",
                    hint="weights are 0 where the target is a token of an image",
                )
        return cls(chunks, targets, arrays)


class WireModel(BaseModel):
    """A small message that is validated on arrival; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class SamplingParams(WireModel):
    """How tokens are drawn. The logprobs of a sample are those of the distribution these parameters define."""

    max_tokens: Annotated[int, Field(ge=1)] = 256
    temperature: Annotated[Finite, Field(ge=0.0)] = 1.0
    """0 is greedy; its logprobs are those at temperature 1."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    """0 = all tokens."""
    stop: tuple[StopString, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Sampling one of these ends the sample; it is kept as the sample's last token."""
    seed: int | None = None


@dataclass(frozen=True)
class SampleRequest:
    """`n` samples for one prompt. A retry with the same `request_id` gets the first attempt's answer."""

    request_id: str
    prompt: tuple[Chunk, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    prompt_logprobs: bool = False
    version: int | None = None
    """The policy version to sample from, which the engine must keep; None = whichever is live."""

    def to_wire(self) -> dict[str, Any]:
        return {
            "request_id": self.request_id,
            "prompt": [c.to_wire() for c in self.prompt],
            "params": self.params.model_dump(),
            "n": self.n,
            "prompt_logprobs": self.prompt_logprobs,
            "version": self.version,
        }

    @classmethod
    def from_wire(cls, body: Any) -> Self:
        if not isinstance(body, Mapping):
            raise InvalidRequestError("a sample request must be an object")
        unknown = set(body) - {"request_id", "prompt", "params", "n", "prompt_logprobs", "version"}
        if unknown:
            raise InvalidRequestError(f"unknown keys in a sample request: {', '.join(sorted(unknown))}")
        request_id, n = body.get("request_id"), body.get("n", 1)
        if not isinstance(request_id, str) or not 1 <= len(request_id) <= 200:
            raise InvalidRequestError("a sample request needs a request_id of 1 to 200 characters")
        if not isinstance(n, int) or not 1 <= n <= 1024:
            raise InvalidRequestError("n must be between 1 and 1024")
        version = body.get("version")
        if version is not None and (not isinstance(version, int) or isinstance(version, bool) or version < 0):
            raise InvalidRequestError(
                f"version must be a whole number from 0, not {version!r}", hint="leave it out for the latest"
            )
        prompt = chunks_from_wire(body.get("prompt"))
        if not sum(len(c.tokens) for c in prompt):
            raise InvalidRequestError("the prompt is empty")
        params = validate(SamplingParams, body.get("params") or {})
        return cls(request_id, prompt, params, n, bool(body.get("prompt_logprobs", False)), version)


FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Sample:
    """One sampled continuation: `tokens` int32[T], `logprobs` float32[T] under the sampling distribution."""

    tokens: IntArray
    logprobs: FloatArray
    finish_reason: FinishReason
    versions: tuple[tuple[int, int], ...]
    """(policy version, number of tokens), run-length encoded; the counts add up to T."""

    def to_wire(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "logprobs": self.logprobs,
            "finish_reason": self.finish_reason,
            "versions": [list(v) for v in self.versions],
        }

    @classmethod
    def from_wire(cls, body: Mapping[str, Any]) -> Self:
        return cls(
            np.asarray(body["tokens"], np.int32),
            np.asarray(body["logprobs"], np.float32),
            body["finish_reason"],
            tuple((int(v), int(n)) for v, n in body["versions"]),
        )


@dataclass(frozen=True)
class SampleResult:
    """The answer to a `SampleRequest`, with the parameters that were in effect."""

    request_id: str
    samples: tuple[Sample, ...]
    params: SamplingParams
    prompt_logprobs: FloatArray | None = None
    """float32[P]; entry 0 is 0 (nothing precedes the first token)."""

    def to_wire(self) -> dict[str, Any]:
        return {
            "request_id": self.request_id,
            "samples": [s.to_wire() for s in self.samples],
            "params": self.params.model_dump(),
            "prompt_logprobs": self.prompt_logprobs,
        }

    @classmethod
    def from_wire(cls, body: Mapping[str, Any]) -> Self:
        logprobs = body.get("prompt_logprobs")
        return cls(
            body["request_id"],
            tuple(Sample.from_wire(s) for s in body["samples"]),
            SamplingParams.model_validate(body["params"]),
            None if logprobs is None else np.asarray(logprobs, np.float32),
        )


class AdamParams(WireModel):
    """AdamW for one step (Loshchilov & Hutter, 2019, Algorithm 2)."""

    learning_rate: Annotated[Finite, Field(ge=0.0)] = 1e-5
    """0 leaves every weight as it is, bit for bit."""
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """Decay of the second moment."""
    eps: Annotated[Finite, Field(gt=0.0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[Finite, Field(ge=0.0)] = 0.0
    """Decoupled weight decay."""
    max_grad_norm: Annotated[float, Field(gt=0.0)] | None = 1.0
    """Gradients are scaled down to this L2 norm; None = never."""


SCALAR_LOSSES = ("value", "bradley_terry")
"""The losses of a scalar head's output; all others are of logprobs."""
PAIR_LOSSES = ("dpo", "ipo", "bradley_terry")
"""The losses that compare two answers: data 2i and 2i + 1 are the chosen and the rejected answer to one prompt."""


class LossConfig(WireModel):
    """A loss by name. All are sums over tokens of weight * loss, times the factor that the caller gives.

    - `cross_entropy`: -logprob.
    - `importance_sampling`: -ratio * advantage, ratio = exp(logprob - anchor's logprob).
    - `ppo`: the clipped surrogate (Schulman et al., 2017, eq. 7) with separate lower and upper clip.
    - `gspo`: the same with the geometric mean of a sequence's ratios at each of its tokens (Zheng et al., 2025, eq. 5).
    - `cispo`: -clip(ratio) * advantage * logprob, the clipped ratio without a gradient (MiniMax-M1, 2025, eq. 4).

    A sequence is a datum. Of a scalar head, the policy's own or its critic's:

    - `value`: (value - `returns`)^2 / 2.

    Three are sums over pairs of data, chosen and rejected in turns (`PAIR_LOSSES`):

    - `dpo`: -log sigmoid(beta * (chosen's - rejected's sum of logprob - reference logprob)) (Rafailov et al., 2023, eq. 7).
    - `ipo`: (the same difference, of means instead of sums, - 1 / (2 beta))^2 (Azar et al., 2024, eq. 17).
    - `bradley_terry`: -log sigmoid(chosen's - rejected's score) of a scalar head (Ouyang et al., 2022, eq. 1).
    """

    name: Literal["cross_entropy", "importance_sampling", "ppo", "gspo", "cispo", "value", "dpo", "ipo", "bradley_terry"]
    clip_low: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    clip_high: Annotated[float, Field(gt=0.0)] = 0.2
    temperature: Annotated[Finite, Field(gt=0.0)] = 1.0
    """Logits are divided by it, so that logprobs are those of the sampling distribution."""
    anchor: Literal["behaviour", "proximal", "current"] = "behaviour"
    """Whose logprobs the ratio is against: the engine's that sampled (`behaviour_logprobs`), the trainer's before the update
    (`proximal_logprobs`), or the trainer's of this very pass, which makes every ratio 1."""
    truncate: Annotated[float, Field(gt=0.0)] | None = None
    """Weight each token with min(exp(anchor - behaviour), this), for the difference between trainer and engine (truncated
    importance sampling; Yao et al., 2025). Not with anchor 'behaviour'."""
    mask_sequences: tuple[float, float] | None = None
    """Leave out sequences whose mean of (anchor - behaviour) is outside [log low, log high]. Not with anchor 'behaviour'."""
    kl_coefficient: Annotated[Finite, Field(ge=0.0)] = 0.0
    """Adds this times an estimate of KL(policy || reference); needs `reference_logprobs`."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Of Schulman (2020): k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d, with d = logprob - reference_logprob."""
    entropy_coefficient: Annotated[Finite, Field(ge=0.0)] = 0.0
    """Subtracts this times the entropy of the policy's distribution at each token."""
    beta: Annotated[Finite, Field(gt=0.0)] = 0.1
    """Of `dpo` and `ipo`: how strongly the policy is held to its reference."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """Of `dpo`: the share of pairs that are taken to be labelled the wrong way round (conservative DPO; Mitchell, 2023)."""
    centring_coefficient: Annotated[float, Field(ge=0.0)] = 0.0
    """Of `bradley_terry`: adds this times the square of the sum of both scores, so that they stay around 0."""
    value_clip: Annotated[float, Field(gt=0.0)] | None = None
    """Of `value`: a value further than this from `old_values` gets no gradient that takes it further away; None = no clip."""

    @model_validator(mode="after")
    def _terms_fit_pairs(self) -> "LossConfig":
        if self.name in PAIR_LOSSES and (self.kl_coefficient or self.entropy_coefficient):
            raise ValueError(f"'{self.name}' is a loss of pairs: it takes no KL or entropy term of tokens")
        if self.label_smoothing and self.name != "dpo":
            raise ValueError(f"label_smoothing is for the loss 'dpo', not for '{self.name}'")
        if self.centring_coefficient and self.name != "bradley_terry":
            raise ValueError(f"centring_coefficient is for the loss 'bradley_terry', not for '{self.name}'")
        return self

    @model_validator(mode="after")
    def _terms_fit_the_head(self) -> "LossConfig":
        if self.name in SCALAR_LOSSES and (self.kl_coefficient or self.entropy_coefficient):
            raise ValueError(f"'{self.name}' is a loss of scalars: it has no distribution for a KL or entropy term")
        if self.value_clip is not None and self.name != "value":
            raise ValueError(f"value_clip is for the loss 'value', not for '{self.name}'")
        return self

    @model_validator(mode="after")
    def _correction_needs_anchor(self) -> "LossConfig":
        if self.anchor == "behaviour" and (self.truncate is not None or self.mask_sequences is not None):
            raise ValueError(
                "truncate and mask_sequences compare the anchor with the engine: take anchor 'proximal' or 'current'"
            )
        return self


class Minibatch(WireModel):
    """One optimizer step of a `train_step`: which data, and the factor on their summed loss."""

    indices: tuple[int, ...]
    factor: float = 1.0


class CriticStep(WireModel):
    """How a `train_step` also trains the policy's critic, minibatch by minibatch and with the same factors."""

    value_clip: Annotated[float, Field(gt=0.0)] | None = None
    """See `LossConfig`; None = the data need no `old_values`."""
    optimizer: AdamParams = AdamParams()
    alone: bool = False
    """Leave the policy as it is."""

    @property
    def loss(self) -> LossConfig:
        return LossConfig(name="value", value_clip=self.value_clip)


class PolicySpec(WireModel):
    """A policy to create: LoRA when `lora` is given, otherwise the full parameters."""

    lora: dict[str, Any] | None = None
    """The fields of `LoraConfig`."""
    head: Literal["lm", "scalar"] = "lm"
    """'scalar' makes it a reward model: one number per state instead of a distribution, so that nothing can be sampled."""
    critic: dict[str, Any] | None = None
    """The fields of `LoraConfig` of its critic, an adapter of its own with a scalar head; None = it has none."""
    seed: int = 0
    checkpoint: str | None = None
    """The folder of the checkpoint whose weights it starts from. Only the scheduler may name one."""

    @model_validator(mode="after")
    def _critic_judges_actions(self) -> "PolicySpec":
        if self.critic is not None and self.head == "scalar":
            raise ValueError("a policy with a scalar head takes no actions that a critic could judge")
        return self


def validate(model: type[M], body: Any) -> M:
    """Validate a small message.

    Raises:
        InvalidRequestError: names the first wrong field.
    """
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or model.__name__
        raise InvalidRequestError(f"{where}: {first['msg']}") from error
