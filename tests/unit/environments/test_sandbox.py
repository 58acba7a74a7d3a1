"""Nothing that code in a sandbox does reaches the machine; whatever it does to itself, the next call works."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import psutil
import pytest

from opentinker.environments.sandbox import Execution, PythonSandbox, SandboxLimits, Walls, usable_walls
from opentinker.environments.sandbox.seccomp import ARCHITECTURES, filter_program
from opentinker.errors import ConfigError

CTYPES = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def attempt(name, *arguments):
    result = getattr(libc, name)(*arguments)
    print(name, os.strerror(ctypes.get_errno()) if result < 0 else f"SUCCEEDED {result}")
"""


@pytest.fixture(scope="module", params=["namespaces", "bubblewrap"])
def walls(request: pytest.FixtureRequest) -> Walls:
    if request.param == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    try:
        return usable_walls(request.param)
    except ConfigError as error:
        pytest.skip(f"this kernel gives us no namespaces: {error.detail}")


@pytest.fixture
def walled(walls: Walls) -> Iterator[PythonSandbox]:
    """By either kind of walls: for what they keep out."""
    with PythonSandbox(walls) as sandbox:
        yield sandbox


@pytest.fixture
def sandbox() -> Iterator[PythonSandbox]:
    """For what the interpreter does, which is the same within all walls."""
    try:
        usable_walls()
    except ConfigError as error:
        pytest.skip(f"this kernel gives us no namespaces: {error.detail}")
    with PythonSandbox() as sandbox:
        yield sandbox


def run(sandbox: PythonSandbox, code: str, timeout_s: float = 10.0) -> Execution:
    return sandbox.run(textwrap.dedent(code), timeout_s)


def works(sandbox: PythonSandbox) -> bool:
    return sandbox.run("print(6 * 7)", 10.0).output == "42\n"


def ours() -> set[int]:
    """The processes that this one started, with all below them."""
    return {p.pid for p in psutil.Process().children(recursive=True)}


# What a Python tool is for


def test_variables_imports_and_functions_are_there_in_the_next_call(walled: PythonSandbox) -> None:
    assert run(walled, "import math\nx = 20\ndef twice(n): return 2 * n").outcome == "ok"
    assert run(walled, "print(twice(x) + math.isqrt(5))").output == "42\n"


def test_the_value_of_the_last_expression_is_printed(sandbox: PythonSandbox) -> None:
    assert run(sandbox, "a = 'q'\na * 2").output == "'qq'\n"
    assert run(sandbox, "_").output == "'qq'\n"
    assert run(sandbox, "None").output == ""
    assert run(sandbox, "").outcome == "ok"


def test_an_exception_is_shown_with_the_lines_of_the_code_alone(sandbox: PythonSandbox) -> None:
    result = run(sandbox, "def half(n):\n    return n / 0\nhalf(1)")
    assert result.outcome == "error"
    assert "return n / 0" in result.output
    assert result.output.endswith("ZeroDivisionError: division by zero\n")
    assert "guest.py" not in result.output


@pytest.mark.parametrize(
    ("code", "outcome", "says"),
    [
        ("print(1", "error", "SyntaxError"),
        ("\x00", "error", "null bytes"),
        ("'\ud800'", "error", "surrogates"),
        ("print('\\ud800')", "ok", "?"),
        ("exit()", "ok", ""),
        ("import sys; sys.exit('bye')", "error", "bye"),
        ("input()", "error", "EOFError"),
        ("import sys; sys.stdout.close()", "ok", ""),
        ("import sys; del sys.stdout, sys.stderr", "ok", ""),
        ("class E(Exception):\n  def __str__(self): raise self\nraise E", "error", "E"),
        ("def f(): f()\nf()", "error", "RecursionError"),
        ("raise KeyboardInterrupt", "error", "KeyboardInterrupt"),
        ("x" * 200_000, "error", "longer than"),
    ],
)
def test_odd_code_gets_an_answer_and_keeps_the_interpreter(sandbox: PythonSandbox, code: str, outcome: str, says: str) -> None:
    run(sandbox, "kept = 1")
    result = sandbox.run(code, 10.0)
    assert result.outcome == outcome
    assert says in result.output
    assert run(sandbox, "print(kept)").output == "1\n"


def test_code_that_takes_too_long_is_stopped_and_its_variables_are_kept(sandbox: PythonSandbox) -> None:
    run(sandbox, "n = 0")
    result = run(sandbox, "print('begun', flush=True)\nwhile True: n += 1", timeout_s=1.5)
    assert (result.outcome, result.output) == ("timeout", "begun\n")
    assert run(sandbox, "print(n > 0)").output == "True\n"


def test_named_packages_can_be_imported_and_no_others(walls: Walls) -> None:
    with PythonSandbox(walls, packages=("yaml",)) as sandbox:
        assert run(sandbox, "import yaml; print(yaml.safe_load('a: 1'))").output == "{'a': 1}\n"
        assert "ModuleNotFoundError" in run(sandbox, "import pydantic").output
        assert "ModuleNotFoundError" in run(sandbox, "import opentinker").output
    with pytest.raises(ConfigError, match="'nosuchpackage' is not installed"):
        PythonSandbox(walls, packages=("nosuchpackage",))


def test_no_other_packages_files_can_be_read(walled: PythonSandbox) -> None:
    code = """
    import os
    for folder, folders, files in os.walk("/"):
        if folder.endswith("-packages"): print(folders, files)
        if "opentinker" in folder: print(folder)
    """
    assert set(run(walled, code).output.splitlines()) <= {"[] []"}


# What it keeps out


def test_it_cannot_read_keys_of_the_process_that_runs_it(
    walled: PythonSandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OPENTINKER_API_KEY", "ot-secret-key")
    secret = tmp_path / "config.yaml"
    secret.write_text("ot-secret-key")
    with PythonSandbox(walled._walls) as started_with_the_key:
        result = run(
            started_with_the_key,
            f"""
            import os, glob
            print(dict(os.environ))
            paths = ["/proc/1/environ", "/proc/self/environ", f"/proc/{os.getpid()}/environ", {str(secret)!r}]
            paths += ["/etc/shadow", "/etc/passwd", "/root/.config", os.path.expanduser("~/.config"), "/run/secrets", "/work"]
            for path in paths:
                print(path, os.path.exists(path))
            for folder, folders, files in os.walk("/"):
                for name in files:
                    if folder.startswith(("/tmp", "/etc", "/home", "/root/.c", "/work", "/var", "/run", "/proc", "/sys")):
                        print("SEES", os.path.join(folder, name))
            """,
        )
    assert result.outcome == "ok"
    assert "ot-secret-key" not in result.output
    assert "True" not in result.output
    assert [line for line in result.output.splitlines() if line.startswith("SEES") and "/etc/ld" not in line] == []


def test_it_runs_without_our_open_files(walled: PythonSandbox, tmp_path: Path) -> None:
    with open(tmp_path / "open", "w+") as file:
        os.set_inheritable(file.fileno(), True)
        with PythonSandbox(walled._walls) as later:
            result = run(
                later, "import os\nfor n in range(3, 4096):\n  try: print(n, oct(os.fstat(n).st_mode))\n  except OSError: pass"
            )
    kinds = {line.split()[1][:-4] for line in result.output.splitlines()}
    assert kinds <= {"0o10", "0o1"}, result.output  # pipes: the requests and the replies


def test_it_cannot_open_a_socket(walled: PythonSandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        result = run(
            walled,
            CTYPES
            + f"""
import socket
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK, socket.AF_PACKET):
    try: socket.socket(family)
    except OSError as error: print(error)
    else: print("SUCCEEDED")
try: socket.create_connection(("127.0.0.1", {port}), 1)
except OSError as error: print(error)
attempt("socket", 2, 1, 0)
attempt("syscall", 41 if os.uname().machine == "x86_64" else 198, 2, 1, 0)
""",
        )
        with pytest.raises(TimeoutError):
            server.accept()
    assert result.output.count("not permitted") == 8, result.output
    assert "SUCCEEDED" not in result.output


def test_it_cannot_start_processes_and_a_fork_bomb_is_nothing(walled: PythonSandbox) -> None:
    before = len(psutil.pids())
    result = run(
        walled,
        CTYPES
        + """
import subprocess, multiprocessing
for start in (os.fork, lambda: subprocess.run(["/bin/true"]), lambda: multiprocessing.Process(target=print).start(),
              lambda: os.execv("/bin/true", ["true"]), lambda: os.posix_spawn("/bin/true", ["true"], {})):
    try: start()
    except OSError as error: print("refused", error.errno)
    else: print("SUCCEEDED")
attempt("fork"); attempt("vfork")
import time
end = time.time() + 0.5
while time.time() < end:
    try: os.fork()
    except OSError: pass
print("still here")
""",
    )
    assert result.output.count("refused") == 5, result.output
    assert "SUCCEEDED" not in result.output
    assert result.output.endswith("still here\n")
    assert len(psutil.pids()) < before + 50


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


def test_it_cannot_write_anywhere_but_into_its_own_tmp(walled: PythonSandbox) -> None:
    result = run(
        walled,
        """
        import os
        for folder, folders, files in os.walk("/"):
            folders[:] = [f for f in folders if not os.path.islink(os.path.join(folder, f))]
            if folder.count("/") > 3 and not folder.startswith("/tmp"): folders[:] = []
            for path in [os.path.join(folder, "new"), *(os.path.join(folder, f) for f in files[:3])]:
                try: open(path, "ab").close()
                except OSError: continue
                print(path)
        """,
    )
    found = set(result.output.split())
    assert found <= {"/tmp/new", "/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"}
    assert "/tmp/new" in found
    assert not Path("/tmp/new").exists()


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


def test_shared_memory_that_no_limit_counts_is_refused(sandbox: PythonSandbox) -> None:
    result = run(
        sandbox, CTYPES + 'attempt("shmget", 0, 1000, 0o1600); attempt("msgget", 0, 0o1600); attempt("semget", 0, 1, 0o1600)'
    )
    assert result.output.count("not permitted") == 3, result.output


def test_it_cannot_kill_who_runs_it(walled: PythonSandbox) -> None:
    us = os.getpid()
    for target in ("1", "-1", "0", "os.getppid()", str(us), f"-{os.getpgid(0)}", "os.getpid()"):
        run(walled, f"import os, signal\ntry: os.kill({target}, signal.SIGKILL)\nexcept OSError as error: print(error)")
        run(walled, f"import os, signal\ntry: os.kill({target}, signal.SIGSTOP)\nexcept OSError as error: print(error)", 0.5)
        assert works(walled)
    assert psutil.Process(us).is_running()


@pytest.mark.parametrize(
    "attempts",
    [
        'attempt("ptrace", 16, 1, 0, 0); attempt("ptrace", 0, 0, 0, 0); attempt("process_vm_readv", 1, 0, 0, 0, 0, 0)',
        'attempt("unshare", 0x10000000); attempt("setns", 0, 0); attempt("chroot", b"/"); attempt("umount2", b"/", 2)',
        'attempt("mount", b"none", b"/tmp", b"proc", 0, 0); attempt("mount", b"none", b"/", 0, 32 | 4096, 0)',
        'attempt("syscall", 425, 8, 0); attempt("syscall", 434, 1, 0); attempt("setuid", 0); attempt("sethostname", b"x", 1)',
        'attempt("mknod", b"/tmp/disk", 0o60600, os.makedev(254, 0)); attempt("init_module", 0, 0, 0); attempt("reboot", 0)',
        'attempt("syscall", 56 if os.uname().machine == "x86_64" else 220, 17, 0, 0, 0, 0); attempt("syscall", 435, 0, 0)',
    ],
)
def test_it_cannot_trace_mount_leave_or_become_root(walled: PythonSandbox, attempts: str) -> None:
    result = run(walled, CTYPES + attempts)
    assert result.output, result
    assert "SUCCEEDED" not in result.output


def test_it_has_no_capabilities_and_cannot_get_any(walled: PythonSandbox) -> None:
    result = run(walled, CTYPES + "print(libc.prctl(39, 0, 0, 0, 0), libc.prctl(21, 0, 0, 0, 0), os.getuid() != 0)")
    assert result.output == "1 2 True\n"  # no new privileges; seccomp filters
    capget = (
        CTYPES
        + "h = (ctypes.c_uint32 * 2)(0x20080522, 0); d = (ctypes.c_uint32 * 6)()\n"
        + "print(libc.capget(h, d), list(d)[:2], list(d)[3:5])"
    )
    assert run(walled, capget).output == "0 [0, 0] [0, 0]\n"


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


# That nothing is left


def test_nothing_is_left_when_it_is_closed(walls: Walls) -> None:
    before = ours()
    sandbox = PythonSandbox(walls)
    run(sandbox, "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()")
    assert ours() - before
    sandbox.close()
    assert not ours() - before
    sandbox.close()
    with pytest.raises(ConfigError, match="closed"):
        sandbox.run("1")


def test_closing_it_ends_a_call_in_another_thread(walls: Walls) -> None:
    sandbox = PythonSandbox(walls)
    run(sandbox, "1")
    results: list[Execution] = []
    thread = threading.Thread(target=lambda: results.append(run(sandbox, "while True: pass", timeout_s=60)))
    thread.start()
    time.sleep(0.3)
    sandbox.close()
    thread.join(5)
    assert [r.outcome for r in results] == ["died"]


def test_nothing_is_left_when_the_process_that_owns_it_is_killed(walls: Walls) -> None:
    program = f"""
import sys
from opentinker.environments.sandbox import PythonSandbox
sandbox = PythonSandbox({walls!r})
sandbox.run("1")
print("up", flush=True)
sandbox.run("while True: pass", 60)
"""
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"up\n"
    below = psutil.Process(owner.pid).children(recursive=True)
    assert below
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    _, alive = psutil.wait_procs(below, timeout=5)
    assert not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_nothing_is_left_when_the_warden_is_killed(walled: PythonSandbox) -> None:
    run(walled, "1")
    assert walled._guest is not None
    warden = psutil.Process(walled._guest._process.pid)
    below = warden.children(recursive=True)
    assert below
    warden.kill()
    _, alive = psutil.wait_procs(below, timeout=5)
    assert not alive
    assert run(walled, "1").outcome == "died"
    assert works(walled)


def test_it_outlives_the_thread_that_started_it(sandbox: PythonSandbox) -> None:
    thread = threading.Thread(target=lambda: run(sandbox, "x = 5"))
    thread.start()
    thread.join()
    assert run(sandbox, "print(x)").output == "5\n"


def test_many_run_at_once(walls: Walls) -> None:
    before = ours()

    def use(number: int) -> str:
        with PythonSandbox(walls) as sandbox:
            run(sandbox, f"x = {number}", timeout_s=60)
            return run(sandbox, "print(x)", timeout_s=60).output

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(use, range(32))) == [f"{n}\n" for n in range(32)]
    assert not ours() - before


# Refusing


def test_where_no_namespaces_can_be_had_it_refuses_and_says_what_to_do() -> None:
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-Ur", "true"], capture_output=True).returncode:
        pytest.skip("unshare(1) cannot make the surroundings")
    code = "from opentinker.environments.sandbox import PythonSandbox; PythonSandbox()"
    limit = 'for kind in user mnt; do echo 0 > /proc/sys/user/max_${kind}_namespaces; done; exec "$@"'
    done = subprocess.run(
        ["unshare", "-Ur", "sh", "-c", limit, "sh", sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert "no sandbox by namespaces" in last
    assert "--security-opt seccomp=unconfined" in last
    assert "unsafe_none" in last


WITHOUT_USER_NAMESPACES = """
import ctypes, os, sys
mapped, go = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    assert ctypes.CDLL(None).unshare(0x10000000) == 0
    os.write(go[1], b"x")
    os.read(mapped[0], 1)
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    open("/proc/sys/user/max_user_namespaces", "w").write("0")
    os.execv(sys.executable, [sys.executable, "-c", sys.argv[1]])
os.read(go[0], 1)
for kind in ("gid", "uid"):
    open(f"/proc/{child}/{kind}_map", "w").write("0 0 4294967295")
os.write(mapped[1], b"x")
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can do without user namespaces")
def test_root_needs_no_user_namespaces_and_the_code_is_not_root() -> None:
    inside = """
import os
def attempt(function, *arguments):
    try: print("SUCCEEDED", function(*arguments))
    except OSError as error: print("refused", error)
print("root" if 0 in (os.getuid(), os.getgid(), *os.getgroups()) else "nobody")
attempt(os.setuid, 0); attempt(os.chown, "/tmp", 0, 0); attempt(os.fork); attempt(open, "/usr/new", "w")
"""
    program = (
        f"from opentinker.environments.sandbox import PythonSandbox as S; s = S('namespaces'); print(s.run({inside!r}).output)"
    )
    command = [sys.executable, "-c", WITHOUT_USER_NAMESPACES, program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if "max_user_namespaces" in done.stderr:
        pytest.skip("the surroundings cannot be made here")
    assert done.stdout.count("refused") == 4, done.stdout + done.stderr
    assert done.stdout.startswith("nobody")
    assert "SUCCEEDED" not in done.stdout


AS_IN_DOCKER = """
import ctypes, struct
def step(opcode, constant, if_true=0, if_false=0): return struct.pack("<HBBI", opcode, if_true, if_false, constant)
code = [step(0x20, 0)]
for number in (272, 165, 166, 155, 308):  # unshare, mount, umount2, pivot_root, setns
    code += [step(0x15, number, 0, 1), step(6, 0x50001)]
code += [step(0x15, 435, 0, 1), step(6, 0x50026)]  # clone3
code += [step(0x15, 56, 0, 3), step(0x20, 16), step(0x45, 0x7E020000, 0, 1), step(6, 0x50001), step(6, 0x7FFF0000)]
class Program(ctypes.Structure): _fields_ = [("length", ctypes.c_ushort), ("steps", ctypes.c_void_p)]
steps = ctypes.create_string_buffer(b"".join(code))
program = Program(len(code), ctypes.cast(steps, ctypes.c_void_p))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0
from opentinker.environments.sandbox import PythonSandbox
PythonSandbox()
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the filter's numbers are those of x86_64")
def test_behind_a_filter_like_dockers_own_it_refuses_and_names_the_option() -> None:
    done = subprocess.run([sys.executable, "-c", AS_IN_DOCKER], capture_output=True, text=True, timeout=60)
    last = done.stderr.strip().splitlines()[-1]
    assert "ConfigError: no sandbox by namespaces: [Errno 1] clone into new namespaces: Operation not permitted" in last
    assert "docker run --security-opt seccomp=unconfined" in last


def test_without_walls_it_runs_only_when_told_so_and_warns(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENTINKER_API_KEY", "ot-secret-key")
    monkeypatch.setattr("opentinker.environments.sandbox.sandbox._warned", threading.Event())
    with PythonSandbox("unsafe_none") as sandbox:
        assert works(sandbox)
        assert "ot-secret-key" not in run(sandbox, "import os; print(dict(os.environ))").output
    assert "NO SANDBOX" in capfd.readouterr().err


def test_unknown_walls_are_refused() -> None:
    with pytest.raises(ConfigError, match="no walls 'none'"):
        PythonSandbox(cast(Walls, "none"))


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_the_filter_is_a_whole_program_without_a_jump_out_of_it(machine: str) -> None:
    program = filter_program(machine)
    steps = [program[i : i + 8] for i in range(0, len(program), 8)]
    assert 50 < len(steps) < 4096
    for number, step in enumerate(steps):
        if step[0] & 0x07 == 0x05:
            assert number + 1 + max(step[2], step[3]) < len(steps)
    assert steps[-1][0] == 0x06
    with pytest.raises(ConfigError, match="sparc"):
        filter_program("sparc")
