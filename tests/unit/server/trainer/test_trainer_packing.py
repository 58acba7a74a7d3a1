"""Packing: every weighted target exactly once, predicted from exactly its own datum's tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker.client.messages import Chunk, Datum, ImageChunk, IntArray, TokenChunk, chunk_tokens, placed_images
from opentinker.server.trainer import prefixes
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


def seen_rows(pack: Pack, row: int) -> IntArray:
    return np.flatnonzero(pack.sees(np.array([row]), np.arange(len(pack)))[0]).astype(np.int32)


def seen_tokens(pack: Pack, row: int) -> list[int]:
    """The tokens that a row sees, in the order of their positions."""
    rows = seen_rows(pack, row)
    positions = pack.positions_T[rows]
    assert sorted(positions) == list(range(len(rows)))
    return [int(t) for t in pack.tokens_T[rows[np.argsort(positions)]]]


@contextmanager
def shared_from(length: int, saved: int = 1) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixes, "MIN_PREFIX", length)
        patch.setattr(prefixes, "MIN_SAVED", saved)
        yield


@pytest.fixture(autouse=True, params=[1, 8])
def min_prefix(request: pytest.FixtureRequest) -> Iterator[None]:
    """What is true of packs is true however short the prefixes are that prompts share."""
    with shared_from(request.param):
        yield


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
            assert set(pack.slots_T[seen_rows(pack, int(row))].tolist()) == {slots[index]}
    assert sorted(covered) == [(i, int(t)) for i, d in enumerate(data) for t in np.flatnonzero(d.weights)]


def test_a_shared_prompt_is_laid_out_once() -> None:
    prompt = [5, 6, 7]
    data = [datum([*prompt, a, b], [0, 0, 1, 1, 1]) for a, b in permutations((1, 2, 3), 2)]
    (pack,) = pack_data(data, 1000)
    assert len(pack) == len(prompt) + 2 * len(data)
    assert [g.branches for g in pack.groups] == [(2,) * len(data)]
    assert np.count_nonzero(pack.rows_N == 2) == len(data)  # all first targets are predicted by the prompt's last row


def prompted(*prompts: list[int]) -> list[Datum]:
    """Two data of each prompt."""
    return [datum([*prompt, a, a], [0.0] * (len(prompt) - 1) + [1.0, 1.0, 0.0]) for prompt in prompts for a in (1, 2)]


SYSTEM, EXAMPLES = list(range(100, 120)), list(range(200, 220))


def test_what_prompts_begin_with_is_laid_out_once_and_what_some_of_them_go_on_with_too() -> None:
    more = [*SYSTEM, *EXAMPLES]
    (pack,) = pack_data(prompted([*SYSTEM, 7], [*more, 8], [*more, 9]), 1000)
    assert len(pack) == 20 + 20 + 3 + 6
    assert [(group.prompt, len(group.branches), group.prefix_length) for group in pack.groups] == [
        (20, 0, 0),
        (20, 0, 20),
        (1, 2, 40),
        (1, 2, 40),
        (1, 2, 20),
    ]
    assert pack.sequence_tokens == 2 * (22 + 42 + 42)


@pytest.mark.parametrize(("length", "saved", "rows"), [(20, 20, 2 * 23 - 20), (21, 1, 2 * 23), (1, 21, 2 * 23)])
def test_a_prefix_that_is_short_or_saves_little_is_computed_again(length: int, saved: int, rows: int) -> None:
    with shared_from(length, saved):
        (pack,) = pack_data(prompted([*SYSTEM, 7], [*SYSTEM, 8]), 1000)
    assert len(pack) == rows


def test_where_all_have_too_little_in_common_some_may_have_more() -> None:
    with shared_from(8):
        (pack,) = pack_data(prompted([1, 2, *SYSTEM, 7], [1, 2, *SYSTEM, 8], [1, 3, *SYSTEM, 7], [1, 3, *SYSTEM, 8]), 1000)
    assert [group.prefix_length for group in pack.groups] == [0, 22, 22, 0, 22, 22]


def test_a_prompt_that_another_begins_with_keeps_its_last_token() -> None:
    (pack,) = pack_data(prompted(SYSTEM, [*SYSTEM, 7]), 1000)
    assert len(pack) == 19 + 1 + 2 + 2 + 2


def test_a_prefix_of_more_than_fits_into_a_pack_is_repeated_in_each() -> None:
    packs = pack_data(prompted(*([*SYSTEM, a] for a in range(5))), 20 + 2 * 3)
    assert [len(pack) for pack in packs] == [26, 26, 23]
    assert all(pack.tokens_T[:20].tolist() == SYSTEM for pack in packs)
    assert [len(pack.groups) for pack in packs] == [3, 3, 1]  # where one is alone, its prefix is its prompt's


def test_prefixes_that_continue_each_other_are_as_many_as_max_depth() -> None:
    letters = [list(range(1000 * i, 1000 * i + 20)) for i in range(12)]
    prompts = [[*(token for part in letters[: i + 1] for token in part), 7] for i in range(12)]
    (pack,) = pack_data(prompted(*prompts, [*prompts[-1], 8]), 1 << 20)
    assert max(len(group.prefix) for group in pack.groups) == prefixes.MAX_DEPTH


def tokens_computed(data: list[Datum], pack_tokens: int, shortest: int) -> int:
    with shared_from(shortest):
        return sum(map(len, pack_data(data, pack_tokens)))


@given(batches(), st.integers(1, 40))
def test_to_share_prefixes_never_takes_more_tokens(data: list[Datum], pack_tokens: int) -> None:
    alone, shared = (tokens_computed(data, pack_tokens, shortest) for shortest in (1000, 1))
    assert shared <= alone


@given(batches(), st.integers(1, 40))
def test_a_prefix_is_seen_by_two_groups_and_is_as_long_as_it_has_to_be(data: list[Datum], pack_tokens: int) -> None:
    for pack in pack_data(data, pack_tokens):
        spans = [span for group in pack.groups for span in group.prefix]
        for group in pack.groups:
            span = (group.start, group.start + group.prompt)
            if not group.branches:
                continue
            assert span not in spans
        for span in set(spans):
            assert span[1] - span[0] >= prefixes.MIN_PREFIX
            assert sum(span in group.prefix for group in pack.groups) >= 2
            assert any((group.start, group.start + group.prompt) == span for group in pack.groups)


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
            rows = seen_rows(pack, int(row))
            seen = {(int(pack.positions_T[start]), image.sha256) for start, image in pack.images if start in rows}
            expected = {(start, image.sha256) for start, image in placed_images(data[index].chunks) if start <= step}
            assert seen == expected
            assert seen_tokens(pack, int(row)) == data[index].tokens[: step + 1].tolist()
        starts = [group.start for group in pack.groups]
        for start, image in pack.images:
            assert not any(start < bound < start + len(image.tokens) for bound in starts)


def test_prompts_with_other_images_are_not_shared() -> None:
    def shown(name: str) -> Datum:
        ids = np.array([9, 9], np.int32)
        weights = np.array([0, 0, 0, 1], np.float32)
        return Datum((TokenChunk(np.array([5], np.int32)), ImageChunk(name, ids), TokenChunk(np.array([6], np.int32))),
                     np.array([9, 9, 6, 7], np.int32), {"weights": weights})  # fmt: skip

    (pack,) = pack_data([shown("a"), shown("b"), shown("a")], 100)
    assert [len(group.branches) for group in pack.groups if group.branches] == [2, 1]
    assert [image.sha256 for _, image in sorted(pack.images, key=lambda placed: placed[0])] == ["a", "b"]
    assert [pack.positions_T[start] for start, _ in pack.images] == [1, 1]


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
