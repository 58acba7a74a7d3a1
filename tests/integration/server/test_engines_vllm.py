"""What only the vLLM engine does: serving adapters, and living in a thread beside others."""

import inspect
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from opentinker.client.messages import Sample, SampleRequest, SamplingParams, TokenChunk
from opentinker.config.server import EngineConfig, LoraConfig
from opentinker.errors import ConfigError, ContextOverflowError, EngineError, InvalidRequestError, WeightSyncError
from opentinker.server.carriers import Probe
from opentinker.server.device_groups import Invitation, invite
from opentinker.server.digest import tensor_digest
from opentinker.server.engine.base import AdapterId, LoraTensors
from opentinker.server.engine.select import create_engine
from opentinker.server.engine.vllm_engine import VllmEngine

RANK, ALPHA = 4, 12.0
PROMPT = np.arange(20, 60, dtype=np.int32)


@pytest.fixture(scope="module")
def shared_engine(tiny_model_dir: Path) -> Iterator[VllmEngine]:
    config = EngineConfig(kind="vllm", max_model_len=128, max_num_seqs=4, cache_gib=0.02, lora_serving="adapter")
    engine = create_engine(tiny_model_dir, config, "float32", lora=LoraConfig(rank=RANK, alpha=ALPHA), stop_token_ids=(2,))
    assert isinstance(engine, VllmEngine)
    yield engine
    engine.close()


@pytest.fixture
def engine(shared_engine: VllmEngine) -> Iterator[VllmEngine]:
    """The engine, holding no adapter."""
    yield shared_engine
    for held in list(shared_engine._adapters):
        shared_engine.drop_adapter(held)


def adapted(tiny_model_dir: Path, seed: int) -> tuple[Any, LoraTensors]:
    """A PEFT model whose adapter does something, and the adapter as an engine gets it."""
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    model: Any = get_peft_model(base, PeftConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear"))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    targets = tuple(sorted(model.peft_config["default"].target_modules))
    return model.eval(), LoraTensors(RANK, ALPHA, targets, get_peft_model_state_dict(model))


def sample(engine: VllmEngine, adapter: AdapterId | None = None, seed: int = 0) -> Sample:
    engine.add(SampleRequest("a", (TokenChunk(PROMPT),), SamplingParams(max_tokens=16, seed=seed)), adapter)
    while engine.has_unfinished():
        for result in engine.step():
            return result.samples[0]
    raise AssertionError("no result")


@torch.inference_mode()
def expected_logprobs(model: Any, found: Sample) -> np.ndarray:
    ids = torch.from_numpy(np.concatenate([PROMPT, found.tokens]).astype(np.int64))
    logprobs = model(input_ids=ids[None]).logits[0].log_softmax(-1)[len(PROMPT) - 1 : -1]
    return logprobs.gather(1, ids[len(PROMPT) :, None])[:, 0].numpy()


def test_served_adapters_sample_like_peft_one_version_beside_the_other(engine: VllmEngine, tiny_model_dir: Path) -> None:
    for version in (1, 2, 3):
        model, adapter = adapted(tiny_model_dir, seed=version)
        at = AdapterId("p", version)
        engine.drop_adapter(AdapterId("p", version - 2))
        ack = engine.update_adapter(adapter, at)
        assert ack.missing == frozenset()
        assert ack.digests == {name: tensor_digest(tensor) for name, tensor in adapter.tensors.items()}
        found = sample(engine, at)
        assert found.versions == ((version, len(found.tokens)),)
        np.testing.assert_allclose(found.logprobs, expected_logprobs(model, found), atol=1e-3)
        base = model.get_base_model()
        with model.disable_adapter():
            assert np.abs(expected_logprobs(base, found) - found.logprobs).max() > 0.05
        if version > 1:
            older, _ = adapted(tiny_model_dir, seed=version - 1)
            found = sample(engine, AdapterId("p", version - 1))
            np.testing.assert_allclose(found.logprobs, expected_logprobs(older, found), atol=1e-3)


def test_there_is_room_for_the_versions_that_are_kept_and_no_more(engine: VllmEngine, tiny_model_dir: Path) -> None:
    _, adapter = adapted(tiny_model_dir, seed=1)
    for version in (1, 2):
        engine.update_adapter(adapter, AdapterId("q", version))
    with pytest.raises(EngineError, match="room for 2"):
        engine.update_adapter(adapter, AdapterId("q", 3))
    with pytest.raises(EngineError, match="does not hold version 3 of policy 'q'"):
        sample(engine, AdapterId("q", 3))
    assert sample(engine, AdapterId("q", 1)).versions[0][0] == 1


def test_an_adapter_whose_tensors_change_afterwards_is_served_as_it_was(engine: VllmEngine, tiny_model_dir: Path) -> None:
    model, adapter = adapted(tiny_model_dir, seed=4)
    at = AdapterId("p", 4)
    engine.update_adapter(LoraTensors(RANK, ALPHA, adapter.target_modules, tensors := dict(adapter.tensors)), at)
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.zero_()
    found = sample(engine, at)
    for name, tensor in tensors.items():
        tensor.copy_(kept[name])
    np.testing.assert_allclose(found.logprobs, expected_logprobs(model, found), atol=1e-3)


def test_adapter_tensors_without_a_home_are_reported_missing(engine: VllmEngine, tiny_model_dir: Path) -> None:
    _, adapter = adapted(tiny_model_dir, seed=5)
    stray = "base_model.model.model.layers.7.mlp.up_proj.lora_A.weight"
    tensors = {**adapter.tensors, stray: torch.zeros(RANK, 64), stray.replace("lora_A", "lora_B"): torch.zeros(128, RANK)}
    ack = engine.update_adapter(LoraTensors(RANK, ALPHA, adapter.target_modules, tensors), AdapterId("p", 5))
    assert ack.missing == {stray, stray.replace("lora_A", "lora_B")}


def asked(name: str, n: int = 1, **params: Any) -> SampleRequest:
    """A request whose parameters nobody has checked."""
    return SampleRequest(name, (TokenChunk(PROMPT),), SamplingParams(max_tokens=4).model_copy(update=params), n)


def answers(engine: VllmEngine) -> list[str]:
    found = []
    for _ in range(200):
        if not engine.has_unfinished():
            return found
        found += [result.request_id for result in engine.step()]
    raise AssertionError("the engine does not finish")


@pytest.mark.parametrize("params", [{"stop": ("",)}, {"top_p": 7.0}, {"top_k": -5}])
def test_what_vllm_refuses_leaves_nothing_in_the_engine(engine: VllmEngine, params: dict[str, Any]) -> None:
    engine.add(asked("good"))
    with pytest.raises(InvalidRequestError, match="vLLM refuses"):
        engine.add(asked("bad", n=3, **params))
    assert answers(engine) == ["good"]


@pytest.mark.parametrize("kind", [ValueError, RuntimeError])
def test_a_request_that_vllm_takes_in_part_is_taken_back(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    add, calls = engine._engine.add_request, []

    def third_fails(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 4:
            raise kind("no")
        return add(*arguments, **options)

    monkeypatch.setattr(engine._engine, "add_request", third_fails)
    engine.add(asked("before"))
    with pytest.raises(InvalidRequestError if kind is ValueError else kind):
        engine.add(asked("bad", n=4))
    engine.add(asked("after"))
    assert sorted(answers(engine)) == ["after", "before"]
    assert not engine._engine.has_unfinished_requests()


def test_scores_that_fail_half_way_leave_nothing_in_the_engine(engine: VllmEngine) -> None:
    with pytest.raises(ContextOverflowError):
        engine.prompt_logprobs([(TokenChunk(PROMPT),), (TokenChunk(np.full(500, 5, np.int32)),)])
    assert not engine.has_unfinished()
    assert len(engine.prompt_logprobs([(TokenChunk(PROMPT),)])[0]) == len(PROMPT)


def test_a_request_that_vllm_loses_is_an_error_and_no_wait_without_end(engine: VllmEngine) -> None:
    engine.add(asked("lost"))
    engine._engine.abort_request([f"{engine._added - 1}:0"])
    with pytest.raises(EngineError, match="1 requests have no answer"):
        answers(engine)
    assert [request.request_id for request in engine.abort_all()] == ["lost"]
    engine.add(asked("next"))
    assert answers(engine) == ["next"]


def test_an_adapter_of_too_high_a_rank_is_refused(engine: VllmEngine, tiny_model_dir: Path) -> None:
    _, adapter = adapted(tiny_model_dir, seed=5)
    with pytest.raises(ConfigError, match="rank 64 is larger"):
        engine.update_adapter(LoraTensors(64, ALPHA, adapter.target_modules, adapter.tensors), AdapterId("p", 6))


def test_base_weights_can_be_replaced_under_adapter_serving(engine: VllmEngine, tiny_model_dir: Path) -> None:
    model, adapter = adapted(tiny_model_dir, seed=6)
    base = model.get_base_model()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" not in name:
                parameter += 0.03
    names = {n.replace(".base_layer.", "."): t for n, t in base.state_dict().items() if "lora_" not in n}
    ack = engine.update_weights(names.items(), 7)
    assert ack.missing == frozenset()
    found = sample(engine)
    with model.disable_adapter():
        np.testing.assert_allclose(found.logprobs, expected_logprobs(model, found), atol=1e-3)
    engine.update_adapter(adapter, AdapterId("p", 8))
    found = sample(engine, AdapterId("p", 8))
    np.testing.assert_allclose(found.logprobs, expected_logprobs(model, found), atol=1e-3)


def test_a_group_between_gpus_is_refused_here_by_the_vllm_that_would_make_it(engine: VllmEngine) -> None:
    """The names and arguments that `device_groups.py` takes of vLLM are those of the one that is installed."""
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

    assert list(inspect.signature(uid_init_process_group).parameters) == [
        "nccl_unique_id_bytes",
        "rank",
        "world_size",
        "device",
    ]
    assert {"tensor", "src", "stream"} <= inspect.signature(PyNcclCommunicator.broadcast).parameters.keys()
    with pytest.raises(WeightSyncError, match="there is no NCCL"):
        invite(1)
    with pytest.raises(WeightSyncError, match="rank 1 of 2 of the weights' NCCL group cannot join"):
        engine.join_group(Invitation(bytes(128), 1))
    probe = Probe()
    assert probe.is_answer(*engine.read_probes(probe.payload))


def test_an_engine_works_in_a_thread_of_its_own_and_after_another_was_closed(engine: VllmEngine, tiny_model_dir: Path) -> None:
    engine.close()
    engine.close()
    config = EngineConfig(kind="vllm", max_model_len=128, max_num_seqs=64, cache_gib=0.02)

    def life() -> int:
        own = create_engine(tiny_model_dir, config, "float32", lora=None, stop_token_ids=(2,))
        # More prompt tokens than one pass takes: seeded requests must survive the split.
        for i in range(60):
            own.add(SampleRequest(str(i), (TokenChunk(np.full(100, 5 + i, np.int32)),), SamplingParams(max_tokens=4, seed=i)))
        finished = 0
        while own.has_unfinished():
            finished += len(own.step())
        own.close()
        return finished

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(life).result(timeout=120) == 60


def test_a_cache_too_small_for_the_context_is_a_clear_error(tiny_model_dir: Path) -> None:
    config = EngineConfig(kind="vllm", max_model_len=512, cache_gib=0.00001)
    with pytest.raises(EngineError, match="vLLM cannot start") as caught:
        create_engine(tiny_model_dir, config, "float32", lora=None, stop_token_ids=(2,))
    assert "engine.cache_gib" in caught.value.hint


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a sleep mode")
def test_an_engine_that_cannot_sleep_says_so_before_it_loads_and_vllm_would_refuse_too(tiny_model_dir: Path) -> None:
    config = EngineConfig(kind="vllm", max_model_len=128, cache_gib=0.02)
    with pytest.raises(EngineError, match="vLLM has no sleep mode on cpu") as refused:
        create_engine(tiny_model_dir, config, "float32", lora=None, stop_token_ids=(2,), sleeps=True)
    assert refused.value.hint == "set engine.sleep=off"
    from vllm import EngineArgs

    with pytest.raises(ValueError, match="Sleep mode is not supported"):
        EngineArgs(model=str(tiny_model_dir), enable_sleep_mode=True).create_engine_config()
