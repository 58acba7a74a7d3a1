"""Memory that runs out during a pass, as an error that says what to do."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from opentinker.errors import TrainerError

_SAID = ("not enough memory", "can't allocate memory", "bad_alloc", "out of memory", "Cannot allocate memory")
"""How torch's CPU allocator, C++, CUDA's libraries and the system say it where they raise nothing more special."""


@contextmanager
def memory_explained() -> Iterator[None]:
    """Raises: TrainerError when memory runs out inside; what the failed computation held is free by then."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        # The frames of the traceback hold the tensors of the pass for as long as anybody keeps the error.
        traceback.clear_frames(error.__traceback__)
        failure = TrainerError(
            f"there was not enough memory: {(str(error) or repr(error)).splitlines()[0]}; nothing was trained",
            hint="set trainer.pack_tokens lower or trainer.activation_checkpointing=true, train an adapter (lora), or give the "
            "server more memory",
        )
    else:
        return
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    raise failure


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(said in str(error) for said in _SAID)
