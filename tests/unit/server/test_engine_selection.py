import json
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from opentinker.config.job import parse_job
from opentinker.config.server import EngineConfig
from opentinker.errors import ConfigError
from opentinker.server.engine import select


@pytest.fixture
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "find_spec", lambda name: None)


@pytest.fixture
def with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "find_spec", lambda name: object())


def test_auto_takes_vllm_where_it_is_installed(with_vllm: None) -> None:
    assert select.resolve_engine_kind(EngineConfig()) == "vllm"


def test_auto_takes_transformers_elsewhere(without_vllm: None) -> None:
    assert select.resolve_engine_kind(EngineConfig()) == "transformers"


def test_asking_for_vllm_where_it_is_missing_says_what_to_do(without_vllm: None) -> None:
    with pytest.raises(ConfigError) as caught:
        select.resolve_engine_kind(EngineConfig(kind="vllm"))
    assert "engine.kind=transformers" in caught.value.hint


@pytest.mark.parametrize(
    ("kind", "device", "expected"),
    [("vllm", "cpu", "merge"), ("vllm", "cuda", "adapter"), ("transformers", "cuda", "merge")],
)
def test_auto_serves_adapters_only_where_it_is_fast(kind: select.EngineKind, device: str, expected: str) -> None:
    assert select.resolve_lora_serving(EngineConfig(), kind, device) == expected


def test_explicit_lora_serving_is_kept() -> None:
    assert select.resolve_lora_serving(EngineConfig(lora_serving="adapter"), "vllm", "cpu") == "adapter"
    assert select.resolve_lora_serving(EngineConfig(lora_serving="merge"), "vllm", "cuda") == "merge"


@pytest.mark.parametrize("kind", ["vllm", "transformers"])
def test_several_adapters_are_served_on_every_engine(kind: select.EngineKind) -> None:
    assert select.resolve_lora_serving(EngineConfig(max_adapters=2), kind, "cpu") == "adapter"


def test_several_adapters_are_not_merged() -> None:
    with pytest.raises(ValidationError, match="max_adapters=2 needs adapters that are served"):
        EngineConfig(max_adapters=2, lora_serving="merge")


def test_several_adapters_need_a_job_with_an_adapter() -> None:
    job = {"kind": "interactive", "base_model": "m", "engine": {"max_adapters": 2}}
    with pytest.raises(ConfigError, match="this job has no lora"):
        parse_job(job)
    assert parse_job(job | {"lora": {}}).engine.max_adapters == 2


def test_a_context_longer_than_the_models_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    config = EngineConfig(kind="transformers", max_model_len=1024)
    with pytest.raises(ConfigError, match="512"):
        select.create_engine(tmp_path, config, "float32", lora=None, stop_token_ids=())


def test_a_tensor_parallel_engine_is_vllm_and_shares_the_heads_out_evenly(with_vllm: None, tmp_path: Path) -> None:
    assert select.resolve_engine_kind(EngineConfig(tensor_parallel=2)) == "vllm"
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 6, "max_position_embeddings": 4096}))
    with pytest.raises(ConfigError, match="tensor_parallel=4 does not divide the model's 6 attention heads") as caught:
        select.create_engine(tmp_path, EngineConfig(tensor_parallel=4), "float32", lora=None, stop_token_ids=())
    assert caught.value.hint == "take one of 1, 2, 3, 6"


def test_a_tensor_parallel_engine_on_fewer_gpus_than_parts_is_refused(
    with_vllm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 4}))
    with pytest.raises(ConfigError, match="tensor_parallel=2 takes a GPU for each part, and the engine has 1") as caught:
        select.create_engine(
            tmp_path, EngineConfig(tensor_parallel=2, max_model_len=16), "float32", lora=None, stop_token_ids=()
        )
    assert "resources.gpus=2" in caught.value.hint


def test_a_tensor_parallel_engine_without_vllm_is_refused(without_vllm: None) -> None:
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel=2, but vLLM is not installed"):
        select.resolve_engine_kind(EngineConfig(tensor_parallel=2))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"engine": {"tensor_parallel": 4}, "resources": {"gpus": 2}},
            "tensor_parallel=4 needs a GPU for each.*set resources.gpus=4",
        ),
        ({"engine": {"tensor_parallel": 2}, "resources": {"gpus": 0.5}}, "resources.gpus is 0.5; set resources.gpus=2"),
        (
            {"engine": {"tensor_parallel": 2}, "trainer": {"ranks": 4}, "resources": {"gpus": 2}},
            "trainer.ranks=4 needs a GPU for each.*set resources.gpus=4",
        ),
        (
            {"engine": {"tensor_parallel": 4}, "trainer": {"ranks": 2}, "resources": {"gpus": 1}},
            "tensor_parallel=4 needs a GPU for each.*set resources.gpus=4",
        ),
        ({"engine": {"tensor_parallel": 2, "weight_carrier": "nccl"}}, "nccl is between different GPUs.*set it to 'auto'"),
        ({"kind": "inference", "engine": {"tensor_parallel": 2, "weight_carrier": "ipc"}}, "for jobs that train: leave it out"),
        ({"engine": {"tensor_parallel": 2, "kind": "transformers"}}, "needs kind 'vllm'"),
        (
            {"engine": {"tensor_parallel": 2}, "resources": {"layout": "split", "rollout": {"gpus": 3}}},
            "resources.rollout.gpus is 3; give both the same",
        ),
        (
            {"resources": {"layout": "split", "rollout": {"gpus": 2}}},
            "tensor_parallel=1 takes a GPU for each part, and resources.rollout.gpus is 2",
        ),
        ({"kind": "inference", "resources": {"layout": "split"}}, "'inference' has an engine only"),
        ({"kind": "inference", "engine": {"tensor_parallel": 2}, "resources": {"gpus": 1}}, "resources.gpus is 1"),
    ],
)
def test_a_layout_that_no_server_has_is_refused_in_words(config: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_job({"kind": "interactive", "base_model": "m", **config})


@pytest.mark.parametrize(
    ("parts", "ranks", "gpus"), [(2, 2, 2), (2, 4, 4), (4, 2, 4), (2, 1, 2), (2, 2, 8), (2, 2, 0), (2, 1, None), (1, 2, 2)]
)
def test_parts_of_an_engine_and_ranks_of_its_trainer_share_gpus(parts: int, ranks: int, gpus: int | None) -> None:
    engine = {"tensor_parallel": parts} | ({"weight_carrier": "ipc"} if parts > 1 else {})
    job = parse_job(
        {
            "kind": "interactive",
            "base_model": "m",
            "engine": engine,
            "trainer": {"ranks": ranks},
            "resources": {} if gpus is None else {"gpus": gpus},
        }
    )
    assert (job.engine.tensor_parallel, job.trainer_ranks) == (parts, ranks)


def test_an_engine_apart_from_its_trainer_has_the_gpu_to_itself() -> None:
    job = parse_job({"kind": "interactive", "base_model": "m", "resources": {"layout": "split"}})
    assert job.engine.memory_fraction == 0.9
    assert parse_job(job.model_dump(mode="json")) == job
    own = parse_job({**job.model_dump(mode="json"), "engine": {"memory_fraction": 0.5}})
    assert own.engine.memory_fraction == 0.5


@pytest.mark.parametrize(
    ("kind", "device", "sleep", "expected"),
    [("vllm", "cuda", "auto", True), ("vllm", "cuda", "off", False), ("vllm", "cpu", "auto", False)],
)
def test_only_vllm_on_cuda_sleeps_and_only_if_it_may(kind: select.EngineKind, device: str, sleep: str, expected: bool) -> None:
    config = EngineConfig.model_validate({"sleep": sleep})
    assert select.resolve_sleep(config, kind, device) is expected
