"""Who meets whom, and in which seats. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Cast = Mapping[str, str]
"""Seat -> who plays there, by name."""


@dataclass(frozen=True)
class Match:
    """One arrangement of the seats, and whose results count: (seat, who plays there, against whom) each."""

    seating: dict[str, str]
    scored: tuple[tuple[str, str, str], ...]


def matches(seats: Sequence[str], homes: Mapping[str, Sequence[str]], casts: Sequence[tuple[str, Cast]]) -> list[Match]:
    """Each player of `homes` in each of its seats against each cast, (name, who plays which seat), in the other seats. Of two
    seats both sides count. No arrangement comes twice, and nobody meets itself alone."""
    found: dict[tuple[str, ...], list[tuple[str, str, str]]] = {}
    for player, own in homes.items():
        for label, cast in casts:
            for home in own:
                seating = {seat: player if seat == home else cast[seat] for seat in seats}
                others = [seating[seat] for seat in seats if seat != home]
                if set(others) <= {player}:
                    continue
                # The one who plays all other seats has a name; several have that of their cast.
                against = others[0] if len(set(others)) == 1 else label
                scored = [(home, player, against)]
                if len(seats) == 2:
                    scored += [(seat, seating[seat], player) for seat in seats if seat != home]
                counted = found.setdefault(tuple(seating.values()), [])
                counted += [one for one in scored if one not in counted]
    return [Match(dict(zip(seats, seated, strict=True)), tuple(counted)) for seated, counted in found.items()]


def spread(steps: Sequence[int], count: int) -> list[int]:
    """`count` of the steps at most, in order: the first, the last, and others as evenly as it goes."""
    if count <= 0:
        return []
    if len(steps) <= count:
        return list(steps)
    if count == 1:
        return [steps[0]]
    return [steps[round(place * (len(steps) - 1) / (count - 1))] for place in range(count)]
