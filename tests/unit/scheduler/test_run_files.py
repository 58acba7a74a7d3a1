from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker.errors import InvalidRequestError, OpenTinkerError
from opentinker.scheduler import run_files
from opentinker.scheduler.run_files import parse_rows, read_lines


def test_half_a_line_waits_for_its_other_half(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert read_lines(path, 0, complete=False) == (b"", 0, True)
    path.write_bytes(b"one\ntw")
    assert read_lines(path, 0, complete=False) == (b"one\n", 4, True)
    path.write_bytes(b"one\ntwo\n")
    assert read_lines(path, 4, complete=False) == (b"two\n", 8, True)


def test_the_last_line_of_a_finished_file_needs_no_newline(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"one\ntw")
    assert read_lines(tmp_path / "log", 4, complete=True) == (b"tw", 6, True)


@given(st.lists(st.binary(max_size=30).filter(lambda line: b"\n" not in line), max_size=20))
def test_a_long_file_comes_in_pieces_that_add_up(lines: list[bytes]) -> None:
    import tempfile

    content = b"".join(line + b"\n" for line in lines)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_files, "MAX_BYTES", 40)
        path = Path(folder, "log")
        path.write_bytes(content)
        read, offset, at_end = b"", 0, False
        while not at_end:
            data, offset, at_end = read_lines(path, offset, complete=True)
            assert data.endswith(b"\n") or not content
            read += data
        assert read == content


def test_a_negative_offset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError):
        read_lines(tmp_path / "log", -1, complete=True)


def test_numbers_that_json_lacks_become_null_and_damage_is_told() -> None:
    assert parse_rows(b'{"loss": NaN, "step": 1}\n\n{"step": 2}\n') == [{"loss": None, "step": 1}, {"step": 2}]
    with pytest.raises(OpenTinkerError, match="damaged"):
        parse_rows(b'{"loss": \n')
