"""A checkpoint as a folder for other tools: the adapter alone, or a whole model without optimizer and driver state."""

import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from opentinker.checkpoint_files import proved_state
from opentinker.checkpoints import MANIFEST, STATE
from opentinker.errors import CheckpointError, ConfigError

OURS = (MANIFEST, STATE, "optimizer.safetensors", "driver_state.json")
"""What only our trainer and driver read."""
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


def export_checkpoint(folder: Path, target: Path, *, merge: Callable[[Path, Path], None] | None = None) -> dict[str, Any]:
    """Write the checkpoint in `folder` to the new folder `target`, whole or not at all: {"path", "kind", "files"}.

    Of full parameters it is a model that transformers and vLLM load, as it was trained. Of an adapter it is the adapter for
    peft, or what `merge` writes of the checkpoint's folder into an empty one.

    Raises:
        CheckpointError: a part of it is missing or corrupt, or what `merge` raises.
        ConfigError: the target is not empty, or cannot be written.
    """
    kind = str(proved_state(folder)["kind"])
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is not empty", hint="choose another folder")
    if kind == "full" or merge is None:
        return _written(target, kind, lambda draft: _copy(folder, draft, full=kind == "full"))
    return _written(target, "merged", lambda draft: merge(folder, draft))


def _copy(folder: Path, draft: Path, *, full: bool) -> None:
    names = [path.name for path in folder.iterdir() if path.is_file() and path.name not in OURS] if full else ADAPTER
    for name in names:
        try:
            shutil.copyfile(folder / name, draft / name)
        except FileNotFoundError as error:
            raise CheckpointError(f"the checkpoint {folder} is incomplete: it has no {name}") from error


def _written(target: Path, kind: str, write: Callable[[Path], None]) -> dict[str, Any]:
    draft = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        draft.mkdir(parents=True)
        write(draft)
        if target.exists():
            target.rmdir()  # empty
        draft.rename(target)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return {"path": str(target.resolve()), "kind": kind, "files": sorted(path.name for path in target.iterdir())}
