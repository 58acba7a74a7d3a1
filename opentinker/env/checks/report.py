"""What the checks found: one finding per promise, and how to mend what is broken."""

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Mark(StrEnum):
    """How a check went."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Finding:
    """One check: what was seen and, if that is wrong, what to change and where (`path:line`)."""

    check: str
    mark: Mark
    seen: str
    mend: str = ""
    where: str = ""


@dataclass
class Report:
    """All findings about one environment, and numbers measured on the way."""

    environment: str
    findings: list[Finding] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not any(finding.mark is Mark.FAILED for finding in self.findings)

    def finding(self, check: str) -> Finding:
        """The finding of a check by its name.

        Raises:
            KeyError: there is none.
        """
        for finding in self.findings:
            if finding.check == check:
                return finding
        raise KeyError(check)

    def to_json(self) -> dict[str, Any]:
        return {
            "environment": self.environment,
            "ok": self.ok,
            "checks": [{**asdict(finding), "mark": str(finding.mark)} for finding in self.findings],
            "figures": self.figures,
        }

    def __str__(self) -> str:
        lines = [f"{self.environment}: {'the contract is kept' if self.ok else 'the contract is broken'}"]
        for finding in self.findings:
            lines.append(f"  {finding.mark:8} {finding.check}: {finding.seen}")
            lines += [f"           {text}" for text in (finding.mend, finding.where and f"at {finding.where}") if text]
        return "\n".join(lines)
