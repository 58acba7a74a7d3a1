import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from opentinker.errors import ConfigError, ConflictError
from opentinker.scheduler import state_dir
from opentinker.scheduler.state_dir import StateDir, write_secret

RECORD = {"url": "http://127.0.0.1:8780", "pid": 7}


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    state = StateDir(tmp_path / "deep" / "state")
    state.create()
    return state


def test_a_secret_is_made_once_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    assert write_secret(tmp_path / "new" / "key", lambda: "first" * 8) == "first" * 8
    assert write_secret(tmp_path / "new" / "key", lambda: "second" * 8) == "first" * 8
    assert (tmp_path / "new" / "key").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def test_a_crash_while_a_secret_is_written_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(ConfigError, match=r"cannot write the secret .*key: No space left on device"):
            write_secret(tmp_path / "key", lambda: "s" * 40)
    assert list(tmp_path.iterdir()) == []
    assert write_secret(tmp_path / "key", lambda: "t" * 40) == "t" * 40


def test_an_empty_secret_is_not_believed(tmp_path: Path) -> None:
    (tmp_path / "key").touch()
    with pytest.raises(ConfigError, match="holds no secret"):
        write_secret(tmp_path / "key", lambda: "s" * 40)


def test_a_running_cluster_is_found_and_a_second_one_refused(state: StateDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_dir, "LOCK_PATIENCE_S", 0.1)
    assert state.running() is None
    with state.held():
        state.write_cluster(RECORD)
        assert state.running() == RECORD
        with pytest.raises(ConflictError, match=r"already runs at http://127.0.0.1:8780 \(pid 7\)"), state.held():
            pass
    assert state.running() is None


def test_the_record_of_a_killed_cluster_does_not_count(state: StateDir) -> None:
    code = """if True:
        import os, sys
        from pathlib import Path
        from opentinker.scheduler.state_dir import StateDir
        state = StateDir(Path(sys.argv[1]))
        with state.held():
            state.write_cluster({"url": "u", "pid": os.getpid()})
            print("held", flush=True)
            sys.stdin.read()
    """
    with subprocess.Popen(
        [sys.executable, "-c", code, str(state.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert state.running() == {"url": "u", "pid": process.pid}
        process.kill()
    assert state.cluster.is_file()
    assert state.running() is None
    with state.held():
        pass


def test_a_state_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot create the state folder"):
        StateDir(tmp_path / "file" / "state").create()


def test_the_folder_is_closed_to_others(state: StateDir) -> None:
    assert os.stat(state.path).st_mode & 0o777 == 0o700
