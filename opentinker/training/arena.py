"""Players meet beside training: policies of now, past versions of them, and reference players. Rows, ratings, what to save."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from opentinker.config.arena import ArenaConfig
from opentinker.config.server import LoraConfig
from opentinker.env.environment import Environment
from opentinker.env.load import load_function
from opentinker.errors import ConfigError, EpisodesFailedError
from opentinker.multiagent.arena import won
from opentinker.multiagent.games import Groups
from opentinker.multiagent.matches import Cast, Match, matches, spread
from opentinker.multiagent.players import PolicyPlayer, ScriptedPlayer, SeatPlayer
from opentinker.multiagent.runner import GameRunner
from opentinker.multiagent.shared import SharedEnvironment
from opentinker.multiagent.tally import Met, Tally, met, results_from_json, results_to_json
from opentinker.rollout.types import Episode, Group
from opentinker.training.metrics import Row, commonest_failure, finite

ARENA_SEED = 2**30
"""Added to a run's seed, for the games of its meetings."""
PairResults = dict[tuple[str, str], Met]
Draw = Callable[[], Awaitable[list[Any]]]
"""Gives the tasks that each pair plays."""


class PastPolicy(Protocol):
    """What the arena needs of a policy whose past versions play: a `PolicyClient` has it."""

    policy: str

    async def create_policy(self, lora: Any, *, name: str = "", seed: int = 0, critic: LoraConfig | None = None) -> Any: ...

    async def delete_policy(self, policy: str) -> None: ...

    async def load_weights(self, name: str, *, policy: str = "") -> dict[str, Any]: ...

    async def save(
        self, name: str, *, driver: Mapping[str, Any] | None = None, keep_last: int | None = None
    ) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Entrant:
    """A policy that meets others. `homes` are the seats that it learns in; `past`: its earlier versions play, too."""

    agent: str
    policy: Any
    homes: tuple[str, ...]
    player: Callable[[Any], PolicyPlayer]
    """Of a policy, how it is sampled as this agent's."""
    lora: LoraConfig | None = None
    past: bool = True


@dataclass
class Played:
    """The results of some matches, and how the games went."""

    results: PairResults = field(default_factory=dict)
    games: int = 0
    errors: int = 0
    tokens: int = 0


class MatchPlayer:
    """Plays matches, several at a time as long as no more than `max_concurrent` episodes run. `score` is as in `ArenaConfig`;
    what 'auto' stands for is settled by the first games."""

    def __init__(
        self, runner: GameRunner, seats: Sequence[str], draw: Draw, samples: int, score: str, max_concurrent: int
    ) -> None:
        """Raises: ConfigError when there are not two seats, and results are to be those of games that one of two wins."""
        if score == "won" and len(seats) != 2:
            raise ConfigError(
                f"arena.score 'won' is for games between two, and here are {len(seats)}", hint="arena.score: reward"
            )
        self._runner = runner
        self._seats = tuple(seats)
        self._draw = draw
        self._tasks: list[Any] | None = None
        self._samples = samples
        self._max_concurrent = max_concurrent
        self.won = None if score == "auto" and len(seats) == 2 else score == "won"
        """Whether results are those of games that one wins; None before the first games tell."""

    async def play(self, wanted: Sequence[Match], players: Mapping[str, SeatPlayer], step: int) -> Played:
        """`step` is part of the seeds.

        Raises:
            EpisodesFailedError: no game of a match could be used.
        """
        found, lists = Played(), dict[tuple[str, str], list[float]]()
        if self._tasks is None:
            self._tasks = await self._draw()
        for match, groups in zip(wanted, await self._games(wanted, players, self._tasks, step), strict=True):
            everything = [group for of_seat in groups.values() for group in of_seat]
            found.errors += sum(len(group.failures) for group in everything)
            found.tokens += sum(e.action_tokens for g in everything for e in (*g.episodes, *g.failures))
            found.games += max((sum(len(g.episodes) for g in of_seat) for of_seat in groups.values()), default=0)
            if self.won is None and any(g.episodes for g in everything):
                self.won = any("won" in e.metrics for g in everything for e in g.episodes)
            self._count(match, groups, lists)
        found.results = {pair: met(values) for pair, values in lists.items()}
        return found

    async def _games(
        self, wanted: Sequence[Match], players: Mapping[str, SeatPlayer], tasks: Sequence[Any], step: int
    ) -> list[Groups]:
        """Of each match; empty where nobody is a policy, so that nothing would be left to count."""
        slots = asyncio.Semaphore(max(1, self._max_concurrent // max(1, len(tasks) * self._samples)))

        async def play(match: Match) -> Groups:
            seated = {seat: players[name] for seat, name in match.seating.items()}
            if not any(isinstance(player, PolicyPlayer) for player in seated.values()):
                return {}
            async with slots:
                return await self._runner.run(seated, tasks, self._samples, step)

        running = [asyncio.ensure_future(play(match)) for match in wanted]
        try:
            return await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def _count(self, match: Match, groups: Mapping[str, list[Group]], lists: dict[tuple[str, str], list[float]]) -> None:
        """A game counts if it left an episode of anybody: who forfeited it leaves none. Where one of two wins, it counts alike
        for both, whichever of them left one."""
        usable = {
            seat: {(g.index, e.member): e for g in of_seat for e in g.episodes if e.termination.trains}
            for seat, of_seat in groups.items()
        }
        if groups and not any(usable.values()):
            seated = ", ".join(f"{who} as {where}" for where, who in match.seating.items())
            everything = [group for of_seat in groups.values() for group in of_seat]
            raise EpisodesFailedError(f"no game of {seated} could be used: {commonest_failure(everything)}")
        games = dict.fromkeys(game for of_seat in usable.values() for game in of_seat)
        for seat, name, other in match.scored:
            own = usable.get(seat, {})
            if self.won:
                theirs = usable.get(self._other(seat), {})
                values = [_score(own.get(game), theirs.get(game)) for game in games]
            else:
                values = [episode.reward for episode in own.values()]
            if values:  # none of a scripted player, whose rewards nobody tells
                lists.setdefault((name, other), []).extend(values)

    def _other(self, seat: str) -> str:
        return next(other for other in self._seats if other != seat)


class Arena:
    """Holds the results of all meetings of a run. `fixed` play the seats that no entrant has, by seat."""

    def __init__(
        self,
        config: ArenaConfig,
        runner: GameRunner,
        seats: Sequence[str],
        entrants: Sequence[Entrant],
        references: Mapping[str, SeatPlayer],
        fixed: Mapping[str, SeatPlayer],
        draw: Draw,
        max_concurrent: int,
    ) -> None:
        """Raises: ConfigError when the config does not fit so many seats."""
        self._config = config
        self._seats = tuple(seats)
        self._entrants = list(entrants)
        self._references = dict(references)
        self._fixed = dict(fixed)
        self._runner = runner
        self._player = MatchPlayer(runner, seats, draw, config.samples, config.score, max_concurrent)
        self.tally = Tally(won=False)
        self.steps: list[int] = []
        """After which steps they met."""

    async def close(self) -> None:
        """End what the environments left running."""
        await self._runner.close()

    def due(self, step: int, *, ends: bool) -> bool:
        """Whether they meet after this step."""
        every = self._config.every
        return step not in self.steps and (ends or step == 0 or bool(every and step % every == 0))

    async def meet(self, step: int) -> Row:
        """One meeting; its row.

        Raises:
            EpisodesFailedError: no game of a pair could be used.
            OpenTinkerError: what the server reports.
        """
        started = time.monotonic()
        earlier = spread(self.steps, self._config.past)
        if self._config.past:
            for entrant in self._entrants:
                if entrant.past:
                    await entrant.policy.save(snapshot(step))
        now = {version(entrant, step): entrant.player(entrant.policy) for entrant in self._entrants}
        standing: dict[str, SeatPlayer] = {**self._references, **self._fixed, **now}
        seen: set[tuple[str, ...]] = set()
        played = [await self._play(self._now(step), standing, step, seen)]
        for when in earlier:
            async with aclosing(self._past(when)) as past:  # a game that fails gives back the places of past versions
                async for casts, players in past:
                    played.append(await self._play(casts, {**standing, **players}, step, seen))
        results = {pair: found for part in played for pair, found in part.results.items()}
        self._count(step, results, won=self._player.won)
        now_called = {entrant.agent: version(entrant, step) for entrant in self._entrants}
        return cross_play_row(
            step, self.tally, results, played, now_called, list(self._references), seconds=time.monotonic() - started
        )

    async def _play(
        self,
        casts: list[tuple[str, Cast]],
        players: Mapping[str, SeatPlayer],
        step: int,
        seen: set[tuple[str, ...]],
    ) -> Played:
        """Arrangements that are in `seen` were played before in this meeting, such as those against a frozen policy."""
        everywhere = self._config.seats == "all"
        homes = {
            version(entrant, step): self._seats if everywhere else entrant.homes for entrant in self._entrants if entrant.past
        }
        wanted = [match for match in matches(self._seats, homes, casts) if tuple(match.seating.values()) not in seen]
        seen.update(tuple(match.seating.values()) for match in wanted)
        return await self._player.play(wanted, players, step)

    def _now(self, step: int) -> list[tuple[str, Cast]]:
        """Those against whom the policies of now play without any past version."""
        references = [(name, dict.fromkeys(self._seats, name)) for name in self._references]
        if self._config.seats == "own":
            return [(_label(step), self._generation(step)), *references]
        current = [version(entrant, step) for entrant in self._entrants]
        return [*((name, dict.fromkeys(self._seats, name)) for name in current), *references]

    def _generation(self, step: int) -> dict[str, str]:
        """Who plays which seat, where everybody has its own."""
        seated = {seat: version(entrant, step) for entrant in self._entrants for seat in entrant.homes}
        return {seat: seated.get(seat, seat) for seat in self._seats}

    async def _past(self, when: int) -> AsyncGenerator[tuple[list[tuple[str, Cast]], dict[str, SeatPlayer]], None]:
        """The versions after an earlier step, as many at a time as the arrangement of the seats needs."""
        learners = [entrant for entrant in self._entrants if entrant.past]
        if self._config.seats == "all":
            for entrant in learners:
                async with self._loaded(entrant, when) as player:
                    name = version(entrant, when)
                    yield [(name, dict.fromkeys(self._seats, name))], {name: player}
            return
        async with self._all_loaded(learners, when) as players:
            yield [(_label(when), self._generation(when))], players

    @asynccontextmanager
    async def _all_loaded(self, entrants: Sequence[Entrant], when: int) -> AsyncIterator[dict[str, SeatPlayer]]:
        if not entrants:
            yield {}
            return
        first, *rest = entrants
        async with self._loaded(first, when) as player, self._all_loaded(rest, when) as others:
            yield {version(first, when): player, **others}

    @asynccontextmanager
    async def _loaded(self, entrant: Entrant, when: int) -> AsyncIterator[SeatPlayer]:
        """A policy beside the agent's, with the weights that the agent's had."""
        policy: PastPolicy = entrant.policy
        name = f"{entrant.agent}.arena"
        slot = await policy.create_policy(entrant.lora, name=name)
        try:
            await slot.load_weights(snapshot(when), policy=policy.policy)
            yield entrant.player(slot)
        finally:
            await policy.delete_policy(name)

    def _count(self, step: int, results: PairResults, *, won: bool | None) -> None:
        if results:  # a meeting of nobody, such as the first one of a policy with itself, tells nothing
            self._player.won = won
        self.tally.won = bool(self._player.won)
        self.tally.add(results)
        self.steps.append(step)

    def state(self) -> dict[str, Any]:
        """What `restore` takes."""
        return {**self.tally.to_json(), "steps": list(self.steps)}

    def restore(self, state: Mapping[str, Any], later: Sequence[Row]) -> None:
        """Go on after a checkpoint, and after the rows that came after it."""
        if state:
            self.tally, self.steps = Tally.from_json(state), [int(step) for step in state["steps"]]
            self._player.won = self.tally.won if self.tally.results else self._player.won
        for row in later:
            if row["kind"] == "cross_play" and row["step"] not in self.steps:
                self._count(row["step"], results_from_json(row["results"]), won=row["score"] == "won")


def cross_play_row(
    step: int,
    tally: Tally,
    results: PairResults,
    played: Sequence[Played],
    players: Mapping[str, str],
    references: Sequence[str],
    *,
    seconds: float,
) -> Row:
    """The row of a meeting whose `results` are in the `tally` already. `players` are those whom it is about: what each is shown
    as, and its name in the tally. The first reference player's rating is 0, or else that of who came first."""
    names = tally.names
    anchor = next((name for name in references if name in names), names[0] if names else "")
    row: Row = {
        "kind": "cross_play",
        "step": step,
        "score": "won" if tally.won else "reward",
        "results": results_to_json(results),
        "matrix": _matrix(tally, results),
        "players": dict(players),
        "anchor": anchor,
        "ratings": {name: rating.to_json() for name, rating in tally.ratings(anchor).items()},
        "rating": {},
        "worst": {},
        "games": sum(part.games for part in played),
        "errors": sum(part.errors for part in played),
        "tokens_sampled": sum(part.tokens for part in played),
        "cross_play_s": seconds,
    }
    for shown, name in players.items():
        if name in row["ratings"]:
            row["rating"][shown] = row["ratings"][name]
        if (worst := tally.worst(name, references)) is not None:
            row["worst"][shown] = {"against": worst[0], **worst[1].to_json()}
    checked: Row = finite(row)
    return checked


def version(entrant: Entrant, step: int) -> str:
    """The name of an agent's policy after a step; one that never changes has only its agent's."""
    return f"{entrant.agent}@{step}" if entrant.past else entrant.agent


def snapshot(step: int) -> str:
    """The checkpoint of a policy as it was in a meeting."""
    return f"arena-{step:06d}"


def reference_players(
    names: Sequence[str] | None, environment: type[Environment], agents: Collection[str], base_dir: Path | None = None
) -> dict[str, SeatPlayer]:
    """Reference players by name: those that the environment brings, and functions from files.

    Raises:
        ConfigError: the environment brings none of this name; two have one name, or one has that of an agent.
        EnvironmentLoadError: a file or its function is missing.
    """
    brought = environment.played.players if issubclass(environment, SharedEnvironment) else {}
    found: dict[str, SeatPlayer] = {}
    for name in brought if names is None else names:
        short = name.rpartition(":")[2]
        if short in found or short in agents:
            what = "two players are called" if short in found else "a player is called as an agent,"
            raise ConfigError(f"arena.references: {what} '{short}'")
        if ":" in name:
            found[short] = ScriptedPlayer(load_function(name, base_dir), short)
        elif name in brought:
            found[short] = ScriptedPlayer(brought[name], short)
        else:
            there = f"it brings {', '.join(brought)}" if brought else "it brings none"
            raise ConfigError(
                f"arena.references: {environment.__name__} brings no player '{name}'",
                hint=f"{there}; your own is named path/to/file.py:function",
            )
    return found


def _score(own: Episode | None, theirs: Episode | None) -> float:
    """Of a game between two, by the episodes that it left."""
    told = [won(own)] if own is not None else []
    if theirs is not None:
        told.append(1.0 - won(theirs))
    return sum(told) / len(told)


def _label(step: int) -> str:
    return f"step {step}"


def _matrix(tally: Tally, results: PairResults) -> dict[str, dict[str, Any]]:
    """By player and opponent, of those who met."""
    matrix: dict[str, dict[str, Any]] = {}
    for name, other in results:
        if (estimate := tally.estimate(name, other)) is not None:
            matrix.setdefault(name, {})[other] = estimate.to_json()
    return matrix
