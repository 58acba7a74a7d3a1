"""What is special about vision-language models: which they are, and how images enter their embeddings.

Axes: T = tokens of a sequence or a pack, H = hidden size, F = features of one image.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from opentinker.client.messages import ImageChunk
from opentinker.errors import ConfigError
from opentinker.server.images import ImageStore

Placed = tuple[int, ImageChunk]
"""(the row of an image's first token, the image)."""


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


def image_features(model: Any, images: ImageStore, image: ImageChunk) -> torch.Tensor:
    """The vision tower's features of an image, [F, H].

    Raises:
        ConfigError: they are not as many as the image has placeholder tokens.
    """
    weight = model.get_input_embeddings().weight
    pixels = {key: value.to(weight.device) for key, value in images.processed(image.sha256).pixels.items()}
    found = model.get_image_features(**pixels, return_dict=True).pooler_output
    features_FH: torch.Tensor = torch.cat(list(found)) if isinstance(found, list | tuple) else found
    features_FH = features_FH.reshape(-1, features_FH.shape[-1])
    places = int((image.tokens == images.processor.token_id).sum())
    if len(features_FH) != places:
        raise ConfigError(
            f"an image has {places} placeholder tokens, but the vision tower gives {len(features_FH)} features",
            hint="the model's processor files do not belong to its weights (see image_seq_len in processor_config.json)",
        )
    return features_FH.to(weight.dtype)


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
