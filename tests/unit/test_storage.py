"""Files behind a URL: whole checkpoints or none, files that grow, and a storage that is away."""

import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from opentinker.checkpoints import MANIFEST, policy_root
from opentinker.errors import ConfigError, UnavailableError
from opentinker.storage import Mirror, Storage, all_checkpoints, further_policies

URLS: dict[str, Callable[[Path], str]] = {
    "memory": lambda folder: f"memory://{uuid.uuid4().hex}/runs",
    "file": lambda folder: f"file://{folder}/remote",
    "chained": lambda folder: f"dir::file://{folder}/remote",
}


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """The folder of all runs, on one node."""
    return tmp_path / "node"


@pytest.fixture(params=URLS)
def storage(request: pytest.FixtureRequest, tmp_path: Path, node: Path) -> Storage:
    (tmp_path / "remote").mkdir()
    return Storage(URLS[request.param](tmp_path), node)


def elsewhere(storage: Storage, tmp_path: Path) -> Storage:
    """The same storage on another node."""
    return Storage(storage.url, tmp_path / "node")


def saved(root: Path, folder: str, *, at: float = 1.0, content: str = "weights") -> Path:
    path = root / folder
    (path / "deep").mkdir(parents=True, exist_ok=True)
    (path / "deep" / "w.bin").write_text(content)
    (path / "trainer_state.json").write_text(json.dumps({"kind": "full", "model_type": "llama", "step": 3, "created_at": at}))
    (path / MANIFEST).write_text(json.dumps({"files": {"deep/w.bin": {"bytes": 7}}}))
    return path


def test_what_a_node_put_there_another_one_gets(storage: Storage, node: Path) -> None:
    folder = saved(node / "ann/job-1/checkpoints", "final@3")
    assert not storage.fetch_folder(folder, last=MANIFEST)
    storage.put_folder(folder, last=MANIFEST)
    kept = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    folder.rename(folder.with_name("moved"))
    assert storage.fetch_folder(folder, last=MANIFEST)
    assert {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()} == kept
    assert {path.name for path in folder.parent.iterdir()} == {"final@3", "moved"}


def test_checkpoints_there_and_here_are_one_list(storage: Storage, node: Path) -> None:
    root = node / "ann/job-1/checkpoints"
    storage.put_folder(saved(root, "final@3", at=5.0), last=MANIFEST)
    storage.put_folder(saved(root, "best@2", at=3.0), last=MANIFEST)
    saved(root, "here@1", at=4.0)
    names = [(c.name, c.version) for c in all_checkpoints(root, storage)]
    assert names == [("final", 3), ("here", 1), ("best", 2)]
    (root / "final@3").rename(node / "gone")
    assert [(c.name, c.version) for c in all_checkpoints(root, storage)] == names
    assert all_checkpoints(root, storage)[0].path == root / "final@3"
    assert all_checkpoints(node / "ann/job-2/checkpoints", storage) == []
    storage.put_folder(saved(policy_root(root, "critic"), "final@3"), last=MANIFEST)
    saved(policy_root(root, "actor"), "final@3")
    (policy_root(root, "critic") / "final@3").rename(node / "gone too")
    assert further_policies(root, storage) == ["actor", "critic"]
    assert [(c.name, c.version) for c in all_checkpoints(root, storage)] == names
    assert further_policies(node / "ann/job-2/checkpoints", storage) == []


def test_half_an_upload_is_no_checkpoint_and_the_next_one_makes_it_whole(
    storage: Storage, node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = node / "ann/job-1/checkpoints"
    folder = saved(root, "final@3")
    storage.put_folder(folder, last=MANIFEST)
    saved(root, "final@3", content="newer weights")
    total = len([path for path in folder.rglob("*") if path.is_file()])
    put, left = storage._put, [0]

    def fails(path: Path) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise ConnectionResetError("the line is dead")
        put(path)

    monkeypatch.setattr(storage, "_put", fails)
    for number in range(total):
        left[0] = number
        with pytest.raises(UnavailableError, match=r"ConnectionResetError: the line is dead"):
            storage.put_folder(folder, last=MANIFEST)
        assert storage.checkpoints(root) == []
        assert not storage.fetch_folder(root / "copy", last=MANIFEST)
    left[0] = total
    storage.put_folder(folder, last=MANIFEST)
    assert [c.name for c in storage.checkpoints(root)] == ["final"]


def test_half_a_download_leaves_nothing(storage: Storage, node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(node / "ann/job-1/checkpoints", "final@3")
    storage.put_folder(folder, last=MANIFEST)
    folder.rename(node / "gone")
    get, left = storage._fs.get_file, [1]

    def fails(*arguments: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError("no space left on device")
        get(*arguments)

    monkeypatch.setattr(storage._fs, "get_file", fails)
    with pytest.raises(UnavailableError, match="no space left"):
        storage.fetch_folder(folder, last=MANIFEST)
    assert list(folder.parent.iterdir()) == []


def test_a_file_is_read_from_any_byte_on(storage: Storage, node: Path) -> None:
    log = node / "ann/job-1/driver.log"
    log.parent.mkdir(parents=True)
    assert storage.read(log) is None
    log.write_text("one\ntwo\n")
    storage.put(log)
    assert storage.exists(log)
    assert storage.read(log) == b"one\ntwo\n"
    assert (storage.read(log, 4), storage.read(log, 2, 3), storage.read(log, 8), storage.read(log, 100)) == (
        b"two\n",
        b"e\nt",
        b"",
        b"",
    )


def test_a_mirror_copies_what_grows_and_nothing_twice(storage: Storage, node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = node / "ann/job-1"
    saved(run / "checkpoints", "final@1")
    (run / "driver.log").write_text("one\n")
    copied: list[str] = []
    put = storage.put
    monkeypatch.setattr(storage, "put", lambda path: (copied.append(path.name), put(path)))
    mirror = Mirror(storage, run, period_s=60.0)
    mirror.start()
    assert mirror.sync()
    assert mirror.sync()
    with (run / "driver.log").open("a") as file:
        file.write("two\n")
    (run / "report.html").write_text("done")
    mirror.close()
    assert copied == ["driver.log", "report.html", "driver.log"]  # small ones first
    assert storage.read(run / "driver.log") == b"one\ntwo\n"


def test_a_mirror_catches_up_when_the_storage_is_back(tmp_path: Path, node: Path, caplog: Any) -> None:
    run, remote = node / "ann/job-1", tmp_path / "remote"
    run.mkdir(parents=True)
    remote.write_text("a file where the folder should be")
    mirror = Mirror(storage := Storage(f"file://{remote}", node), run)
    (run / "driver.log").write_text("one\n")
    assert [mirror.sync(), mirror.sync()] == [False, False]
    assert [record.message for record in caplog.records if "storage_away" in record.message][1:] == []
    remote.unlink()
    assert mirror.sync()
    assert storage.read(run / "driver.log") == b"one\n"


def test_a_url_that_nothing_can_talk_to_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="storage_url: gopher://x cannot be used") as error:
        Storage("gopher://x", tmp_path)
    assert "package" in error.value.hint


def test_paths_outside_have_no_place_there(tmp_path: Path) -> None:
    storage = Storage("memory://x", tmp_path / "runs")
    assert not storage.covers(tmp_path / "other/job-1")
    assert all_checkpoints(tmp_path / "other/job-1/checkpoints", storage) == []
