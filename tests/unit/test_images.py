"""An image is its encoded bytes, wherever it came from; what is none is refused."""

import base64
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image as Pillow

from opentinker.images import MAX_IMAGE_BYTES, Image


def png(color: str = "red") -> bytes:
    encoded = BytesIO()
    Pillow.new("RGB", (4, 3), color).save(encoded, format="PNG")
    return encoded.getvalue()


def test_every_source_gives_the_same_image(tmp_path: Path) -> None:
    data = png()
    (tmp_path / "a.png").write_bytes(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    sources = [data, bytearray(data), tmp_path / "a.png", url, Image(data)]
    assert {Image.of(source) for source in sources} == {Image(data)}
    assert Image.of(data).data_url() == url
    drawn = Image.of(Pillow.new("RGB", (4, 3), "red"))
    assert drawn.pil().getpixel((0, 0)) == (255, 0, 0)
    assert drawn.sha256 == Image.of(Pillow.new("RGB", (4, 3), "red")).sha256 != Image(png("blue")).sha256


def test_types_are_told_by_their_bytes() -> None:
    def encoded(kind: str) -> bytes:
        buffer = BytesIO()
        Pillow.new("RGB", (4, 3)).save(buffer, format=kind)
        return buffer.getvalue()

    assert [Image(encoded(k)).media_type for k in ("PNG", "JPEG", "WEBP")] == ["image/png", "image/jpeg", "image/webp"]
    with pytest.raises(ValueError, match="PNG, JPEG or WebP"):
        Image(encoded("GIF"))


@pytest.mark.parametrize("value", ["a.png", "data:image/png,red", "data:image/png;base64,!", 7, None, b"", b"RIFF0000WAVE"])
def test_what_is_no_image_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="image"):
        Image.of(value)


def test_an_image_has_a_largest_size() -> None:
    with pytest.raises(ValueError, match="16,777,216 are allowed"):
        Image(png() + bytes(MAX_IMAGE_BYTES))
