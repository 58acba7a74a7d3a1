"""A job server on a tiny vision-language model: images from the client through the front to both engines and the trainer."""

import asyncio
import base64
import io
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from server_tools import FAST, LORA, Server, serving
from trainer_tools import gradients
from vlm_tools import IMAGE_TOKENS, build_tiny_vlm, picture

from opentinker.client.messages import (
    AdamParams,
    Chunk,
    Datum,
    FloatArray,
    ImageChunk,
    LossConfig,
    Minibatch,
    PolicySpec,
    SampleRequest,
    SamplingParams,
    TokenChunk,
    chunk_tokens,
    placed_images,
)
from opentinker.config.server import EngineConfig, LoraConfig, TrainerConfig
from opentinker.errors import ConfigError, EngineError, ImageMissingError, InvalidRequestError, TooLargeError
from opentinker.server import images
from opentinker.server.engine.select import create_engine
from opentinker.server.images import ImageProcessor, ImageStore
from opentinker.server.trainer import prefixes
from opentinker.server.trainer.lead_trainer import LeadTrainer
from opentinker.server.trainer.packing import pack_data
from opentinker.server.trainer.trainer import TorchTrainer

IMAGE_TOKEN = 3
START, QUESTION, ASIDE = [1, 300, 301], [310, 311, 312], [320, 321]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)


def tokens(ids: list[int]) -> TokenChunk:
    return TokenChunk(np.asarray(ids, np.int32))


@pytest.fixture(scope="module")
def vlm_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_vlm(tmp_path_factory.mktemp("tiny-vlm"))


@pytest.fixture(scope="module")
def oracle(vlm_dir: Path) -> Any:
    """The model itself, to compute what engines and trainer should have computed."""
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(vlm_dir, dtype=torch.float32).eval()


@pytest.fixture
def store(vlm_dir: Path) -> ImageStore:
    return ImageStore(ImageProcessor(vlm_dir))


def pixels_of(model_dir: Path, *pictures: bytes) -> dict[str, torch.Tensor]:
    """What transformers' own processor makes of several pictures together."""
    from PIL import Image
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(model_dir)
    opened = [Image.open(io.BytesIO(p)) for p in pictures]
    out = processor(text=["<image>" * len(opened)], images=[opened], return_tensors="pt")
    return {key: value for key, value in out.items() if key.startswith("pixel")}


@torch.inference_mode()
def greedy(model: Any, chunks: tuple[Chunk, ...], pixels: dict[str, torch.Tensor]) -> list[int]:
    ids = torch.from_numpy(chunk_tokens(chunks).astype(np.int64))[None]
    found = model.generate(input_ids=ids, max_new_tokens=GREEDY.max_tokens, do_sample=False, **pixels)
    return [int(token) for token in found[0, ids.shape[1] :]]


async def conversation(server: Server, *pictures: bytes) -> tuple[Chunk, ...]:
    """A prompt that shows the pictures: the first one after its start, the others later on."""
    shown = list((await server.client.upload(pictures)).values())
    prompt: list[Chunk] = [tokens(START), *shown[:1], tokens(QUESTION)]
    for image in shown[1:]:
        prompt += [tokens(ASIDE), image, tokens(QUESTION)]
    return tuple(prompt)


@pytest.mark.parametrize(
    ("kind", "lora", "lora_serving", "layout"),
    [
        ("transformers", None, "merge", "colocated"),
        ("transformers", None, "merge", "split"),
        ("vllm", None, "merge", "colocated"),
        ("vllm", LORA, "merge", "colocated"),
        ("vllm", LORA, "adapter", "colocated"),
    ],
)
async def test_images_are_seen_by_the_engine_as_the_model_itself_sees_them_and_by_the_trainer_too(
    vlm_dir: Path, tmp_path: Path, oracle: Any, kind: str, lora: LoraConfig | None, lora_serving: str, layout: str
) -> None:
    async with serving(vlm_dir, tmp_path, kind=kind, lora=lora, lora_serving=lora_serving, layout=layout) as server:
        assert (await server.client.info())["image_placeholder"] == "<image>"
        first, second = picture(1), picture(2, 64, 48)
        answers = []
        for pictures in ((first,), (second,), (first, second), (second, first, second)):
            prompt = await conversation(server, *pictures)
            (sample,) = (await server.client.sample(prompt, GREEDY)).samples
            assert sample.tokens.tolist() == greedy(oracle, prompt, pixels_of(vlm_dir, *pictures))
            answers.append(sample.tokens.tobytes())
        assert len(set(answers)) == len(answers)
        # A picture in a later turn only, and a prompt without any, between prompts with pictures.
        text = (tokens(START + QUESTION),)
        later = (*text, tokens(ASIDE), prompt[1], tokens(QUESTION))
        both = await asyncio.gather(server.client.sample(text, GREEDY), server.client.sample(later, GREEDY))
        assert both[0].samples[0].tokens.tolist() == greedy(oracle, text, {})
        assert both[1].samples[0].tokens.tolist() == greedy(oracle, later, pixels_of(vlm_dir, second))

        # What is sampled is what is trained on: the trainer gives it the logprob that the engine gave it.
        data = [await sampled_datum(server, await conversation(server, first, second), seed) for seed in range(3)]
        data += [await sampled_datum(server, await conversation(server, second, first), 7)]
        for step in range(3):
            behaviour = [datum.arrays["behaviour_logprobs"] for datum in data]
            scores = (await server.client.forward(data))["logprobs"]
            for mine, theirs in zip(scores, behaviour, strict=True):
                np.testing.assert_allclose(mine, theirs, atol=2e-3)
            published = await server.client.train_step(
                data, [Minibatch(indices=(0, 1, 2, 3), factor=0.1)], LossConfig(name="importance_sampling"), FAST
            )
            assert published["version"] == step + 1
            assert published["publish"]["drift"] < 0.01
            assert published["publish"]["changed"]
            data = [await scored_anew(server, datum) for datum in data]


async def sampled_datum(server: Server, prompt: tuple[Chunk, ...], seed: int) -> Datum:
    (sample,) = (await server.client.sample(prompt, SamplingParams(max_tokens=5, seed=seed))).samples
    answer = TokenChunk(sample.tokens)
    weights = np.zeros(len(chunk_tokens(prompt)) + len(sample.tokens) - 1, np.float32)
    weights[-len(sample.tokens) :] = 1
    behaviour = np.zeros_like(weights)
    behaviour[-len(sample.tokens) :] = sample.logprobs
    everything = chunk_tokens((*prompt, answer))
    inputs = (*prompt, TokenChunk(sample.tokens[:-1]))
    return Datum(inputs, everything[1:], {"weights": weights, "advantages": weights, "behaviour_logprobs": behaviour})


async def scored_anew(server: Server, datum: Datum) -> Datum:
    """The datum with the logprobs that the engine gives its tokens now."""
    prompt = (*datum.chunks, TokenChunk(datum.targets[-1:]))
    result = await server.client.sample(prompt, SamplingParams(max_tokens=1), prompt_logprobs=True)
    assert result.prompt_logprobs is not None
    return replace(datum, arrays=datum.arrays | {"behaviour_logprobs": result.prompt_logprobs[1:] * datum.weights})


@pytest.fixture
async def server(vlm_dir: Path, tmp_path: Path) -> AsyncIterator[Server]:
    async with serving(vlm_dir, tmp_path) as server:
        yield server


async def test_an_image_travels_once_and_again_when_the_server_has_dropped_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[str, int]] = []
    request = server.client._http.request

    async def counting(method: str, path: str, **more: Any) -> Any:
        sent.append((path.rpartition("/")[2], len(more.get("content") or b"")))
        return await request(method, path, **more)

    monkeypatch.setattr(server.client._http, "request", counting)
    big = picture(1, 900, 700)
    uploads = [conversation(server, big) for _ in range(8)]
    prompt, *others = await asyncio.gather(*uploads)
    assert [name for name, _ in sent] == ["images"]
    assert all(other[1].sha256 == prompt[1].sha256 for other in others if isinstance(other[1], ImageChunk))
    sent.clear()
    before = (await server.client.sample(prompt, GREEDY)).samples[0]
    datum = await sampled_datum(server, prompt, 0)
    await server.client.forward([datum])
    await server.client.upload([big])
    assert "images" not in dict(sent)
    assert max(size for _, size in sent) < len(big)

    def forget() -> None:
        sent.clear()
        store = server.parts.images
        assert store is not None
        for sha256 in [sha256 for sha256 in store._encoded if not store._pins[sha256]]:
            del store._encoded[sha256], store._tokens[sha256], store._processed[sha256]

    forget()
    assert (await server.client.sample(prompt, GREEDY)).samples[0].tokens.tolist() == before.tokens.tolist()
    assert "images" in dict(sent)
    forget()
    await server.client.train_step([datum], [Minibatch(indices=(0,))], LossConfig(name="ppo"), FAST)
    assert "images" in dict(sent)
    assert (await server.client.state())["version"] == 1
    forget()
    unknown = tuple(replace(chunk, data=None) if isinstance(chunk, ImageChunk) else chunk for chunk in prompt)
    with pytest.raises(ImageMissingError, match="not on this server"):
        await server.client.sample(unknown, GREEDY)


async def test_wrong_images_are_refused_with_what_to_do(
    server: Server, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = server.client
    whole = picture(1, 300, 200)
    for broken in (b"", b"not an image", whole[: len(whole) // 2], b"GIF89a" + bytes(50)):
        with pytest.raises(InvalidRequestError, match="cannot be decoded") as refused:
            await client.upload([broken])
        assert "PNG, JPEG, WEBP" in refused.value.hint
    with pytest.raises(InvalidRequestError, match=r"image 1 of 2: .*cannot be decoded"):
        await client.upload([whole, b"x"])
    with monkeypatch.context() as patch:
        patch.setattr(images, "MAX_IMAGE_PIXELS", 10_000)
        with pytest.raises(TooLargeError, match="400 x 300 pixels"):
            await client.upload([picture(1, 400, 300)])
        patch.setattr(images, "MAX_IMAGE_BYTES", 100)
        with pytest.raises(TooLargeError, match="bytes"):
            await client.upload([picture(2, 400, 300)])
    (image,) = (await client.upload([picture(1)])).values()
    assert len(image.tokens) == IMAGE_TOKENS + 3
    short = replace(image, tokens=image.tokens[:-1])
    with pytest.raises(InvalidRequestError, match=f"has {IMAGE_TOKENS + 3} tokens here, not {IMAGE_TOKENS + 2}"):
        await client.sample([tokens(START), short], GREEDY)
    datum = Datum((image, tokens([5])), np.append(image.tokens, 6).astype(np.int32), {"weights": np.ones(8, np.float32)})
    with pytest.raises(InvalidRequestError, match="nobody sampled it"):
        await client.forward([datum])
    for height in (1, 3):  # not taken for a picture with its channels first
        await client.upload([picture(1, 50, height)])
    async with serving(tiny_model_dir, tmp_path / "text") as text_only:
        assert (await text_only.client.info())["image_placeholder"] is None
        with pytest.raises(InvalidRequestError, match="takes no images") as refused:
            await text_only.client.upload([whole])
        assert "vision-language model" in refused.value.hint
        with pytest.raises(InvalidRequestError, match="takes no images"):
            await text_only.client.sample([tokens(START), image], GREEDY)


async def test_images_work_in_json_by_plain_http(server: Server) -> None:
    headers = {"Authorization": "Bearer secret"}
    async with httpx.AsyncClient(base_url=server.endpoint, headers=headers, timeout=60) as http:
        encoded = base64.b64encode(picture(1)).decode()
        ((sha256, found),) = (await http.post("/v1/policies/p/images", json={"images": [encoded]})).json()["images"].items()
        chunk = {"kind": "image", "sha256": sha256, "count": len(found["tokens"])}
        body = {"request_id": "r", "prompt": [{"kind": "tokens", "tokens": START}, chunk], "params": {"max_tokens": 2}}
        sampled = (await http.post("/v1/policies/p/sample?wait_s=30", json=body)).json()
        assert len(sampled["result"]["samples"][0]["tokens"]) == 2
        missing = body | {"request_id": "r2", "prompt": [chunk | {"sha256": "0" * 64}]}
        problem = (await http.post("/v1/policies/p/sample?wait_s=30", json=missing)).json()["problem"]
        assert (problem["code"], problem["status"]) == ("image_missing", 409)
        for wrong in ({"images": []}, {"images": [3]}, {"images": ["no base64!"]}, {"image": [encoded]}, [encoded]):
            refused = await http.post("/v1/policies/p/images", json=wrong)
            assert refused.status_code == 400, wrong
        denied = await http.post("/v1/policies/p/images", json={"images": [encoded]}, headers={"Authorization": "Bearer no"})
        assert denied.status_code == 401


@pytest.mark.parametrize("kind", ["transformers", "vllm"])
def test_a_placeholder_token_that_was_sampled_is_a_token_like_others(
    vlm_dir: Path, store: ImageStore, oracle: Any, kind: str
) -> None:
    """The picture's features stay at the picture's own places, on the engine and in the trainer."""
    ((sha256, ids),) = store.add([picture(1)]).items()
    config = EngineConfig(kind=kind, max_model_len=128, max_num_seqs=4, cache_gib=0.05)
    engine = create_engine(vlm_dir, config, "float32", lora=None, stop_token_ids=(2,), images=store)
    try:
        prompt = (tokens([IMAGE_TOKEN, 300]), ImageChunk(sha256, ids), tokens([IMAGE_TOKEN, 310]))
        (found,) = engine.prompt_logprobs([prompt])
        engine.add(SampleRequest("a", prompt, GREEDY))
        while engine.has_unfinished():
            engine.step()
    finally:
        engine.close()
    with torch.inference_mode():
        embedded = oracle.get_input_embeddings()(torch.from_numpy(chunk_tokens(prompt).astype(np.int64)))[None].clone()
        shown = oracle.get_image_features(**pixels_of(vlm_dir, picture(1)), return_dict=True).pooler_output
        embedded[0, 4 : 4 + IMAGE_TOKENS] = shown.reshape(IMAGE_TOKENS, -1)
        logprobs = oracle(inputs_embeds=embedded).logits[0].log_softmax(-1).numpy()
    expected = logprobs[np.arange(len(found) - 1), chunk_tokens(prompt)[1:]]
    np.testing.assert_allclose(found[1:], expected, atol=1e-4)


@pytest.mark.parametrize("kind", ["transformers", "vllm"])
def test_pictures_that_are_cut_into_tiles_are_seen_whole(tmp_path: Path, kind: str) -> None:
    from transformers import AutoModelForImageTextToText

    model_dir = build_tiny_vlm(tmp_path / "tiles", tiles=True)
    store = ImageStore(ImageProcessor(model_dir))
    shown = [ImageChunk(sha256, ids) for sha256, ids in store.add([picture(1, 64, 40), picture(2, 20, 64)]).items()]
    assert all(len(image.tokens) > 2 * (IMAGE_TOKENS + 2) for image in shown)
    prompt = (tokens(START), shown[0], tokens(QUESTION), shown[1], tokens(ASIDE))
    config = EngineConfig(kind=kind, max_model_len=256, max_num_seqs=4, cache_gib=0.05)
    engine = create_engine(model_dir, config, "float32", lora=None, stop_token_ids=(2,), images=store)
    try:
        (found,) = engine.prompt_logprobs([prompt])
    finally:
        engine.close()
    oracle = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=torch.float32).eval()
    ids = torch.from_numpy(chunk_tokens(prompt).astype(np.int64))[None]
    with torch.inference_mode():
        pixels = pixels_of(model_dir, picture(1, 64, 40), picture(2, 20, 64))
        logprobs = oracle(input_ids=ids, **pixels).logits[0].log_softmax(-1)
    expected = logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0].numpy()
    np.testing.assert_allclose(found[1:], expected, atol=1e-4)
    TorchTrainer(model_dir, TrainerConfig(dtype="float32"), device="cpu", images=store)  # proves the same of itself


def test_a_processor_that_does_not_belong_to_the_model_is_an_error_before_anything_is_trained(tmp_path: Path) -> None:
    model_dir = build_tiny_vlm(tmp_path / "wrong", image_seq_len=IMAGE_TOKENS + 1)
    store = ImageStore(ImageProcessor(model_dir))
    mismatch = r"images have \d+ placeholder tokens, but the vision tower gives \d+ features"
    with pytest.raises(ConfigError, match=mismatch):
        TorchTrainer(model_dir, TrainerConfig(dtype="float32"), device="cpu", images=store)
    config = EngineConfig(kind="transformers", max_model_len=128, max_num_seqs=4)
    with pytest.raises(ConfigError, match=mismatch):
        create_engine(model_dir, config, "float32", lora=None, stop_token_ids=(2,), images=store)


def vlm_data(store: ImageStore) -> list[Datum]:
    """Two groups whose prompts differ in their pictures alone, one datum with a picture in a later turn, one without any."""
    shown = [ImageChunk(sha256, ids) for sha256, ids in store.add([picture(1), picture(2), picture(3)]).items()]
    rng = np.random.default_rng(0)
    data = []
    for first in (shown[0], shown[0], shown[1], shown[1]):
        turns: list[Chunk] = [tokens(START), first, tokens(QUESTION), tokens(rng.integers(50, 500, 3).tolist())]
        scored: list[bool] = [False, False, False, True]
        if len(data) % 2:
            turns += [tokens(ASIDE), shown[2], tokens(QUESTION), tokens(rng.integers(50, 500, 2).tolist())]
            scored += [False, False, False, True]
        data.append(datum_of(turns, scored, rng))
    data.append(datum_of([tokens(START), tokens(rng.integers(50, 500, 3).tolist())], [False, True], rng))
    return data


def datum_of(turns: list[Chunk], scored: list[bool], rng: np.random.Generator) -> Datum:
    weights = np.concatenate([np.full(len(t.tokens), s, np.float32) for t, s in zip(turns, scored, strict=True)])[1:]
    arrays = {
        "weights": weights,
        "advantages": weights * np.float32(rng.normal()),
        "behaviour_logprobs": weights * rng.uniform(-7, -5, len(weights)).astype(np.float32),
    }
    return Datum((*turns[:-1], TokenChunk(turns[-1].tokens[:-1])), chunk_tokens(turns)[1:], arrays)


def plain_logprobs(model: Any, model_dir: Path, store: ImageStore, datum: Datum) -> torch.Tensor:
    shown = [store.encoded(image.sha256) for _, image in placed_images(datum.chunks)]
    ids = torch.from_numpy(datum.tokens.astype(np.int64))[None]
    logits = model(input_ids=ids, **(pixels_of(model_dir, *shown) if shown else {})).logits[0]
    targets = torch.from_numpy(datum.targets.astype(np.int64))
    found: torch.Tensor = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
    return found


@pytest.mark.parametrize(("pack_tokens", "min_prefix"), [(16, 16), (512, 16), (512, 2)])
def test_packed_logprobs_and_gradients_are_those_of_the_models_own_forward_pass(
    vlm_dir: Path, store: ImageStore, pack_tokens: int, min_prefix: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of every parameter, those of the vision tower among them; also of a picture in a prefix that prompts share."""
    monkeypatch.setattr(prefixes, "MIN_PREFIX", min_prefix)
    monkeypatch.setattr(prefixes, "MIN_SAVED", min_prefix)
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(vlm_dir, dtype=torch.float32).eval()
    data = vlm_data(store)
    asked_otherwise: list[Chunk] = [*data[0].chunks[:2], tokens(ASIDE), tokens([60, 61, 62])]
    data.append(datum_of(asked_otherwise, [False, False, False, True], np.random.default_rng(1)))
    config = TrainerConfig.model_validate({"dtype": "float32", "pack_tokens": pack_tokens})
    trainer = TorchTrainer(vlm_dir, config, device="cpu", images=store)
    trainer.create_policy("p", PolicySpec())
    result = trainer.forward_backward("p", data, LossConfig(name="cross_entropy"), 1.0)
    if min_prefix == 2:
        (pack,) = pack_data(data, pack_tokens)
        shared = [range(*span) for group in pack.groups for span in group.prefix]
        assert any(start in span for start, _ in pack.images for span in shared)
    loss = torch.zeros(())
    for datum, found in zip(data, result.logprobs, strict=True):
        expected = plain_logprobs(model, vlm_dir, store, datum) * torch.from_numpy(datum.weights)
        np.testing.assert_allclose(found, expected.detach().numpy(), atol=1e-4)
        loss = loss - expected.sum()
    loss.backward()  # type: ignore[no-untyped-call]
    ours = gradients(trainer)
    noise = 1e-6 * max(float(p.grad.abs().max()) for p in model.parameters())  # the gradient of a key's bias is zero
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        scale = float(parameter.grad.abs().max())
        torch.testing.assert_close(ours[name], parameter.grad, rtol=0, atol=1e-4 * scale + noise, msg=name)
    assert any(float(g.abs().max()) > 1e-3 for name, g in ours.items() if "vision_model" in name)


def test_two_ranks_train_what_one_trains_whichever_of_them_sees_the_images(vlm_dir: Path, store: ImageStore) -> None:
    config = {"dtype": "float32", "pack_tokens": 64}
    one = TorchTrainer(vlm_dir, TrainerConfig.model_validate(config), device="cpu", images=store)
    two = LeadTrainer(vlm_dir, TrainerConfig.model_validate({**config, "ranks": 2}), device="cpu", timeout_s=60.0, images=store)
    data, loss = vlm_data(store), LossConfig(name="cross_entropy")
    try:
        for lora in (None, {"rank": 4}):
            for trainer in (one, two):
                trainer.create_policy("p", PolicySpec(lora=lora, seed=3))
            for batch in (data, data[:1]):  # the second shows images to one rank only
                results = [trainer.forward_backward("p", batch, loss, 0.1) for trainer in (one, two)]
                assert results[0].loss == pytest.approx(results[1].loss, rel=1e-5)
                for a, b in zip(results[0].logprobs, results[1].logprobs, strict=True):
                    np.testing.assert_allclose(a, b, atol=1e-5)
                norms = [trainer.optim_step("p", AdamParams(learning_rate=1e-4))["grad_norm"] for trainer in (one, two)]
                assert norms[0] == pytest.approx(norms[1], rel=1e-5)
            scores = [trainer.forward("p", data)["logprobs"] for trainer in (one, two)]
            for a, b in zip(*scores, strict=True):
                np.testing.assert_allclose(a, b, atol=1e-4)
            for trainer in (one, two):
                trainer.delete_policy("p")
    finally:
        two.close()


def test_an_adapter_changes_the_language_model_alone_and_peft_agrees(vlm_dir: Path, store: ImageStore, tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForImageTextToText

    trainer = TorchTrainer(vlm_dir, TrainerConfig(dtype="float32"), device="cpu", images=store)
    trainer.create_policy("p", PolicySpec(lora=LORA.model_dump()))
    data = vlm_data(store)
    for _ in range(3):
        trainer.forward_backward("p", data, LossConfig(name="cross_entropy"), 0.1)
        trainer.optim_step("p", FAST)
    adapter = trainer.adapter("p")
    assert adapter.tensors
    assert all(".text_model.layers." in name for name in adapter.tensors)
    trainer.save("p", tmp_path / "adapter")
    base = AutoModelForImageTextToText.from_pretrained(vlm_dir, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    assert {n.partition(".lora_")[0] for n, _ in model.named_parameters() if ".lora_" in n} == {
        n.partition(".lora_")[0] for n in adapter.tensors
    }
    scores: list[FloatArray] = trainer.forward("p", data)["logprobs"]
    with torch.inference_mode():
        for datum, found in zip(data, scores, strict=True):
            expected = plain_logprobs(model, vlm_dir, store, datum).numpy() * datum.weights
            np.testing.assert_allclose(found, expected, atol=1e-4)


async def test_a_checkpoint_is_a_model_with_its_processor_and_restores_the_vision_tower(vlm_dir: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    async with serving(vlm_dir, tmp_path) as server:
        datum = await sampled_datum(server, await conversation(server, picture(1)), 0)
        await server.client.train_step([datum], [Minibatch(indices=(0,))], LossConfig(name="cross_entropy"), FAST)
        saved, trained = await server.client.save("first"), (await server.client.forward([datum]))["logprobs"][0]
        await server.client.train_step([datum], [Minibatch(indices=(0,))], LossConfig(name="cross_entropy"), FAST)
        await server.client.load("first")
        np.testing.assert_array_equal((await server.client.forward([datum]))["logprobs"][0], trained)
    folder = Path(saved["path"])
    assert AutoProcessor.from_pretrained(folder).image_token == "<image>"
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    base = AutoModelForImageTextToText.from_pretrained(vlm_dir, dtype=torch.float32)
    patches = "model.vision_model.embeddings.patch_embedding.weight"
    assert not torch.equal(model.get_parameter(patches), base.get_parameter(patches))
    async with serving(vlm_dir, tmp_path / "b", trains=False, checkpoint=saved["path"]) as server:
        prompt = await conversation(server, picture(1))
        (sample,) = (await server.client.sample(prompt, GREEDY)).samples
        assert sample.tokens.tolist() == greedy(model, prompt, pixels_of(vlm_dir, picture(1)))


def bounded(vlm_dir: Path, count: int) -> ImageStore:
    return ImageStore(ImageProcessor(vlm_dir), max_bytes=count * len(picture(0)) + 50, max_pixel_bytes=1)


def test_a_store_drops_what_was_used_least_recently_but_never_what_is_pinned(vlm_dir: Path) -> None:
    store = bounded(vlm_dir, 2)
    first, second, third, fourth = (next(iter(store.add([picture(seed)]))) for seed in range(4))
    with pytest.raises(ImageMissingError):
        store.pin([first, fourth])
    store.pin([third, third])
    (fifth,) = store.add([picture(4)])
    with pytest.raises(ImageMissingError):
        store.encoded(fourth)
    store.unpin([third])
    store.add([picture(5), picture(6)])
    assert len(store.processed(third).tokens) == IMAGE_TOKENS + 3
    store.unpin([third])
    store.add([picture(7), picture(8)])
    for gone in (first, second, third, fifth):
        with pytest.raises(ImageMissingError):
            store.resolve([ImageChunk(gone, np.zeros(7, np.int32))])


async def test_an_image_that_pending_work_needs_stays_until_it_is_done(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    store = server.parts.images
    assert store is not None
    prompt = await conversation(server, picture(1))
    held: list[int] = []
    add: Callable[..., None] = server.parts.engine.add

    def crowded(request: SampleRequest, *adapter: None) -> None:
        store._max_bytes = 1
        store.add([picture(seed) for seed in range(20, 25)])
        held.append(len(store._encoded))
        add(request, *adapter)

    monkeypatch.setattr(server.parts.engine, "add", crowded)
    await server.client.sample(prompt, GREEDY)
    assert held == [3]  # the request's, the canary's, and the one that came last
    assert sum(store._pins.values()) == 1
    monkeypatch.setattr(server.parts.engine, "add", lambda _: 1 / 0)
    with pytest.raises(EngineError):
        await server.client.sample(prompt, GREEDY)
    assert sum(store._pins.values()) == 1
