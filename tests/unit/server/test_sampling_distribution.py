import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opentinker.client.messages import SampleRequest, SamplingParams, TokenChunk
from opentinker.errors import ContextOverflowError, InvalidRequestError
from opentinker.server.engine.sampling import MIN_TEMPERATURE, effective_params, sample_seed, sampling_logprobs


def _reference(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """One row in float64, by the definition."""
    scaled = logits.astype(np.float64) / (temperature or 1.0)
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    kept = order[: top_k or len(order)]
    mass = np.exp(scaled[kept] - scaled[kept].max())
    mass /= mass.sum()
    nucleus, held = [], 0.0
    for token, share in zip(kept, mass, strict=True):
        if nucleus and top_p < 1 and held >= top_p:
            break
        nucleus.append(token)
        held += share
    logprobs = np.full(len(scaled), -np.inf)
    logprobs[nucleus] = scaled[nucleus] - np.logaddexp.reduce(scaled[nucleus])
    return logprobs


@given(
    seed=st.integers(0, 10_000),
    rows=st.lists(
        st.tuples(st.sampled_from([0.0, 0.3, 1.0, 2.0]), st.integers(0, 9), st.sampled_from([0.05, 0.4, 0.83, 1.0])),
        min_size=1,
        max_size=5,
    ),
)
@settings(deadline=None, max_examples=100)
def test_the_distribution_is_the_defined_one_for_every_row(seed: int, rows: list[tuple[float, int, float]]) -> None:
    logits = np.random.default_rng(seed).normal(0, 2, (len(rows), 7)).astype(np.float32)
    temperature, top_k, top_p = (torch.tensor(column) for column in zip(*rows, strict=True))
    found = sampling_logprobs(torch.from_numpy(logits), temperature, top_k, top_p).numpy()
    for row, parameters in enumerate(rows):
        np.testing.assert_allclose(found[row], _reference(logits[row], *parameters), atol=1e-5)


def _request(length: int, **params: object) -> SampleRequest:
    return SampleRequest("r", (TokenChunk(np.arange(length, dtype=np.int32)),), SamplingParams(**params))


def _effective(request: SampleRequest) -> SamplingParams:
    return effective_params(request, max_model_len=32, vocab_size=30, stop_token_ids=(2, 7))


def test_max_tokens_is_clipped_to_the_context_that_is_left() -> None:
    assert _effective(_request(10, max_tokens=5)).max_tokens == 5
    assert _effective(_request(10, max_tokens=100)).max_tokens == 22


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    request = SampleRequest("r", (TokenChunk(np.zeros(32, np.int32)),))
    with pytest.raises(ContextOverflowError, match="32 tokens"):
        _effective(request)
    assert effective_params(request, max_model_len=33, vocab_size=30, stop_token_ids=()).max_tokens == 1


@pytest.mark.parametrize("tokens", [[], [30], [-1]])
def test_a_prompt_outside_the_vocabulary_is_refused(tokens: list[int]) -> None:
    with pytest.raises(InvalidRequestError):
        _effective(SampleRequest("r", (TokenChunk(np.array(tokens, np.int32)),)))


def test_the_models_own_stop_ids_are_always_in_effect() -> None:
    assert _effective(_request(3, stop_token_ids=(9, 7))).stop_token_ids == (2, 7, 9)


def test_greedy_sampling_ignores_truncation_and_says_so() -> None:
    effective = _effective(_request(3, temperature=0.0, top_k=3, top_p=0.5))
    assert (effective.temperature, effective.top_k, effective.top_p) == (0.0, 0, 1.0)


def test_a_tiny_temperature_is_raised_and_says_so() -> None:
    assert _effective(_request(3, temperature=1e-6)).temperature == MIN_TEMPERATURE


def test_neighbouring_seeds_and_indices_give_distinct_seeds_that_fit_int64() -> None:
    seeds = {sample_seed(seed, index) for seed in range(-20, 100) for index in range(64)}
    assert len(seeds) == 120 * 64
    assert min(seeds) >= 0
    assert max(seeds) < 2**63
