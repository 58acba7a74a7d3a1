"""Gymnasium environments as text: `gymnasium:FrozenLake-v1`. A codec puts observations and actions into words."""

import functools
import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from opentinker.env.adapters.codecs import KNOWN, Codec, SpaceCodec
from opentinker.env.adapters.common import Illegal, IllegalMoveError, IllegalRule, SeededEnvironment, adapted, require, seed_of
from opentinker.env.environment import Action, Environment, Observation, StepResult
from opentinker.env.load import load_function
from opentinker.env.tasks import Split, TaskSource
from opentinker.errors import ConfigError, EnvironmentLoadError

SAMPLED = 40
"""Actions that an episode at random has."""


class GymnasiumEnvironment(SeededEnvironment):
    """One episode of a Gymnasium environment.

    `codec` is a class or function that takes the environment, or `path/to/file.py:Class`; without one, the spaces are put into
    words. `actions` names the actions of a Discrete space. An illegal action earns `illegal_reward` and leaves the position as
    it is (`illegal: continue`) or ends the episode (`end`). Rewards are multiplied by `reward_scale`. Other arguments are
    Gymnasium's own (`is_slippery`, `map_name`, `max_episode_steps`, ...). A task may hold Gymnasium's reset `options`.

    Raises:
        ConfigError: an argument is wrong, or the spaces need a codec.
    """

    spec_id: ClassVar[str]
    host_args: ClassVar[tuple[str, ...]] = ("codec", "xml_file")
    """What loads files."""

    def __init__(
        self,
        codec: str | Callable[[Any], Codec] | None = None,
        actions: Sequence[str] = (),
        illegal: IllegalRule = "continue",
        illegal_reward: float = 0.0,
        reward_scale: float = 1.0,
        **options: Any,
    ) -> None:
        self._illegal = Illegal(illegal, illegal_reward)
        self._scale = reward_scale
        self._env = _make(self.spec_id, options)
        try:
            self._codec = _codec(codec, self._env, actions)
        except BaseException:
            self._env.close()
            raise
        self._illegal_moves = 0
        self._done = False

    @classmethod
    def task_source(cls, split: Split, args: Mapping[str, Any]) -> TaskSource:
        cls(**args).close()  # wrong arguments show before any episode
        return super().task_source(split, args)

    @classmethod
    def sample_actions(cls, task: Any) -> list[str]:
        """Actions at random, where the action space can be listed and needs no arguments."""
        try:
            environment, numbers = cls(), random.Random(seed_of(task))
        except ConfigError:
            return []
        environment.close()
        names = environment._codec.names_of_actions() if isinstance(environment._codec, SpaceCodec) else []
        return [numbers.choice(names) for _ in range(SAMPLED)] if names else []

    def reset(self, task: Any) -> Observation:
        observation, info = self._env.reset(seed=seed_of(task), options=task.get("options"))
        rules, seen = self._codec.rules(), self._codec.observe(observation, info)
        if isinstance(seen, str):
            return f"{rules}\n\n{seen}" if rules else seen
        parts: list[Any] = [{"type": "text", "text": rules}] if rules else []
        return [*parts, *(seen if isinstance(seen, Sequence) else [{"type": "image", "image": seen}])]

    def step(self, action: Action) -> StepResult:
        if self._done:
            raise RuntimeError("the episode is over")
        try:
            chosen = self._codec.act(action.text)
        except IllegalMoveError as error:
            self._illegal_moves += 1
            self._done = self._illegal.rule == "end"
            reply = f"Not possible: {error}."
            return StepResult(self._illegal.reward, self._done, reply, metrics=self._metrics(truncated=False))
        observation, reward, terminated, truncated, info = self._env.step(chosen)
        self._done = bool(terminated or truncated)
        seen = self._codec.observe(observation, info)
        return StepResult(float(reward) * self._scale, self._done, seen, metrics=self._metrics(truncated=bool(truncated)))

    def close(self) -> None:
        self._env.close()

    def _metrics(self, *, truncated: bool) -> dict[str, float]:
        return {"illegal_actions": float(self._illegal_moves), "time_limit": float(truncated)}


@functools.cache
def environment_class(spec: str) -> type[Environment]:
    """The environment of Gymnasium's id `spec`; `module:Name-v0` imports the module that registers it first.

    Raises:
        EnvironmentLoadError: Gymnasium is not installed, or has no such environment.
    """
    gymnasium = require("gymnasium")
    module, _, _ = spec.rpartition(":")
    if module:
        require("gymnasium", module)
    try:
        gymnasium.spec(spec)
    except gymnasium.error.Error as error:
        raise EnvironmentLoadError(f"gymnasium: {error}", hint="gymnasium.pprint_registry() lists what there is") from error
    return adapted("gymnasium", spec, GymnasiumEnvironment, spec_id=spec)


def _make(spec_id: str, options: dict[str, Any]) -> Any:
    gymnasium = require("gymnasium")
    name = gymnasium.spec(spec_id).name
    try:
        # Without a codec of ours, an environment that can draw itself as text does so.
        draws = name not in KNOWN and "ansi" in _render_modes(gymnasium, spec_id)
        return gymnasium.make(spec_id, **({"render_mode": "ansi"} if draws else {}) | options, disable_env_checker=True)
    except Exception as error:  # whatever its constructor makes of the arguments
        text = f"gymnasium cannot make {spec_id}: {type(error).__name__}: {error}"
        raise ConfigError(text, hint="check environment.args") from error


def _render_modes(gymnasium: Any, spec_id: str) -> Sequence[str]:
    entry = gymnasium.spec(spec_id).entry_point
    made = gymnasium.envs.registration.load_env_creator(entry) if isinstance(entry, str) else entry
    metadata = getattr(made, "metadata", {})
    return metadata.get("render_modes", ()) if isinstance(metadata, Mapping) else ()


def _codec(codec: str | Callable[[Any], Codec] | None, env: Any, actions: Sequence[str]) -> Codec:
    if codec is None:
        return KNOWN.get(env.spec.name, SpaceCodec)(env, actions)
    if actions:
        raise ConfigError("actions are named by the codec that is given", hint="drop one of codec and actions")
    made = load_function(codec) if isinstance(codec, str) else codec
    if inspect.isclass(made) and not all(callable(getattr(made, method, None)) for method in ("rules", "observe", "act")):
        raise ConfigError(f"{made.__name__} is no codec", hint="it needs rules, observe and act")
    if not callable(made):
        raise ConfigError(f"{codec} is no codec", hint="give a class that takes the environment")
    result: Codec = made(env)
    return result
