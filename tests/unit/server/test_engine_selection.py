import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from opentinker.config.job import EngineConfig, parse_job
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
