"""The pictures of an episode, and the tool that cuts a part out of one and enlarges it."""

from io import BytesIO
from typing import Any

from opentinker.environments.geo3k.drawing import pillow
from opentinker.images import Image

SMALLEST = 8
"""Pixels of a part's sides."""
LARGEST_PICTURE = 64_000_000
"""Pixels of a picture that is opened: a small file may hold a huge one."""
_TOO_MANY = "the image has too many pixels to be enlarged"


class CropError(ValueError):
    """Says to the policy what is wrong with its coordinates."""


class Pictures:
    """Numbered from 0: the problem's own first, then every part that was cut out."""

    def __init__(self, images: tuple[Image, ...], longer_side: int) -> None:
        self.images = list(images)
        self._longer_side = longer_side

    def crop(self, left: float, top: float, right: float, bottom: float, image: float = 0) -> tuple[Image, str]:
        """A part of a picture, enlarged so that its longer side has `longer_side` pixels, and what to say about it. Coordinates
        are pixels from the upper left corner.

        Raises:
            CropError: there is no such picture or part; says the picture's size.
        """
        if image != int(image) or not 0 <= image < len(self.images):
            raise CropError(f"there is no image {image}; there are {len(self.images)}, numbered from 0")
        source = _opened(self.images[int(image)])
        width, height = source.size
        size = f"image {int(image)} is {width} pixels wide and {height} high"
        box = tuple(round(min(max(value, -1.0), 1e9)) for value in (left, top, right, bottom))
        if not (0 <= box[0] < box[2] <= width and 0 <= box[1] < box[3] <= height):
            raise CropError(f"{size}: it needs 0 <= left < right <= {width} and 0 <= top < bottom <= {height}")
        if min(box[2] - box[0], box[3] - box[1]) < SMALLEST:
            raise CropError(f"the part is too small: at least {SMALLEST} x {SMALLEST} pixels; {size}")
        part = source.crop(box)
        factor = self._longer_side / max(part.size)
        enlarged = part.resize(tuple(max(1, round(side * factor)) for side in part.size), pillow().Image.Resampling.LANCZOS)
        made = Image.of(enlarged)
        self.images.append(made)
        left_, top_, right_, bottom_ = box
        where = f"columns {left_} to {right_} and rows {top_} to {bottom_} of image {int(image)}"
        return made, f"Image {len(self.images) - 1}: {where}, now {enlarged.width} pixels wide and {enlarged.height} high."


def _opened(image: Image) -> Any:
    library = pillow()
    try:
        with library.Image.open(BytesIO(image.data)) as header:
            pixels = header.width * header.height
    except library.Image.DecompressionBombError as error:
        raise CropError(_TOO_MANY) from error
    if pixels > LARGEST_PICTURE:
        raise CropError(_TOO_MANY)
    return image.pil().convert("RGB")
