"""What a Python tool is for: code runs as in an interpreter that stays, and odd code gets an answer."""

import threading

import pytest
from sandbox_tools import run

from opentinker.environments.sandbox import PythonSandbox, Walls
from opentinker.errors import ConfigError


def test_variables_imports_and_functions_are_there_in_the_next_call(walled: PythonSandbox) -> None:
    assert run(walled, "import math\nx = 20\ndef twice(n): return 2 * n").outcome == "ok"
    assert run(walled, "print(twice(x) + math.isqrt(5))").output == "42\n"


def test_the_value_of_the_last_expression_is_printed(sandbox: PythonSandbox) -> None:
    assert run(sandbox, "a = 'q'\na * 2").output == "'qq'\n"
    assert run(sandbox, "_").output == "'qq'\n"
    assert run(sandbox, "None").output == ""
    assert run(sandbox, "").outcome == "ok"


def test_an_exception_is_shown_with_the_lines_of_the_code_alone(sandbox: PythonSandbox) -> None:
    result = run(sandbox, "def half(n):\n    return n / 0\nhalf(1)")
    assert result.outcome == "error"
    assert "return n / 0" in result.output
    assert result.output.endswith("ZeroDivisionError: division by zero\n")
    assert "guest.py" not in result.output


@pytest.mark.parametrize(
    ("code", "outcome", "says"),
    [
        ("print(1", "error", "SyntaxError"),
        ("\x00", "error", "null bytes"),
        ("'\ud800'", "error", "surrogates"),
        ("print('\\ud800')", "ok", "?"),
        ("exit()", "ok", ""),
        ("import sys; sys.exit('bye')", "error", "bye"),
        ("input()", "error", "EOFError"),
        ("import sys; sys.stdout.close()", "ok", ""),
        ("import sys; del sys.stdout, sys.stderr", "ok", ""),
        ("class E(Exception):\n  def __str__(self): raise self\nraise E", "error", "E"),
        ("def f(): f()\nf()", "error", "RecursionError"),
        ("raise KeyboardInterrupt", "error", "KeyboardInterrupt"),
        ("x" * 200_000, "error", "longer than"),
    ],
)
def test_odd_code_gets_an_answer_and_keeps_the_interpreter(sandbox: PythonSandbox, code: str, outcome: str, says: str) -> None:
    run(sandbox, "kept = 1")
    result = sandbox.run(code, 10.0)
    assert result.outcome == outcome
    assert says in result.output
    assert run(sandbox, "print(kept)").output == "1\n"


def test_code_that_takes_too_long_is_stopped_and_its_variables_are_kept(sandbox: PythonSandbox) -> None:
    run(sandbox, "n = 0")
    result = run(sandbox, "print('begun', flush=True)\nwhile True: n += 1", timeout_s=1.5)
    assert (result.outcome, result.output) == ("timeout", "begun\n")
    assert run(sandbox, "print(n > 0)").output == "True\n"


def test_named_packages_can_be_imported_and_no_others(walls: Walls) -> None:
    with PythonSandbox(walls, packages=("yaml",)) as sandbox:
        assert run(sandbox, "import yaml; print(yaml.safe_load('a: 1'))").output == "{'a': 1}\n"
        assert "ModuleNotFoundError" in run(sandbox, "import pydantic").output
        assert "ModuleNotFoundError" in run(sandbox, "import opentinker").output
    with pytest.raises(ConfigError, match="'nosuchpackage' is not installed"):
        PythonSandbox(walls, packages=("nosuchpackage",))


def test_it_outlives_the_thread_that_started_it(sandbox: PythonSandbox) -> None:
    thread = threading.Thread(target=lambda: run(sandbox, "x = 5"))
    thread.start()
    thread.join()
    assert run(sandbox, "print(x)").output == "5\n"
