"""Weight publish: from the trainer into the engine, with proof that they arrived and that both compute the same."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from opentinker.client.messages import Chunk, Datum, FloatArray, ImageChunk, TokenChunk, chunk_tokens
from opentinker.errors import EngineError, InvalidRequestError, OpenTinkerError, VersionNotServedError, WeightSyncError
from opentinker.server.digest import tensor_digest
from opentinker.server.engine.base import AdapterId, NamedTensors, WeightAck
from opentinker.server.images import ImageStore, sample_picture
from opentinker.server.state import Hosted, Parts, State

MIN_DRIFT_LIMIT = 0.05
"""bf16 noise between two correct implementations, in nats per token."""
MAX_BASELINE = 0.5
"""A larger difference before any training means that the two do not run the same model."""
CANARY_TOKENS = 24
_CANARY_TEXTS = (
    "The capital of France is Paris, and the capital of Italy is Rome. Both cities lie on a river, and both are very old.",
    "Question: what is 17 + 25? Answer: 17 + 25 = 42. Question: what is 9 * 8? Answer: 9 * 8 = 72. Question: what is 5 - 3?",
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef mul(a, b):\n    return a * b\n",
    "Once upon a time there was a fox who lived in the forest. One day the fox met a crow who held a piece of cheese.",
)


def canary_prompts(
    tokenizer_file: Path, images: ImageStore | None = None, longest: int | None = None
) -> tuple[tuple[Chunk, ...], ...]:
    """The fixed prompts in the model's own tokens, at most 24 each; with `images`, one more that shows a picture first, unless
    that makes it longer than `longest`."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    encoded = [tokenizer.encode(text, add_special_tokens=False).ids[:CANARY_TOKENS] for text in _CANARY_TEXTS]
    prompts: list[tuple[Chunk, ...]] = [(TokenChunk(np.asarray(ids, np.int32)),) for ids in encoded]
    if images is not None:
        ((sha256, tokens),) = images.add([sample_picture(0)]).items()
        if longest is None or len(tokens) + CANARY_TOKENS < longest:
            images.pin([sha256])  # every publish needs it
            prompts.append((ImageChunk(sha256, tokens), *prompts[0]))
    return tuple(prompts)


def first_measure(state: State, policy: str) -> Hosted:
    """Version 0, before any training: the baseline of all later comparisons. Where adapters are served, the engine gets it.

    Raises:
        WeightSyncError: engine and trainer already disagree.
    """
    parts, served = state.parts, state.adapter(policy, 0)
    digests: dict[str, str] = {}
    if served is not None:
        _check_ack(_send(parts, policy, 0, served, digests), digests)
    logprobs, drift = _compare(parts, policy, served)
    if not drift <= MAX_BASELINE:
        raise WeightSyncError(
            f"engine and trainer disagree on the base model: mean |logprob difference| {drift:.3f}",
            hint="the engine does not compute this architecture as transformers does; try engine.kind=transformers",
        )
    if served is None:
        for _ in _digesting(parts.trainer.full_weights(policy), digests):
            pass
    return Hosted(baseline=drift, canary_logprobs=logprobs, digests=digests)


def restore(parts: Parts, policy: str) -> None:
    """Give the engine back the base model, which the weights of a new policy are: nothing is trained yet.

    Raises:
        WeightSyncError: a tensor did not arrive as it was sent, or the engine misses one.
    """
    digests: dict[str, str] = {}
    _check_ack(_send(parts, policy, 0, None, digests), digests)


def serve(parts: Parts, weights: NamedTensors | None) -> Hosted:
    """The policy of a server without a trainer: the base model, or these weights.

    Raises:
        WeightSyncError: a tensor did not arrive as it was sent, or the engine misses one.
    """
    digests: dict[str, str] = {}
    if weights is not None:
        _check_ack(parts.engine.update_weights(_digesting(weights, digests), 0), digests)
    return Hosted(baseline=0.0, canary_logprobs=[], digests=digests)


def publish(state: State, policy: str, mode: str, *, after: int = 0) -> dict[str, Any]:
    """Make the engine sample from the trainer's weights, under the next version, which is above `after`.

    `mode` says what happens to the policy's running requests: 'drain' finishes them under the old version, 'abort' starts them
    anew under the new one, and fails those that were asked of the old one. Where the engine keeps several versions, 'drain'
    waits for those of the version only that makes room, and 'abort' lets those go on that were asked of one that stays.

    Raises:
        WeightSyncError: a tensor did not arrive as it was sent, or engine and trainer disagree. The version stays, and
            the engine refuses to sample until a publish succeeds.
        ConflictError: the policy only scores.
        DeadlineError: running requests do not end; nothing was published.
    """
    state.check_samples(policy)
    hosted = state.hosted(policy)
    if mode not in ("drain", "abort"):
        hint = "'continue' would mix versions in one sample" if mode == "continue" else ""
        raise InvalidRequestError(f"publish mode '{mode}' is not offered: use 'drain' or 'abort'", hint=hint)
    leaving = state.leaving(policy)
    interrupted = _interrupt(state, policy, leaving) if mode == "abort" else []
    if mode == "drain":
        state.drain(policy, leaving)
    state.drop(policy, leaving)
    # A push that fails leaves a fault, for which the worker fails the interrupted requests.
    result = push(state, policy, max(hosted.attempted, after) + 1)
    try:
        for operation in interrupted:
            try:
                state.start(state.running[operation].work)
            except VersionNotServedError as error:
                state.fail(operation, error)
    except Exception as error:
        hosted.fault = EngineError(f"the engine does not take up again what a publish interrupted: {error}")
        raise hosted.fault from error
    return result


def _interrupt(state: State, policy: str, leaving: Sequence[int]) -> list[str]:
    """Stop the policy's requests, but for those that were asked of a version that stays; what was stopped."""
    affected = {
        operation
        for operation, running in state.running.items()
        if running.work.policy == policy and (running.work.request.version is None or running.version in leaving)
    }
    return [request.request_id for request in state.parts.engine.abort(affected)]


def push(state: State, policy: str, version: int) -> dict[str, Any]:
    """Send the weights as `version`, verify, and account for it. No request is running that the weights would change."""
    started = time.monotonic()
    parts, hosted, served = state.parts, state.hosted(policy), state.adapter(policy, version)
    hosted.attempted = version
    sent: dict[str, str] = {}
    try:
        _check_ack(_send(parts, policy, version, served, sent), sent)
        logprobs, drift = _compare(parts, policy, served)
        limit = max(MIN_DRIFT_LIMIT, parts.drift_limit * hosted.baseline)
        if not drift <= limit:
            raise WeightSyncError(
                f"after the publish, engine and trainer differ by {drift:.3f} per token (limit {limit:.3f}, "
                f"version 0 {hosted.baseline:.3f})"
            )
        changed = not all(np.array_equal(old, new) for old, new in zip(hosted.canary_logprobs, logprobs, strict=True))
        if not changed and _share_changed(hosted.digests, sent) > 0.5:
            raise WeightSyncError("most weights changed, but the engine answers exactly as before: it still uses the old ones")
    except Exception as error:
        hosted.fault = error if isinstance(error, OpenTinkerError) else EngineError(f"a publish failed midway: {error!r}")
        state.drop(policy, [version])
        raise
    hosted.fault = None
    hosted.version, hosted.canary_logprobs, hosted.digests = version, logprobs, sent
    hosted.kept = (*(kept for kept in hosted.kept if kept != version), version) if served is not None else (version,)
    return {
        "version": version,
        "parameters": len(sent),
        "drift": drift,
        "baseline": hosted.baseline,
        "changed": changed,
        "seconds": time.monotonic() - started,
    }


def _send(parts: Parts, policy: str, version: int, served: AdapterId | None, sent: dict[str, str]) -> WeightAck:
    """Send the weights, as an adapter or as the base weights; fills `sent` with name -> digest as they leave the trainer."""
    if served is not None:
        adapter = parts.trainer.adapter(policy)
        sent.update({name: tensor_digest(tensor) for name, tensor in adapter.tensors.items()})
        return parts.engine.update_adapter(adapter, served)
    return parts.engine.update_weights(_digesting(parts.trainer.full_weights(policy), sent), version)


def _digesting(weights: NamedTensors, digests: dict[str, str]) -> NamedTensors:
    for name, tensor in weights:
        digests[name] = tensor_digest(tensor)
        yield name, tensor


def _check_ack(ack: WeightAck, sent: dict[str, str]) -> None:
    if ack.missing:
        raise WeightSyncError(f"{len(ack.missing)} engine parameters were not updated, such as {min(ack.missing)}")
    wrong = sorted(name for name in sent.keys() | ack.digests.keys() if sent.get(name) != ack.digests.get(name))
    if wrong:
        raise WeightSyncError(f"{len(wrong)} tensors did not arrive as they were sent, such as {wrong[0]}")


def _share_changed(old: dict[str, str], new: dict[str, str]) -> float:
    return sum(old.get(name) != digest for name, digest in new.items()) / max(1, len(new))


def _compare(parts: Parts, policy: str, served: AdapterId | None) -> tuple[list[FloatArray], float]:
    """(the engine's logprobs of the canaries, mean |difference| to the trainer's per token, in nats)."""
    scored = [_scored(prompt) for prompt in parts.canaries]
    answers = parts.engine.prompt_logprobs(parts.canaries, served)
    # What a model says of the tokens inside an image means nothing, and it says it differently in another engine.
    engine = [np.where(chosen, logprobs, np.float32(0)) for logprobs, chosen in zip(answers, scored, strict=True)]
    trainer = parts.trainer.forward(policy, _data(parts.canaries), temperature=1.0)["logprobs"]
    differences = [np.abs(ours[1:] - theirs)[chosen[1:]] for ours, theirs, chosen in zip(engine, trainer, scored, strict=True)]
    return engine, float(np.concatenate(differences).mean())


def _data(prompts: Sequence[tuple[Chunk, ...]]) -> list[Datum]:
    return [
        Datum((*p[:-1], TokenChunk(p[-1].tokens[:-1])), chunk_tokens(p)[1:], {"weights": scored[1:].astype(np.float32)})
        for p, scored in ((p, _scored(p)) for p in prompts)
    ]


def _scored(prompt: tuple[Chunk, ...]) -> npt.NDArray[np.bool_]:
    """Which of a prompt's tokens are compared: not the first, which nothing precedes, and not those of an image."""
    scored: npt.NDArray[np.bool_] = np.concatenate(
        [np.full(len(chunk.tokens), isinstance(chunk, TokenChunk)) for chunk in prompt]
    )
    scored[0] = False
    return scored
