"""Configs: every mistake is named, with the nearest known key."""

from pathlib import Path
from typing import Any

import pytest

from opentinker.config.base import apply_overrides, parse_config, read_yaml
from opentinker.config.job import KINDS, InferenceJobConfig, RLJobConfig, parse_job
from opentinker.config.server import INFERENCE_MEMORY_FRACTION, EngineConfig
from opentinker.errors import ConfigError
from opentinker.scheduler.settings import Settings

MINIMAL = {"base_model": "m", "environment": {"name": "arithmetic"}}


@pytest.mark.parametrize(
    ("override", "key", "suggestion"),
    [
        ("base_modl=x", "base_modl", "base_model"),
        ("training.optimizer.learning_rat=1", "training.optimizer.learning_rat", "learning_rate"),
        ("lora.rnk=4", "lora.rnk", "rank"),
        ("algorithm.groop_size=4", "algorithm.groop_size", "group_size"),
        ("rollout.max_turn=4", "rollout.max_turn", "max_turns"),
        ("training.minibatches=4", "training.minibatches", "did you mean 'algorithm.minibatches'?"),
        ("learning_rate=1", "learning_rate", "'training.optimizer.learning_rate'?"),
        ("training.learning_rate=1", "training.learning_rate", "'training.optimizer.learning_rate'?"),
        ("temperature=1", "temperature", "did you mean 'sampling.temperature' or 'evaluation.temperature'?"),
        ("resources.gpu=1", "resources.gpu", "did you mean 'gpus'?"),
    ],
)
def test_an_unknown_key_is_an_error_that_names_the_nearest_one(override: str, key: str, suggestion: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(RLJobConfig, apply_overrides(MINIMAL, [override]))
    assert f"unknown key '{key}'" in caught.value.detail
    assert suggestion in caught.value.hint


def test_overrides_reach_nested_fields_and_leave_the_input_alone() -> None:
    values = {**MINIMAL, "training": {"steps": 3}}
    config = parse_config(RLJobConfig, apply_overrides(values, ["training.optimizer.learning_rate=1e-5", "training.steps=7"]))
    assert config.training.optimizer.learning_rate == 1e-5
    assert config.training.steps == 7
    assert values["training"] == {"steps": 3}


@pytest.mark.parametrize("override", ["training.steps", "=3", "base_model.x=3"])
def test_a_malformed_override_is_an_error(override: str) -> None:
    with pytest.raises(ConfigError):
        apply_overrides(MINIMAL, [override])


def test_weights_go_from_gpu_to_gpu_between_two_processes_only() -> None:
    split = {"layout": "split", "trainer": {"gpus": 1}, "rollout": {"gpus": 1}}
    config = parse_job({**MINIMAL, "kind": "rl", "engine": {"weight_carrier": "nccl"}, "resources": split})
    assert config.engine.weight_carrier == "nccl"
    with pytest.raises(
        ConfigError, match=r"engine\.weight_carrier=ipc is between two processes: set resources.layout to 'split'"
    ):
        parse_job({**MINIMAL, "kind": "rl", "engine": {"weight_carrier": "ipc"}})


def test_each_rank_of_the_trainer_needs_a_gpu_of_its_own() -> None:
    config = parse_job({**MINIMAL, "kind": "rl", "trainer": {"ranks": 4}, "resources": {"gpus": 8}})
    assert config.trainer_ranks == 4
    assert parse_job({"kind": "inference", "base_model": "m"}).trainer_ranks == 1
    assert parse_job({**MINIMAL, "kind": "rl", "trainer": {"ranks": 2}, "resources": {"gpus": 0}}).trainer_ranks == 2
    with pytest.raises(ConfigError, match="shard_base shares out the base model among ranks, and there is one"):
        parse_job({**MINIMAL, "kind": "rl", "trainer": {"shard_base": True}})
    split = {"layout": "split", "trainer": {"gpus": 1}, "rollout": {"gpus": 1}}
    for resources, key in (
        ({"gpus": 2}, "resources.gpus"),
        ({"gpus": 0.5}, "resources.gpus"),
        (split, "resources.trainer.gpus"),
    ):
        with pytest.raises(ConfigError, match=f"trainer.ranks=4 needs a GPU for each.*set {key}=4"):
            parse_job({**MINIMAL, "kind": "rl", "trainer": {"ranks": 4}, "resources": resources})


def test_an_action_must_leave_room_for_a_prompt() -> None:
    with pytest.raises(ConfigError, match="leaves no room for a prompt"):
        parse_config(RLJobConfig, apply_overrides(MINIMAL, ["sampling.max_tokens=1024", "engine.max_model_len=1024"]))


@pytest.mark.parametrize(
    "override",
    ["training.steps=0", "algorithm.group_size=1", "training.optimizer.learning_rate=-1", "sampling.stop=['']"],
)
def test_impossible_values_are_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=override.split("=")[0]):
        parse_config(RLJobConfig, apply_overrides(MINIMAL, [override]))


def test_a_dumped_config_loads_again() -> None:
    config = parse_config(RLJobConfig, {**MINIMAL, "lora": {"rank": 4, "target_modules": ["q_proj"]}})
    assert parse_job(config.model_dump(mode="json")) == config


def test_yaml_mistakes_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_yaml(tmp_path / "absent.yaml")
    (tmp_path / "bad.yaml").write_text("a: [1")
    with pytest.raises(ConfigError, match="not valid YAML"):
        read_yaml(tmp_path / "bad.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ConfigError, match="must hold a mapping"):
        read_yaml(tmp_path / "list.yaml")


def test_every_kind_that_the_cluster_drives_has_a_driver() -> None:
    settings = Settings(state_dir=Path("s"), runs_dir=Path("r"))
    assert {kind for kind, model in KINDS.items() if model.driven} == set(settings.drivers)


def test_an_unknown_kind_is_told_the_nearest_one() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_job({"kind": "inferense", "base_model": "m"})
    assert "did you mean 'inference'?" in caught.value.hint


def test_an_engine_alone_takes_the_gpu_unless_it_is_told_otherwise() -> None:
    def fraction(**engine: Any) -> float:
        return parse_job({"kind": "inference", "base_model": "m", "engine": engine}).engine.memory_fraction

    assert fraction() == fraction(max_model_len=64) == INFERENCE_MEMORY_FRACTION
    assert fraction(memory_fraction=0.3) == 0.3
    for engine, wanted in (
        (EngineConfig(max_model_len=64), INFERENCE_MEMORY_FRACTION),
        (EngineConfig(memory_fraction=0.45), 0.45),
    ):
        assert InferenceJobConfig(base_model="m", engine=engine).engine == engine.model_copy(update={"memory_fraction": wanted})
    assert parse_job({**MINIMAL, "kind": "rl"}).engine.memory_fraction < 0.5


def test_a_job_with_a_lease_cannot_be_restarted_by_the_cluster() -> None:
    with pytest.raises(ConfigError, match="max_restarts"):
        parse_job({"kind": "interactive", "base_model": "m", "scheduling": {"max_restarts": 1}})
    assert parse_job({"kind": "inference", "base_model": "m", "scheduling": {"max_restarts": 1}}).scheduling.max_restarts == 1
