"""Config machinery: strict pydantic models, YAML files, dotted overrides, errors that suggest the nearest name."""

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from opentinker.errors import ConfigError

C = TypeVar("C", bound=BaseModel)
Seconds = Annotated[float, Field(gt=0.0)]
Count = Annotated[int, Field(ge=1)]


class Config(BaseModel):
    """Base of all configs: unknown keys are errors, instances are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint that names the closest known name, or lists them all."""
    options = sorted(known)
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else f"known here: {', '.join(options)}"


def models_of(annotation: Any) -> list[type[BaseModel]]:
    """The config models inside a type annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    found = []
    if get_origin(annotation) in (Union, UnionType) or hasattr(annotation, "__metadata__") or get_args(annotation):
        for arg in get_args(annotation):
            found += models_of(arg)
    return found


def _without_tags(model: type[BaseModel], path: tuple[Any, ...]) -> tuple[Any, ...]:
    """A field's path without what pydantic puts into it to say which member of a union was meant."""
    kept: list[Any] = []
    models = [model]
    tagged = False
    for part in path:
        fields = [m.model_fields[part] for m in models if isinstance(part, str) and part in m.model_fields]
        if not fields and tagged and part in {m.model_fields["kind"].default for m in models if "kind" in m.model_fields}:
            models = [m for m in models if m.model_fields["kind"].default == part]
            tagged = False
            continue
        kept.append(part)
        models = [child for field in fields for child in models_of(field.annotation)] or models
        tagged = len(models) > 1
    return tuple(kept)


def _fields_at(model: type[BaseModel], path: tuple[Any, ...]) -> set[str]:
    models = [model]
    for part in path:
        models = [
            child
            for parent in models
            if isinstance(part, str) and part in parent.model_fields
            for child in models_of(parent.model_fields[part].annotation)
        ] or models
    return {name for m in models for name in m.model_fields}


def _paths_to(model: type[BaseModel], name: str, prefix: str = "") -> list[str]:
    """Every dotted path in `model` that ends in the key `name`, the shortest first; none below a name of the user's choice."""
    found = []
    for field, info in model.model_fields.items():
        if field == name:
            found.append(prefix + field)
        for child in models_of(info.annotation) if get_origin(info.annotation) is not dict else ():
            found += _paths_to(child, name, f"{prefix}{field}.")
    return sorted(dict.fromkeys(found), key=lambda path: path.count("."))


def _suggestion(model: type[BaseModel], path: tuple[Any, ...]) -> str:
    """For an unknown key: where a key of that name is, or else the nearest name where it was looked for."""
    name, known = str(path[-1]), _fields_at(model, path[:-1])
    elsewhere = _paths_to(model, name)
    if elsewhere and not difflib.get_close_matches(name, known, n=1, cutoff=0.85):
        return "did you mean " + " or ".join(f"'{p}'" for p in elsewhere[:3]) + "?"
    return nearest(name, known)


def parse_config(model: type[C], values: Mapping[str, Any]) -> C:
    """Validate `values`.

    Raises:
        ConfigError: every wrong field with its dotted path; for an unknown key also the nearest known one.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        lines, hints = [], []
        for item in error.errors():
            path = _without_tags(model, tuple(item["loc"]))
            where = ".".join(str(part) for part in path) or "config"
            if item["type"] == "union_tag_invalid":
                tag, known = item["ctx"]["tag"], item["ctx"]["expected_tags"].replace("'", "").split(", ")
                lines.append(f"{where}.kind: there is no '{tag}'")
                hints.append(nearest(tag, known))
            elif item["type"] == "extra_forbidden":
                lines.append(f"unknown key '{where}'")
                hints.append(_suggestion(model, path))
            else:
                lines.append(f"{where}: {item['msg']}")
        raise ConfigError("; ".join(lines), hint="; ".join(hints)) from error


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML mapping from a file.

    Raises:
        ConfigError: the file is missing, is not YAML, or is not a mapping.
    """
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a mapping, not a {type(values).__name__}")
    return values


def apply_overrides(values: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """`values` with dotted overrides such as `sampling.temperature=0.7` applied; the right side is YAML.

    Raises:
        ConfigError: an override is not of the form key=value, or crosses something that is not a mapping.
    """
    result: dict[str, Any] = {k: _copy(v) for k, v in values.items()}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise ConfigError(f"'{override}' is not an override", hint="write key=value, such as training.steps=10")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"the value of '{key}' is not valid YAML: {text}") from error
        if isinstance(value, str):
            value = _number(value)
        *parents, last = key.split(".")
        node = result
        for part in parents:
            child = node.setdefault(part, {})
            if child is None:
                child = node[part] = {}
            if not isinstance(child, dict):
                raise ConfigError(f"'{key}': '{part}' is not a mapping")
            node = child
        node[last] = value
    return result


def _number(text: str) -> Any:
    """YAML 1.1 reads 1e-5 as a string; people mean a number."""
    try:
        return float(text) if "e" in text.lower() else text
    except ValueError:
        return text


def _copy(value: Any) -> Any:
    return {k: _copy(v) for k, v in value.items()} if isinstance(value, dict) else value
