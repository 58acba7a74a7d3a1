"""Starts one guest in its walls and ends it: when its standard input closes (its owner died, or is done), all inside die.

A program of its own with nothing but the standard library, so that it starts in milliseconds with an empty environment. It is
the parent of the sandbox's first process, in the main thread of a process of its own: the death signal that ties a sandbox to
its parent follows threads, and environments run in threads that come and go.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
from typing import Any, NoReturn

NEW_NAMESPACES = 0x00020000 | 0x08000000 | 0x04000000 | 0x20000000 | 0x40000000  # mount, IPC, UTS, PID, network
NEW_USER = 0x10000000
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
_KEPT_FLAGS = {2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}
"""statvfs flag -> mount flag: those that a user namespace must keep (nosuid, nodev, noexec, noatime, nodiratime, relatime)."""
_DETACH = 2
_DEATH_SIGNAL = 1
_CLONE = {"x86_64": 56, "aarch64": 220}
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_FIRST_UID = 0x70000000

libc = ctypes.CDLL(None, use_errno=True)
machine = os.uname().machine


def checked(result: int, what: str) -> int:
    """`result` of a C function; OSError with `what` failed where it is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    """mount(2)."""
    arguments = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    checked(libc.mount(*arguments, ctypes.c_ulong(flags), os.fsencode(data) if data else None), f"mount {target}")


def clone(flags: int) -> int:
    """fork(2) into new namespaces."""
    return checked(
        libc.syscall(_CLONE[machine], ctypes.c_ulong(flags | signal.SIGCHLD), 0, 0, 0, 0), "clone into new namespaces"
    )


def pivot(root: str, old: str) -> None:
    """pivot_root(2)."""
    checked(libc.syscall(_PIVOT_ROOT[machine], os.fsencode(root), os.fsencode(old)), "pivot_root")


def build(config: dict[str, Any]) -> None:
    """Make a root of the files in `config` and nothing else, and enter it."""
    mount("none", "/", None, REC | PRIVATE)
    mount("tmpfs", "/tmp", "tmpfs", NOSUID | NODEV, "mode=755,size=1m")
    for name in ("new", "old"):
        os.mkdir(f"/tmp/{name}")
    mount("tmpfs", "/tmp/new", "tmpfs", NOSUID | NODEV, "mode=755,size=1m")
    pivot("/tmp", "/tmp/old")
    os.chdir("/")
    for source, target in config["binds"]:
        bind("/old" + source, "/new" + target)
    for target in config["covered"]:
        mount("tmpfs", "/new" + target, "tmpfs", NOSUID | NODEV | RDONLY, "mode=755,size=4k")
    for text, target in config["links"]:
        os.makedirs(os.path.dirname("/new" + target), exist_ok=True)
        os.symlink(text, "/new" + target)
    for device in ("null", "zero", "random", "urandom"):
        bind(f"/old/dev/{device}", f"/new/dev/{device}")
    os.mkdir("/new/tmp")
    size = f"mode=1777,size={config['tmp_bytes']},nr_inodes={config['tmp_files']}"
    mount("tmpfs", "/new/tmp", "tmpfs", NOSUID | NODEV, size)
    read_only_below("/new")
    os.chdir("/new")
    pivot(".", ".")
    checked(libc.umount2(b".", _DETACH), "umount the old root")
    os.chdir("/tmp")


def bind(source: str, target: str) -> None:
    """Make the file or folder `source` appear at `target`."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "wb"):
            pass
    mount(source, target, None, BIND | REC)


def read_only_below(root: str) -> None:
    """Remount all that is mounted at and below `root` read-only, but for its /tmp; devices can still be written to."""
    with open("/old/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        points = [line.split(" ", 5)[4] for line in lines]
    for escaped, plain in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        points = [point.replace(escaped, plain) for point in points]
    for point in points:
        if point != root and not point.startswith(root + "/"):
            continue
        if point == f"{root}/tmp":
            continue
        had = os.statvfs(point).f_flag
        kept = sum(flag for bit, flag in _KEPT_FLAGS.items() if had & bit)
        device = 0 if point.startswith(f"{root}/dev/") else NODEV
        mount("none", point, None, REMOUNT | BIND | RDONLY | NOSUID | device | kept)


def become(identity: tuple[int, int] | None) -> None:
    """Take a user and group that own nothing, if there are some to be had; programs we execute have no privileges then."""
    if identity is not None:
        uid, gid = identity
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)


def map_ids(child: int) -> tuple[int, int] | None:
    """Write the user namespace's map for `child`; what the child should become, or None for itself.

    As root all ids are mapped, so that root can reach the files it mounts and the code can be somebody else.
    """
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):
            for kind in ("gid", "uid"):
                with open(f"/proc/self/{kind}_map") as own:
                    ranges = [line.split() for line in own]
                with open(f"/proc/{child}/{kind}_map", "w") as theirs:
                    theirs.write("".join(f"{inside} {inside} {count}\n" for inside, _, count in ranges))
            return nobody()
    for name, text in (("setgroups", "deny"), ("gid_map", f"1000 {os.getegid()} 1"), ("uid_map", f"1000 {os.geteuid()} 1")):
        with open(f"/proc/{child}/{name}", "w") as file:
            file.write(text)
    return None


def nobody() -> tuple[int, int]:
    """An id that no other process has, so that limits per user are the sandbox's own; nobody's where few are mapped."""
    wanted = _FIRST_UID + os.getpid()
    with open("/proc/self/uid_map") as own:
        mapped = any(int(i) <= wanted < int(i) + int(n) for i, _, n in (line.split() for line in own))
    return (wanted, wanted) if mapped else (65534, 65534)


def start_in_namespaces(config: dict[str, Any]) -> int:
    """The pid of the guest, in namespaces of its own; its own setup's errors go to the reply descriptor."""
    go, told = os.pipe()
    user = True
    try:
        child = clone(NEW_NAMESPACES | NEW_USER)
    except OSError:
        if os.geteuid() != 0:
            raise
        user, child = False, clone(NEW_NAMESPACES)  # real root needs no user namespace
    if child == 0:
        guarded(config, lambda: enter(config, go, told))
    os.close(go)
    try:
        identity = map_ids(child) if user else nobody()
        os.write(told, json.dumps(identity).encode())
        os.close(told)
    except OSError:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    return child


def enter(config: dict[str, Any], go: int, told: int) -> NoReturn:
    """In the guest's process: build the walls, drop the privileges, become the guest."""
    os.close(told)
    identity = json.loads(os.read(go, 1000))
    build(config)
    checked(libc.sethostname(b"sandbox", 7), "sethostname")
    become(None if identity is None else (identity[0], identity[1]))
    execute(config)


def start_in_bubblewrap(config: dict[str, Any]) -> int:
    """The pid of bwrap, whose child the guest is."""
    child = os.fork()
    if child == 0:
        guarded(config, lambda: os.execve(config["bwrap"][0], config["bwrap"], dict(config["environment"])))
    return child


def start_bare(config: dict[str, Any]) -> int:
    """The pid of a guest without any walls."""
    child = os.fork()
    if child == 0:

        def enter_folder() -> NoReturn:
            os.setpgid(0, 0)
            os.chdir(config["folder"])
            execute(config)

        guarded(config, enter_folder)
    return child


def execute(config: dict[str, Any]) -> NoReturn:
    """Become the guest."""
    if sys.platform == "linux":
        libc.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    os.execve(config["guest"][0], config["guest"], dict(config["environment"]))


def guarded(config: dict[str, Any], function: Any) -> NoReturn:
    """Run `function`, which does not return; its error goes to the reply descriptor, and the process ends."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        function()
    except BaseException as error:
        refuse(config, error)
    finally:
        os._exit(1)


def refuse(config: dict[str, Any], error: BaseException) -> None:
    """Tell the owner why there is no sandbox."""
    with contextlib.suppress(OSError):
        os.write(config["replies"], json.dumps({"call": 0, "refused": str(error)}).encode() + b"\n")


def watch(child: int, bare: bool) -> None:
    """Wait until the guest ends, our standard input closes or we are told to end; then kill what is left, of a bare guest its
    process group."""
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    poll = select.poll()
    poll.register(0, 0)  # only that it hung up
    poll.register(wake, select.POLLIN)
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        ready = [descriptor for descriptor, _ in poll.poll()]
        if 0 in ready or signal.SIGTERM in os.read(wake, 100):
            (os.killpg if bare else os.kill)(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return


def main() -> None:
    """The configuration is argument 1."""
    config = json.loads(sys.argv[1])
    start = {"namespaces": start_in_namespaces, "bubblewrap": start_in_bubblewrap, "none": start_bare}[config["walls"]]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # until there is something to end
    try:
        child = start(config)
    except OSError as error:
        refuse(config, error)
        return
    null = os.open("/dev/null", os.O_WRONLY)
    for descriptor in (1, 2, config["replies"]):  # so that the owner sees their end when the guest's are closed
        os.dup2(null, descriptor)
    watch(child, config["walls"] == "none")


if __name__ == "__main__":
    main()
