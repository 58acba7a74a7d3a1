"""Checkpoints of finished runs meet: which of them, on what server, and what comes of it."""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from opentinker.client.policy import PolicyClient
from opentinker.config.arena import ArenaConfig
from opentinker.config.base import nearest
from opentinker.config.job import RLJobConfig
from opentinker.env.environment import Environment
from opentinker.errors import ConfigError
from opentinker.multiagent.matches import matches, spread
from opentinker.multiagent.players import SeatPlayer
from opentinker.multiagent.runner import GameRunner
from opentinker.multiagent.seats import seats_of
from opentinker.multiagent.tally import Tally
from opentinker.training.arena import ARENA_SEED, MatchPlayer, cross_play_row, reference_players
from opentinker.training.homes import home_of
from opentinker.training.metrics import Row
from opentinker.training.policy_player import policy_player
from opentinker.training.tasks import JobTasks

_NUMBERED = re.compile(r"(?:step|arena)-(\d+)")
FINAL = "final"
WHILE_TRAINING = "an `arena` in the run's config compares its agents while they train"


@dataclass(frozen=True)
class Version:
    """A checkpoint that plays: its address, whose policy it is, and after which step; None if its name does not say."""

    ref: str
    agent: str
    step: int | None
    label: str

    @property
    def name(self) -> str:
        """What it is called in a table."""
        return f"{self.agent}@{self.label if self.step is None else self.step}"


def versions(config: RLJobConfig, saved: Sequence[Mapping[str, Any]], last_step: int | None) -> list[Version]:
    """The checkpoints of a run's agents that learn and are not `left_out`, as the scheduler lists them: one of each step, by
    agent and step. The step of `final` is `last_step`."""
    without = left_out(config)
    learners = [name for name in config.learners if name not in without]
    found: dict[tuple[str, Any], Version] = {}
    for checkpoint in saved:
        agent = checkpoint.get("policy") or config.own_policy
        if agent not in learners:
            continue
        numbered = _NUMBERED.fullmatch(checkpoint["name"])
        step = int(numbered[1]) if numbered else last_step if checkpoint["name"] == FINAL else None
        found.setdefault((agent, checkpoint["name"] if step is None else step), _version(checkpoint, agent, step))
    return sorted(found.values(), key=lambda one: (learners.index(one.agent), one.step is None, one.step or 0, one.label))


def left_out(config: RLJobConfig) -> dict[str, str]:
    """The agents that learn whose policies have no place on one server with the others', and why."""
    found = {}
    for name in config.learners:
        server = config.server_of(name)
        if server.base_model != config.base_model:
            found[name] = f"the base model of its server is {server.base_model}, that of the job's own {config.base_model}"
        elif config.lora_of(name) is None:
            found[name] = "it trained full parameters, which need a server for themselves"
    return found


def chosen(found: Sequence[Version], per_agent: int) -> list[Version]:
    """Of each agent's numbered versions the first, the last, and others as evenly as it goes; and any `final`."""
    picked: list[Version] = []
    for agent in dict.fromkeys(version.agent for version in found):
        by_step = {version.step: version for version in found if version.agent == agent and version.step is not None}
        picked += [by_step[step] for step in spread(sorted(step for step in by_step if step is not None), per_agent)]
        picked += [one for one in found if one.agent == agent and one.step is None and one.label == FINAL]
    return picked


def named(found: Sequence[Version], names: Sequence[str], without: Mapping[str, str] = MappingProxyType({})) -> list[Version]:
    """The versions of these names, `white@20` or `white@best`. `without` are the agents that are `left_out`.

    Raises:
        ConfigError: there is none of a name, or its agent is left out.
    """
    by_name = {version.name: version for version in found}
    if barred := [name for name in names if name.partition("@")[0] in without]:
        raise ConfigError(f"'{barred[0]}' cannot play here: {without[barred[0].partition('@')[0]]}", hint=WHILE_TRAINING)
    if missing := [name for name in names if name not in by_name]:
        hint = f"{nearest(missing[0], by_name)}; there are {', '.join(by_name)}" if by_name else "it has saved none"
        raise ConfigError(f"the run has no checkpoint '{missing[0]}'", hint=hint)
    return [by_name[name] for name in names]


async def play_versions(
    own: PolicyClient,
    config: RLJobConfig,
    arena: ArenaConfig,
    environment: type[Environment],
    players: Sequence[Version],
    base_dir: Path | None = None,
) -> Row:
    """Everybody meets everybody on the server of `own`, whose job names the checkpoints; the row of the meeting. The server has
    room for a policy of each player, besides its own.

    Raises:
        ConfigError: the environment is for one agent; a reference player is not there.
        EpisodesFailedError: no game of a pair could be used.
        OpenTinkerError: what the server reports.
    """
    started = time.monotonic()
    seats = seats_of(environment, config.environment.args)
    if seats is None:
        raise ConfigError(f"{environment.__name__} is an environment for one agent", hint="players meet in games of several")
    references = reference_players(arena.references, environment, config.agents, base_dir)
    home = await home_of(own)
    seated: dict[str, SeatPlayer] = dict(references)
    for place, version in enumerate(players):
        lora = config.lora_of(version.agent)
        if lora is None:
            raise ConfigError("only adapters meet on one server, and this run trained full parameters")
        policy = await own.create_policy(lora, name=f"player-{place}")
        await policy.load_weights(version.ref)
        seated[version.name] = policy_player(
            policy,
            home,
            config.agents[version.agent].sampling or config.sampling,
            deadline_s=config.rollout.generation_timeout_s,
            temperature=config.evaluation.temperature,
        )
    make = partial(environment, **config.environment.args)
    seed = config.training.seed + ARENA_SEED
    runner = GameRunner(make, seats, config.rollout, config.turns, seed)
    tasks = JobTasks(environment, config.environment, timeout_s=config.rollout.reset_timeout_s, base_dir=base_dir)
    draw, at_once = partial(tasks.standing, seed, arena.tasks), config.rollout.max_concurrent_episodes
    games = MatchPlayer(runner, seats.agents, draw, arena.samples, arena.score, at_once)
    casts = [(name, dict.fromkeys(seats.agents, name)) for name in seated]
    homes = {version.name: _homes(config, version.agent, seats.agents, arena) for version in players}
    try:
        played = await games.play(matches(seats.agents, homes, casts), seated, 0)
    finally:
        await runner.close()
    tally = Tally(won=bool(games.won))
    tally.add(played.results)
    names = {version.name: version.name for version in players}
    last = max((version.step or 0 for version in players), default=0)
    seconds = time.monotonic() - started
    return cross_play_row(last, tally, played.results, [played], names, list(references), seconds=seconds)


def _homes(config: RLJobConfig, agent: str, seats: Sequence[str], arena: ArenaConfig) -> list[str]:
    if arena.seats == "all":
        return list(seats)
    return [seat for seat in seats if seat == agent or config.agents[seat].policy == agent]


def _version(checkpoint: Mapping[str, Any], agent: str, step: int | None) -> Version:
    return Version(checkpoint["ref"], agent, step, checkpoint["name"])
