"""Writes the pairs of answers that configs/preference.yaml trains on: sums, said right and briefly, are preferred.

    python examples/preferences.py configs

A rejected answer is a wrong sum, or the right one at length. The sums that are held out are in no training pair.
"""

import json
import random
import sys
from pathlib import Path

LARGEST = 20
HELD_OUT = 60


def pair(a: int, b: int, rng: random.Random) -> dict[str, str]:
    """One comparison."""
    if rng.random() < 0.5:
        wrong = rng.choice([value for value in range(max(0, a + b - 3), a + b + 4) if value != a + b])
        rejected = f"{a} + {b} = {wrong}"
    else:
        rejected = f"Well, let me think about it. I would say that the answer could be {a + b}."
    return {"prompt": f"What is {a} + {b}?", "chosen": f"{a} + {b} = {a + b}", "rejected": rejected}


def main(folder: Path) -> None:
    rng = random.Random(0)
    sums = [(a, b) for a in range(LARGEST + 1) for b in range(a, LARGEST + 1)]
    rng.shuffle(sums)
    parts = {"preferences-held-out.jsonl": sums[:HELD_OUT], "preferences.jsonl": sums[HELD_OUT:] * 2}
    for name, chosen in parts.items():
        lines = [json.dumps(pair(*rng.sample(numbers, 2), rng)) for numbers in chosen]
        (folder / name).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
