"""Data and requests are checked on arrival; the error names what is wrong."""

from typing import Any

import numpy as np
import pytest

from opentinker.client.messages import (
    Datum,
    ImageChunk,
    Sample,
    SampleRequest,
    SampleResult,
    SamplingParams,
    TokenChunk,
    placed_images,
    validate,
)
from opentinker.client.wire import pack, unpack
from opentinker.errors import InvalidRequestError


def datum(**changes: Any) -> dict[str, Any]:
    return {"chunks": [1, 2, 3], "targets": [2, 3, 4], "weights": [0, 1, 1], "advantages": [0, 0.5, 0.5]} | changes


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"stop\.1"):
        validate(SamplingParams, {"stop": ["end", ""]})
    assert validate(SamplingParams, {"stop": ["end"]}).stop == ("end",)


def test_a_datum_survives_the_wire() -> None:
    first = Datum.from_wire(datum())
    second = Datum.from_wire(unpack(pack(first.to_wire())))
    np.testing.assert_array_equal(second.tokens, [1, 2, 3])
    np.testing.assert_array_equal(second.targets, [2, 3, 4])
    np.testing.assert_array_equal(second.weights, np.array([0, 1, 1], np.float32))
    assert second.arrays.keys() == first.arrays.keys()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"targets": [2, 3]}, "3 tokens but 2 targets"),
        ({"advantages": [0, float("nan"), 0]}, "advantages holds NaN"),
        ({"advantages": [0, float("inf"), 0]}, "NaN or infinity"),
        ({"advantages": [1, 2]}, "advantages has shape"),
        ({"advantages": ["a", "b", "c"]}, "advantages must be a list of numbers"),
        ({"rewards": [1, 2, 3]}, "unknown array 'rewards'"),
        ({"chunks": [1, -2, 3]}, "outside int32"),
        ({"chunks": [1.5, 2.5, 3.5]}, "flat list of token ids"),
        ({"chunks": [{"kind": "video", "hash": "x"}]}, "unknown chunk kind 'video'"),
        ({"weights": None}, "weights"),
    ],
)
def test_a_wrong_datum_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        Datum.from_wire(datum(**changes))


def test_a_datum_without_weights_is_refused() -> None:
    body = datum()
    del body["weights"]
    with pytest.raises(InvalidRequestError, match="needs 'weights'"):
        Datum.from_wire(body)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": [1]}, "request_id"),
        ({"request_id": "a", "prompt": []}, "prompt is empty"),
        ({"request_id": "a", "prompt": [1], "n": 0}, "between 1 and 1024"),
        ({"request_id": "a", "prompt": [1], "params": {"temperature": -1}}, "temperature"),
        ({"request_id": "a", "prompt": [1], "params": {"temprature": 1}}, "temprature"),
        ({"request_id": "a", "prompt": [1], "max_tokens": 3}, "unknown keys in a sample request: max_tokens"),
        ({"request_id": "a", "prompt": [1], "version": -1}, "version must be a whole number from 0, not -1"),
        ({"request_id": "a", "prompt": [1], "version": True}, "version must be a whole number from 0, not True"),
        ({"request_id": "a", "prompt": [1], "version": "latest"}, "version must be .* not 'latest' .leave it out"),
        ([], "must be an object"),
    ],
)
def test_a_wrong_sample_request_is_refused_by_name(body: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        SampleRequest.from_wire(body)


def test_a_sample_result_survives_the_wire() -> None:
    sample = Sample(np.array([5, 6], np.int32), np.array([-0.5, -1.0], np.float32), "stop", ((3, 2),))
    result = SampleResult("r", (sample,), SamplingParams(max_tokens=4), np.zeros(3, np.float32))
    back = SampleResult.from_wire(unpack(pack(result.to_wire())))
    assert back.request_id == "r"
    assert back.params == result.params
    assert back.samples[0].versions == ((3, 2),)
    np.testing.assert_array_equal(back.samples[0].tokens, sample.tokens)
    np.testing.assert_array_equal(back.samples[0].logprobs, sample.logprobs)


def test_request_round_trip() -> None:
    request = SampleRequest("r", (TokenChunk(np.array([1, 2], np.int32)),), SamplingParams(seed=3, stop=("x",)), 2, True, 7)
    back = SampleRequest.from_wire(unpack(pack(request.to_wire())))
    assert (back.request_id, back.params, back.n, back.prompt_logprobs, back.version) == ("r", request.params, 2, True, 7)


def test_a_sample_request_without_a_version_asks_for_the_latest() -> None:
    assert SampleRequest.from_wire({"request_id": "r", "prompt": [1]}).version is None
    assert SampleRequest.from_wire({"request_id": "r", "prompt": [1], "version": 0}).version == 0


def test_validate_names_the_field() -> None:
    with pytest.raises(InvalidRequestError, match="top_p"):
        validate(SamplingParams, {"top_p": 2})


def image(count: int = 3) -> ImageChunk:
    return ImageChunk("ab" * 32, np.arange(count, dtype=np.int32), b"encoded")


def test_of_an_image_only_its_hash_and_its_number_of_tokens_travel() -> None:
    request = SampleRequest("r", (tokens(1, 2), image(), tokens(3)))
    packed = pack(request.to_wire())
    assert b"encoded" not in packed
    before, back, after = SampleRequest.from_wire(unpack(packed)).prompt
    assert isinstance(back, ImageChunk)
    assert (back.sha256, back.tokens.tolist(), back.data) == ("ab" * 32, [-1, -1, -1], None)
    assert (before.tokens.tolist(), after.tokens.tolist()) == ([1, 2], [3])
    assert [(start, chunk.sha256) for start, chunk in placed_images(request.prompt)] == [(2, "ab" * 32)]


def tokens(*ids: int) -> TokenChunk:
    return TokenChunk(np.array(ids, np.int32))


@pytest.mark.parametrize(
    "chunk",
    [
        {"kind": "image"},
        {"kind": "image", "sha256": "ab" * 32},
        {"kind": "image", "sha256": "AB" * 32, "count": 3},
        {"kind": "image", "sha256": "ab", "count": 3},
        {"kind": "image", "sha256": "ab" * 32, "count": 0},
        {"kind": "image", "sha256": "ab" * 32, "count": 10**9},
        {"kind": "image", "sha256": "ab" * 32, "count": True},
        {"kind": ["image"]},
    ],
)
def test_a_wrong_image_chunk_is_refused(chunk: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=r"image chunk needs|unknown chunk kind"):
        SampleRequest.from_wire({"request_id": "r", "prompt": [chunk]})


def test_no_token_of_an_image_may_be_in_the_loss() -> None:
    """The target before an image is its first token; the target at its last token is what follows it."""

    def sent(*weights: float) -> Any:
        chunks = (tokens(1, 2), image(), tokens(3, 4))
        arrays = {"weights": np.array(weights, np.float32)}
        return unpack(pack(Datum(chunks, np.arange(7, dtype=np.int32), arrays).to_wire()))

    assert Datum.from_wire(sent(1, 0, 0, 0, 1, 1, 1)).weights.tolist() == [1, 0, 0, 0, 1, 1, 1]
    for place in (1, 2, 3):
        weights = [0.0] * 7
        weights[place] = 1.0
        with pytest.raises(InvalidRequestError, match="image at token 2 of a datum is in the loss"):
            Datum.from_wire(sent(*weights))
