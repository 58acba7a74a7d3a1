"""Models by name: what the settings register, what a submit says to it, and what a server is told to load."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from opentinker.config.base import parse_config
from opentinker.config.job import InteractiveJobConfig
from opentinker.errors import ConfigError, UnknownModelError
from opentinker.scheduler.gpus import GpuUse
from opentinker.scheduler.model_registry import ModelRegistry
from opentinker.scheduler.placement import Node
from opentinker.scheduler.settings import Settings
from opentinker.server.models import check_model


def model_dir(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "bfloat16"}))
    for number, shapes in enumerate(([[3, 5], [7]], [[2, 2]])):
        header = {str(i): {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]} for i, shape in enumerate(shapes)}
        raw = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
        (folder / f"model-{number}.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw)
    return folder


def registry(models: dict[str, Any], **settings: Any) -> ModelRegistry:
    fields = {"state_dir": "/s", "runs_dir": "/r", "models": models, **settings}
    return ModelRegistry(parse_config(Settings, fields))


def job(base_model: str, **trainer: Any) -> InteractiveJobConfig:
    return parse_config(InteractiveJobConfig, {"base_model": base_model, "trainer": trainer})


def test_a_registered_name_is_loaded_from_its_directory(tmp_path: Path) -> None:
    models = registry({"small": {"path": str(model_dir(tmp_path / "m"))}})
    models.check(job("small"), check_model)
    assert models.location("small") == str(tmp_path / "m")


def test_a_registered_hub_id_is_loaded_from_the_hub_and_no_other_one_is() -> None:
    models = registry({"qwen": {"path": "Qwen/Qwen3-0.6B"}})
    models.check(job("qwen"), check_model)
    assert models.location("qwen") == "hub:Qwen/Qwen3-0.6B"
    for name in ("hub:Qwen/Qwen3-0.6B", "hub:someone/else"):
        with pytest.raises(UnknownModelError, match="not registered"):
            models.check(job(name), check_model)


def test_an_unknown_name_gets_the_nearest_of_all(tmp_path: Path) -> None:
    models = registry({"qwen3-small": {"path": "Qwen/Qwen3-0.6B"}})
    for name, near in (("qwen3-smal", "qwen3-small"), ("smolm2-135m", "smollm2-135m")):
        with pytest.raises(UnknownModelError) as error:
            models.check(job(name), check_model)
        assert f"'{near}'" in error.value.hint


def test_a_directory_works_unless_only_registered_models_do(tmp_path: Path) -> None:
    folder = str(model_dir(tmp_path / "m"))
    registry({}).check(job(folder), check_model)
    with pytest.raises(UnknownModelError, match="not registered"):
        registry({}, only_registered_models=True).check(job(folder), check_model)
    registry({}, only_registered_models=True).check(job("smollm2-135m"), lambda name: None)


def test_what_is_registered_and_wrong_says_so(tmp_path: Path) -> None:
    models = registry({"gone": {"path": str(tmp_path / "gone")}, "exact": {"path": "a/b", "dtype": "float32"}})
    with pytest.raises(UnknownModelError, match="'gone' is registered, but its files cannot be used"):
        models.check(job("gone"), check_model)
    with pytest.raises(ConfigError, match="registered for float32, not for bfloat16") as error:
        models.check(job("exact"), check_model)
    assert error.value.hint == "trainer.dtype=float32"
    models.check(job("exact", dtype="float32"), check_model)
    with pytest.raises(ConfigError, match="neither an absolute path nor a hub id"):
        registry({"odd": {"path": "../x"}})


def test_the_list_tells_what_the_files_say(tmp_path: Path) -> None:
    models = registry(
        {
            "small": {"path": str(model_dir(tmp_path / "m"))},
            "hub": {"path": "a/b", "size": 600},
            "gone": {"path": str(tmp_path / "x")},
        }
    )
    rows = {row["name"]: row for row in models.listing()}
    assert list(rows) == ["gone", "hub", "small", "smollm2-135m"]
    assert rows["small"] == {
        "name": "small",
        "path": str(tmp_path / "m"),
        "source": "directory",
        "parameters": 26,
        "dtype": "bfloat16",
        "model_type": "llama",
    }
    assert (rows["hub"]["source"], rows["hub"]["path"], rows["hub"]["parameters"]) == ("hub", "a/b", 600)
    assert (rows["gone"]["parameters"], rows["gone"]["dtype"]) == (None, None)
    assert rows["smollm2-135m"]["source"] == "built-in"


async def test_a_server_is_told_where_its_model_lies_and_the_job_keeps_the_name(world: Any, tmp_path: Path) -> None:
    folder = str(model_dir(tmp_path / "m"))
    world.settings = world.settings.model_copy(update=registry_settings({"small": {"path": folder}}))
    await world.crash()
    world.boot()
    running = await world.reach(await world.interactive("small"), "RUNNING")
    assert [spec.config["base_model"] for spec in world.launcher.servers.values()] == [folder]
    assert running["server"]["base_model"] == running["config"]["base_model"] == "small"
    assert {row["name"] for row in await world.service.models()} == {"small", "smollm2-135m"}


def registry_settings(models: dict[str, Any]) -> dict[str, Any]:
    return {"models": parse_config(Settings, {"state_dir": "/s", "runs_dir": "/r", "models": models}).models}


async def test_a_model_that_no_gpu_here_can_hold_is_refused_at_submit(world: Any) -> None:
    world.settings = world.settings.model_copy(update=registry_settings({"big": {"path": "a/big", "size": 7_000_000_000}}))
    await world.crash()
    world.boot()
    world.launcher.cluster = [Node("n1", "here", gpus=2, cpu_slots=0)]
    big: dict[str, Any] = {"kind": "interactive", "base_model": "big", "resources": {"gpus": 1}}
    assert (await world.service.submit("admin", big))["state"] == "QUEUED"  # nobody knows how large the GPUs are
    world.launcher.use = {"n1": [GpuUse(i, "a GPU", 0.0, 0, 80 * 2**30) for i in range(2)]}
    await world.service._gpu_use.read(world.launcher.cluster)
    world.service._gpu_use._until = 0.0
    with pytest.raises(ConfigError, match=r"7,000,000,000 parameters, which need 130 GiB at least; 1 GPU .* have 80 GiB"):
        await world.service.submit("admin", big)
    for fits in ({"lora": {"rank": 4}}, {"resources": {"gpus": 2}}):
        assert (await world.service.submit("admin", {**big, **fits}))["id"]
