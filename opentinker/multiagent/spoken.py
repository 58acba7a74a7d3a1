"""What a player says that is no policy."""

import random
from collections.abc import Sequence

from opentinker.env.environment import Action, Message
from opentinker.env.threads import UserThreads
from opentinker.errors import OpenTinkerError, UnavailableError
from opentinker.multiagent.players import ModelPlayer, ScriptedPlayer
from opentinker.rollout.machine import Failed


async def spoken(
    player: ScriptedPlayer | ModelPlayer, seen: Sequence[Message], seed: int, threads: UserThreads
) -> Action | Failed:
    """The player's action after what it was shown and said so far. How long that may take is the caller's to see.

    Raises:
        OpenTinkerError: a model elsewhere refuses to be asked, which no other episode would survive either.
    """
    messages = list(seen)
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
