"""What is special about vision-language models: which they are, and how images enter their embeddings.

Axes: T = tokens of a sequence or a pack, H = hidden size, F = features of one image.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from opentinker.client.messages import ImageChunk
from opentinker.errors import ConfigError
from opentinker.server.images import ImageStore

Placed = tuple[int, ImageChunk]
"""(the row of an image's first token, the image)."""
BATCH_BYTES = 64 * 2**20
"""Pixel values that go through the vision tower at once."""


def takes_images(config: Any) -> bool:
    """Whether a model of this transformers config has a vision tower."""
    return getattr(config, "vision_config", None) is not None


def auto_class(config: Any) -> Any:
    """The transformers class that loads models of this config."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if takes_images(config) else AutoModelForCausalLM


def attention(config: Any, implementation: str) -> str | dict[str, str]:
    """What `attn_implementation` must be, so that the language model alone uses `implementation`."""
    if not takes_images(config):
        return implementation
    text = next(name for name in config.sub_configs if getattr(config, name) is config.get_text_config())
    return {text: implementation, "vision_config": "sdpa"}


def language_prefix(model: Any) -> str:
    """What the names of the language model's layers begin with."""
    decoder = model.get_decoder() if takes_images(model.config) else model
    return next(f"{name}." if name else "" for name, module in model.named_modules() if module is decoder)


def image_features(model: Any, images: ImageStore, wanted: Iterable[ImageChunk]) -> dict[str, torch.Tensor]:
    """The vision tower's features of each image, [F, H], by its hash. Images of one shape are computed together.

    Raises:
        ConfigError: they are not as many as the image has placeholder tokens.
    """
    alike: dict[tuple[object, ...], list[list[ImageChunk]]] = {}
    for image in {image.sha256: image for image in wanted}.values():
        processed = images.processed(image.sha256)
        shape = tuple((key, tuple(value.shape[1:])) for key, value in processed.pixels.items())
        batches = alike.setdefault(shape, [[]])
        if (len(batches[-1]) + 1) * processed.nbytes > BATCH_BYTES:
            batches.append([])
        batches[-1].append(image)
    found: dict[str, torch.Tensor] = {}
    for batch in (batch for batches in alike.values() for batch in batches if batch):
        found |= _batch_features(model, images, batch)
    return found


def _batch_features(model: Any, images: ImageStore, batch: Sequence[ImageChunk]) -> dict[str, torch.Tensor]:
    weight = model.get_input_embeddings().weight
    pixels = [images.processed(image.sha256).pixels for image in batch]
    joined = {key: torch.cat([each[key] for each in pixels]).to(weight.device) for key in pixels[0]}
    found = model.get_image_features(**joined, return_dict=True).pooler_output
    features: torch.Tensor = torch.cat(list(found)) if isinstance(found, list | tuple) else found
    features = features.reshape(-1, features.shape[-1]).to(weight.dtype)
    places = [int((image.tokens == images.processor.token_id).sum()) for image in batch]
    if len(features) != sum(places):
        raise ConfigError(
            f"{len(batch)} images have {sum(places)} placeholder tokens, but the vision tower gives {len(features)} features",
            hint="the model's processor files do not belong to its weights (see image_seq_len in processor_config.json)",
        )
    return {image.sha256: part for image, part in zip(batch, torch.split(features, places), strict=True)}


def embed(
    embeddings: nn.Module, tokens_T: torch.Tensor, images: Sequence[Placed], features: dict[str, torch.Tensor], token_id: int
) -> torch.Tensor:
    """Embeddings of the tokens, [T, H], with each image's features at its placeholder tokens, and only there: a placeholder
    token that was sampled is a token like others."""
    embedded_TH: torch.Tensor = embeddings(tokens_T)
    if not images:
        return embedded_TH
    rows = [start + torch.from_numpy(image.tokens == token_id).nonzero()[:, 0].to(tokens_T.device) for start, image in images]
    found_FH = torch.cat([features[image.sha256] for _, image in images])
    return embedded_TH.index_copy(0, torch.cat(rows), found_FH)
