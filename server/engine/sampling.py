"""What sampling parameters mean, for every engine: which values take effect, and the distribution they define.

Axes: B = sequences, V = vocabulary.
"""

import hashlib
from collections.abc import Sequence

import torch

from opentinker.client.messages import SampleRequest, SamplingParams, chunk_tokens
from opentinker.errors import ContextOverflowError, InvalidRequestError

MIN_TEMPERATURE = 0.01
"""Positive temperatures below it are raised to it: dividing by less overflows."""


def effective_params(
    request: SampleRequest, *, max_model_len: int, vocab_size: int, stop_token_ids: Sequence[int]
) -> SamplingParams:
    """The parameters that will be in effect: `max_tokens` clipped to the context, the model's own stop ids added, and no
    truncation of the distribution where it has no meaning (greedy).

    Raises:
        ContextOverflowError: the prompt leaves no room for one token.
        InvalidRequestError: the prompt is empty or holds a token outside the vocabulary.
    """
    prompt, params = chunk_tokens(request.prompt), request.params
    if not prompt.size:
        raise InvalidRequestError("the prompt is empty")
    if int(prompt.max()) >= vocab_size or int(prompt.min()) < 0:
        raise InvalidRequestError(f"the prompt holds a token outside the vocabulary of {vocab_size}")
    room = max_model_len - len(prompt)
    if room < 1:
        raise ContextOverflowError(
            f"a prompt of {len(prompt)} tokens leaves no room for an answer in a context of {max_model_len}",
            hint="shorten the prompt or raise engine.max_model_len",
        )
    update: dict[str, object] = {
        "max_tokens": min(params.max_tokens, room),
        "stop_token_ids": tuple(sorted({*params.stop_token_ids, *stop_token_ids})),
    }
    if params.temperature == 0.0:
        update |= {"top_p": 1.0, "top_k": 0}
    else:
        update["temperature"] = max(params.temperature, MIN_TEMPERATURE)
    return params.model_copy(update=update)


def sample_seed(seed: int, index: int) -> int:
    """The seed of the `index`-th sample of a request: unrelated for neighbouring seeds and indices."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()) >> 1


def sampling_logprobs(
    logits_B_V: torch.Tensor, temperature_B: torch.Tensor, top_k_B: torch.Tensor, top_p_B: torch.Tensor
) -> torch.Tensor:
    """Logprobs of the sampling distribution, float32[B, V]: logits over temperature, then the `top_k` likeliest (0 = all),
    then the smallest set of those that holds `top_p` of the mass. A temperature of 0 counts as 1 (greedy)."""
    scaled = logits_B_V.float() / torch.where(temperature_B == 0, 1.0, temperature_B)[:, None]
    vocab = scaled.shape[1]
    if not bool(((top_k_B > 0) & (top_k_B < vocab)).any() or (top_p_B < 1).any()):
        return scaled.log_softmax(-1)
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    limit_B = torch.where(top_k_B > 0, top_k_B, vocab)
    ordered = ordered.masked_fill(torch.arange(vocab, device=scaled.device) >= limit_B[:, None], -torch.inf)
    mass = ordered.softmax(-1)
    before = mass.cumsum(-1) - mass
    # The likeliest token always stays: nothing precedes it.
    ordered = ordered.masked_fill((before >= top_p_B[:, None]) & (top_p_B < 1)[:, None], -torch.inf)
    return torch.full_like(scaled, -torch.inf).scatter(1, order, ordered.log_softmax(-1))
