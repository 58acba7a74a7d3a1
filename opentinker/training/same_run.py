"""Whether a run that goes on would be the same run: what of its config may be another one."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from opentinker.config.base import read_yaml
from opentinker.config.job import parse_job
from opentinker.errors import ConfigError

_MAY_CHANGE = (
    ("name",),
    ("scheduling",),
    ("resources",),
    ("sinks",),
    ("engine", "memory_fraction"),
    ("engine", "cache_gib"),
    ("trainer", "memory_gb"),
    ("servers", "*", "resources"),
    ("servers", "*", "engine", "memory_fraction"),
    ("servers", "*", "engine", "cache_gib"),
    ("servers", "*", "trainer", "memory_gb"),
    ("training", "steps"),
    ("training", "save_every"),
    ("training", "keep_last"),
    ("training", "transcripts_per_step"),
)
"""Where it runs and how much room it has there, for how long, and what is written down. All else has a part in the learning."""
_SHOWN = 80
_HINT = "give it as it was, or begin another run in another folder; start_from lets that begin with a checkpoint's weights"


def check_same_run(folder: Path, config: Mapping[str, Any], given_before: Mapping[str, str], given: Mapping[str, str]) -> None:
    """Compare a config with the one in a run's folder, and what was given besides, by its digests.

    Raises:
        ConfigError: going on would be another run; it names the first field that differs, and both values.
    """
    try:
        before = parse_job(read_yaml(folder / "config.yaml")).model_dump(mode="json")  # with what newer releases added
    except ConfigError as error:
        raise ConfigError(f"the run in {folder} cannot go on: {error.detail}", hint=error.hint) from error
    for where, then, now in differences(before, config):
        raise ConfigError(f"{where}: the run in {folder} has {_said(then)}, and now it is {_said(now)}", hint=_HINT)
    for name in sorted(given_before.keys() | given.keys()):
        then, now = given_before.get(name, "nothing to compare"), given.get(name, "nothing to compare")
        if then != now:
            raise ConfigError(f"{name}: the run in {folder} was given {then}, and now it is {now}", hint=_HINT)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, the value before, the value now) of what differs between two resolved configs of jobs and has to be the
    same in one run."""
    falling = [where for part in ("training", "algorithm", "agents") for where in _falling(before.get(part), (part,))]
    for path, then, value in _different(before, now, ()):
        if path == ("training", "steps") and falling:
            yield f"training.steps ({falling[0]} is 'linear', over all of them)", then, value
        elif not any(_below(path, free) for free in _MAY_CHANGE):
            yield ".".join(path), then, value


def _different(before: Any, now: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in [*before, *(key for key in now if key not in before)]:
            yield from _different(before.get(key), now.get(key), (*path, str(key)))
    elif before != now:
        yield path, before, now


def _falling(config: Any, path: tuple[str, ...]) -> Iterator[str]:
    """Where it says that a learning rate falls over all steps."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            if key == "decay" and value == "linear":
                yield ".".join((*path, key))
            yield from _falling(value, (*path, str(key)))


def _below(path: tuple[str, ...], free: tuple[str, ...]) -> bool:
    return len(path) >= len(free) and all(allowed in ("*", part) for part, allowed in zip(path, free, strict=False))


def _said(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
