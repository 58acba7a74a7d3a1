"""Configs: every mistake is named, with the nearest known key."""

from pathlib import Path

import pytest
from pydantic import TypeAdapter

from opentinker.config.base import apply_overrides, parse_config, read_yaml
from opentinker.config.job import JobConfig, RLJobConfig
from opentinker.errors import ConfigError

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
        ("learning_rate=1", "learning_rate", "did you mean 'training.optimizer.learning_rate'?"),
        ("training.learning_rate=1", "training.learning_rate", "did you mean 'training.optimizer.learning_rate'?"),
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
    assert TypeAdapter(JobConfig).validate_python(config.model_dump(mode="json")) == config


def test_yaml_mistakes_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_yaml(tmp_path / "absent.yaml")
    (tmp_path / "bad.yaml").write_text("a: [1")
    with pytest.raises(ConfigError, match="not valid YAML"):
        read_yaml(tmp_path / "bad.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ConfigError, match="must hold a mapping"):
        read_yaml(tmp_path / "list.yaml")
