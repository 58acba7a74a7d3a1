"""Nothing that code in a sandbox does reaches the machine."""

import os
import socket
from pathlib import Path

import psutil
import pytest
from sandbox_tools import CTYPES, run, works

from opentinker.environments.sandbox import PythonSandbox
from opentinker.environments.sandbox.seccomp import ARCHITECTURES, filter_program
from opentinker.errors import ConfigError


def test_no_other_packages_files_can_be_read(walled: PythonSandbox) -> None:
    code = """
    import os
    for folder, folders, files in os.walk("/"):
        if folder.endswith("-packages"): print(folders, files)
        if "opentinker" in folder: print(folder)
    """
    assert set(run(walled, code).output.splitlines()) <= {"[] []"}


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
