"""The process of a submitted job's driver: everything that it prints goes to the job's driver.log."""

import json
import logging
import os
import traceback
from pathlib import Path
from typing import Any

from opentinker.errors import ConfigError, OpenTinkerError
from opentinker.logfile import write_to
from opentinker.process_group import own_process_group
from opentinker.redaction import RedactedOutput, Redactor
from opentinker.scheduler.imports import load
from opentinker.scheduler.packages import INSTALL_LOG_NAME
from opentinker.scheduler.processes import forget_secrets

LOG_NAME = "driver.log"
MARK_NAME = "driver.json"
"""Says which driver came up last: {"server", "pid"}."""
SERVER_LOG_NAME = "server.log"
"""Beside it: what the processes of the job's server print."""
OUTPUT_S = 5.0
"""How long the last of a driver's output may take to be in the log."""


class DriverProcess:
    """A Ray actor. Its one long call runs in the main thread, where user code may use signals.

    It lives until it is killed, so that a scheduler that restarted while it ran can still fetch how it ended.
    """

    def __init__(self, job_id: str, server_id: str, run_dir: str) -> None:
        self._outcome: dict[str, str] | None = None
        self._log = Path(run_dir) / LOG_NAME
        self._redactor = Redactor({})
        self._output: RedactedOutput | None = None
        own_process_group()
        forget_secrets()
        _leave_mark(Path(run_dir), server_id)
        begin_log(Path(run_dir))
        write_to(self._log, job=job_id)
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request, of which a step has hundreds

    def describe(self) -> dict[str, Any]:
        return {"pid": os.getpid()}

    def run(
        self,
        function: str,
        config: dict[str, Any],
        arguments: dict[str, Any],
        secrets: dict[str, tuple[str, str]] | None = None,
        refusal: str = "",
    ) -> dict[str, str]:
        """Run the driver; blocks. `secrets` and `refusal` are those of `DriverSpec`.

        A second call, which Ray lets begin after the first, only returns what that one did.

        Returns:
            {"cause", "code"}: both empty when it succeeded. Errors do not travel as exceptions, because those of user code
            may not unpickle elsewhere; the traceback is in the log.
        """
        if self._outcome is None and refusal:
            self._outcome = {"cause": refusal, "code": ConfigError.code}
        if self._outcome is None:
            if secrets:
                self._reveal(secrets)
            self._outcome = self._run(function, config, **arguments)
            if self._output is not None:
                self._output.close(OUTPUT_S)
        return self._outcome

    def _reveal(self, secrets: dict[str, tuple[str, str]]) -> None:
        """Put secrets into the environment, where the user's code looks for them, and keep them out of the log."""
        values = dict(secrets.values())
        self._redactor = Redactor(values)
        self._output = RedactedOutput(self._log, values)
        os.environ.update({variable: value for variable, (_, value) in secrets.items()})

    def _run(self, function: str, config: dict[str, Any], **arguments: Any) -> dict[str, str]:
        try:
            load(function)(config, **arguments)
        except OpenTinkerError as error:
            traceback.print_exc()
            return {"cause": _one_line(self._redactor.text(str(error))), "code": error.code}
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            text = self._redactor.text(f"the driver failed: {type(error).__name__}: {error}")
            return {"cause": _one_line(text), "code": ""}
        return {"cause": "", "code": ""}


def begin_log(run_dir: Path) -> None:
    """Let the driver's log go on, or begin, with what was printed when its packages were installed, if any were."""
    log, installing = run_dir / LOG_NAME, run_dir / INSTALL_LOG_NAME
    if not installing.exists():
        return
    if not log.exists():
        installing.rename(log)
        return
    with log.open("ab") as file:  # of an earlier driver, which was lost
        file.write(installing.read_bytes())
    installing.unlink()


def came_up(run_dir: Path, server_id: str) -> bool:
    """Whether the driver beside this server ever came up."""
    try:
        mark: dict[str, Any] = json.loads((run_dir / MARK_NAME).read_text())
    except FileNotFoundError:
        return False
    return bool(mark["server"] == server_id)


def _leave_mark(run_dir: Path, server_id: str) -> None:
    draft = run_dir / f".{MARK_NAME}"
    draft.write_text(json.dumps({"server": server_id, "pid": os.getpid()}))
    draft.replace(run_dir / MARK_NAME)


def _one_line(text: str) -> str:
    return " ".join(text.split()) or "the driver failed without a message"
