"""What the adapters share: packages that may be missing, tasks that are seeds, the answer in a model's text, illegal moves."""

import copyreg
import importlib
import random
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, TypeVar, cast

from opentinker.env.environment import Environment
from opentinker.env.load import load_environment
from opentinker.errors import ConfigError, EnvironmentFailedError, EnvironmentLoadError
from opentinker.multiagent.environment import MultiAgentEnvironment
from opentinker.multiagent.shared import SharedEnvironment

T = TypeVar("T", bound=Environment | MultiAgentEnvironment)

TRAINING_SEEDS = 2**31 - 1024
"""Seeds below it are for training; held-out tasks have those from it on (all fit into 31 bits, which every package takes)."""
HELD_OUT = 100


@dataclass(frozen=True)
class Adapter:
    """An adapter, the package that it needs, and what was run with it."""

    name: str
    module: str
    package: str
    """What pip calls it."""
    tested: tuple[str, ...]
    """Versions that the adapter's tests were run with."""
    adapts: str
    extra: str = "adapters"
    """The extra of opentinker that installs it; empty if none does."""


ADAPTERS = {
    a.name: a
    for a in (
        Adapter("gymnasium", "gymnasium", "gymnasium", ("1.4.0",), "ToyText, and what has spaces that fit into words"),
        Adapter("openenv", "websockets", "websockets", ("17.4",), "Servers of openenv-core 0.3.0 and openenv 0.10.0"),
        Adapter("pettingzoo", "pettingzoo", "pettingzoo", ("1.27.0",), "Turn games (AEC), one seat against opponents"),
        Adapter("pettingzoo_aec", "pettingzoo", "pettingzoo", ("1.27.0",), "Turn games (AEC), every seat an agent of the run"),
        Adapter("pettingzoo_parallel", "pettingzoo", "pettingzoo", ("1.27.0",), "Simultaneous games, every seat an agent"),
        Adapter("reasoning_gym", "reasoning_gym", "reasoning-gym", ("0.1.25",), "All datasets"),
        Adapter("textarena", "textarena", "textarena", ("0.7.4",), "Games for one; games for more against opponents"),
        Adapter("verifiers", "verifiers", "verifiers", ("0.3.1", "0.4.0"), "Environments (0.3), tasksets (0.4)", extra=""),
    )
}


def require(adapter: str, module: str = "") -> ModuleType:
    """The adapter's package, or a module of it.

    Raises:
        EnvironmentLoadError: it is not installed, or its import fails; the hint is the command that installs it.
    """
    needs = ADAPTERS[adapter]
    try:
        return importlib.import_module(module or needs.module)
    except ImportError as error:
        install = f"pip install {needs.package}" + (f", or pip install 'opentinker[{needs.extra}]'" if needs.extra else "")
        missing = getattr(error, "name", None)
        if missing and missing.split(".")[0] != needs.module:
            detail, install = f"'{module or needs.module}' needs '{missing}': {error}", f"pip install {missing.split('.')[0]}"
        else:
            detail = f"the adapter '{adapter}' needs the package {needs.package}: {error}"
        raise EnvironmentLoadError(detail, hint=install) from error


class Adapted(type):
    """The type of adapted classes. They are made by name, so that is how they travel between processes."""

    adapted_name: str


def _travel(cls: Adapted) -> Any:
    if "adapted_name" not in vars(cls):
        return cls.__qualname__
    return (_played if issubclass(cls, MultiAgentEnvironment) else load_environment, (cls.adapted_name,))


def _played(name: str) -> type[MultiAgentEnvironment]:
    loaded = load_environment(name)
    assert issubclass(loaded, SharedEnvironment)
    return loaded.played


copyreg.pickle(Adapted, _travel)


def adapted(adapter: str, spec: str, base: type[T], **attributes: Any) -> type[T]:
    """A class for the environment `adapter:spec`."""
    name = f"{adapter}:{spec}"
    made: Any = Adapted(
        name, (base,), {"adapted_name": name, "__module__": base.__module__, "__doc__": base.__doc__} | attributes
    )
    return cast(type[T], made)


class SeededEnvironment(Environment):
    """An environment whose task is a seed: {"seed": 7}."""

    @classmethod
    def make_task(cls, seed: int) -> Any:
        return {"seed": random.Random(seed).randrange(TRAINING_SEEDS)}

    @classmethod
    def held_out_tasks(cls) -> Sequence[Any]:
        return [{"seed": TRAINING_SEEDS + place} for place in range(HELD_OUT)]


def seed_of(task: Any) -> int:
    """The task's seed.

    Raises:
        EnvironmentFailedError: it has none.
    """
    seed = task.get("seed") if isinstance(task, Mapping) else None
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise EnvironmentFailedError(f"the task {str(task)[:100]} has no seed", hint='a task is {"seed": 7}')
    return seed


_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)


def answer_of(text: str) -> str:
    """What stands in the last <answer> tag; without one, the whole text."""
    found = _ANSWER.findall(text)
    return str(found[-1] if found else text).strip()


class IllegalMoveError(Exception):
    """The policy's text is no legal action; the message, which it is told, says why."""


IllegalRule = Literal["continue", "end"]


@dataclass(frozen=True)
class Illegal:
    """What an illegal action costs, and whether the episode goes on (the same position again) or ends."""

    rule: IllegalRule = "continue"
    reward: float = 0.0

    def __post_init__(self) -> None:
        if self.rule not in ("continue", "end"):
            raise ConfigError(f"illegal is '{self.rule}'", hint="it is continue (the same position again) or end")


def choose(text: str, names: Mapping[str, Any], also: Mapping[str, Any] | None = None) -> Any:
    """The value of the last of `names` that the answer mentions as a word of its own; `also` are names that are not advertised.

    Raises:
        IllegalMoveError: it mentions none.
    """
    answer = answer_of(text)
    known = {name.lower(): value for name, value in {**(also or {}), **names}.items()}
    either = "|".join(re.escape(name) for name in sorted(known, key=lambda n: (-len(n), n)))
    found = re.findall(rf"(?<![\w.-])(?:{either})(?![\w-]|\.\d)", answer, re.IGNORECASE)
    if not found:
        raise IllegalMoveError(f"your answer names none of: {', '.join(names)}")
    return known[found[-1].lower()]


class ModuleRandom:
    """A stream of random numbers of its own for code that uses the module `random`: set up on entering, kept on leaving.

    Without it, games that run at the same time would draw from one stream, and a seed would determine nothing.
    """

    _lock = threading.RLock()

    def __init__(self, seed: int) -> None:
        self._state = random.Random(seed).getstate()

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        with self._lock:
            outside = random.getstate()
            random.setstate(self._state)
            try:
                yield
            finally:
                self._state = random.getstate()
                random.setstate(outside)
