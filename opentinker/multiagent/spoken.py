"""What a player says that is no policy."""

import asyncio
import random
from collections.abc import Sequence

from opentinker.env.environment import Action, Message
from opentinker.env.threads import UserThreads
from opentinker.errors import OpenTinkerError, UnavailableError
from opentinker.multiagent.players import ModelPlayer, ScriptedPlayer
from opentinker.rollout.machine import DeadlinePassed, Failed


async def spoken(
    player: ScriptedPlayer | ModelPlayer, seen: Sequence[Message], seed: int, threads: UserThreads, timeout_s: float
) -> Action | DeadlinePassed | Failed:
    """The player's action after what it was shown and said so far, or why there is none.

    Raises:
        OpenTinkerError: a model elsewhere refuses to be asked, which no other episode would survive either.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _said(player, list(seen), seed, threads)
    except TimeoutError:
        return DeadlinePassed(f"the player did not answer within {timeout_s:.3g} s")


async def _said(
    player: ScriptedPlayer | ModelPlayer, messages: list[Message], seed: int, threads: UserThreads
) -> Action | Failed:
    try:
        if isinstance(player, ModelPlayer):
            text = await player.ask(messages, seed)
        else:
            act = player.act
            text = await threads.call(lambda: act(messages, random.Random(seed)))
    except UnavailableError as error:
        return Failed(str(error))
    except Exception as error:
        if isinstance(player, ModelPlayer) and isinstance(error, OpenTinkerError):
            raise
        # A user's function, or a bug.
        return Failed(f"the player '{player.name}' raised {type(error).__name__}: {error}")
    if not isinstance(text, str):
        return Failed(f"the player '{player.name}' gave {type(text).__name__}, not a text")
    return Action(text)
