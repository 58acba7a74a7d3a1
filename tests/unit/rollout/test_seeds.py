"""Seeds repeat on every machine and tell everything apart."""

from itertools import product

from opentinker.rollout.seeds import derive_seed


def test_a_seed_is_the_same_for_ever() -> None:
    assert derive_seed(0, 1, 2, 3) == 1621034049
    assert 0 <= derive_seed("x", -1) < 2**31


def test_neighbouring_parts_give_unrelated_seeds() -> None:
    seeds = [derive_seed(*parts) for parts in product(range(4), range(8), range(8), range(8))]
    assert len(set(seeds)) == len(seeds)
    assert len({derive_seed(1, 23), derive_seed(12, 3), derive_seed("1", 23), derive_seed(1, 2, 3)}) == 4
