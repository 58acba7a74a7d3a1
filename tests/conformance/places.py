"""Where an environment can run: here in a thread, here in a process of its own, or on a real server."""

import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Protocol

HERE = Path(__file__).parent
PLACES = ("local", "process", "hosted")
TOKEN = "a-token-of-these-tests"


class MakeSession(Protocol):
    """A session of an environment by its name, with its constructor's arguments."""

    def __call__(self, name: str, /, **args: Any) -> Any: ...


class Servers:
    """`opentinker env serve` for every environment that is asked for, each started once."""

    def __init__(self, folder: Path) -> None:
        self._token_file = folder / "token"
        self._token_file.write_text(TOKEN)
        self._token_file.chmod(0o600)
        self._running: dict[str, tuple[subprocess.Popen[str], str]] = {}

    def url(self, name: str) -> str:
        if name not in self._running:
            command = [sys.executable, "-m", "opentinker", "env", "serve", name, "--port", "0", "--workers", "1"]
            command += ["--isolation", "thread", "--token-file", str(self._token_file), "--drain", "0"]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=HERE)
            self._running[name] = (process, _address(process))
        return self._running[name][1]

    def stop(self) -> None:
        for process, _ in self._running.values():
            process.terminate()
        for process, _ in self._running.values():
            process.wait(30)


def _address(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    lines = []
    killer = threading.Timer(60, process.kill)
    killer.start()
    for line in process.stdout:
        lines.append(line)
        if found := re.search(r"https?://[\w.:\[\]]+", line):
            killer.cancel()
            threading.Thread(target=process.stdout.read, daemon=True).start()
            return found[0].rstrip("/.")
    raise AssertionError(f"the server did not start: {''.join(lines)}")
