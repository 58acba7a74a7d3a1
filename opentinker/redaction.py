"""Takes the values of secrets out of what a process prints, also what its children and C libraries print.

The output goes through a pipe to a process of its own, which is this file run as a script: it sees everything up to the last
byte of a process that was killed. It imports nothing of OpenTinker, so that it is there in an instant.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

SHORTEST = 6
"""Characters of the shortest value that is looked for; shorter ones are found in too many innocent words."""
LONG_LINE = 16
_READY = b"ready"


class Redactor:
    """Replaces values in a stream of bytes, however it is cut into pieces: the leftmost first, of those the longest."""

    def __init__(self, secrets: Mapping[str, str]) -> None:
        """`secrets`: name -> value. A value is also found as JSON and Python write it within quotes; of several lines,
        the long ones are also found by themselves."""
        self._names: dict[bytes, str] = {}
        for name, value in secrets.items():
            lines = [line for line in value.splitlines() if len(line) >= LONG_LINE]
            for form in (value, json.dumps(value)[1:-1], repr(value)[1:-1], *lines):
                if len(form) >= SHORTEST:
                    self._names.setdefault(form.encode(), name)
        longest_first = sorted(self._names, key=len, reverse=True)
        self._pattern = re.compile(b"|".join(map(re.escape, longest_first))) if longest_first else None
        self._longest = len(longest_first[0]) if longest_first else 0
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """What can be passed on by now. The end of it is held back while it may be the beginning of a value."""
        if self._pattern is None:
            return data
        data, passed, at = self._held + data, [], 0
        hold = self._beginning(data, at)
        while (found := self._pattern.search(data, at)) is not None and found.start() < hold:
            passed += [data[at : found.start()], self._mark(found)]
            at = found.end()
            if hold < at:
                hold = self._beginning(data, at)
        self._held = data[hold:]
        return b"".join([*passed, data[at:hold]])

    def finish(self) -> bytes:
        """The rest, when nothing follows."""
        rest, self._held = self._held, b""
        return rest if self._pattern is None else self._pattern.sub(self._mark, rest)

    def text(self, text: str) -> str:
        """A whole text without the values."""
        if self._pattern is None:
            return text
        return self._pattern.sub(self._mark, text.encode("utf-8", "surrogateescape")).decode("utf-8", "replace")

    def _mark(self, found: re.Match[bytes]) -> bytes:
        return f"[secret {self._names[found.group()]}]".encode()

    def _beginning(self, data: bytes, at: int) -> int:
        """Where the first tail of the data begins, from `at` on, that a value could go on with; the data's end if none does."""
        for start in range(max(at, len(data) - self._longest + 1), len(data)):
            tail = data[start:]
            if any(len(value) > len(tail) and value.startswith(tail) for value in self._names):
                return start
        return len(data)


class RedactedOutput:
    """This process's stdout and stderr, and those of its children from now on, sent to the end of a file without secrets."""

    def __init__(self, path: Path, secrets: Mapping[str, str]) -> None:
        """Returns when the other process is at work: from then on nothing is lost, also if this one is killed.

        Raises:
            OSError: it cannot be started, or cannot write the file.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        read_end, write_end = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__],
                stdin=read_end,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            os.close(read_end)
            read_end = -1
            # The first line is for the other process alone: neither arguments nor environment may hold a secret.
            head = json.dumps({"path": str(path), "secrets": dict(secrets)}).encode() + b"\n"
            while head:
                head = head[os.write(write_end, head) :]
            assert self._process.stdout is not None
            with self._process.stdout as said:
                if said.read(len(_READY)) != _READY:
                    raise OSError(f"{path} cannot be written by way of another process")
            for descriptor in (1, 2):
                os.dup2(write_end, descriptor)
        finally:
            os.close(write_end)
            if read_end >= 0:
                os.close(read_end)

    def close(self, timeout_s: float) -> None:
        """Wait until everything is in the file, if no child goes on writing; what this process prints later is thrown away."""
        sys.stdout.flush()
        sys.stderr.flush()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):
            os.dup2(nowhere, descriptor)
        os.close(nowhere)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)


def main() -> None:
    """Pass standard input on to the file that its first line names."""
    data = b""
    while b"\n" not in data:
        part = os.read(0, 2**16)
        if not part:
            return
        data += part
    line, _, data = data.partition(b"\n")
    head = json.loads(line)
    redactor = Redactor(head["secrets"])
    with open(head["path"], "ab", buffering=0) as file:
        _write(1, _READY)
        os.close(1)
        while True:
            _write(file.fileno(), redactor.feed(data))
            data = os.read(0, 2**16)
            if not data:
                break
        _write(file.fileno(), redactor.finish())


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    main()
