"""What every rollout engine promises, shown on real engines and a tiny float32 model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from opentinker.client.messages import FloatArray, IntArray, Sample, SampleRequest, SampleResult, SamplingParams, TokenChunk
from opentinker.config.server import EngineConfig
from opentinker.errors import ContextOverflowError, EngineError, InvalidRequestError, WeightSyncError
from opentinker.server.digest import tensor_digest
from opentinker.server.engine.base import AdapterId, LoraTensors, RolloutEngine
from opentinker.server.engine.select import create_engine

EOS = 2
CONTEXT = 128
CONFIG = {"max_model_len": CONTEXT, "max_num_seqs": 8, "cache_gib": 0.02}


@pytest.fixture(scope="module")
def oracle(tiny_model_dir: Path) -> Any:
    """The model itself, to compute what the engines should have computed."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="module", params=["vllm", "transformers"])
def shared_engine(request: pytest.FixtureRequest, tiny_model_dir: Path) -> Iterator[RolloutEngine]:
    config = EngineConfig(kind=request.param, **CONFIG)
    engine = create_engine(tiny_model_dir, config, "float32", lora=None, stop_token_ids=(EOS,))
    yield engine
    engine.close()


@pytest.fixture
def engine(shared_engine: RolloutEngine, oracle: Any) -> Iterator[RolloutEngine]:
    """The engine, idle and with the model's own weights, however the test before ended."""
    yield shared_engine
    shared_engine.abort_all()
    if shared_engine.version:
        shared_engine.update_weights(oracle.state_dict().items(), 0)


def request(
    name: str, prompt: list[int] | IntArray, n: int = 1, *, prompt_logprobs: bool = False, **params: object
) -> SampleRequest:
    tokens = np.asarray(prompt, np.int32)
    return SampleRequest(name, (TokenChunk(tokens),), SamplingParams(**params), n, prompt_logprobs)


def run(engine: RolloutEngine, *requests: SampleRequest) -> dict[str, SampleResult]:
    for item in requests:
        engine.add(item)
    results: dict[str, SampleResult] = {}
    for _ in range(2_000):
        if not engine.has_unfinished():
            return results
        results |= {r.request_id: r for r in engine.step()}
    raise AssertionError("the engine does not finish")


def prompts(count: int, seed: int = 0) -> list[IntArray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 400, rng.integers(2, 40)).astype(np.int32) for _ in range(count)]


@torch.inference_mode()
def distributions(model: Any, prompt: IntArray, tokens: IntArray) -> np.ndarray:
    """Logits for each of `tokens` after `prompt`, float64[T, V], from one plain forward pass."""
    ids = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))
    logits = model(input_ids=ids[None]).logits[0]
    return logits[len(prompt) - 1 : -1].double().numpy()


def chosen_logprobs(logits: np.ndarray, tokens: IntArray, temperature: float = 1.0) -> np.ndarray:
    scaled = logits / temperature
    return scaled[np.arange(len(tokens)), tokens] - np.logaddexp.reduce(scaled, axis=1)


def assert_consistent(sample: Sample, version: int = 0) -> None:
    assert len(sample.tokens) == len(sample.logprobs)
    assert sample.versions == ((version, len(sample.tokens)),)


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.7])
def test_logprobs_are_those_of_the_distribution_that_was_sampled(
    engine: RolloutEngine, oracle: Any, temperature: float
) -> None:
    asked = [request(str(i), p, temperature=temperature, max_tokens=12, seed=i) for i, p in enumerate(prompts(11))]
    for item, result in zip(asked, run(engine, *asked).values(), strict=True):
        prompt = asked[int(result.request_id)].prompt[0].tokens
        (sample,) = result.samples
        assert_consistent(sample)
        expected = chosen_logprobs(distributions(oracle, prompt, sample.tokens), sample.tokens, temperature or 1.0)
        assert np.abs(expected - sample.logprobs).mean() < 1e-4, item.request_id


REFUSED = {
    "an empty prompt": request("bad", []),
    "a token outside the vocabulary": request("bad", [5, 512]),
    "a prompt that fills the context": request("bad", [5] * CONTEXT),
}


@pytest.mark.parametrize("refused", REFUSED.values(), ids=REFUSED)
def test_a_refused_request_leaves_nothing_in_the_engine(engine: RolloutEngine, refused: SampleRequest) -> None:
    engine.add(request("good", [5, 6], max_tokens=3))
    with pytest.raises(InvalidRequestError):
        engine.add(refused)
    assert set(run(engine)) == {"good"}
    with pytest.raises(InvalidRequestError):
        engine.add(refused)
    assert not engine.has_unfinished()


def test_truncated_sampling_reports_the_truncated_distribution(engine: RolloutEngine, oracle: Any) -> None:
    (prompt,) = prompts(1, seed=5)
    result = run(engine, request("a", prompt, n=6, top_k=4, max_tokens=10, seed=1), request("b", prompt, top_p=0.3, seed=1))
    for sample in result["a"].samples:
        logits = distributions(oracle, prompt, sample.tokens)
        for row, token, logprob in zip(logits, sample.tokens, sample.logprobs, strict=True):
            best = np.argsort(-row)[:4]
            assert token in best
            assert abs(row[token] - np.logaddexp.reduce(row[best]) - logprob) < 1e-3
    (nucleus,) = result["b"].samples
    for row, token in zip(distributions(oracle, prompt, nucleus.tokens), nucleus.tokens, strict=True):
        share = np.exp(row - np.logaddexp.reduce(row))
        assert share[share > share[token]].sum() < 0.3 + 1e-4


def test_samples_follow_the_distribution(engine: RolloutEngine, oracle: Any) -> None:
    (prompt,) = prompts(1, seed=7)
    result = run(engine, request("a", prompt, n=600, max_tokens=1, seed=3, temperature=0.5))
    counts = np.bincount([int(s.tokens[0]) for s in result["a"].samples], minlength=512)
    logits = distributions(oracle, prompt, np.zeros(1, np.int32))[0] / 0.5
    share = np.exp(logits - np.logaddexp.reduce(logits))
    likely = share > 0.02
    assert likely.any()
    assert (np.abs(counts / 600 - share)[likely] < 4.5 * np.sqrt(share / 600)[likely]).all()


def test_greedy_takes_the_likeliest_token(engine: RolloutEngine, oracle: Any) -> None:
    (prompt,) = prompts(1, seed=2)
    (sample,) = run(engine, request("a", prompt, temperature=0.0, max_tokens=20))["a"].samples
    np.testing.assert_array_equal(distributions(oracle, prompt, sample.tokens).argmax(axis=1), sample.tokens)


def test_a_seed_repeats_its_samples_and_the_samples_of_a_request_differ(engine: RolloutEngine) -> None:
    (prompt,) = prompts(1, seed=3)
    first = run(engine, request("a", prompt, n=4, max_tokens=12, seed=11))["a"].samples
    company = [request(f"other {i}", p, max_tokens=5) for i, p in enumerate(prompts(5, seed=9))]
    again = run(engine, *company, request("a", prompt, n=4, max_tokens=12, seed=11))["a"].samples
    for one, two in zip(first, again, strict=True):
        np.testing.assert_array_equal(one.tokens, two.tokens)
    assert len({s.tokens.tobytes() for s in first}) == 4
    other = run(engine, request("a", prompt, n=4, max_tokens=12, seed=12))["a"].samples
    assert not {s.tokens.tobytes() for s in first} & {s.tokens.tobytes() for s in other}


def test_without_a_seed_samples_differ(engine: RolloutEngine) -> None:
    (prompt,) = prompts(1, seed=3)
    samples = run(engine, request("a", prompt, n=4, max_tokens=12), request("b", prompt, n=4, max_tokens=12))
    assert len({s.tokens.tobytes() for r in samples.values() for s in r.samples}) == 8


def test_batching_does_not_change_greedy_tokens_or_logprobs(engine: RolloutEngine) -> None:
    """Prompts of different lengths, more than fit at once: padding, admission and compaction leave no trace."""
    asked = [request(str(i), p, temperature=0.0, max_tokens=3 + i) for i, p in enumerate(prompts(19, seed=4))]
    together = run(engine, *asked)
    for item in asked:
        (alone,), (batched,) = run(engine, item)[item.request_id].samples, together[item.request_id].samples
        np.testing.assert_array_equal(alone.tokens, batched.tokens)
        np.testing.assert_allclose(alone.logprobs, batched.logprobs, atol=1e-4)


def test_requests_that_arrive_while_others_run_are_not_disturbed(engine: RolloutEngine) -> None:
    asked = [request(str(i), p, temperature=0.0, max_tokens=10) for i, p in enumerate(prompts(6, seed=6))]
    expected = {item.request_id: run(engine, item)[item.request_id] for item in asked}
    found: dict[str, SampleResult] = {}
    for item in asked:
        engine.add(item)
        for _ in range(3):
            found |= {r.request_id: r for r in engine.step()}
    found |= run(engine)
    for name, result in expected.items():
        np.testing.assert_array_equal(found[name].samples[0].tokens, result.samples[0].tokens)
        np.testing.assert_allclose(found[name].samples[0].logprobs, result.samples[0].logprobs, atol=1e-4)


def test_a_stop_token_is_kept_as_the_last_token(engine: RolloutEngine) -> None:
    (prompt,) = prompts(1, seed=2)
    (free,) = run(engine, request("a", prompt, temperature=0.0, max_tokens=20))["a"].samples
    stop = int(free.tokens[4])
    first = int(np.flatnonzero(free.tokens == stop)[0])
    result = run(engine, request("a", prompt, temperature=0.0, max_tokens=20, stop_token_ids=(stop,)))["a"]
    np.testing.assert_array_equal(result.samples[0].tokens, free.tokens[: first + 1])
    assert result.samples[0].finish_reason == "stop"
    assert result.params.stop_token_ids == tuple(sorted({EOS, stop}))


def test_the_models_end_of_sequence_stops_without_being_asked_for(engine: RolloutEngine, oracle: Any) -> None:
    """Weights that make the end of sequence the likeliest token."""
    weights = {name: tensor.clone() for name, tensor in oracle.state_dict().items()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name][EOS] = 3.0 * weights[name][10:400].mean(0).sign()
    engine.update_weights(weights.items(), 1)
    results = run(engine, *(request(str(i), p, n=8, max_tokens=60, temperature=1.5) for i, p in enumerate(prompts(8))))
    samples = [s for r in results.values() for s in r.samples]
    stopped = [s for s in samples if s.finish_reason == "stop"]
    assert stopped
    assert all(s.tokens[-1] == EOS for s in stopped)
    assert not any(EOS in s.tokens[:-1] for s in samples)


def test_a_stop_string_keeps_the_tokens_as_they_were_sampled(engine: RolloutEngine, tiny_model_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_model_dir / "tokenizer.json"))
    (prompt,) = prompts(1, seed=2)
    (free,) = run(engine, request("a", prompt, temperature=0.0, max_tokens=20))["a"].samples
    stop = next(text for t in free.tokens[3:] if (text := tokenizer.decode([int(t)])).isascii() and len(text.strip()) > 1)
    (sample,) = run(engine, request("a", prompt, temperature=0.0, max_tokens=20, stop=(stop,)))["a"].samples
    np.testing.assert_array_equal(sample.tokens, free.tokens[: len(sample.tokens)])
    assert_consistent(sample)
    assert sample.finish_reason == "stop"
    assert stop in tokenizer.decode(sample.tokens.tolist())
    assert stop not in tokenizer.decode(sample.tokens[:-1].tolist())


def test_an_answer_that_fills_the_context_ends_by_length(engine: RolloutEngine) -> None:
    prompt = np.full(CONTEXT - 5, 9, np.int32)
    result = run(engine, request("a", prompt, max_tokens=50, seed=0))["a"]
    assert result.params.max_tokens == 5
    assert len(result.samples[0].tokens) == 5 or result.samples[0].finish_reason == "stop"
    assert run(engine, request("b", prompt[:10], max_tokens=1, seed=0))["b"].samples[0].finish_reason == "length"


def test_a_prompt_that_does_not_fit_is_refused_and_harms_nobody(engine: RolloutEngine) -> None:
    engine.add(request("good", [5, 6, 7], max_tokens=3))
    with pytest.raises(ContextOverflowError):
        engine.add(request("long", np.full(CONTEXT, 9, np.int32)))
    with pytest.raises(InvalidRequestError):
        engine.add(request("foreign", [5, 512]))
    assert set(run(engine)) == {"good"}


def test_prompt_logprobs_are_those_of_temperature_one(engine: RolloutEngine, oracle: Any) -> None:
    asked = [*prompts(3, seed=8), np.asarray([7], np.int32)]

    def check(found: FloatArray | None, prompt: IntArray) -> None:
        assert found is not None
        assert found.dtype == np.float32
        assert found[0] == 0.0
        expected = chosen_logprobs(distributions(oracle, prompt[:1], prompt[1:]), prompt[1:])
        np.testing.assert_allclose(found[1:], expected, atol=1e-3)

    for found, prompt in zip(engine.prompt_logprobs([(TokenChunk(p),) for p in asked]), asked, strict=True):
        check(found, prompt)
    with_prompt = request("a", asked[0], n=2, max_tokens=3, temperature=0.4, prompt_logprobs=True)
    result = run(engine, with_prompt, request("b", asked[0], max_tokens=3))
    check(result["a"].prompt_logprobs, asked[0])
    assert result["b"].prompt_logprobs is None


def test_unfinished_requests_come_back_and_can_be_added_again(engine: RolloutEngine) -> None:
    asked = [request(str(i), p, n=2, max_tokens=30, seed=i) for i, p in enumerate(prompts(9))]
    for item in asked:
        engine.add(item)
    for _ in range(5):
        engine.step()
    aborted = engine.abort_all()
    assert [item.request_id for item in aborted] == [str(i) for i in range(9)]
    assert not engine.has_unfinished()
    assert engine.step() == []
    assert {len(r.samples) for r in run(engine, *aborted).values()} == {2}


def test_some_requests_can_be_stopped_and_scores_asked_for_while_others_go_on(engine: RolloutEngine, oracle: Any) -> None:
    asked = [request(str(i), p, n=2, temperature=0.0, max_tokens=4 + i) for i, p in enumerate(prompts(6, seed=8))]
    alone = {item.request_id: run(engine, item)[item.request_id].samples[0] for item in asked}
    for item in asked:
        engine.add(item)
    engine.step()
    assert sorted(item.request_id for item in engine.abort({"1", "4", "no such"})) == ["1", "4"]
    (scored,) = engine.prompt_logprobs([asked[0].prompt])
    prompt = asked[0].prompt[0].tokens
    np.testing.assert_allclose(
        scored[1:], chosen_logprobs(distributions(oracle, prompt[:1], prompt[1:]), prompt[1:]), atol=1e-3
    )
    results = run(engine)
    assert set(results) == {"0", "2", "3", "5"}
    for name, result in results.items():
        for sample in result.samples:
            np.testing.assert_array_equal(sample.tokens, alone[name].tokens)
            np.testing.assert_allclose(sample.logprobs, alone[name].logprobs, atol=1e-4)


def changed(oracle: Any, scale: float = 0.05) -> Any:
    from copy import deepcopy

    model = deepcopy(oracle)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator)
    return model


def test_new_weights_are_what_samples_come_from(engine: RolloutEngine, oracle: Any) -> None:
    (prompt,) = prompts(1, seed=10)
    greedy = request("a", prompt, temperature=0.0, max_tokens=24)
    (before,) = run(engine, greedy)["a"].samples
    model = changed(oracle)
    weights = model.state_dict()
    ack = engine.update_weights(weights.items(), 7)
    assert ack.missing == frozenset()
    assert ack.written == ack.expected
    assert ack.digests == {name: tensor_digest(tensor) for name, tensor in weights.items()}
    assert engine.version == 7
    (after,) = run(engine, greedy)["a"].samples
    assert_consistent(after, version=7)
    assert before.tokens.tolist() != after.tokens.tolist()
    expected = chosen_logprobs(distributions(model, prompt, after.tokens), after.tokens)
    np.testing.assert_allclose(after.logprobs, expected, atol=1e-3)
    np.testing.assert_array_equal(distributions(model, prompt, after.tokens).argmax(axis=1), after.tokens)


@pytest.mark.parametrize("interrupted", [False, True])
def test_cached_keys_and_values_do_not_survive_an_update(engine: RolloutEngine, oracle: Any, interrupted: bool) -> None:
    """A prompt of several cache blocks, read under the old weights and then under the new ones."""
    prompt = np.random.default_rng(0).integers(3, 400, 100).astype(np.int32)
    run(engine, request("a", prompt, max_tokens=1), request("b", prompt, max_tokens=1))
    if interrupted:
        engine.add(request("c", prompt, n=3, max_tokens=20, seed=0))
        engine.step()
        engine.step()
        engine.abort_all()
    model = changed(oracle)
    engine.update_weights(model.state_dict().items(), 1)
    (sample,) = run(engine, request("a", prompt, max_tokens=8, seed=0))["a"].samples
    expected = chosen_logprobs(distributions(model, prompt, sample.tokens), sample.tokens)
    np.testing.assert_allclose(sample.logprobs, expected, atol=1e-3)


def test_a_tied_head_follows_its_embedding_even_if_it_is_not_sent(engine: RolloutEngine, oracle: Any) -> None:
    model = changed(oracle)
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    assert engine.update_weights(weights.items(), 1).missing == frozenset()
    (prompt,) = prompts(1, seed=10)
    (sample,) = run(engine, request("a", prompt, max_tokens=8, seed=0))["a"].samples
    expected = chosen_logprobs(distributions(model, prompt, sample.tokens), sample.tokens)
    np.testing.assert_allclose(sample.logprobs, expected, atol=1e-3)


def test_a_sender_may_reuse_its_buffer_for_the_next_tensor(engine: RolloutEngine, oracle: Any) -> None:
    model = changed(oracle)

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        buffer = torch.empty(512 * 64)
        for name, tensor in model.state_dict().items():
            view = buffer[: tensor.numel()].view(tensor.shape)
            yield name, view.copy_(tensor)
            buffer.fill_(float("nan"))

    assert engine.update_weights(stream(), 1).missing == frozenset()
    (prompt,) = prompts(1, seed=10)
    (sample,) = run(engine, request("a", prompt, max_tokens=8, seed=0))["a"].samples
    expected = chosen_logprobs(distributions(model, prompt, sample.tokens), sample.tokens)
    np.testing.assert_allclose(sample.logprobs, expected, atol=1e-3)


@pytest.mark.parametrize(
    "dropped", ["model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.down_proj.weight", "model.norm.weight"]
)
def test_a_parameter_that_was_not_sent_is_reported_missing(engine: RolloutEngine, oracle: Any, dropped: str) -> None:
    weights = {name: tensor for name, tensor in oracle.state_dict().items() if name != dropped}
    ack = engine.update_weights(weights.items(), 1)
    # vLLM fuses some parameters: the engine's name holds the layer and the kind.
    (missing,) = ack.missing
    assert missing.split(".")[:3] == dropped.split(".")[:3]
    assert dropped not in ack.digests


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("model.layers.9.mlp.up_proj.weight", torch.zeros(128, 64)),
        ("model.layers.0.mlp.up_proj.weight", torch.zeros(128, 65)),
        ("lm_head.weight", torch.zeros(512, 64)),
    ],
    ids=["unknown", "other shape", "tied but different"],
)
@pytest.mark.parametrize("kind", ["vllm", "transformers"])
def test_weights_that_do_not_belong_to_the_model_are_an_error_and_never_sampled_from(
    tiny_model_dir: Path, oracle: Any, kind: str, name: str, tensor: torch.Tensor
) -> None:
    config = EngineConfig(kind=kind, **CONFIG)
    engine = create_engine(tiny_model_dir, config, "float32", lora=None, stop_token_ids=(EOS,))
    try:
        with pytest.raises(WeightSyncError):
            engine.update_weights({**oracle.state_dict(), name: tensor}.items(), 1)
        with pytest.raises(EngineError, match="half-way"):
            engine.add(request("a", [5, 6, 7]))
        assert not engine.has_unfinished()
    finally:
        engine.close()


def test_weights_are_refused_while_requests_run(engine: RolloutEngine, oracle: Any) -> None:
    engine.add(request("a", [5, 6, 7], max_tokens=30))
    with pytest.raises(EngineError, match="1 requests are running"):
        engine.update_weights(oracle.state_dict().items(), 1)
    assert set(run(engine)) == {"a"}


def test_an_engine_without_adapter_serving_refuses_adapters(engine: RolloutEngine) -> None:
    with pytest.raises(EngineError) as caught:
        engine.update_adapter(LoraTensors(4, 8.0, ("q_proj",), {}), AdapterId("p", 1))
    assert "engine.lora_serving" in caught.value.hint
