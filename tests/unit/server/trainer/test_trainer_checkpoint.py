"""Checkpoints are written whole or not at all; a real full disk and a real file-size limit included."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from opentinker.errors import CheckpointError
from opentinker.server.trainer.checkpoint import open_checkpoint, read_tensors, seal, write_checkpoint, write_tensors
from opentinker.server.trainer.gathered import Gathered

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


def write(folder: Path, step: int = 1) -> dict[str, Any]:
    write_tensors(folder / "optimizer.safetensors", TENSORS)
    return seal(folder, {"step": step})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_reads_back(tmp_path: Path) -> None:
    manifest = write_checkpoint(tmp_path / "c", write)
    assert sorted(manifest["files"]) == ["optimizer.safetensors", "trainer_state.json"]
    assert open_checkpoint(tmp_path / "c")["step"] == 1
    tensors = read_tensors(tmp_path / "c" / "optimizer.safetensors", TENSORS)
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)


def test_gathered_tensors_are_written_as_others_are(tmp_path: Path) -> None:
    tensors = {**TENSORS, "none": torch.zeros(0, 3), "odd": torch.ones(3, dtype=torch.bfloat16), "last": torch.rand(2, 2)}
    like = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
    gathered = Gathered(like, lambda names: ((name, tensors[name]) for name in reversed(names)))
    write_tensors(tmp_path / "gathered", gathered)
    write_tensors(tmp_path / "whole", tensors)
    found = [read_tensors(tmp_path / name, like) for name in ("gathered", "whole")]
    for name, tensor in tensors.items():
        assert torch.equal(found[0][name], tensor)
        assert torch.equal(found[1][name], tensor)
        assert torch.equal(gathered[name], tensor)


def test_a_new_checkpoint_replaces_one_of_the_same_name_and_leaves_nothing_else(tmp_path: Path) -> None:
    for step in (1, 2):
        write_checkpoint(tmp_path / "c", lambda folder, step=step: write(folder, step))  # type: ignore[misc]
    assert open_checkpoint(tmp_path / "c")["step"] == 2
    assert names(tmp_path) == ["c"]


def test_a_failed_write_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c", write)

    def fails(folder: Path) -> dict[str, Any]:
        write(folder, 2)
        raise RuntimeError("midway")

    with pytest.raises(RuntimeError, match="midway"):
        write_checkpoint(tmp_path / "c", fails)
    assert open_checkpoint(tmp_path / "c")["step"] == 1
    assert names(tmp_path) == ["c"]


def test_a_replacement_interrupted_between_its_renames_is_undone(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c", write)
    (tmp_path / "c").rename(tmp_path / ".c.previous")
    assert open_checkpoint(tmp_path / "c")["step"] == 1


STEPS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")
"""Audit events of everything that changes the disk, and of every file that is opened."""


def save_number(number: int, folder: Path) -> None:
    def into(empty: Path) -> dict[str, Any]:
        (empty / "weights").write_text(str(number))
        return seal(empty, {"step": number})

    write_checkpoint(folder, into)


def leave(state: str, folder: Path) -> None:
    """What is on the disk before the save: checkpoint 1, as one of these interruptions left it."""
    if state != "nothing":
        save_number(1, folder)
    match state:
        case "between the renames":
            folder.rename(folder.with_name(".c.previous"))
        case "before the old one was removed":
            shutil.copytree(folder, folder.with_name(".c.previous"))
        case "in the middle of a write":
            shutil.copytree(folder, folder.with_name(".c.0123abcd.tmp"))


def save_and_stop_at(step: int, failure: str, folder: Path) -> bool:
    """Save checkpoint 2 in a process that dies at the nth step, or is refused it by the system; whether it got that far."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    taken, reached = 0, False

    def count(event: str, _: Any) -> None:
        nonlocal taken, reached
        if event not in STEPS:
            return
        taken += 1
        if taken == step:
            reached = True
            if failure == "dies":
                os._exit(7)
            raise OSError(5, "Input/output error")

    code = 1
    try:
        sys.addaudithook(count)
        try:
            save_number(2, folder)
        except CheckpointError:
            code = 7 if reached else 1
        else:
            code = 7 if reached else 0
    finally:
        os._exit(code)


@pytest.mark.parametrize("failure", ["dies", "is refused"])
@pytest.mark.parametrize(
    "before",
    ["nothing", "a checkpoint", "between the renames", "before the old one was removed", "in the middle of a write"],
)
def test_wherever_a_save_stops_a_whole_checkpoint_is_there_and_the_next_save_works(
    tmp_path: Path, before: str, failure: str
) -> None:
    step, found = 0, set()
    while True:
        step += 1
        root = tmp_path / str(step)
        folder = root / "c"
        root.mkdir()
        (root / ".c.more.0123abcd.tmp").mkdir()  # another checkpoint's
        leave(before, folder)
        if not save_and_stop_at(step, failure, folder):
            break
        if any((root / name).exists() for name in ("c", ".c.previous")):
            found.add(open_checkpoint(folder)["step"])
        else:
            found.add(0)
        save_number(3, folder)
        assert open_checkpoint(folder)["step"] == 3
        assert names(root) == [".c.more.0123abcd.tmp", "c"]
    assert step > 10
    old = 0 if before == "nothing" else 1
    # A first checkpoint that the system refused is gone altogether.
    assert found == ({old} if (old, failure) == (0, "is refused") else {old, 2})


def test_a_leftover_beside_a_checkpoint_does_not_replace_it_when_a_save_fails(tmp_path: Path) -> None:
    leave("before the old one was removed", tmp_path / "c")
    save_number(2, tmp_path / "c")
    shutil.copytree(tmp_path / "c", tmp_path / ".c.previous")
    save_number(3, tmp_path / "c")
    with pytest.raises(RuntimeError):
        write_checkpoint(tmp_path / "c", lambda _: (_ for _ in ()).throw(RuntimeError("midway")))
    assert open_checkpoint(tmp_path / "c")["step"] == 3


WRITER = """
import sys, torch
from pathlib import Path
from opentinker.errors import CheckpointError
from opentinker.server.trainer.checkpoint import open_checkpoint, seal, write_checkpoint, write_tensors

def write(size):
    def into(folder):
        write_tensors(folder / "optimizer.safetensors", {"a": torch.zeros(size)})
        return seal(folder, {"step": size})
    return into

folder = Path(sys.argv[1]) / "c"
write_checkpoint(folder, write(1000))
if sys.argv[2] == "limit":
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    write_checkpoint(folder, write(1_000_000))
except CheckpointError as error:
    print(error)
print(open_checkpoint(folder)["step"], sorted(p.name for p in folder.parent.iterdir()))
"""


def test_a_write_that_the_system_refuses_is_a_clear_error(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WRITER, str(tmp_path), "limit"], capture_output=True, text=True, timeout=120, check=True
    )
    message, after = done.stdout.splitlines()
    assert "File too large" in message
    assert "the previous checkpoint is intact" in message
    assert after == "1000 ['c']"


def _can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    probe = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs -o size=1m none /mnt"]
    return subprocess.run(probe, capture_output=True, timeout=30, check=False).returncode == 0


@pytest.mark.skipif(not _can_mount(), reason="no user namespaces here: a small disk cannot be mounted")
def test_a_full_disk_is_named_and_the_previous_checkpoint_intact(tmp_path: Path) -> None:
    script = 'mount -t tmpfs -o size=1m none "$1" && exec "$2" -c "$3" "$1" disk'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, "sh", str(tmp_path), sys.executable, WRITER],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    message, after = done.stdout.splitlines()
    assert "disk full; the previous checkpoint is intact" in message
    assert after == "1000 ['c']"


def test_a_first_checkpoint_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="nothing was left behind"):
        write_checkpoint(tmp_path / "file" / "c", write)
    assert names(tmp_path) == ["file"]


def spoil_bytes(folder: Path) -> None:
    path = folder / "optimizer.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_bytes, "optimizer.safetensors is corrupt"),
        (lambda f: (f / "optimizer.safetensors").unlink(), "incomplete"),
        (lambda f: (f / "manifest.json").unlink(), "incomplete"),
        (lambda f: (f / "manifest.json").write_text("{}"), "no valid manifest"),
        (lambda f: (f / "manifest.json").write_text("]"), "no valid manifest"),
        (lambda f: shutil.rmtree(f), "incomplete"),
        (lambda f: seal_format(f, 99), "has format 99"),
    ],
)
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, spoil: Any, message: str) -> None:
    write_checkpoint(tmp_path / "c", write)
    spoil(tmp_path / "c")
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path / "c")


def seal_format(folder: Path, number: int) -> None:
    (folder / "manifest.json").unlink()
    seal(folder, {"format": number})


@pytest.mark.parametrize(
    ("like", "message"),
    [
        ({"a": TENSORS["a"]}, "differs in 1 tensors, such as b"),
        ({**TENSORS, "a": torch.zeros(3, 2)}, r"a is torch.float32\[2, 3\], not torch.float32\[3, 2\]"),
        ({**TENSORS, "b": torch.zeros(4)}, "b is torch.bfloat16"),
    ],
)
def test_tensors_of_another_architecture_are_refused(tmp_path: Path, like: dict[str, torch.Tensor], message: str) -> None:
    write_tensors(tmp_path / "t.safetensors", TENSORS)
    with pytest.raises(CheckpointError, match=message):
        read_tensors(tmp_path / "t.safetensors", like)


def test_a_file_that_is_not_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.safetensors").write_text(json.dumps({}))
    with pytest.raises(CheckpointError, match="cannot read"):
        read_tensors(tmp_path / "t.safetensors", TENSORS)
