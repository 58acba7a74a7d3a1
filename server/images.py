"""The images of a server: checked, turned into pixels and placeholder tokens by the model's own processor, kept by hash."""

import hashlib
import io
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from opentinker.client.messages import Chunk, ImageChunk, IntArray
from opentinker.errors import ConfigError, ImageMissingError, InvalidRequestError, TooLargeError
from opentinker.images import MAX_IMAGE_BYTES

FORMATS = ("PNG", "JPEG", "WEBP")
MAX_IMAGE_PIXELS = 32 * 2**20
"""A few bytes of a picture can stand for gigabytes of pixels."""
MAX_ENCODED_BYTES = 2**30
MAX_PIXEL_BYTES = 2 * 2**30
_NOT_PIXELS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def decode(data: bytes) -> Any:
    """The PIL image, in RGB.

    Raises:
        TooLargeError: more bytes or pixels than allowed; nothing was decoded.
        InvalidRequestError: it is no image of a known format, or broken.
    """
    from PIL import Image

    if len(data) > MAX_IMAGE_BYTES:
        raise TooLargeError(f"an image has {len(data)} bytes, allowed are {MAX_IMAGE_BYTES}", hint="scale it down")
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = image.size  # from the header: the pixels are decoded by `convert`
        if width * height <= MAX_IMAGE_PIXELS:
            return image.convert("RGB")
    except Exception as error:
        # Pillow's decoders raise whatever their format makes them stumble over.
        raise InvalidRequestError(
            f"an image of {len(data)} bytes cannot be decoded: {error}", hint=f"send whole files of {', '.join(FORMATS)}"
        ) from error
    raise TooLargeError(f"an image has {width} x {height} pixels, allowed are {MAX_IMAGE_PIXELS}", hint="scale it down")


def sample_picture(seed: int) -> bytes:
    """A picture that holds something in every corner, determined by its seed: a PNG of 64 x 64."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3)).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).resize((64, 64), Image.Resampling.NEAREST).save(out, "PNG")
    return out.getvalue()


@dataclass(frozen=True)
class ProcessedImage:
    """What the model's processor makes of an image."""

    tokens: IntArray
    """The ids that the image becomes in a prompt, int32[n]."""
    pixels: dict[str, torch.Tensor]
    """Keyword arguments of the model's vision tower."""
    prepared: dict[str, Any] = field(default_factory=dict)
    """What an engine made of it for its own use."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.pixels.values())


class ImageProcessor:
    """A model directory's processor (transformers' own).

    Raises:
        ConfigError: it cannot be loaded, or knows no images.
    """

    def __init__(self, model_dir: Path) -> None:
        from transformers import AutoConfig, AutoProcessor

        try:
            self._processor: Any = AutoProcessor.from_pretrained(model_dir, local_files_only=True)
            self.placeholder: str = self._processor.image_token
            """The text that the chat template puts for an image."""
        except Exception as error:
            # transformers promises no exception type for a missing package, file or class.
            raise ConfigError(
                f"the model in {model_dir} takes images, but its image processor cannot be loaded: {error}",
                hint="it needs the files that its processor was saved with; some processors need torchvision",
            ) from error
        config = AutoConfig.from_pretrained(model_dir)
        token_id = getattr(config, "image_token_id", None)
        self.token_id = int(self._processor.image_token_id if token_id is None else token_id)
        """The id at the places that take the vision tower's features."""
        # An image of 1 or 3 rows would otherwise be taken for one with its channels first.
        pil = getattr(self._processor.image_processor, "backend", "pil") == "pil"
        self._options = {"images_kwargs": {"input_data_format": "channels_last"}} if pil else {}

    def __call__(self, images: Sequence[bytes]) -> ProcessedImage:
        """All images as they are in one prompt with nothing between them.

        Raises:
            InvalidRequestError: one is broken, or the model's processor refuses it.
        """
        decoded = [decode(data) for data in images]
        try:
            out = self._processor(
                text=[self.placeholder * len(decoded)],
                images=[decoded],
                text_kwargs={"add_special_tokens": False},
                return_tensors="pt",
                **self._options,
            )
        except Exception as error:
            raise InvalidRequestError(f"the model's image processor refuses an image: {error}") from error
        tokens = out["input_ids"][0].numpy().astype(np.int32)
        return ProcessedImage(tokens, {key: value for key, value in out.items() if key not in _NOT_PIXELS})


class ImageStore:
    """The images that were uploaded, by the SHA-256 of their bytes. May be used from any thread.

    Encoded bytes and pixel values are each bounded, the least recently used dropped first. Images that pending work needs are
    pinned and stay; pixel values are computed again when they were dropped.
    """

    def __init__(
        self, processor: ImageProcessor, *, max_bytes: int = MAX_ENCODED_BYTES, max_pixel_bytes: int = MAX_PIXEL_BYTES
    ) -> None:
        self.processor = processor
        self._max_bytes, self._max_pixel_bytes = max_bytes, max_pixel_bytes
        self._encoded: OrderedDict[str, bytes] = OrderedDict()
        self._tokens: dict[str, IntArray] = {}
        self._processed: OrderedDict[str, ProcessedImage] = OrderedDict()
        self._pins: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._processing = threading.Lock()
        """Held by whoever computes pixel values: side by side they would only take the cores from the worker."""

    def add(self, images: Sequence[bytes]) -> dict[str, IntArray]:
        """Keep the images; the tokens of each by its hash.

        Raises:
            InvalidRequestError: one is broken, too large, or refused by the model's processor; those before it are kept.
        """
        added: dict[str, IntArray] = {}
        for number, data in enumerate(images):
            sha256 = sha256_of(data)
            try:
                added[sha256] = self._add(sha256, data)
            except InvalidRequestError as error:
                if len(images) > 1:
                    error.detail = f"image {number} of {len(images)}: {error.detail}"
                raise
        return added

    def _add(self, sha256: str, data: bytes) -> IntArray:
        with self._lock:
            if sha256 in self._encoded:
                self._encoded.move_to_end(sha256)
                return self._tokens[sha256]
        with self._processing:
            processed = self.processor([data])
        with self._lock:
            self._encoded[sha256] = data
            self._tokens[sha256] = processed.tokens
            self._keep(sha256, processed)
            held = sum(map(len, self._encoded.values()))
            for old in list(self._encoded):
                if held <= self._max_bytes:
                    break
                if old != sha256 and not self._pins[old]:
                    held -= len(self._encoded.pop(old))
                    del self._tokens[old]
                    self._processed.pop(old, None)
        return processed.tokens

    def _keep(self, sha256: str, processed: ProcessedImage) -> None:
        self._processed[sha256] = processed
        held = sum(p.nbytes for p in self._processed.values())
        while held > self._max_pixel_bytes and len(self._processed) > 1:
            _, dropped = self._processed.popitem(last=False)
            held -= dropped.nbytes

    def pin(self, hashes: Iterable[str]) -> None:
        """Keep these until `unpin`, as often as they were pinned.

        Raises:
            ImageMissingError: one is not here; none is pinned.
        """
        hashes = tuple(hashes)
        with self._lock:
            if missing := [sha256 for sha256 in hashes if sha256 not in self._encoded]:
                raise _missing(missing)
            self._pins.update(hashes)
            for sha256 in hashes:
                self._encoded.move_to_end(sha256)

    def unpin(self, hashes: Iterable[str]) -> None:
        with self._lock:
            self._pins.subtract(hashes)
            self._pins = +self._pins

    def resolve(self, chunks: Sequence[Chunk]) -> tuple[Chunk, ...]:
        """The chunks with every image's tokens in place.

        Raises:
            ImageMissingError: an image is not here.
            InvalidRequestError: an image has another number of tokens than the chunk says.
        """
        return tuple(self._resolved(chunk) if isinstance(chunk, ImageChunk) else chunk for chunk in chunks)

    def _resolved(self, chunk: ImageChunk) -> ImageChunk:
        with self._lock:
            tokens = self._tokens.get(chunk.sha256)
        if tokens is None:
            raise _missing([chunk.sha256])
        if len(tokens) != len(chunk.tokens):
            raise InvalidRequestError(
                f"image {chunk.sha256[:12]} has {len(tokens)} tokens here, not {len(chunk.tokens)}",
                hint="use the count that the upload was answered with",
            )
        return ImageChunk(chunk.sha256, tokens)

    def encoded(self, sha256: str) -> bytes:
        """Raises: ImageMissingError."""
        with self._lock:
            if sha256 not in self._encoded:
                raise _missing([sha256])
            return self._encoded[sha256]

    def processed(self, sha256: str) -> ProcessedImage:
        """Raises: ImageMissingError."""
        with self._lock:
            if (processed := self._processed.get(sha256)) is not None:
                self._processed.move_to_end(sha256)
                return processed
        with self._processing:
            processed = self.processor([self.encoded(sha256)])
        with self._lock:
            self._keep(sha256, processed)
        return processed


def resolved(store: ImageStore | None, chunks: Sequence[Chunk]) -> tuple[Chunk, ...]:
    """`ImageStore.resolve`, where the model may be one that takes no images.

    Raises:
        InvalidRequestError: there is an image and the model takes none.
    """
    if store is not None:
        return store.resolve(chunks)
    if any(isinstance(chunk, ImageChunk) for chunk in chunks):
        raise takes_none()
    return tuple(chunks)


def takes_none() -> InvalidRequestError:
    return InvalidRequestError(
        "this model takes no images", hint="use a vision-language model as base_model, or an environment without images"
    )


def _missing(hashes: Sequence[str]) -> ImageMissingError:
    return ImageMissingError(
        f"{len(hashes)} images are not on this server, such as {hashes[0][:12]}", hint="upload them, and send this again"
    )
