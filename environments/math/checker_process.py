"""Judges one answer after another by math-verify; a program of its own, because some answers make it compute for ever.

Whoever takes more processor time than allowed is killed by the kernel: a computation on large numbers runs in C and would see
neither an exception nor another thread.
"""

import json
import logging
import os
import resource
import signal
import sys
from typing import Any

MEMORY_BYTES = 2 << 30


def verdict(request: dict[str, Any]) -> dict[str, Any]:
    """What math-verify says; `bad_gold` where it cannot read the right answer itself."""
    from math_verify import parse, verify

    # Its own deadlines are alarms, which the limit on processor time replaces.
    gold = parse(f"\\boxed{{{request['gold']}}}", parsing_timeout=None)
    if all(isinstance(reading, str) for reading in gold):
        return {"status": "bad_gold"}
    answer = parse(f"\\boxed{{{request['answer']}}}", parsing_timeout=None)
    right = bool(answer) and verify(gold, answer, timeout_seconds=None, raise_on_error=True)
    return {"status": "right" if right else "wrong"}


def main() -> None:
    """JSON lines on standard input and output; the first line out says that the libraries are loaded."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    os.nice(5)
    try:
        verdict({"gold": r"\frac{x}{2}+1", "answer": "0.5x+1"})  # loads what is loaded lazily
    except ImportError as error:
        print(json.dumps({"status": "missing", "detail": str(error)}), file=replies)
        return
    print(json.dumps({"status": "ready"}), file=replies)
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request["timeout_s"])
        try:
            answer = verdict(request)
        except (Exception, RecursionError) as error:
            answer = {"status": "error", "detail": f"{type(error).__name__}: {error}"[:300]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), file=replies)


if __name__ == "__main__":
    main()
