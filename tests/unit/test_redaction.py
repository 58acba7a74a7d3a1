"""What a process prints arrives without the values of its secrets, whatever the pieces that it comes in."""

import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from opentinker.redaction import SHORTEST, Redactor

LETTERS = st.text("ab\n", max_size=40)
VALUES = st.dictionaries(st.sampled_from("xyz"), st.text("ab", min_size=SHORTEST, max_size=9), max_size=3)


@given(VALUES, st.lists(LETTERS, max_size=12))
def test_the_pieces_do_not_matter_and_no_value_is_left(secrets: dict[str, str], pieces: list[str]) -> None:
    redactor = Redactor(secrets)
    passed = [redactor.feed(piece.encode()) for piece in pieces]
    out = b"".join([*passed, redactor.finish()]).decode()
    assert out == Redactor(secrets).text("".join(pieces))
    assert not any(value in part for value in secrets.values() for part in out.replace("]", "[").split("[")[::2])


@given(VALUES, LETTERS)
def test_only_what_may_become_a_value_is_held_back(secrets: dict[str, str], text: str) -> None:
    redactor = Redactor(secrets)
    redactor.feed(text.encode())
    held = redactor.finish().decode()
    assert held == "" or any(value.startswith(held) for value in secrets.values()) or "[secret" in held


def test_a_line_is_not_held_back_for_the_next_one() -> None:
    redactor = Redactor({"key": "sk-123456"})
    assert redactor.feed(b"a line\nand sk-123456 here\n") == b"a line\nand [secret key] here\n"
    assert redactor.feed(b"sk-12") == b""
    assert redactor.feed(b"not\n") == b"sk-12not\n"


def test_the_longest_value_wins_and_short_ones_are_let_be() -> None:
    redactor = Redactor({"short": "abc", "one": "abcdef", "two": "abcdefgh"})
    assert redactor.text("abc abcdef abcdefgh") == "abc [secret one] [secret two]"


def test_values_are_found_in_json_and_reprs_and_line_by_line() -> None:
    value = 'with "quotes" and\na long second line\nshort'
    redactor = Redactor({"key": value})
    for text in (f"{value!r}", '{"v": "with \\"quotes\\" and\\na long second line\\nshort"}', "> a long second line <"):
        assert "[secret key]" in redactor.text(text)
        assert "second" not in redactor.text(text)


def test_a_killed_process_and_its_children_leave_no_value_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = f"""if True:
        import os, signal, subprocess, sys
        from pathlib import Path
        from opentinker.redaction import RedactedOutput
        RedactedOutput(Path({str(log)!r}), {{"key": "sk-tr0ub4dor"}})
        print("printed sk-tr0ub4dor", flush=True)
        subprocess.run(["echo", "by a child: sk-tr0ub4dor"], check=True)
        os.write(2, b"in two pieces: sk-tr0")
        os.write(2, b"ub4dor, at the last moment")
        os.kill(os.getpid(), signal.SIGKILL)
    """
    log.write_text("what was there before\n")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("", "")
    expected = "printed [secret key]\nby a child: [secret key]\nin two pieces: [secret key], at the last moment"
    for _ in range(200):
        if log.read_text().endswith("moment"):
            break
        subprocess.run(["sleep", "0.02"], check=True)
    assert log.read_text() == f"what was there before\n{expected}"


def test_at_the_end_everything_is_in_the_log_and_a_file_that_cannot_be_written_is_said_so(tmp_path: Path) -> None:
    script = """if True:
        import sys
        from pathlib import Path
        from opentinker.redaction import RedactedOutput
        log = Path(sys.argv[1])
        output = RedactedOutput(log, {"key": "sk-tr0ub4dor"})
        print("x" * 200_000, "sk-tr0", end="")
        output.close(30.0)
        print("thrown away")
        assert log.read_text() == "x" * 200_000 + " sk-tr0"
    """
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "log"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "no" / "log"], capture_output=True, text=True, timeout=60)
    assert "OSError" in done.stderr
