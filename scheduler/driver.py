"""The process of a submitted job's driver: everything that it prints goes to the job's driver.log."""

import logging
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from opentinker.errors import OpenTinkerError
from opentinker.scheduler.imports import load

LOG_NAME = "driver.log"


class DriverProcess:
    """A Ray actor. Its one long call runs in the main thread, where user code may use signals.

    It lives until it is killed, so that a scheduler that restarted while it ran can still fetch how it ended.
    """

    def __init__(self, job_id: str, run_dir: str) -> None:
        self._outcome: dict[str, str] | None = None
        log = os.open(Path(run_dir) / LOG_NAME, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
        for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            os.dup2(log, descriptor)
        os.close(log)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        logging.basicConfig(
            stream=sys.stderr,
            level=logging.INFO,
            format=f"%(asctime)s level=%(levelname)s job={job_id} logger=%(name)s %(message)s",
            force=True,
        )
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request, of which a step has hundreds

    def describe(self) -> dict[str, Any]:
        return {"pid": os.getpid()}

    def run(
        self, function: str, config: dict[str, Any], endpoint: str, token: str, policy: str, run_dir: str, code_dir: str | None
    ) -> dict[str, str]:
        """Run the driver; blocks. A second call, which Ray lets begin after the first, only returns what that one did.

        Returns:
            {"cause", "code"}: both empty when it succeeded. Errors do not travel as exceptions, because those of user code
            may not unpickle elsewhere; the traceback is in the log.
        """
        if self._outcome is None:
            self._outcome = self._run(
                function, config, endpoint=endpoint, token=token, policy=policy, run_dir=run_dir, code_dir=code_dir
            )
        return self._outcome

    def _run(self, function: str, config: dict[str, Any], **arguments: str | None) -> dict[str, str]:
        try:
            load(function)(config, **arguments)
        except OpenTinkerError as error:
            traceback.print_exc()
            return {"cause": _one_line(str(error)), "code": error.code}
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            return {"cause": _one_line(f"the driver failed: {type(error).__name__}: {error}"), "code": ""}
        return {"cause": "", "code": ""}


def _one_line(text: str) -> str:
    return " ".join(text.split()) or "the driver failed without a message"
