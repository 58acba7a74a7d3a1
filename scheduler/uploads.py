"""User code that travels with a job: checked, then unpacked into the job's own folder."""

import base64
import hashlib
import io
import lzma
import shutil
import stat
import struct
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from opentinker.errors import InvalidRequestError

MAX_ZIP_BYTES = 20 * 2**20
MAX_UNPACKED_BYTES = 200 * 2**20
MAX_FILES = 10_000
_DAMAGED = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    EOFError,
    NotImplementedError,
    RuntimeError,
    ValueError,
    OSError,
)
"""What `zipfile` and its decompressors raise on bytes that are no good."""


def decode_zip(encoded: str, sha256: str) -> bytes:
    """The zip's bytes.

    Raises:
        InvalidRequestError: too large, not base64, or not what the digest says.
    """
    if len(encoded) > (MAX_ZIP_BYTES * 4) // 3 + 4:
        raise InvalidRequestError(f"the code is larger than {MAX_ZIP_BYTES >> 20} MiB", hint="keep data out of its folder")
    try:
        content = base64.b64decode(encoded, validate=True)
    except ValueError as error:
        raise InvalidRequestError("code.zip is not base64") from error
    if hashlib.sha256(content).hexdigest() != sha256.lower():
        raise InvalidRequestError("code.sha256 is not the digest of code.zip: the upload is damaged")
    return content


def unpack(content: bytes, target: Path) -> None:
    """Unpack a zip of plain files into the new folder `target`, all or nothing.

    Raises:
        InvalidRequestError: not a zip, too much in it, or an entry that is a link, absolute, or points outside.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = [entry for entry in archive.infolist() if not entry.is_dir()]
            _check(entries)
            target.mkdir(parents=True)
            for entry in entries:
                path = target / entry.filename
                path.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(entry) as source, path.open("xb") as sink:
                    shutil.copyfileobj(source, sink)
    except _DAMAGED as error:
        shutil.rmtree(target, ignore_errors=True)
        raise InvalidRequestError(f"the code cannot be unpacked: {error}") from error


def _check(entries: list[zipfile.ZipInfo]) -> None:
    # zipfile stops reading an entry at the size that its header declares, so the declared sizes bound the real ones.
    if len(entries) > MAX_FILES or sum(entry.file_size for entry in entries) > MAX_UNPACKED_BYTES:
        raise InvalidRequestError(f"the code unpacks to more than {MAX_FILES} files or {MAX_UNPACKED_BYTES >> 20} MiB")
    for entry in entries:
        path = PurePosixPath(entry.filename)
        mode = entry.external_attr >> 16
        if path.is_absolute() or ".." in path.parts or "\\" in entry.filename or "\0" in entry.filename:
            raise InvalidRequestError(f"the code holds a file outside of its folder: {entry.filename!r}")
        if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
            raise InvalidRequestError(f"the code holds {entry.filename!r}, which is a link or a device, not a file")
