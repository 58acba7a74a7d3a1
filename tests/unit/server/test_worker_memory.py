"""What a worker says of its memory is what the process held."""

import subprocess
import sys

SCRIPT = """
from opentinker.server.memory import begin_peak, peak_memory_bytes
before = peak_memory_bytes()
block = bytearray(300_000_000)
block[::4096] = b"x" * len(block[::4096])
del block
begin_peak()
print(before, peak_memory_bytes())
"""


def test_the_peak_is_of_the_process_and_stays_when_the_memory_is_given_back() -> None:
    """In a process of its own: this one may have held more before."""
    said = subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True, timeout=120).stdout
    before, after = (int(number) for number in said.split())
    assert before > 10_000_000, "an interpreter with torch"
    assert 250_000_000 < after - before < 400_000_000
