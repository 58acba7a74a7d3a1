"""Runs an author's environment through the contract of `opentinker.Environment`."""

from opentinker.env.checks.report import Finding, Mark, Report
from opentinker.env.checks.run import check_environment
from opentinker.env.checks.subject import CheckOptions

__all__ = ["CheckOptions", "Finding", "Mark", "Report", "check_environment"]
