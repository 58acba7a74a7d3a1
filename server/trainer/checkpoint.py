"""Checkpoints on disk: written whole or not at all, and verified when read.

A checkpoint is a folder with weights in a format other tools read, what it takes to continue bit for bit
(`optimizer.safetensors`, `trainer_state.json`), and `manifest.json` with the size and SHA-256 of every other file.
"""

import contextlib
import errno
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from opentinker.checkpoint_files import FORMAT, digest, manifest_text, proved_state
from opentinker.checkpoints import MANIFEST, STATE
from opentinker.errors import CheckpointError
from opentinker.server.trainer.gathered import Gathered, stream_tensors

OPTIMIZER = "optimizer.safetensors"


def write_checkpoint(folder: Path, write: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Call `write` with an empty folder beside `folder`, make its files durable and move it to `folder`; what `write` gave.

    A checkpoint that was at `folder` is replaced only after the new one is whole. Wherever the process dies, one of the two
    is whole, and the next write of that name clears away what was left. One process writes below a folder.

    Raises:
        CheckpointError: it cannot be written (a full disk, a missing permission); the previous one is intact.
    """
    previous, temporary = _previous(folder), _temporary(folder)
    in_place = False
    try:
        recover(folder)
        _clear(folder)
        temporary.mkdir(parents=True)
        result = write(temporary)
        for path in (*temporary.iterdir(), temporary):
            _sync(path)
        if folder.exists():
            folder.rename(previous)
        temporary.rename(folder)
        in_place = True
        _sync(folder.parent)
    except BaseException as error:
        _roll_back(folder, temporary, in_place)
        if isinstance(error, OSError | SafetensorError):
            kept = "the previous checkpoint is intact" if folder.exists() else "nothing was left behind"
            raise CheckpointError(f"cannot write the checkpoint {folder}: {_reason(error)}; {kept}") from error
        raise
    # What cannot be removed now, the next write removes; the checkpoint is there.
    with contextlib.suppress(OSError):
        _clear(folder)
    return result


def recover(folder: Path) -> None:
    """Undo a replacement that was interrupted between its two renames."""
    previous = _previous(folder)
    if previous.exists() and not folder.exists():
        previous.rename(folder)


def recover_all(root: Path) -> None:
    """`recover` every checkpoint below `root`."""
    for previous in root.glob(".*.previous"):
        recover(root / previous.name.removeprefix(".").removesuffix(".previous"))


def _roll_back(folder: Path, temporary: Path, in_place: bool) -> None:
    """Undo a replacement from wherever it failed. A second failure changes no checkpoint: `recover` goes on from there."""
    with contextlib.suppress(OSError):
        if in_place:
            folder.rename(temporary)  # nobody can say whether it is durable
        recover(folder)
    shutil.rmtree(temporary, ignore_errors=True)


def _clear(folder: Path) -> None:
    """Remove what interrupted writes of this checkpoint left beside it."""
    previous = _previous(folder)
    if previous.exists():
        # Out of the way first: what is called previous has to be whole, and a removal may be interrupted.
        previous.rename(_temporary(folder))
    name = re.compile(rf"\.{re.escape(folder.name)}\.[0-9a-f]{{8}}\.tmp")
    for path in folder.parent.glob(".*.tmp"):
        if name.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def _temporary(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.tmp")


def _previous(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.previous")


def _reason(error: Exception) -> str:
    code = error.errno if isinstance(error, OSError) else None
    if code in (errno.ENOSPC, errno.EDQUOT) or "os error 28" in str(error):
        return "disk full"
    return str(error)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """A safetensors file that transformers and peft read."""
    if isinstance(tensors, Gathered):
        stream_tensors(path, tensors)
        return
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def read_tensors(path: Path, like: Mapping[str, torch.Tensor], *, part: bool = False) -> dict[str, torch.Tensor]:
    """The tensors of a file, on the CPU; with `part`, only those that `like` names.

    Raises:
        CheckpointError: their names, shapes or dtypes are not those of `like`.
    """
    try:
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if not part or name in like]  # noqa: SIM118
            tensors = {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if set(tensors) != set(like):
        odd = sorted(set(tensors) ^ set(like))
        raise CheckpointError(f"{path} is of another architecture: it differs in {len(odd)} tensors, such as {odd[0]}")
    for name, tensor in tensors.items():
        if tensor.shape != like[name].shape or tensor.dtype != like[name].dtype:
            raise CheckpointError(
                f"{path} is of another architecture: {name} is {tensor.dtype}{list(tensor.shape)}, "
                f"not {like[name].dtype}{list(like[name].shape)}"
            )
    return tensors


def seal(folder: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """Write the trainer state and the manifest; the manifest."""
    (folder / STATE).write_text(json.dumps({"format": FORMAT, **state}, indent=1, sort_keys=True))
    files = {path.name: {"bytes": path.stat().st_size, "sha256": digest(path)} for path in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(manifest_text(files))
    return {"format": FORMAT, "files": files}


def open_checkpoint(folder: Path) -> dict[str, Any]:
    """The trainer state of a checkpoint, once all its files are proved whole.

    Raises:
        CheckpointError: there is none, or a file is missing or corrupt.
    """
    recover(folder)
    state = proved_state(folder)
    if state.get("format") != FORMAT:
        raise CheckpointError(f"the checkpoint {folder} has format {state.get('format')}, this trainer reads {FORMAT}")
    return state
