"""How a batch is shared out among ranks."""

from collections.abc import Callable

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from opentinker.client.messages import Datum, TokenChunk
from opentinker.server.trainer.packing import Pack, pack_data
from opentinker.server.trainer.ranks import BUCKET_BYTES, buckets, rows_of
from opentinker.server.trainer.shares import balance, share_out


@st.composite
def batches(draw: st.DrawFn) -> list[Datum]:
    """Data with few different prompts; some without a weighted target."""
    data = []
    for _ in range(draw(st.integers(0, 12))):
        prompt = [draw(st.integers(1, 3))] * draw(st.integers(1, 9))
        branch = draw(st.lists(st.integers(4, 9), max_size=9))
        tokens = np.array(prompt + branch + [1], np.int32)
        weights = (np.arange(len(tokens) - 1) >= len(prompt) - 1).astype(np.float32) * draw(st.sampled_from([0.0, 1.0, 1.0]))
        data.append(Datum((TokenChunk(tokens[:-1]),), tokens[1:], {"weights": weights}))
    return data


def packer(data: list[Datum], together: int = 1) -> Callable[[int], list[Pack]]:
    return lambda pack_tokens: pack_data(data, pack_tokens, together=together)


@given(batches(), st.integers(1, 5), st.integers(8, 64))
def test_every_weighted_target_is_in_one_share(data: list[Datum], ranks: int, pack_tokens: int) -> None:
    shares = share_out(data, ranks, pack_tokens, packer(data))
    assert len(shares) == ranks
    found = []
    for share in shares:
        for pack in share.packs:
            for index, step, row in zip(pack.data_N, pack.steps_N, pack.rows_N, strict=True):
                datum = share.data[index]
                assert pack.tokens_T[row] == datum.tokens[step]
                assert datum is data[share.indices[index]]
                found.append((share.indices[index], int(step)))
    wanted = [(index, int(step)) for index, datum in enumerate(data) for step in np.flatnonzero(datum.weights)]
    assert sorted(found) == wanted
    assert {share.passes for share in shares} == {max(len(share.packs) for share in shares)}


@given(batches(), st.integers(1, 5), st.integers(8, 64))
def test_the_same_batch_is_shared_out_the_same_way(data: list[Datum], ranks: int, pack_tokens: int) -> None:
    one, other = (share_out(data, ranks, pack_tokens, packer(data)) for _ in range(2))
    assert [share.indices for share in one] == [share.indices for share in other]
    for mine, theirs in zip(one, other, strict=True):
        for pack, same in zip(mine.packs, theirs.packs, strict=True):
            np.testing.assert_array_equal(pack.tokens_T, same.tokens_T)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(8, 64))
def test_pairs_stay_on_one_rank(pairs: int, ranks: int, pack_tokens: int) -> None:
    rng = np.random.default_rng(pairs)
    data = []
    for _ in range(pairs):
        prompt = rng.integers(1, 9, int(rng.integers(1, 9)))
        for _ in range(2):
            tokens = np.concatenate([prompt, rng.integers(1, 9, int(rng.integers(1, 30)))]).astype(np.int32)
            weights = (np.arange(len(tokens) - 1) >= len(prompt) - 1).astype(np.float32)
            data.append(Datum((TokenChunk(tokens[:-1]),), tokens[1:], {"weights": weights}))
    for share in share_out(data, ranks, pack_tokens, packer(data, 2)):
        assert all(index ^ 1 in share.indices for index in share.indices)


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 8))
def test_no_rank_has_more_than_the_even_part_and_one_size(sizes: list[int], ranks: int) -> None:
    parts = balance(sizes, ranks)
    assert sorted(index for part in parts for index in part) == list(range(len(sizes)))
    loads = [sum(sizes[index] for index in part) for part in parts]
    assert max(loads) <= sum(sizes) / ranks + max(sizes, default=0)


def test_one_full_pack_becomes_one_for_each_rank() -> None:
    rng = np.random.default_rng(0)
    data = []
    for _ in range(8):
        tokens = rng.integers(1, 90, 101).astype(np.int32)
        data.append(Datum((TokenChunk(tokens[:-1]),), tokens[1:], {"weights": np.ones(100, np.float32)}))
    shares = share_out(data, 2, 1024, packer(data))
    assert [len(share.data) for share in shares] == [4, 4]


@given(st.integers(1, 40), st.integers(1, 8))
def test_rows_are_dealt_out_as_chunks_are(size: int, ranks: int) -> None:
    chunks = [chunk.tolist() for chunk in torch.arange(size).chunk(ranks)]
    rows = [list(range(*rows_of(size, ranks, rank))) for rank in range(ranks)]
    assert [part for part in rows if part] == chunks


@given(st.lists(st.integers(0, 2 * BUCKET_BYTES), max_size=20))
def test_buckets_keep_the_order_and_their_size(sizes: list[int]) -> None:
    found = buckets(sizes, lambda size: size)
    assert [size for bucket in found for size in bucket] == sizes
    assert all(len(bucket) == 1 or sum(bucket) <= BUCKET_BYTES for bucket in found)
