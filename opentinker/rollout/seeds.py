"""Seeds that depend on what they are for and on nothing else, so that a run repeats whatever order things happen in."""

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**31) for parts such as (run seed, step, task, member, turn); the same on every machine."""
    digest = hashlib.blake2b("/".join(f"{type(p).__name__}:{p}" for p in parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1
