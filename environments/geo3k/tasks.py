"""Tasks of the geometry environments: generated problems, or rows of Geometry3K, and what a policy is shown of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

from opentinker.env.datasets import SUFFIXES, load_tasks
from opentinker.env.environment import Part
from opentinker.env.tasks import GeneratedTasks, ListTasks, Split, TaskSource
from opentinker.environments.geo3k.drawing import draw, lay_out_turned
from opentinker.environments.geo3k.problems import FAMILIES, check_families, held_out_tasks, make_problem, training_task
from opentinker.environments.math.judging import require_checker
from opentinker.errors import ConfigError, InvalidRequestError
from opentinker.images import Image

INSTRUCTIONS = (
    "Think step by step. Give the exact value: a whole number, a fraction, or an expression with roots or pi, "
    "not a rounded decimal. Put the final answer in \\boxed{}."
)
DATASET_INSTRUCTIONS = "Think step by step. Put the final answer in \\boxed{}."
COLUMNS = ("images", "problem", "answer")
"""Of a dataset, as in hiyouga/geometry3k; `<image>` in a problem stands where a picture belongs."""
PLACEHOLDER = "<image>"
HELD_OUT = 128
"""Generated problems that are kept for evaluation."""
SIZES = range(160, 2049)
"""Pixels of a generated picture's sides; in smaller ones the labels cannot be read."""


@dataclass(frozen=True)
class Posed:
    """A task as a policy sees it."""

    parts: tuple[Part, ...]
    images: tuple[Image, ...]
    answer: str
    family: str = ""
    """Of a generated problem."""

    @property
    def instructions(self) -> str:
        """On a line of its own: templates put the parts of a message together as they are."""
        return f"\n{INSTRUCTIONS if self.family else DATASET_INSTRUCTIONS}"


def pose(task: Mapping[str, Any], size: int) -> Posed:
    """A generated problem, drawn in a square of `size` pixels, or a row of a dataset.

    Raises:
        InvalidRequestError: it is neither.
        ConfigError: a problem is to be drawn, but Pillow is missing.
    """
    if "family" in task:
        if task["family"] not in FAMILIES:
            raise InvalidRequestError(f"there is no family of problems {task['family']!r}", hint=", ".join(FAMILIES))
        return _drawn(task["family"], int(task["seed"]), size)
    missing = [name for name in COLUMNS if name not in task]
    if missing:
        raise InvalidRequestError(
            f"the task has no {' and no '.join(missing)}: it has {', '.join(map(str, task)) or 'nothing'}",
            hint=f"a task has {', '.join(COLUMNS)}, or the family and seed of a generated problem",
        )
    images = tuple(_image(value) for value in task["images"] or ())
    if not images:
        raise InvalidRequestError("the task has no picture", hint="`images` is a list of at least one")
    return Posed(_placed(str(task["problem"]), images), images, str(task["answer"]))


@lru_cache(256)
def _drawn(family: str, seed: int, size: int) -> Posed:
    """Kept for a while, because all members of a group ask for it."""
    problem = make_problem(family, seed)
    image = draw(lay_out_turned(problem.figure, size, Random(seed)))
    return Posed(_placed(problem.question, (image,)), (image,), str(problem.answer), family)


def _placed(text: str, images: Sequence[Image]) -> tuple[Part, ...]:
    """Each picture at its placeholder; pictures without one come first.

    Raises:
        InvalidRequestError: there are more placeholders than pictures.
    """
    texts = text.strip().split(PLACEHOLDER)
    unplaced = len(images) - (len(texts) - 1)
    if unplaced < 0:
        raise InvalidRequestError(f"the problem names {len(texts) - 1} pictures, but there are {len(images)}")
    parts: list[Part] = [{"type": "image", "image": image} for image in images[:unplaced]]
    for piece, image in zip(texts, [None, *images[unplaced:]], strict=True):
        if image is not None:
            parts.append({"type": "image", "image": image})
        if piece.strip():
            parts.append({"type": "text", "text": piece})
    return tuple(parts)


def _image(value: Any) -> Image:
    """From a data URL, or an image in memory. A path is none: where this runs, it may be nobody's to read."""
    try:
        return Image.of(value)
    except (ValueError, OSError) as error:
        raise InvalidRequestError(f"a picture of the task cannot be read: {error}") from error


def source(split: Split, args: Mapping[str, Any]) -> TaskSource:
    """The tasks of a split, by the environment's arguments.

    Raises:
        ConfigError: the dataset cannot be loaded, or a family does not exist.
    """
    if args.get("dataset"):
        require_checker()
    dataset, held_out = args.get("dataset"), args.get("held_out_dataset")
    if dataset and split == "train":
        return load_tasks(dataset, split=args.get("train_split", "train"), required=COLUMNS)
    if dataset and not held_out and Path(dataset).suffix in SUFFIXES:
        raise ConfigError(f"{dataset} is one split, for training", hint="held_out_dataset names another file, for evaluation")
    if dataset:
        name = args.get("held_out_split", "test")
        return load_tasks(held_out or dataset, split=name, shuffle=False, required=COLUMNS)
    families = check_families(args.get("families", ()))
    if split == "train":
        return GeneratedTasks(lambda seed: training_task(seed, families))
    return ListTasks(held_out_tasks(families, HELD_OUT), shuffle=False)


def check_size(size: int) -> int:
    """
    Raises:
        ConfigError: pictures of this size cannot be drawn.
    """
    if size not in SIZES:
        raise ConfigError(f"image_size cannot be {size}", hint=f"pictures have {SIZES.start} to {SIZES.stop - 1} pixels a side")
    return size
