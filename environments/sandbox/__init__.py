"""A sandbox for code that a policy writes: see README.md for what it keeps out, and how that is done."""

from opentinker.environments.sandbox.sandbox import Execution, PythonSandbox, SandboxLimits, Walls, usable_walls

__all__ = ["Execution", "PythonSandbox", "SandboxLimits", "Walls", "usable_walls"]
