"""Packing: every weighted target exactly once, predicted from exactly its own datum's tokens."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker.client.messages import Chunk, Datum, ImageChunk, TokenChunk, chunk_tokens, placed_images
from opentinker.server.trainer.packing import Pack, pack_data


def datum(tokens: list[int], weights: list[float]) -> Datum:
    inputs = np.array(tokens, np.int32)
    targets = np.append(inputs[1:], 7).astype(np.int32)
    return Datum((TokenChunk(inputs),), targets, {"weights": np.array(weights, np.float32)})


@st.composite
def batches(draw: st.DrawFn) -> list[Datum]:
    """Data over two letters, so that prompts and whole data often coincide."""
    length = st.integers(1, 9)
    data = []
    for _ in range(draw(st.integers(0, 8))):
        n = draw(length)
        tokens = draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))
        weights = draw(st.lists(st.sampled_from([0.0, 1.0, 0.5]), min_size=n, max_size=n))
        data.append(datum(tokens, weights))
    return data


def seen_tokens(pack: Pack, row: int) -> list[int]:
    """The tokens that a row sees, in the order of their positions."""
    (group,) = [g for g in pack.groups if g.start <= row < g.stop]
    rows = group.start + np.flatnonzero(group.mask()[row - group.start])
    positions = pack.positions_T[rows]
    assert sorted(positions) == list(range(len(rows)))
    return [int(t) for t in pack.tokens_T[rows[np.argsort(positions)]]]


@given(batches(), st.integers(1, 40))
def test_every_weighted_target_is_covered_once_and_sees_its_own_prefix(data: list[Datum], pack_tokens: int) -> None:
    covered = []
    for pack in pack_data(data, pack_tokens):
        for row, index, step in zip(pack.rows_N, pack.data_N, pack.steps_N, strict=True):
            covered.append((int(index), int(step)))
            assert seen_tokens(pack, int(row)) == data[index].tokens[: step + 1].tolist()
    expected = [(i, int(t)) for i, d in enumerate(data) for t in np.flatnonzero(d.weights)]
    assert sorted(covered) == expected


@given(batches(), st.integers(1, 40))
def test_a_pack_exceeds_the_budget_only_for_a_single_datum(data: list[Datum], pack_tokens: int) -> None:
    for pack in pack_data(data, pack_tokens):
        assert len(pack) == pack.groups[-1].stop
        if len(pack) > pack_tokens:
            assert len(set(pack.data_N.tolist())) == 1


@given(batches(), st.integers(1, 40), st.data())
def test_data_of_several_policies_are_each_computed_in_their_own_slot(
    data: list[Datum], pack_tokens: int, choice: st.DataObject
) -> None:
    slots = [choice.draw(st.integers(-1, 2)) for _ in data]
    covered = []
    for pack in pack_data(data, pack_tokens, slots):
        assert pack.slots_T is not None
        assert len(pack.slots_T) == len(pack)
        for row, index, step in zip(pack.rows_N, pack.data_N, pack.steps_N, strict=True):
            covered.append((int(index), int(step)))
            assert seen_tokens(pack, int(row)) == data[index].tokens[: step + 1].tolist()
            (group,) = [g for g in pack.groups if g.start <= row < g.stop]
            assert set(pack.slots_T[group.start : group.stop].tolist()) == {slots[index]}
    assert sorted(covered) == [(i, int(t)) for i, d in enumerate(data) for t in np.flatnonzero(d.weights)]


def test_a_shared_prompt_is_laid_out_once() -> None:
    prompt = [5, 6, 7]
    data = [datum([*prompt, a, b], [0, 0, 1, 1, 1]) for a, b in permutations((1, 2, 3), 2)]
    (pack,) = pack_data(data, 1000)
    assert len(pack) == len(prompt) + 2 * len(data)
    assert [g.branches for g in pack.groups] == [(2,) * len(data)]
    assert np.count_nonzero(pack.rows_N == 2) == len(data)  # all first targets are predicted by the prompt's last row


def test_a_group_that_does_not_fit_is_split_and_its_prompt_repeated() -> None:
    data = [datum([5, 6, a, a], [0, 1, 1, 1]) for a in range(5)]
    packs = pack_data(data, 6)
    assert [len(p) for p in packs] == [6, 6, 4]
    assert all(p.tokens_T[:2].tolist() == [5, 6] for p in packs)


def test_tokens_that_no_weighted_target_depends_on_are_left_out() -> None:
    (pack,) = pack_data([datum([1, 2, 3, 4, 5], [0, 1, 0, 0, 0])], 100)
    assert pack.tokens_T.tolist() == [1, 2]


@pytest.mark.parametrize("data", [[], [datum([1], [0])], [datum([1, 2, 3], [0, 0, 0])]])
def test_without_a_weighted_target_there_is_no_pack(data: list[Datum]) -> None:
    assert pack_data(data, 100) == []


def test_a_datum_of_one_token_is_a_prompt_without_a_branch() -> None:
    (pack,) = pack_data([datum([4], [1])], 100)
    assert (pack.tokens_T.tolist(), pack.rows_N.tolist(), pack.steps_N.tolist()) == ([4], [0], [0])


@given(batches(), st.randoms(use_true_random=False))
def test_packs_do_not_depend_on_the_order_of_the_data(data: list[Datum], random: object) -> None:
    order = list(range(len(data)))
    random.shuffle(order)  # type: ignore[attr-defined]
    for one, other in zip(pack_data(data, 12), pack_data([data[i] for i in order], 12), strict=True):
        assert one.tokens_T.tolist() == other.tokens_T.tolist()
        assert one.groups == other.groups
        assert one.rows_N.tolist() == other.rows_N.tolist()


@st.composite
def illustrated(draw: st.DrawFn) -> list[Datum]:
    """Data of two letters and two pictures, which have the same tokens, so that often the pictures alone tell prompts apart."""
    data = []
    for _ in range(draw(st.integers(1, 6))):
        chunks: list[Chunk] = []
        weights: list[float] = []
        for kind in draw(st.lists(st.sampled_from(["t", "t", "a", "b"]), min_size=1, max_size=5)):
            ids = np.array([draw(st.integers(0, 1))] if kind == "t" else [9, 9], np.int32)
            chunks.append(TokenChunk(ids) if kind == "t" else ImageChunk(kind, ids))
            weights += [draw(st.sampled_from([0.0, 1.0]))] if kind == "t" else [0.0, 0.0]
        targets = np.append(chunk_tokens(chunks)[1:], 7).astype(np.int32)
        data.append(Datum(tuple(chunks), targets, {"weights": np.array([*weights[1:], 1.0], np.float32)}))
    return data


@given(illustrated(), st.integers(1, 40))
def test_a_target_sees_the_images_of_its_own_datum_at_their_own_places(data: list[Datum], pack_tokens: int) -> None:
    for pack in pack_data(data, pack_tokens):
        for row, index, step in zip(pack.rows_N, pack.data_N, pack.steps_N, strict=True):
            (group,) = [g for g in pack.groups if g.start <= row < g.stop]
            rows = group.start + np.flatnonzero(group.mask()[row - group.start])
            seen = {(int(pack.positions_T[start]), image.sha256) for start, image in pack.images if start in rows}
            expected = {(start, image.sha256) for start, image in placed_images(data[index].chunks) if start <= step}
            assert seen == expected
            assert seen_tokens(pack, int(row)) == data[index].tokens[: step + 1].tolist()


def test_prompts_with_other_images_are_not_shared() -> None:
    def shown(name: str) -> Datum:
        ids = np.array([9, 9], np.int32)
        weights = np.array([0, 0, 0, 1], np.float32)
        return Datum((TokenChunk(np.array([5], np.int32)), ImageChunk(name, ids), TokenChunk(np.array([6], np.int32))),
                     np.array([9, 9, 6, 7], np.int32), {"weights": weights})  # fmt: skip

    (pack,) = pack_data([shown("a"), shown("b"), shown("a")], 100)
    assert [len(group.branches) for group in pack.groups] == [2, 1]
    assert sorted((start, image.sha256) for start, image in pack.images) == [(1, "a"), (5, "b")]


@st.composite
def pair_batches(draw: st.DrawFn) -> list[Datum]:
    """Pairs over two letters that share their prompt."""
    letters, data = st.lists(st.integers(0, 1), min_size=1, max_size=6), []
    for _ in range(draw(st.integers(0, 5))):
        prompt = draw(letters)
        for _ in range(2):
            answer = draw(letters)
            data.append(datum([*prompt, *answer], [0.0] * (len(prompt) - 1) + [1.0] * (len(answer) + 1)))
    return data


@given(pair_batches(), st.integers(1, 40))
def test_a_pair_stays_in_one_pack_side_by_side_whatever_the_budget(data: list[Datum], pack_tokens: int) -> None:
    covered = []
    for pack in pack_data(data, pack_tokens, together=2):
        order = list(dict.fromkeys(pack.data_N.tolist()))
        assert len(order) % 2 == 0
        assert all(b == a + 1 and a % 2 == 0 for a, b in zip(order[0::2], order[1::2], strict=True))
        assert len(pack) <= pack_tokens or len(order) == 2
        for row, index, step in zip(pack.rows_N, pack.data_N, pack.steps_N, strict=True):
            covered.append((int(index), int(step)))
            assert seen_tokens(pack, int(row)) == data[index].tokens[: step + 1].tolist()
    assert sorted(covered) == [(i, int(t)) for i, d in enumerate(data) for t in np.flatnonzero(d.weights)]
