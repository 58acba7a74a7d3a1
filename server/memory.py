"""Keeps a worker's memory flat: what a command's many short-lived tensors leave behind goes back to the system."""

import ctypes
import sys


def release_free_memory() -> None:
    """Give the allocator's free memory back; glibc keeps what lies between blocks in use, gigabytes after some commands."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)
