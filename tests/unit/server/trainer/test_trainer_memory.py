"""Packs by memory: every pass fits, nothing is lost, and what cannot fit is named."""

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opentinker.client.messages import Datum, TokenChunk
from opentinker.config.server import TrainerConfig
from opentinker.errors import TooLargeError, TrainerError
from opentinker.server.trainer.attention import PackLayout, packed_attention
from opentinker.server.trainer.budget import MemoryBudget, ModelSize, PassKind
from opentinker.server.trainer.memory import (
    DoesNotFitError,
    PassCost,
    PassShape,
    fitted,
    pass_shape,
    plan_packs,
    refusal,
    sequence_shape,
)
from opentinker.server.trainer.model import PackedModel
from opentinker.server.trainer.packing import Pack, pack_data
from opentinker.server.trainer.peak import peak_bytes
from opentinker.server.trainer.rank_trainer import AgreedError, RankTrainer
from opentinker.server.trainer.ranks import Ranks

BEGUN = PassCost(0, 0, 0, per_long_key=2.0, vocabulary=1, hidden_size=0)


def datum(prompt: int, answer: int, first: int = 1) -> Datum:
    tokens = np.full(prompt + answer, first, np.int32)
    weights = (np.arange(prompt + answer - 1) >= prompt - 1).astype(np.float32)
    return Datum((TokenChunk(tokens[:-1]),), tokens[1:], {"weights": weights})


def targets(packs: list[Pack]) -> list[tuple[int, int]]:
    return sorted((int(d), int(t)) for pack in packs for d, t in zip(pack.data_N, pack.steps_N, strict=True))


lengths = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(1, 3)), min_size=1, max_size=12)


@given(lengths, st.integers(16, 200), st.integers(40, 200), st.sampled_from([1, 2]))
def test_every_pack_fits_and_holds_its_part_of_all_targets(
    shapes: list[tuple[int, int, int]], pack_tokens: int, room: int, together: int
) -> None:
    if together == 2:  # pairs share their prompt
        shapes = [pair for shape in shapes for pair in (shape, shape)]
        room *= 2
    data = [datum(*shape) for shape in shapes]
    packs, used = plan_packs(data, pack_tokens, lambda pack: len(pack) <= room, together=together)
    assert used <= pack_tokens
    assert all(len(pack) <= room for pack in packs)
    assert targets(packs) == targets(pack_data(data, 10_000))
    if together == 2:
        homes = [{int(d) // 2 for d in pack.data_N} for pack in packs]
        assert sum(map(len, homes)) == len(set().union(*homes))


def test_packs_that_fit_are_those_without_a_budget() -> None:
    data = [datum(5, n + 1, n) for n in range(20)]
    packs, used = plan_packs(data, 64, lambda pack: True)
    assert used == 64
    assert [p.tokens_T.tolist() for p in packs] == [p.tokens_T.tolist() for p in pack_data(data, 64)]


def test_a_group_that_is_too_large_repeats_its_prompt() -> None:
    data = [datum(30, 10) for _ in range(8)]
    assert len(pack_data(data, 200)) == 1
    packs, _ = plan_packs(data, 200, lambda pack: len(pack) <= 50)
    assert len(packs) > 1
    assert all(pack.groups[0].prompt == 30 for pack in packs)


def test_what_cannot_fit_alone_is_named_with_what_would() -> None:
    data = [datum(3, 3), datum(50, 60, 2), datum(3, 3)]
    with pytest.raises(DoesNotFitError) as caught:
        plan_packs(data, 256, lambda pack: len(pack) <= 100)
    error = refusal(caught.value, 3 * 2**30, 2**30, 77, recomputes=False, lora=False)
    assert isinstance(error, TooLargeError)
    assert error.detail.startswith("datum 1 has 109 tokens, whose pass takes about 3.00 GiB; with 1.00 GiB to spare about 77")
    assert "trainer.activation_checkpointing=true, train an adapter (lora)" in error.hint
    done = refusal(caught.value, 3 * 2**30, -1, 0, recomputes=True, lora=True)
    assert "activation_checkpointing" not in done.hint
    assert "0.00 GiB to spare" in done.detail


def test_a_pair_that_cannot_fit_is_named_as_one() -> None:
    data = [datum(3, 3), datum(3, 3), datum(5, 60), datum(5, 60)]
    with pytest.raises(DoesNotFitError) as caught:
        plan_packs(data, 256, lambda pack: len(pack) <= 100, together=2)
    error = refusal(caught.value, 1, 1, 1, recomputes=True, lora=True)
    assert error.detail.startswith("data 2 and 3, which stay together, have")


@given(st.integers(0, 10**9), st.integers(0, 10**7), st.integers(0, 10**4))
def test_measurements_of_a_linear_cost_give_it_back(fixed: int, per_token: int, per_score: int) -> None:
    shapes = [PassShape(16, 1, 256), PassShape(192, 12, 3072), PassShape(192, 1, 36864)]
    cost = fitted(BEGUN, {s: fixed + per_token * s.tokens + per_score * s.scores for s in shapes})
    far = PassShape(4000, 1, 10**6)
    expected = fixed + per_token * far.tokens + per_score * far.scores
    assert cost.bytes(far) == pytest.approx(expected, rel=1e-3, abs=1e3)


@given(st.lists(st.integers(0, 10**9), min_size=3, max_size=3))
def test_no_measured_pass_is_underestimated(peaks: list[int]) -> None:
    shapes = [PassShape(16, 1, 256), PassShape(192, 12, 3072), PassShape(192, 1, 36864)]
    measured = dict(zip(shapes, peaks, strict=True))
    cost = fitted(BEGUN, measured)
    assert all(cost.bytes(shape) >= peak - 1 for shape, peak in measured.items())
    assert min(cost.fixed, cost.per_token, cost.per_score) >= 0


@given(st.floats(0, 1e9), st.booleans())
def test_the_longest_sequence_fits_and_one_more_token_does_not(limit: float, windowed: bool) -> None:
    cost = PassCost(1e4, 1e3, 2.0, 50.0, vocabulary=1000, hidden_size=8)
    tokens = cost.tokens_within(limit, windowed=windowed)
    size = [cost.bytes(sequence_shape(n, windowed=windowed)) for n in (tokens, tokens + 1)]
    assert tokens == 0 or size[0] <= limit
    assert size[1] > limit or tokens == 768  # the longest that holds its scores takes more than one that is a little longer


def test_the_shape_of_a_pack_counts_tiles() -> None:
    data = [datum(10, 5, 1), datum(10, 5, 1), datum(1000, 5, 2)]
    (pack,) = pack_data(data, 10_000)
    shape = pass_shape(pack)
    short = 10 + 4 + 4
    assert (shape.tokens, shape.targets) == (short + 1004, 15)
    assert shape.scores == short**2 + 4 * 1004  # the branch of the long one is a short tile that sees its prompt
    assert (shape.long_keys, shape.masked) == (1000, 0)
    assert pass_shape(pack, windowed=True).masked == 1000**2
    assert shape.copied_keys == 1000  # which that branch's tile copies


def beginning_alike(count: int, prefix: int, own: int) -> list[Datum]:
    """Prompts of which the first `prefix` tokens are the same."""
    rng = np.random.default_rng(0)
    begun, data = rng.integers(3, 512, prefix), []
    for _ in range(count):
        tokens = np.concatenate([begun, rng.integers(3, 512, own + 3)]).astype(np.int32)
        weights = (np.arange(len(tokens) - 1) >= prefix + own - 1).astype(np.float32)
        data.append(Datum((TokenChunk(tokens[:-1]),), tokens[1:], {"weights": weights}))
    return data


def test_the_shape_of_a_pack_counts_prefixes_that_its_groups_copy() -> None:
    (pack,) = pack_data(beginning_alike(100, 500, 3), 10_000)
    assert len(pack.groups) == 101
    assert pass_shape(pack).copied_keys == 100 * 500


def size_of(layers: int, heads: int, key_heads: int, width: int, device: str = "cpu", *, flex: bool = False) -> ModelSize:
    text = SimpleNamespace(
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=key_heads, head_dim=width, hidden_size=64
    )
    model = SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda: text),
        dtype=torch.float32,
        device=torch.device(device),
        flex=flex,
        trainable=lambda: {"weight": torch.zeros(64, 64)},
        vocabulary=1,
        hidden_size=0,
        longest=None,
    )
    return ModelSize.of(cast(PackedModel, model), recomputes=False)


def attention_bytes(pack: Pack, heads: int, key_heads: int, width: int) -> int:
    """What attention of one layer takes, with its backward pass."""
    layout = PackLayout(pack, torch.float32, torch.device("cpu"))
    query, key, value = (
        torch.randn(1, each, len(pack), width, dtype=torch.float32, requires_grad=True)
        for each in (heads, key_heads, key_heads)
    )

    def attend() -> None:
        packed_attention(torch.nn.Module(), query, key, value, None, packed=layout)[0].sum().backward()  # type: ignore[no-untyped-call]

    return peak_bytes(torch.device("cpu"), attend)


@pytest.mark.parametrize(("heads", "key_heads"), [(6, 2), (3, 3)])
@pytest.mark.parametrize(("prefix", "own"), [(180, 3), (60, 10)])
def test_what_attention_to_a_shared_prefix_takes_is_foreseen(heads: int, key_heads: int, prefix: int, own: int) -> None:
    plain = [pack_data(beginning_alike(count, 0, tokens), 10_000)[0] for count, tokens in ((1, 16), (12, 16), (1, 189))]
    begun = size_of(1, heads, key_heads, 32).rough
    cost = fitted(begun, {pass_shape(pack): attention_bytes(pack, heads, key_heads, 32) for pack in plain})
    (pack,) = pack_data(beginning_alike(20, prefix, own), 10_000)
    taken, shape = attention_bytes(pack, heads, key_heads, 32), pass_shape(pack)
    assert taken <= cost.bytes(shape) <= 2 * taken


def test_a_copied_key_counts_as_often_as_a_device_copies_it() -> None:
    once = size_of(4, 9, 3, 64).rough.per_copied_key
    assert once == 2 * 3 * 64 * 4 * (4 + 1)
    assert size_of(4, 9, 3, 64, "cuda").rough.per_copied_key == 3 * once  # for each query head
    assert size_of(4, 9, 3, 64, "cuda", flex=True).rough.per_copied_key == 0


def test_passes_with_copied_keys_raise_their_factor_alone() -> None:
    begun = PassCost(0, 0, 0, 0, vocabulary=1, hidden_size=0, per_copied_key=10.0)
    plain = {PassShape(16, 1, 256): 1000, PassShape(192, 12, 3072): 12_000, PassShape(192, 1, 36864): 40_000}
    alone = fitted(begun, plain)
    for extra, expected in ((0, 10), (9_000, 10), (30_000, 30)):
        copying = PassShape(192, 12, 20_000, copied_keys=1000)
        peak = round(alone.bytes(PassShape(192, 12, 20_000))) + extra
        cost = fitted(begun, {**plain, copying: peak})
        assert cost.per_copied_key == pytest.approx(expected, abs=0.01)
        assert (cost.fixed, cost.per_token, cost.per_score) == (alone.fixed, alone.per_token, alone.per_score)


class FullRank(RankTrainer):
    """A rank on which a pass that is measured runs out of memory."""

    def __init__(self, exchanges: bool) -> None:
        self._budget, self._device = MemoryBudget(TrainerConfig()), torch.device("cpu")
        self._ranks = cast(Ranks, SimpleNamespace(count=2, layer_bytes=lambda model: 0))
        self._model, self._size = cast(PackedModel, None), size_of(1, 2, 2, 8)
        self._shares = exchanges

    def _exchanges(self, policy: str) -> bool:
        return self._shares

    def _pass_kind(self, policy: str, *, scalar: bool, trains: bool) -> tuple[PassKind, int]:
        def run(data: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        return PassKind(policy, run, self._device, lambda rng, count: rng.integers(0, 9, count).astype(np.int32), True), 0


def test_memory_that_runs_out_on_a_rank_while_a_pass_is_measured_ends_no_rank_that_does_not_wait_for_it() -> None:
    with pytest.raises(AgreedError) as agreed:
        FullRank(exchanges=False).room_share("p", scalar=False, trains=True, measured=True)
    assert isinstance(agreed.value.problem, TrainerError)
    assert "not enough memory" in str(agreed.value.problem)
    with pytest.raises(TrainerError, match="not enough memory"):
        FullRank(exchanges=True).room_share("p", scalar=False, trains=True, measured=True)
