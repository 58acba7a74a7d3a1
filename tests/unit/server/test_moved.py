"""A job that goes on on another node: it finds there what it wrote before, and loses none of it in the storage."""

import asyncio
import json
import uuid
from pathlib import Path
from typing import Any

import pytest

from opentinker.checkpoints import MANIFEST
from opentinker.errors import DeadlineError, UnavailableError
from opentinker.images import Image
from opentinker.server import actors
from opentinker.server.moved import bring_log, bring_run
from opentinker.storage import Mirror, Storage
from opentinker.training.recorder import Recorder
from opentinker.training.run import last_checkpoint
from opentinker.training.transcripts import image_file

JOB = "ann/job-1"
ROWS = "".join(json.dumps({"kind": "step", "step": step}) + "\n" for step in (10, 20, 21))


def saved(root: Path, folder: str, *, at: float) -> Path:
    path = root / folder
    path.mkdir(parents=True)
    (path / "w.bin").write_text(folder)
    (path / "trainer_state.json").write_text(json.dumps({"kind": "full", "model_type": "llama", "step": 3, "created_at": at}))
    (path / MANIFEST).write_text(json.dumps({"files": {"w.bin": {"bytes": 7}}}))
    return path


@pytest.fixture
def first(tmp_path: Path) -> Storage:
    """The storage as the node sees it where the job ran first, with all that the job wrote there."""
    storage = Storage(f"memory://{uuid.uuid4().hex}", tmp_path / "first")
    run = storage.root / JOB
    for name, at in (("step-000010@10", 1.0), ("step-000020@25", 2.0), ("step-000020@20", 3.0), ("final@21", 4.0)):
        storage.put_folder(saved(run / "checkpoints", name, at=at), last=MANIFEST)
    (run / "code").mkdir()
    for name in ("code/mine.py", "config.yaml", "transcripts.jsonl", "driver.log", "server.log", "driver.json"):
        (run / name).write_text("" if name.endswith(".jsonl") else f"{name} of the first node\n")
    (run / "metrics.jsonl").write_text(ROWS + '{"kind": "st')
    storage.put_folder(run / "code")
    assert Mirror(storage, run).sync()
    return storage


@pytest.fixture
def second(first: Storage, tmp_path: Path) -> Storage:
    """The same storage as another node sees it."""
    return Storage(first.url, tmp_path / "second")


def test_a_restarted_run_goes_on_behind_its_last_step_on_another_node(second: Storage) -> None:
    run = second.root / JOB
    bring_run(second, run)
    assert {path.name for path in run.iterdir()} == {
        *("code", "checkpoints", "config.yaml", "metrics.jsonl", "transcripts.jsonl", "driver.log"),
    }
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000020@20"]  # the newest of the last step
    assert (run / "checkpoints/step-000020@20/w.bin").read_text() == "step-000020@20"
    assert last_checkpoint(run) == 20
    recorder = Recorder(run, {}, resume_at=20)
    assert [row["step"] for row in recorder.rows] == [10, 20]
    assert Mirror(second, run).sync()
    kept = second.read(run / "metrics.jsonl")
    assert kept is not None
    assert kept.decode().startswith(ROWS)
    assert '"resumed"' in kept.decode()
    assert second.read(run / "driver.log") == b"driver.log of the first node\n"


def test_a_report_shows_the_images_of_before_the_move_and_after_it(second: Storage, first: Storage) -> None:
    images = [Image(b"\x89PNG\r\n\x1a\n" + bytes([n])) for n in range(3)]
    there, here = Recorder(first.root / JOB, {}, resume_at=20), second.root / JOB
    there.transcript({"step": 20}, images[:2])
    assert Mirror(first, there.folder).sync()
    (here / "images").mkdir(parents=True)  # of an earlier stay
    (here / image_file(images[0])).write_bytes(images[0].data)
    bring_run(second, here)
    Recorder(here, {}, resume_at=20).transcript({"step": 20}, images[1:])
    assert Mirror(second, here).sync()
    for image in images:
        assert (here / image_file(image)).read_bytes() == image.data
        assert second.read(here / image_file(image)) == image.data


def test_what_is_here_stays_unless_the_storage_has_more(first: Storage, second: Storage) -> None:
    there, here = first.root / JOB, second.root / JOB
    here.mkdir(parents=True)
    (here / "driver.log").write_text("of an earlier stay")  # shorter
    longer = f"{ROWS}{ROWS}"
    (here / "metrics.jsonl").write_text(longer)
    saved(here / "checkpoints", "step-000030@30", at=5.0)
    bring_run(second, here)
    assert (here / "driver.log").read_text() == (there / "driver.log").read_text()
    assert (here / "metrics.jsonl").read_text() == longer
    assert [path.name for path in (here / "checkpoints").iterdir()] == ["step-000030@30"]


def test_nothing_is_brought_for_a_job_that_begins(tmp_path: Path) -> None:
    storage = Storage(f"memory://{uuid.uuid4().hex}", tmp_path)
    run = tmp_path / JOB
    assert bring_log({"url": storage.url, "root": str(tmp_path)}, run / "server.log") is None
    assert bring_log(None, tmp_path / "elsewhere/server.log") is None
    bring_run(storage, run)
    assert list(run.iterdir()) == []
    assert not (tmp_path / "elsewhere").exists()


def test_both_processes_of_a_server_write_behind_the_earlier_ones_log(second: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    log = second.root / JOB / "server.log"

    def write_to(path: Path, **fields: str) -> None:
        with path.open("a") as file:
            file.write(f"{fields['process']} begins\n")

    monkeypatch.setattr(actors, "own_process_group", lambda: None)
    monkeypatch.setattr(actors, "write_to", write_to)
    at: dict[str, Any] = {"storage": {"url": second.url, "root": str(second.root)}}

    async def serve() -> actors.WorkerProcess:
        actors.FrontProcess(None, {}, "127.0.0.1", "job-1", str(log), **at)
        return actors.WorkerProcess({"base_model": "m"}, None, str(log.parent / "checkpoints"), "job-1", str(log), **at)

    worker = asyncio.run(serve())
    assert log.read_text() == "server.log of the first node\nfront begins\nworker begins\n"
    worker._follow(second)
    assert worker._mirror is not None
    assert last_checkpoint(log.parent) == 20
    assert (log.parent / "driver.log").exists()
    worker.flush()
    assert second.read(log) == log.read_bytes()

    class Busy:
        def stop(self) -> None:
            raise DeadlineError("it computes")

    worker._worker = Busy()  # type: ignore[assignment]
    worker._loaded.set()
    log.write_text("the last words, which are longer than all that were there before")
    with pytest.raises(DeadlineError):
        worker.stop()
    assert second.read(log) == log.read_bytes()


def test_a_server_does_not_start_over_a_log_that_it_could_not_bring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "remote").write_text("a file where the folder should be")
    monkeypatch.setattr(actors, "own_process_group", lambda: None)
    monkeypatch.setattr(actors, "write_to", lambda path, **fields: path.touch())
    monkeypatch.setattr(Storage, "fetch_longer", _away)
    at = {"url": f"file://{tmp_path / 'remote'}", "root": str(tmp_path / "runs")}
    log = tmp_path / "runs" / JOB / "server.log"
    worker = actors.WorkerProcess({"base_model": "m"}, None, str(log.parent / "checkpoints"), "job-1", str(log), at)
    with pytest.raises(UnavailableError, match="is away"):
        worker._follow(Storage(**{"url": at["url"], "root": Path(at["root"])}))
    assert worker._mirror is None


def _away(*_: Any) -> None:
    raise UnavailableError("the storage is away")


def test_half_a_file_is_not_brought(second: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(source: str, target: str) -> None:
        Path(target).write_text("half")
        raise ConnectionResetError("the line is dead")

    monkeypatch.setattr(second._fs, "get_file", fails)
    with pytest.raises(UnavailableError, match="the line is dead"):
        second.fetch_longer(second.root / JOB, ["driver.log"])
    assert list((second.root / JOB).iterdir()) == []
