"""Attention in tiles against attention over the whole pack with one dense mask."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from opentinker.client.messages import Datum, TokenChunk
from opentinker.errors import ConfigError, TrainerError
from opentinker.server.trainer import attention, flex, prefixes
from opentinker.server.trainer.attention import PackLayout, packed_attention
from opentinker.server.trainer.flex import needed_blocks
from opentinker.server.trainer.model import PackedModel
from opentinker.server.trainer.packing import Pack, pack_data

HEADS, KEY_HEADS, WIDTH = 4, 2, 8


def make_pack() -> Pack:
    """Prompts of which three begin alike, and two of these with more alike."""
    rng = np.random.default_rng(0)
    data = []
    beginning = rng.integers(0, 50, 4)
    longer = np.concatenate([beginning, rng.integers(0, 50, 3)])
    for begun, prompt, branches in (
        ([], 5, (3, 0, 4, 2)),
        ([], 1, (6,)),
        (beginning, 2, (1, 1)),
        (longer, 1, (2, 5, 1)),
        (longer, 4, (1, 7)),
    ):
        start = np.concatenate([begun, rng.integers(0, 50, prompt)])
        prompt = len(start)
        for length in branches:
            tokens = np.concatenate([start, rng.integers(0, 50, length)]).astype(np.int32)
            weights = (np.arange(len(tokens)) >= prompt - 1).astype(np.float32)
            data.append(Datum((TokenChunk(tokens),), tokens, {"weights": weights}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixes, "MIN_PREFIX", 3)
        patch.setattr(prefixes, "MIN_SAVED", 3)
        (pack,) = pack_data(data, 200)
    assert sorted(len(group.prefix) for group in pack.groups) == [0, 0, 0, 1, 1, 2, 2]
    return pack


def dense(pack: Pack, window: int | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    sees = torch.from_numpy(pack.sees(np.arange(len(pack)), np.arange(len(pack))))
    if window is not None:
        position = torch.from_numpy(pack.positions_T)
        sees &= position[:, None] - position[None, :] < window
    k, v = (t.repeat_interleave(HEADS // KEY_HEADS, 1) for t in (k, v))
    scores = (q @ k.transpose(2, 3) * WIDTH**-0.5).masked_fill(~sees, -torch.inf)
    return (torch.softmax(scores, -1) @ v).transpose(1, 2)


@pytest.mark.parametrize("long_rows", [0, 4, 768])
@pytest.mark.parametrize("tile_rows", [1, 8, 1000])
@pytest.mark.parametrize("window", [None, 3])
def test_tiles_attend_as_one_dense_mask_does(
    tile_rows: int, long_rows: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "TILE_ROWS", tile_rows)
    monkeypatch.setattr(attention, "LONG_ROWS", long_rows)
    pack = make_pack()
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, len(pack), WIDTH, generator=generator).requires_grad_() for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    )
    layout = PackLayout(pack, torch.float32, torch.device("cpu"))
    out, _ = packed_attention(torch.nn.Identity(), q, k, v, None, sliding_window=window, packed=layout)
    expected = dense(pack, window, q, k, v)
    torch.testing.assert_close(out, expected)
    seed = torch.randn(out.shape, generator=generator)
    for mine, theirs in zip(
        torch.autograd.grad(out, (q, k, v), seed), torch.autograd.grad(expected, (q, k, v), seed), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


def test_tiles_cover_a_group_and_cut_neither_prompt_nor_branch() -> None:
    for group in make_pack().groups:
        for rows in range(1, 20):
            tiles = group.tiles(rows)
            assert tiles[0][0] == group.start
            assert tiles[-1][1] == group.stop
            assert all(a[1] == b[0] for a, b in pairwise(tiles))
            bounds = group.start + group.prompt + np.cumsum([0, *group.branches])
            assert {stop for _, stop in tiles} <= set(bounds.tolist())


def test_a_model_that_drops_the_layout_is_an_error() -> None:
    tensor = torch.zeros(1, 2, 3, 8)
    with pytest.raises(TrainerError, match="Identity does not pass"):
        packed_attention(torch.nn.Identity(), tensor, tensor, tensor, None)


@pytest.mark.parametrize("size", [1, 4, 16])
def test_every_block_that_a_row_sees_into_is_needed_and_few_others(size: int) -> None:
    pack = make_pack()
    count = -(-len(pack) // size)
    sees = np.zeros((count * size, count * size), np.bool_)
    sees[: len(pack), : len(pack)] = pack.sees(np.arange(len(pack)), np.arange(len(pack)))
    seen = sees.reshape(count, size, count, size).any((1, 3))
    needed = needed_blocks(pack, size)
    assert not (seen & ~needed).any()
    assert size > 1 or (seen == needed).all()


@pytest.mark.parametrize("size", [4, 128])
@pytest.mark.parametrize("window", [None, 3])
def test_flex_attends_as_one_dense_mask_does(window: int | None, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "BLOCK", size)
    pack = make_pack()
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, len(pack), 16, generator=generator) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    layout = PackLayout(pack, torch.float32, torch.device("cpu"), flex=True)
    out, _ = packed_attention(torch.nn.Identity(), q, k, v, None, scaling=WIDTH**-0.5, sliding_window=window, packed=layout)
    torch.testing.assert_close(out, dense(pack, window, q, k, v), rtol=0, atol=1e-5)


def test_flex_is_refused_where_it_cannot_train(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no backward pass on cpu") as caught:
        PackedModel(tmp_path, torch.float32, torch.device("cpu"), flex=True)
    assert "trainer.attention" in caught.value.hint
