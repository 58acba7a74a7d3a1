"""What the adapters of PettingZoo share: its games by name, their legal moves, and what several agents at one game need."""

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, ClassVar, Literal

from opentinker.env.adapters.codecs import MOST_ACTIONS
from opentinker.env.adapters.common import IllegalMoveError, SeededEnvironment, adapted, choose, require, seed_of
from opentinker.env.adapters.turn_codecs import KNOWN, TurnCodec
from opentinker.env.load import load_function
from opentinker.env.tasks import Split, TaskSource
from opentinker.errors import ConfigError, EnvironmentFailedError, EnvironmentLoadError
from opentinker.multiagent.environment import MultiAgentEnvironment, MultiStepResult

FAMILIES = ("atari", "butterfly", "classic", "magent", "mpe", "sisl")
CodecChoice = str | Callable[[Any, str], TurnCodec] | None
"""A class made with (env, agent), or `path/to/file.py:Class`; None for the adapter's own."""
SubstituteRule = Literal["random", "end"]


def game_module(adapter: str, spec: str, maker: str) -> str:
    """The module of the game `spec`, such as `classic.connect_four_v3`; or any module that has `maker`.

    Raises:
        EnvironmentLoadError: PettingZoo is not installed, or has no such game.
    """
    require(adapter)
    module = f"pettingzoo.{spec}" if spec.split(".")[0] in FAMILIES else spec
    try:
        found = require(adapter, module)
    except EnvironmentLoadError as error:
        missing = error.__cause__.name if isinstance(error.__cause__, ModuleNotFoundError) else None
        if missing and (module == missing or module.startswith(f"{missing}.")):
            hint = "a game is named like classic.tictactoe_v3 (its file in pettingzoo)"
            raise EnvironmentLoadError(f"pettingzoo has no game '{spec}'", hint=hint) from error
        raise
    if not callable(getattr(found, maker, None)):
        hint = "a game is named like classic.tictactoe_v3"
        if maker == "parallel_env" and callable(getattr(found, "env", None)):
            hint = f"its agents move one after the other: pettingzoo_aec:{spec}"
        raise EnvironmentLoadError(f"{module} has no {maker}()", hint=hint)
    return module


def make_game(adapter: str, module: str, maker: str, options: Mapping[str, Any]) -> Any:
    """PettingZoo's environment.

    Raises:
        ConfigError: the game does not take these arguments.
        EnvironmentLoadError: the module, or what it needs, is not installed.
    """
    make = getattr(require(adapter, module), maker)
    try:
        return make(**options)
    except Exception as error:  # whatever the game makes of its arguments
        text = f"{module} cannot be made: {type(error).__name__}: {error}"
        raise ConfigError(text, hint="check environment.args") from error


def codec_for(choice: CodecChoice, env: Any) -> Callable[[Any, str], TurnCodec]:
    """Makes the codec of each seat; `choice` was loaded, if it was a file's."""
    name = str(env.metadata.get("name", "")).rsplit("_v", 1)[0]
    assert not isinstance(choice, str)
    return choice or KNOWN.get(name, TurnCodec)


def seed_actions(env: Any, seed: int) -> None:
    """The spaces' own random numbers, which some games draw from."""
    for place, agent in enumerate(env.possible_agents):
        env.action_space(agent).seed(seed % 2**31 + place)


def legal_actions(env: Any, agent: str, observation: Any, info: Mapping[str, Any]) -> list[int]:
    """What the action mask allows; without one, the whole space.

    Raises:
        EnvironmentFailedError: the space is not Discrete, or nothing is allowed.
    """
    mask = observation.get("action_mask") if isinstance(observation, Mapping) else None
    mask = info.get("action_mask") if mask is None else mask
    if mask is not None:
        legal = [action for action, allowed in enumerate(mask) if allowed]
        if not legal:
            raise EnvironmentFailedError(f"it is the turn of {agent}, and its action mask allows nothing")
        return legal
    space = env.action_space(agent)
    if not hasattr(space, "n"):
        hint = "only games with a Discrete action space are played"
        raise EnvironmentFailedError(f"the actions of {agent} are {type(space).__name__}", hint=hint)
    return list(range(int(space.start), int(space.start + space.n)))


def listed(names: Iterable[str]) -> str:
    """The line that says what is legal."""
    legal = sorted(names, key=lambda name: (len(name), name))
    more = f" and {len(legal) - MOST_ACTIONS} more" if len(legal) > MOST_ACTIONS else ""
    return f"Legal moves: {', '.join(legal[:MOST_ACTIONS])}{more}"


@dataclass
class _Seat:
    """What an agent is to be told, may do, and did."""

    codec: TurnCodec
    told: list[str] = field(default_factory=list)
    """What happened since it was shown something."""
    choices: dict[str, int] = field(default_factory=dict)
    """Its legal actions by their words, since its last view."""
    answers: int = 0
    illegal: int = 0
    earned: float = 0.0
    """By the game itself, without what illegal answers cost."""

    def take(self) -> list[str]:
        taken, self.told = self.told, []
        return taken


@dataclass(frozen=True)
class _Ruling:
    """What is played for an answer (None: the game ends), and what it costs."""

    move: int | None
    cost: float = 0.0


class PettingZooAgents(MultiAgentEnvironment):
    """One game of PettingZoo whose agents are all players of the run. `codec` is a class made with (env, agent), or
    `path/to/file.py:Class`. An answer that names no legal move costs `illegal_reward` (-0.1) and a random legal move, which the
    task's seed and the answer determine, is played instead (`illegal: random`); or it ends the game (`end`) for -1, and the
    others earn nothing. Other arguments are the game's own.

    Raises:
        ConfigError: an argument is wrong, or gives the game other agents.
    """

    adapter: ClassVar[str]
    module: ClassVar[str]
    maker: ClassVar[str]
    """The module's function that makes the game."""
    host_args: ClassVar[tuple[str, ...]] = ("codec",)
    """What loads files."""

    def __init__(
        self,
        codec: CodecChoice = None,
        illegal: SubstituteRule = "random",
        illegal_reward: float | None = None,
        **options: Any,
    ) -> None:
        if illegal not in ("random", "end"):
            hint = "it is random (a random legal move is played) or end; asking again would break the order of play"
            raise ConfigError(f"illegal is {illegal!r}", hint=hint)
        if illegal_reward is not None and not (isinstance(illegal_reward, int | float) and math.isfinite(illegal_reward)):
            raise ConfigError(f"illegal_reward is {illegal_reward!r}", hint="it is a number")
        self._rule = illegal
        self._illegal_reward = illegal_reward if illegal_reward is not None else -0.1 if illegal == "random" else -1.0
        self._codec_choice: Any = load_function(codec) if isinstance(codec, str) else codec
        self._env = make_game(self.adapter, self.module, self.maker, options)
        if (there := tuple(self._env.possible_agents)) != self.agents:
            self._env.close()
            raise ConfigError(
                f"with these arguments the agents of {self.module} are {_many(there)}, not {_many(self.agents)}",
                hint="derive a class that sets `agents` (docs/adapters.md)",
            )
        self._seed = 0
        self._seats: dict[str, _Seat] = {}
        self._zero_sum = True
        """Each step's rewards summed to zero so far."""

    @classmethod
    def make_task(cls, seed: int) -> Any:
        return SeededEnvironment.make_task(seed)

    @classmethod
    def held_out_tasks(cls) -> Sequence[Any]:
        return SeededEnvironment.held_out_tasks()

    @classmethod
    def task_source(cls, split: Split, args: Mapping[str, Any]) -> TaskSource:
        cls(**args).close()  # wrong arguments show before any episode
        return super().task_source(split, args)

    def leave(self, agent: str) -> MultiStepResult:
        """The game cannot go on without an agent."""
        return self._ended_by([agent], {}, f"{agent} has left.")

    def close(self) -> None:
        self._env.close()

    def _begin(self, task: Any) -> Any:
        """What PettingZoo's reset gives. Rules are what each agent is told first."""
        self._seed = seed_of(task)
        first = self._env.reset(seed=self._seed)
        seed_actions(self._env, self._seed)
        make = codec_for(self._codec_choice, self._env)
        self._seats = {agent: _Seat(make(self._env, agent)) for agent in self.agents}
        for seat in self._seats.values():
            seat.told.append(seat.codec.rules())
        return first

    def _view(self, agent: str, observation: Any, info: Mapping[str, Any]) -> str:
        """What an agent is shown before it acts: what happened, what it sees, what it may do."""
        seat = self._seats[agent]
        seat.choices = {seat.codec.name(move): move for move in legal_actions(self._env, agent, observation, info)}
        return "\n\n".join([*seat.take(), f"{seat.codec.board(observation)}\n{listed(seat.choices)}"])

    def _last_view(self, agent: str, observation: Any) -> str:
        """What an agent is shown for whom the game is over."""
        seat = self._seats[agent]
        return "\n\n".join([*seat.take(), f"{seat.codec.board(observation)}\nThe game is over."])

    def _ruling(self, agent: str, text: str) -> _Ruling:
        """What becomes of an answer."""
        seat = self._seats[agent]
        seat.answers += 1
        try:
            return _Ruling(choose(text, seat.choices))
        except IllegalMoveError:
            seat.illegal += 1
        if self._rule == "end":
            return _Ruling(None, self._illegal_reward)
        name, move = self._any_move(agent, text)
        seat.told.append(f"Your answer named no legal move: {name} was played for you.")
        return _Ruling(move, self._illegal_reward)

    def _any_move(self, agent: str, text: str) -> tuple[str, int]:
        """A legal move by chance: its word and itself."""
        numbers = random.Random(f"{self._seed} {agent} {self._seats[agent].answers} {text}")
        return numbers.choice(sorted(self._seats[agent].choices.items()))

    def _announce(self, moves: Mapping[str, int]) -> None:
        """Tell each agent what the others are about to play, where its codec says that everybody may see it."""
        for name, seat in self._seats.items():
            for agent, move in moves.items():
                if agent != name and seat.codec.moves_are_public:
                    who = "Your opponent" if len(self.agents) == 2 else agent
                    seat.told.append(f"{who} played {seat.codec.name(move)}.")

    def _played(
        self,
        rewards: Mapping[str, Any],
        costs: Mapping[str, float],
        shown: Mapping[str, str],
        left: Sequence[str],
        next_agents: Sequence[str] = (),
    ) -> MultiStepResult:
        """What came of a step; `costs` are what the answers of those who acted cost."""
        game = {agent: float(reward) for agent, reward in rewards.items() if agent in self._seats}
        for agent, reward in game.items():
            self._seats[agent].earned += reward
        self._zero_sum = self._zero_sum and abs(sum(game.values())) < 1e-6
        return MultiStepResult(
            {name: {"game": game.get(name, 0.0), "illegal": costs.get(name, 0.0)} for name in {**costs, **game}},
            shown,
            done=not self._env.agents,
            left=left,
            next_agents=next_agents,
            metrics={agent: self._metrics(agent, over=agent in left) for agent in dict.fromkeys([*costs, *left])},
        )

    def _ended_by(self, losers: Sequence[str], costs: Mapping[str, float], text: str) -> MultiStepResult:
        """The game ends without a result of its own. Of two agents the other has won, if it did not fail too."""
        playing = [agent for agent in self.agents if agent in self._env.agents]
        shown = dict.fromkeys(playing, f"{text} The game is over.")
        winners = [agent for agent in playing if agent not in losers] if len(self.agents) == 2 else []
        metrics = {}
        for agent in playing:
            won, lost = float(agent in winners), float(agent in losers)
            outcome = {"won": won, "lost": lost, "draw": 0.0} if won or lost else {}
            metrics[agent] = self._metrics(agent, over=False) | outcome
        rewards = {agent: {"game": 0.0, "illegal": costs.get(agent, 0.0)} for agent in playing}
        return MultiStepResult(rewards, shown, done=True, metrics=metrics)

    def _metrics(self, agent: str, *, over: bool) -> dict[str, float]:
        seat = self._seats[agent]
        numbers = {"illegal": seat.illegal / max(seat.answers, 1), "moves": float(seat.answers)}
        if not (over and self._zero_sum):
            return numbers
        won, lost = float(seat.earned > 0), float(seat.earned < 0)
        return numbers | {"won": won, "lost": lost, "draw": 1.0 - won - lost}


def agents_class(adapter: str, spec: str, base: type[PettingZooAgents]) -> type[PettingZooAgents]:
    """The game of PettingZoo's module `spec` for several agents.

    Raises:
        EnvironmentLoadError: there is none, or its agents are not known.
    """
    module = game_module(adapter, spec, base.maker)
    try:
        env = make_game(adapter, module, base.maker, {})
    except ConfigError as error:
        hint = "its agents are those that it has without arguments; wrap it in a module of yours that sets them"
        raise EnvironmentLoadError(error.detail, hint=hint) from error
    agents = getattr(env, "possible_agents", ())
    env.close()
    if not agents or not all(isinstance(agent, str) for agent in agents):
        raise EnvironmentLoadError(f"{module} does not name its agents", hint="possible_agents lists them, as texts")
    return adapted(
        adapter, spec, base, module=module, agents=tuple(agents), version=f"pettingzoo {metadata.version('pettingzoo')}"
    )


def _many(agents: Sequence[Any]) -> str:
    return ", ".join(map(str, agents))
