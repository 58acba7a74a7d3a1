"""A token is in the loss exactly if it was sampled, exactly if it has a logprob."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker.client.messages import Chunk, Datum, ImageChunk, Sample, TokenChunk, chunk_tokens, placed_images
from opentinker.client.wire import pack, unpack
from opentinker.rollout.trajectory import Run, RunKind, Trajectory


def sample(tokens: list[int], version: int = 0) -> Sample:
    logprobs = -np.arange(1, len(tokens) + 1, dtype=np.float32)
    return Sample(np.array(tokens, np.int32), logprobs, "stop", ((version, len(tokens)),))


tokens = st.lists(st.integers(0, 99), min_size=1, max_size=6)
turns = st.lists(st.tuples(tokens, tokens), min_size=1, max_size=5)


@given(prompt=tokens, turns=turns)
def test_masks_follow_from_provenance(prompt: list[int], turns: list[tuple[list[int], list[int]]]) -> None:
    trajectory = Trajectory()
    trajectory.append_rendered(RunKind.PROMPT, prompt)
    expected_tokens, sampled = list(prompt), [False] * len(prompt)
    for action, observation in turns:
        trajectory.append_sample(sample(action))
        trajectory.append_rendered(RunKind.OBSERVATION, observation)
        expected_tokens += action + observation
        sampled += [True] * len(action) + [False] * len(observation)
    assert trajectory.tokens.tolist() == expected_tokens
    assert trajectory.loss_mask.tolist() == [float(s) for s in sampled]
    assert ((trajectory.behaviour_logprobs != 0) == np.array(sampled)).all()
    assert trajectory.action_tokens == sum(sampled)
    assert sum(n for _, n in trajectory.versions) == sum(sampled)

    datum = trajectory.to_datum()
    assert datum.tokens.tolist() == expected_tokens[:-1]
    assert datum.targets.tolist() == expected_tokens[1:]
    assert datum.weights.tolist() == [float(s) for s in sampled[1:]]


def test_an_action_run_without_its_sample_cannot_be_built() -> None:
    chunk = (TokenChunk(np.array([1], np.int32)),)
    with pytest.raises(ValueError, match="exactly the ACTION runs"):
        Run(RunKind.ACTION, chunk)
    with pytest.raises(ValueError, match="exactly the ACTION runs"):
        Run(RunKind.OBSERVATION, chunk, sample([1]))


def test_sampled_tokens_cannot_be_replaced_or_lose_their_version() -> None:
    chunk = (TokenChunk(np.array([1, 2], np.int32)),)
    with pytest.raises(ValueError, match="exactly the sampled tokens"):
        Run(RunKind.ACTION, chunk, sample([1, 3]))
    short = Sample(np.array([1, 2], np.int32), np.zeros(2, np.float32), "stop", ((0, 1),))
    with pytest.raises(ValueError, match="has a policy version"):
        Run(RunKind.ACTION, chunk, short)


image = ImageChunk("ab" * 32, np.full(3, 50, np.int32))


places = st.lists(st.sampled_from(["before", "between", "after", "none"]), min_size=5, max_size=5)


@given(prompt=tokens, turns=turns, shown=places)
def test_images_keep_their_places_and_are_never_in_the_loss(
    prompt: list[int], turns: list[tuple[list[int], list[int]]], shown: list[str]
) -> None:
    def rendered(ids: list[int], where: str) -> tuple[Chunk, ...]:
        middle = len(ids) // 2
        first, second = (TokenChunk(np.array(part, np.int32)) for part in (ids[:middle], ids[middle:]))
        chunks = {
            "before": (image, first, second),
            "between": (first, image, second),
            "after": (first, second, image),
            "none": (first, second),
        }[where]
        return tuple(chunk for chunk in chunks if len(chunk.tokens))

    trajectory = Trajectory()
    trajectory.append_rendered(RunKind.PROMPT, rendered(prompt, "before"))
    for (action, observation), where in zip(turns, shown, strict=False):
        trajectory.append_sample(sample(action))
        trajectory.append_rendered(RunKind.OBSERVATION, rendered(observation, where))
    np.testing.assert_array_equal(chunk_tokens(trajectory.chunks), trajectory.tokens)
    assert not any(isinstance(a, TokenChunk) and isinstance(b, TokenChunk) for a, b in pairwise(trajectory.chunks))
    datum = trajectory.to_datum()
    assert datum.weights.sum() == trajectory.action_tokens, "whatever is left out at the end, no action is"
    received = Datum.from_wire(unpack(pack(datum.to_wire())))
    assert len(received) == len(datum)
    for start, chunk in placed_images(datum.chunks):
        np.testing.assert_array_equal(trajectory.tokens[start : start + 3], chunk.tokens)
