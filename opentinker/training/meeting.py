"""How the driver of some agents meets those of the others: what all must agree on, and the runners of games in such a run."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from opentinker.config.job import RLJobConfig
from opentinker.env.environment import Environment
from opentinker.env.remote import TOKEN_VARIABLE, remote_environment
from opentinker.env.secret_files import read_token
from opentinker.multiagent.coordination.member import Member
from opentinker.multiagent.coordination.run import SeatKind
from opentinker.multiagent.coordination.seat_runner import SeatRunner
from opentinker.multiagent.games import Games
from opentinker.multiagent.runner import GameRunner
from opentinker.multiagent.seats import Seats, identity_of

EVALUATION_SEED = 2**31
"""Added to the run's: evaluation must not reuse training's sampling seeds."""
_OF_EACH = {"generation_timeout_s", "generation_retries"}
"""Of a rollout's limits, what each driver decides for its own policies."""


def runners(config: RLJobConfig, environment: type[Environment], seats: Seats, member: Member | None) -> tuple[Games, Games]:
    """Who plays the games of training and of evaluation: this process, or the coordinator with the others."""
    seed = config.training.seed
    if member is not None:
        return (
            SeatRunner(member, "train", config.rollout, config.turns, seed),
            SeatRunner(member, "evaluation", config.rollout, config.turns, seed + EVALUATION_SEED),
        )
    make = partial(environment, **config.environment.args)
    return (
        GameRunner(make, seats, config.rollout, config.turns, seed),
        GameRunner(make, seats, config.rollout, config.turns, seed + EVALUATION_SEED),
    )


async def join_run(config: RLJobConfig, environment: type[Environment], steps: Sequence[int]) -> Member | None:
    """Join the run that the config names, if it names one. `steps` are those after which this driver could go on.

    Raises:
        ConflictError: a seat is taken, or the drivers do not agree; the detail names both values.
        UnavailableError: the coordinator does not answer.
        OpenTinkerError: what it reports.
    """
    if (meeting := config.coordinator) is None:
        return None
    args = config.environment.args
    url = meeting.url or config.environment.name.split(",")[0].strip()
    remote_environment(url)  # looks at the address
    identity = await asyncio.to_thread(identity_of, environment, args)
    token = read_token(meeting.token_file or args.get("token_file"), TOKEN_VARIABLE)
    member = Member(url, token, meeting.run, {name: _kind(config, name) for name in config.agents})
    try:
        await member.join(terms_of(config, identity), steps)
    except BaseException:
        await member.leave()
        raise
    return member


def terms_of(config: RLJobConfig, identity: dict[str, Any]) -> dict[str, Any]:
    """What the drivers of a run must agree on, by dotted names; `identity` is that of the environment."""
    rollout = config.rollout.model_dump(mode="json", exclude=_OF_EACH)
    turns = config.turns.model_dump(mode="json")
    evaluation = config.evaluation.model_dump(
        mode="json", include={"at_start", "at_end", "every", "max_tasks", "samples_per_task"}
    )
    return {
        "environment.version": identity["version"],
        "environment.name": identity["name"],
        "environment.agents": list(identity["agents"]),
        "environment.args": {name: value for name, value in config.environment.args.items() if name != "token_file"},
        **{f"rollout.{name}": value for name, value in rollout.items()},
        **{f"turns.{name}": value for name, value in turns.items()},
        **{f"evaluation.{name}": value for name, value in evaluation.items()},
        "algorithm.group_size": config.algorithm_of(config.learners[0]).group_size,
        "training.seed": config.training.seed,
        "training.save_every": config.training.save_every,
    }


def _kind(config: RLJobConfig, name: str) -> SeatKind:
    agent = config.agents[name]
    return "script" if agent.script or agent.model is not None else "policy"
