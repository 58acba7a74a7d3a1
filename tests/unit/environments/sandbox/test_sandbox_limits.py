"""Code takes no more than it is given, and whatever it does to itself, the next call works."""

import shutil
import time

import psutil
import pytest
from sandbox_tools import run, works

from opentinker.environments.sandbox import PythonSandbox, SandboxLimits, Walls


def test_threads_work_up_to_a_limit(sandbox: PythonSandbox) -> None:
    result = run(
        sandbox,
        """
        import threading
        go, count = threading.Event(), 0
        try:
            for count in range(10_000):
                threading.Thread(target=go.wait, daemon=True).start()
        except (RuntimeError, MemoryError) as error:
            print(4 <= count <= 40)
        go.set()
        """,
    )
    assert result.output == "True\n"
    assert works(sandbox)


def test_it_cannot_fill_the_disk(walled: PythonSandbox) -> None:
    before = shutil.disk_usage("/").free
    result = run(
        walled,
        """
        import errno
        written, files = 0, 0
        try:
            for files in range(10_000):
                with open(f"/tmp/{files}", "wb") as file:
                    for _ in range(100):
                        written += file.write(b"x" * 1_000_000)
        except OSError as error:
            print(errno.errorcode[error.errno])
        print(written < 20_000_000)
        """,
    )
    assert result.output in ("ENOSPC\nTrue\n", "EFBIG\nTrue\n")
    assert shutil.disk_usage("/").free > before - 100_000_000
    assert works(walled)


def test_it_cannot_make_files_without_end(walls: Walls) -> None:
    if walls == "bubblewrap":
        pytest.skip("bubblewrap cannot limit the number of files")
    with PythonSandbox(walls) as sandbox:
        result = run(sandbox, "n = 0\nwhile True:\n    open(f'/tmp/{n}', 'w').close()\n    n += 1")
        assert "No space left" in result.output
        assert run(sandbox, "print(n < 300)").output == "True\n"


@pytest.mark.parametrize(
    "grow",
    [
        "b = []\nwhile True: b.append(bytearray(10_000_000))",
        "import mmap\nb = []\nwhile True: b.append(mmap.mmap(-1, 10_000_000)); b[-1].write(b'x' * 10_000_000)",
        "'x' * 10**10",
        "9**9**9",
        "import re; re.match('(a+)+$', 'a' * 40 + 'b')",
        "import os\nwhile True: os.memfd_create('x')",
    ],
)
def test_memory_and_time_are_limited_and_the_next_call_works(sandbox: PythonSandbox, grow: str) -> None:
    start = time.monotonic()
    result = run(sandbox, grow, timeout_s=1.0)
    assert result.outcome in ("error", "timeout", "killed")
    assert time.monotonic() - start < 10
    for process in psutil.Process().children(recursive=True):
        with_memory = process.memory_info().rss
        assert with_memory < 1 << 30
    assert works(sandbox)


def test_a_flood_of_output_is_cut_and_ends_in_time(sandbox: PythonSandbox) -> None:
    result = run(sandbox, "import os\nwhile True: os.write(1, b'x' * 65536)", timeout_s=1.0)
    assert result.outcome == "timeout"
    assert result.seconds < 3
    assert result.truncated
    assert len(result.output) < 17_000
    short = run(sandbox, "for n in range(100_000): print(n)\n1 / 0")
    assert short.output.startswith("0\n1\n")
    assert "bytes dropped" in short.output
    assert short.output.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize(
    "code",
    [
        "from signal import *\nsignal(SIGTERM, SIG_IGN)\nsignal(SIGALRM, SIG_IGN)\nwhile True: pass",
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass",
        "import signal, time\nsignal.setitimer(signal.ITIMER_REAL, 0)\ntime.sleep(100)",
    ],
)
def test_code_that_will_not_stop_is_killed(sandbox: PythonSandbox, code: str) -> None:
    run(sandbox, "kept = 1")
    result = run(sandbox, code, timeout_s=0.5)
    assert result.outcome == "killed"
    assert result.seconds < 9
    assert "NameError" in run(sandbox, "kept").output


@pytest.mark.parametrize(
    "code",
    [
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        "import os\nfor n in range(3, 4096):\n    try: os.read(n, 10)\n    except OSError: pass",
        "import ctypes\nctypes.CDLL(None).pause()",
        "import threading, time\nthreading.Thread(target=exec, args=('while True: pass',)).start()\ntime.sleep(10)",
    ],
)
def test_no_trick_makes_a_call_longer_than_its_time(sandbox: PythonSandbox, code: str) -> None:
    result = run(sandbox, code, timeout_s=0.5)
    assert result.outcome in ("timeout", "killed")
    assert result.seconds < 9
    assert works(sandbox)


def test_processor_time_is_limited_for_all_calls_together(sandbox: PythonSandbox) -> None:
    with PythonSandbox(limits=SandboxLimits(cpu_s=1)) as brief:
        assert run(brief, "while True: pass").outcome == "died"
        assert works(brief)


@pytest.mark.parametrize(
    "code",
    [
        "import os; os._exit(0)",
        "import os; os.closerange(0, 4096)",
        "import ctypes; ctypes.string_at(0)",
        "import os\nfor n in range(3, 4096):\n    try: os.write(n, b'x' * 100_000)\n    except OSError: pass",
        "import os\nfor n in range(3, 4096):\n    try: os.write(n, b'[' * 2000 + b'\\n')\n    except OSError: pass",
        "import sys; sys.modules['__main__'].json.dumps = None",
    ],
)
def test_an_interpreter_that_breaks_itself_is_replaced(sandbox: PythonSandbox, code: str) -> None:
    result = run(sandbox, code, timeout_s=1.0)
    assert result.outcome in ("died", "killed")
    assert works(sandbox)


def test_a_forged_answer_does_not_shift_the_next_ones(sandbox: PythonSandbox) -> None:
    forge = """
    import os, time
    for n in range(3, 4096):
        try: os.write(n, b'{"call": 1, "outcome": "ok"}\\n')
        except OSError: pass
    time.sleep(0.2); print("late")
    """
    assert run(sandbox, forge).outcome == "ok"
    assert "42" in run(sandbox, "print(42)").output
    assert works(sandbox)
