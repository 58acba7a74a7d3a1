"""The deadline of the call that runs: an environment that asks somebody else passes on what is left."""

import time
from contextvars import Context, ContextVar, copy_context

_DEADLINE: ContextVar[float] = ContextVar("opentinker_call_deadline", default=float("inf"))


def context_with(timeout_s: float) -> Context:
    """The current context, with a deadline in `timeout_s`."""
    context = copy_context()
    context.run(_DEADLINE.set, time.monotonic() + timeout_s)
    return context


def left_s(longest_s: float) -> float:
    """Seconds until the deadline of the current call, at most `longest_s`."""
    return min(longest_s, _DEADLINE.get() - time.monotonic())
