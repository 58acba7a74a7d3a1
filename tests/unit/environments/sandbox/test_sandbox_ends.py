"""Nothing is left of a sandbox when it has ended, however it did."""

import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from sandbox_tools import ours, run, works

from opentinker.environments.sandbox import Execution, PythonSandbox, Walls
from opentinker.errors import ConfigError


def test_nothing_is_left_when_it_is_closed(walls: Walls) -> None:
    before = ours()
    sandbox = PythonSandbox(walls)
    run(sandbox, "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()")
    assert ours() - before
    sandbox.close()
    assert not ours() - before
    sandbox.close()
    with pytest.raises(ConfigError, match="closed"):
        sandbox.run("1")


def test_closing_it_ends_a_call_in_another_thread(walls: Walls) -> None:
    sandbox = PythonSandbox(walls)
    run(sandbox, "1")
    results: list[Execution] = []
    thread = threading.Thread(target=lambda: results.append(run(sandbox, "while True: pass", timeout_s=60)))
    thread.start()
    time.sleep(0.3)
    sandbox.close()
    thread.join(5)
    assert [r.outcome for r in results] == ["died"]


def test_nothing_is_left_when_the_process_that_owns_it_is_killed(walls: Walls) -> None:
    program = f"""
import sys
from opentinker.environments.sandbox import PythonSandbox
sandbox = PythonSandbox({walls!r})
sandbox.run("1")
print("up", flush=True)
sandbox.run("while True: pass", 60)
"""
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"up\n"
    below = psutil.Process(owner.pid).children(recursive=True)
    assert below
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    _, alive = psutil.wait_procs(below, timeout=5)
    assert not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_nothing_is_left_when_the_warden_is_killed(walled: PythonSandbox) -> None:
    run(walled, "1")
    assert walled._guest is not None
    warden = psutil.Process(walled._guest._process.pid)
    below = warden.children(recursive=True)
    assert below
    warden.kill()
    _, alive = psutil.wait_procs(below, timeout=5)
    assert not alive
    assert run(walled, "1").outcome == "died"
    assert works(walled)


def test_many_run_at_once(walls: Walls) -> None:
    before = ours()

    def use(number: int) -> str:
        with PythonSandbox(walls) as sandbox:
            run(sandbox, f"x = {number}", timeout_s=60)
            return run(sandbox, "print(x)", timeout_s=60).output

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(use, range(32))) == [f"{n}\n" for n in range(32)]
    assert not ours() - before
