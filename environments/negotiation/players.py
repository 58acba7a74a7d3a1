"""Players of negotiation that know the game."""

import random
import re
from collections.abc import Sequence

from opentinker.env.environment import Message

_RULES = re.compile(r"You are (\w+)\..*? divide (\d+) coins\. Each in turn proposes how many ([\w, ]+) get", re.DOTALL)
_PROPOSAL = re.compile(r"(\w+) proposes: ([\w ,]+)\.")


def random_offer(messages: Sequence[Message], numbers: random.Random) -> str:
    """Accepts half of the proposals, and else divides the coins at random."""
    _, coins, names = _rules(messages)
    if _proposal(messages) is not None and numbers.random() < 0.5:
        return "accept"
    cuts = sorted(numbers.randint(0, coins) for _ in names[1:])
    return _said([high - low for low, high in zip([0, *cuts], [*cuts, coins], strict=True)])


def fair(messages: Sequence[Message], numbers: random.Random) -> str:
    """Accepts an even share or more, and else proposes even shares."""
    me, coins, names = _rules(messages)
    offered = _proposal(messages)
    even = [coins // len(names) + (place < coins % len(names)) for place in range(len(names))]
    if offered is not None and offered.get(me, 0) >= coins // len(names):
        return "accept"
    return _said(even)


def greedy(messages: Sequence[Message], numbers: random.Random) -> str:
    """Wants half of the coins, gives the next in turn all but one of the rest, and accepts what gives it half."""
    me, coins, names = _rules(messages)
    offered, half = _proposal(messages), -(-coins // 2)
    if offered is not None and offered.get(me, 0) >= half:
        return "accept"
    partner = names[(names.index(me) + 1) % len(names)]
    shares = {me: half, partner: coins - half - 1}
    left = coins - sum(shares.values())
    return _said([shares.get(name, left) for name in names])


def _said(shares: Sequence[int]) -> str:
    return " ".join(map(str, shares))


def _rules(messages: Sequence[Message]) -> tuple[str, int, list[str]]:
    """Who it is, how many coins there are, and who gets some, in order.

    Raises:
        ValueError: the rules were not shown.
    """
    for message in messages:
        if (found := _RULES.search(str(message["content"]))) is not None:
            return found[1], int(found[2]), found[3].split(", ")
    raise ValueError("the rules were not shown")


def _proposal(messages: Sequence[Message]) -> dict[str, int] | None:
    """The last proposal of another, if nobody accepted or spoke since in between."""
    told = [found for message in messages for found in _PROPOSAL.finditer(str(message["content"]))]
    if not told:
        return None
    shares = [part.split() for part in told[-1][2].split(", ")]
    return {name: int(number) for name, number in shares}
