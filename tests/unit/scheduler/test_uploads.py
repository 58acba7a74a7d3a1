import base64
import hashlib
import io
import stat
import tempfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opentinker.errors import InvalidRequestError
from opentinker.scheduler import uploads
from opentinker.scheduler.uploads import decode_zip, unpack


def zipped(*entries: tuple[str | zipfile.ZipInfo, str]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in entries:
            archive.writestr(name, text)
    return buffer.getvalue()


def link(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return info


def test_a_folder_of_files_arrives_as_it_was(tmp_path: Path) -> None:
    unpack(zipped(("env.py", "x = 1"), ("pkg/", ""), ("pkg/deep/more.py", "y = 2")), tmp_path / "code")
    assert (tmp_path / "code/env.py").read_text() == "x = 1"
    assert (tmp_path / "code/pkg/deep/more.py").read_text() == "y = 2"


@pytest.mark.parametrize("name", ["../evil.py", "/etc/evil.py", "a/../../evil.py", "a\\..\\evil.py"])
def test_nothing_is_written_outside_of_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidRequestError, match="outside"):
        unpack(zipped(("fine.py", ""), (name, "bad")), tmp_path / "jobs/code")
    assert list(tmp_path.rglob("*")) == []


def test_links_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="link"):
        unpack(zipped((link("passwd"), "/etc/passwd")), tmp_path / "code")
    assert not (tmp_path / "code").exists()


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "MAX_UNPACKED_BYTES", 1000)
    with pytest.raises(InvalidRequestError, match="unpacks to more"):
        unpack(zipped(("zeros", "0" * 1001)), tmp_path / "code")


@pytest.mark.parametrize(
    "content",
    [b"no zip at all", zipped(("a", "text"))[:-30], zipped(("a", "1"), ("a/b", "2"))],
    ids=["no zip", "cut", "a file that is a folder"],
)
def test_what_cannot_be_unpacked_leaves_nothing(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        unpack(content, tmp_path / "code")
    assert not (tmp_path / "code").exists()


@given(data=st.data(), method=st.sampled_from([zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]))
@settings(max_examples=300, deadline=None)
def test_damage_anywhere_in_a_zip_is_the_uploaders_error_and_leaves_nothing(data: st.DataObject, method: int) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        archive.writestr("env.py", "x = 1\n" * 20 + "y = 2\n" * 20)
    content = bytearray(buffer.getvalue())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with tempfile.TemporaryDirectory() as folder:
        try:
            unpack(bytes(content), Path(folder, "jobs/code"))
        except InvalidRequestError:
            assert not Path(folder, "jobs/code").exists()
            assert list(Path(folder).rglob("*.py")) == []


def test_a_damaged_deflate_stream_is_refused(tmp_path: Path) -> None:
    content = bytearray(zipped(("env.py", "x = 1\n" * 200)))
    start = 30 + len("env.py")
    content[start : start + 4] = b"\xff\xff\xff\xff"
    with pytest.raises(InvalidRequestError, match="cannot be unpacked"):
        unpack(bytes(content), tmp_path / "code")
    assert not (tmp_path / "code").exists()


def test_a_damaged_upload_is_told_apart_by_its_digest() -> None:
    content = b"content"
    encoded, digest = base64.b64encode(content).decode(), hashlib.sha256(content).hexdigest()
    assert decode_zip(encoded, digest.upper()) == content
    with pytest.raises(InvalidRequestError, match="damaged"):
        decode_zip(encoded, "0" * 64)
    for broken in ("*" + encoded, encoded[:-1], "é" + encoded):
        with pytest.raises(InvalidRequestError, match="base64"):
            decode_zip(broken, digest)


def test_too_large_an_upload_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "MAX_ZIP_BYTES", 30)
    with pytest.raises(InvalidRequestError, match="larger than"):
        decode_zip("A" * 100, "0" * 64)
