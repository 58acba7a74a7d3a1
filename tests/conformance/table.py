"""Prints the conformance table: every environment and where it runs. `python tests/conformance/table.py [--json]`."""

import json
import sys
from collections import Counter, defaultdict
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


class Collector:
    """Counts outcomes by environment and place."""

    def __init__(self) -> None:
        self.outcomes: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
        self.reasons: dict[str, str] = {}

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        report = (yield).get_result()
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if "name" not in parameters or not (report.when == "call" or report.outcome != "passed"):
            return
        environment, place = parameters["name"].removeprefix("probe.py:"), parameters.get("where", "contract")
        self.outcomes[environment][place][report.outcome] += 1
        if report.skipped:
            self.reasons[f"{environment}, {place}"] = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else "")


def main() -> int:
    collector = Collector()
    quiet = ["-q", "--no-header", "-p", "no:cacheprovider", "-W", "ignore"]
    with redirect_stdout(sys.stderr):  # only the table is the result
        code = pytest.main([str(HERE), *quiet, "--tb=line", "-r", "f"], plugins=[collector])
    places = ["contract", "local", "process", "hosted"]
    if "--json" in sys.argv:
        print(json.dumps({name: {p: dict(c) for p, c in row.items()} for name, row in sorted(collector.outcomes.items())}))
        return int(code)
    print("| environment | " + " | ".join(places) + " |")
    print("|---|" + "---|" * len(places))
    for name, row in sorted(collector.outcomes.items()):
        print(f"| {name} | " + " | ".join(_cell(row.get(place)) for place in places) + " |")
    for what, reason in sorted(collector.reasons.items()):
        print(f"{what}: {reason}")
    return int(code)


def _cell(outcomes: "Counter[str] | None") -> str:
    if not outcomes:
        return "-"
    if outcomes["failed"]:
        return f"{outcomes['failed']} of {outcomes.total()} FAILED"
    return "skipped" if not outcomes["passed"] else f"ok ({outcomes['passed']})"


if __name__ == "__main__":
    sys.exit(main())
