"""Images as they travel: encoded bytes under their hash. Only a conversion from or to PIL needs Pillow."""

import base64
import binascii
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any, Self

MAX_IMAGE_BYTES = 16 << 20
IMAGES_FOLDER = "images"
"""Where a run's folder has the images of its transcripts."""
_SIGNATURES = ((b"\x89PNG\r\n\x1a\n", "image/png"), (b"\xff\xd8\xff", "image/jpeg"), (b"RIFF", "image/webp"))


@dataclass(frozen=True)
class Image:
    """An encoded image (PNG, JPEG or WebP).

    Raises:
        ValueError: the bytes are none of these, or more than 16 MiB.
    """

    data: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.data, bytes):
            raise ValueError(f"an image is made of its encoded bytes, not of {type(self.data).__name__}")
        if len(self.data) > MAX_IMAGE_BYTES:
            raise ValueError(f"an image has {len(self.data):,} bytes; {MAX_IMAGE_BYTES:,} are allowed")
        _ = self.media_type

    @classmethod
    def of(cls, value: Any) -> Self:
        """From an Image, encoded bytes, a path, a data URL, or a PIL image (which becomes a PNG).

        Raises:
            ValueError: it is none of these, or no PNG, JPEG or WebP.
            OSError: the path cannot be read.
        """
        match value:
            case cls():
                return value
            case bytes() | bytearray() | memoryview():
                return cls(bytes(value))
            case Path():
                return cls(value.read_bytes())
            case str() if value.startswith("data:"):
                return cls(_decoded(value))
            case _ if callable(getattr(value, "save", None)):
                encoded = BytesIO()
                value.save(encoded, format="PNG")
                return cls(encoded.getvalue())
        raise ValueError(f"an image is bytes, a path, a data URL or a PIL image, not {type(value).__name__}")

    @cached_property
    def sha256(self) -> str:
        """Of the encoded bytes, in hexadecimal."""
        return sha256(self.data).hexdigest()

    @cached_property
    def media_type(self) -> str:
        for signature, name in _SIGNATURES:
            if self.data.startswith(signature) and (name != "image/webp" or self.data[8:12] == b"WEBP"):
                return name
        raise ValueError("an image must be encoded as PNG, JPEG or WebP")

    def data_url(self) -> str:
        return f"data:{self.media_type};base64,{base64.b64encode(self.data).decode()}"

    def pil(self) -> Any:
        """As a PIL image.

        Raises:
            ImportError: Pillow is not installed.
            OSError: the bytes are damaged.
        """
        from PIL import Image as Pillow

        opened = Pillow.open(BytesIO(self.data))
        opened.load()
        return opened


def _decoded(url: str) -> bytes:
    _, comma, encoded = url.partition(";base64,")
    if not comma:
        raise ValueError("an image's data URL must be base64")
    try:
        return base64.b64decode(encoded, validate=True)
    except binascii.Error as error:
        raise ValueError(f"an image's data URL is not valid base64: {error}") from error
