"""Requests as vLLM takes them: prompts, with images where they are shown, and sampling parameters."""

from collections.abc import Sequence
from typing import Any

import torch

from opentinker.client.messages import Chunk, ImageChunk, SamplingParams, chunk_tokens, placed_images
from opentinker.errors import EngineError
from opentinker.server.engine.sampling import sample_seed
from opentinker.server.images import ImageStore, decode


class Prompts:
    """Makes vLLM's prompts of ours. `renderer` is vLLM's, which has its image processor; `images` are those that prompts may
    name."""

    def __init__(self, renderer: Any, images: ImageStore | None) -> None:
        self._renderer = renderer
        self._images = images

    def __call__(self, chunks: Sequence[Chunk]) -> Any:
        """One prompt. Images are placed where our chunks are, not where vLLM would find a placeholder token: the
        policy may have sampled one."""
        tokens, placed = chunk_tokens(chunks).tolist(), placed_images(chunks)
        if not placed:
            return {"prompt_token_ids": tokens}
        from vllm.inputs.engine import mm_input
        from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

        prepared = [self._prepare(image) for _, image in placed]
        ranges = [
            PlaceholderRange(start + place.offset, place.length, place.is_embed)
            for (start, _), (_, place) in zip(placed, prepared, strict=True)
        ]
        return mm_input(
            tokens,
            MultiModalKwargsItems({"image": [item for item, _ in prepared]}),
            {"image": [image.sha256 for _, image in placed]},
            {"image": ranges},
        )

    def _prepare(self, image: ImageChunk) -> tuple[Any, Any]:
        """(what vLLM's own processor makes of the image, where the features go among its tokens), made once.

        Raises:
            EngineError: vLLM expands it to other tokens, or sees other pixels, than the trainer.
        """
        assert self._images is not None, "only a store can have resolved the images of a request"
        processed = self._images.processed(image.sha256)
        if "vllm" not in processed.prepared:
            made = self._renderer._process_multimodal(
                [self._images.processor.token_id],
                {"image": [decode(self._images.encoded(image.sha256))]},
                {"image": [image.sha256]},
                None,
            )
            (item,), (place,) = made["mm_kwargs"]["image"], made["mm_placeholders"]["image"]
            if made["prompt_token_ids"] != image.tokens.tolist():
                raise EngineError(
                    f"vLLM makes {len(made['prompt_token_ids'])} tokens of an image, the model's processor {len(image.tokens)}",
                    hint="set engine.kind=transformers, or update vllm",
                )
            for key, ours in processed.pixels.items():
                theirs = item.get_data().get(key)
                if theirs is not None and not torch.equal(theirs.flatten().to(ours.dtype), ours.flatten()):
                    raise EngineError(
                        f"vLLM's {key} of an image are not those that the trainer sees", hint="set engine.kind=transformers"
                    )
            processed.prepared["vllm"] = (item, place)
        prepared: tuple[Any, Any] = processed.prepared["vllm"]
        return prepared


def vllm_params(params: SamplingParams, index: int, *, prompt_logprobs: bool) -> Any:
    """Of the sample at this place among those of a request."""
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.sampling_params import RequestOutputKind

    return VllmSamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        max_tokens=params.max_tokens,
        seed=None if params.seed is None else sample_seed(params.seed, index),
        stop=list(params.stop),
        stop_token_ids=list(params.stop_token_ids),
        logprobs=0,
        prompt_logprobs=0 if prompt_logprobs else None,
        flat_logprobs=True,
        detokenize=bool(params.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
