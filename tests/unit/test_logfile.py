"""What a process writes after `write_to` is in the file, from wherever it comes."""

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import ctypes, logging, os, sys
from pathlib import Path
from opentinker.logfile import write_to

write_to(Path(sys.argv[1]), job="job-1", process=sys.argv[2])
print("printed by", sys.argv[2])
print("complained", file=sys.stderr)
logging.getLogger("some.where").info("logged 100%")
os.write(1, b"by a C library\\n")
sys.argv[3] == "raise" and 1 / 0
os.abort()
"""


def run(path: Path, name: str, end: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-X", "faulthandler", "-c", SCRIPT, str(path), name, end]
    return subprocess.run(command, capture_output=True, timeout=60, check=False)


def test_processes_append_all_that_they_write_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "server.log"
    for name, end in (("first%", "raise"), ("second", "abort")):
        done = run(path, name, end)
        assert done.returncode != 0
        assert (done.stdout, done.stderr) == (b"", b"")
    text = path.read_text()
    assert "printed by first%\ncomplained\n" in text
    assert " level=INFO job=job-1 process=first% logger=some.where logged 100%\n" in text
    assert "ZeroDivisionError: division by zero" in text
    assert text.count("by a C library\n") == 2
    assert text.index("ZeroDivisionError") < text.index("printed by second")
    assert "Fatal Python error: Aborted" in text
