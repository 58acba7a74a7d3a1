"""Where there can be no walls, there is no sandbox, and it says what to do."""

import os
import shutil
import subprocess
import sys
import threading
from typing import cast

import pytest
from sandbox_tools import run, works

from opentinker.environments.sandbox import PythonSandbox, Walls
from opentinker.errors import ConfigError


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
