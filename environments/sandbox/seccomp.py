"""The system calls that code in a sandbox may not make, as a program for the kernel's filter (seccomp, Linux 3.5)."""

import platform
import struct

from opentinker.errors import ConfigError

EPERM, ENOSYS = 1, 38
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
"""BPF opcodes: load a word of the call's description; compare it with a constant; return a verdict."""
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_CLONE_THREAD = 0x00010000
_X32_BIT = 0x40000000

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_DENIED: dict[str, tuple[int, int]] = {
    # New processes and programs: one process per sandbox makes its memory limit the sandbox's.
    "fork": (57, -1),
    "vfork": (58, -1),
    "execve": (59, 221),
    "execveat": (322, 281),
    # The network; pairs within the process stay.
    "socket": (41, 198),
    # Other processes.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    # Memory that no address-space limit counts.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    # Namespaces and mounts.
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # Parts of the kernel that have had many holes, and that arithmetic does not need.
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "fanotify_init": (300, 262),
    "inotify_init": (253, -1),
    "inotify_init1": (294, 26),
    "personality": (135, 92),
    "modify_ldt": (154, -1),
    "iopl": (172, -1),
    "ioperm": (173, -1),
    "syslog": (103, 116),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
}
"""Name -> number on x86_64 and on aarch64; -1: there is none."""
_CLONE = (56, 220)
_CLONE3 = 435


def filter_program(machine: str = "") -> bytes:
    """The filter for `machine` (this one), as the array of `struct sock_filter` that `prctl` takes.

    Raises:
        ConfigError: no list of system calls for this machine is known.
    """
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        raise ConfigError(
            f"the sandbox knows no system calls of {machine or 'this machine'}", hint=f"it runs on {', '.join(ARCHITECTURES)}"
        )
    column = list(ARCHITECTURES).index(machine)
    code = [_step(_LOAD, _ARCHITECTURE), _step(_IF_EQUAL, ARCHITECTURES[machine], 1, 0), _step(_RETURN, _KILL)]
    code.append(_step(_LOAD, _NUMBER))
    if machine == "x86_64":  # the same calls again, under other numbers
        code += [_step(_IF_AT_LEAST, _X32_BIT, 0, 1), _step(_RETURN, _ERRNO | EPERM)]
    for numbers in _DENIED.values():
        number = numbers[column]
        if number >= 0:
            code += [_step(_IF_EQUAL, number, 0, 1), _step(_RETURN, _ERRNO | EPERM)]
    # The flags of clone3 are out of a filter's sight; without it the C library takes clone.
    code += [_step(_IF_EQUAL, _CLONE3, 0, 1), _step(_RETURN, _ERRNO | ENOSYS)]
    code += [
        _step(_IF_EQUAL, _CLONE[column], 0, 3),
        _step(_LOAD, _FIRST_ARGUMENT),
        _step(_IF_BITS, _CLONE_THREAD, 1, 0),
        _step(_RETURN, _ERRNO | EPERM),
    ]
    code.append(_step(_RETURN, _ALLOW))
    return b"".join(code)


def _step(opcode: int, constant: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", opcode, if_true, if_false, constant)
