"""The config of who meets whom, besides training."""

from typing import Annotated, Literal

from pydantic import Field

from opentinker.config.base import Config, Count


class ArenaConfig(Config):
    """Players meet before the first step, every so many steps and after the last one: the policies of now, past versions of
    them, and reference players that stay the same. Policies are sampled as their agents are, at `evaluation.temperature`."""

    every: Annotated[int, Field(ge=0)] = 0
    """They meet every this many steps, too; 0 = only at start and end."""
    past: Annotated[int, Field(ge=0)] = 3
    """How many earlier meetings' versions each policy of now plays against: the first, the last, and others in between. Above 0
    the server needs room for one more adapter (with `seats: own`, for one of each agent that learns)."""
    references: tuple[str, ...] | None = None
    """Players that stay the same: names of those that the environment brings, such as `random`, or `path/to/file.py:function`
    as in `agents`. None = all that it brings. The first one has the rating 0."""
    tasks: Count = 16
    """Held-out tasks that each pair plays, from the first; training tasks of another seed where none are held out."""
    samples: Count = 2
    """Games per task and arrangement of the seats."""
    seats: Literal["all", "own"] = "all"
    """'all': each player plays each seat, so that a better seat favours nobody. 'own': a policy plays only where it learns, for
    games whose seats are different roles; its opponents are the policies of the other seats."""
    score: Literal["auto", "won", "reward"] = "auto"
    """'won': 1 for a game that reports `won`, 0 for `lost`, 0.5 for others; between two players, and then there are ratings.
    'reward': what a player earned, which nobody has to lose. 'auto' = 'won' where two play and games report it."""
