import io
import zipfile
from pathlib import Path

import pytest

from opentinker.client.code import pack_folder
from opentinker.errors import ConfigError


def names(packed: bytes) -> list[str]:
    return zipfile.ZipFile(io.BytesIO(packed)).namelist()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("env.py", "data/words.txt", ".git/config", ".venv/lib.py", "__pycache__/env.pyc", ".env", "runs/big.bin"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def test_code_and_data_travel_and_secrets_caches_and_runs_stay(folder: Path) -> None:
    packed = pack_folder(folder)
    assert names(packed) == ["data/words.txt", "env.py"]
    assert zipfile.ZipFile(io.BytesIO(packed)).read("data/words.txt") == b"data/words.txt"


def test_equal_folders_give_equal_bytes(folder: Path) -> None:
    packed = pack_folder(folder)
    (folder / "env.py").touch()
    assert pack_folder(folder) == packed
    (folder / "env.py").write_text("changed")
    assert pack_folder(folder) != packed


def test_a_large_folder_is_refused_and_its_largest_parts_are_named(folder: Path) -> None:
    (folder / "model.bin").write_bytes(b"x" * 2000)
    with pytest.raises(ConfigError, match="larger than") as caught:
        pack_folder(folder, limit_bytes=1000)
    assert "model.bin" in caught.value.hint
