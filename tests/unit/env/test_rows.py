"""Rows of datasets become tasks that are JSON, whatever their columns hold."""

import json
from datetime import date, datetime, timedelta
from decimal import Decimal
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from opentinker.env.datasets import load_tasks
from opentinker.env.rows import JsonRows, json_value
from opentinker.errors import ConfigError
from opentinker.images import Image

pillow = pytest.importorskip("PIL.Image")


def png(mode: str = "RGB") -> bytes:
    encoded = BytesIO()
    pillow.new(mode, (4, 3)).save(encoded, format="PNG")
    return encoded.getvalue()


def test_images_in_all_forms_become_data_urls(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(png())
    url = Image(png()).data_url()
    forms: list[Any] = [png(), Image(png()), {"bytes": png(), "path": None}, {"bytes": None, "path": str(file)}, file]
    assert json_value(forms) == [url] * 5
    for mode in ("RGB", "RGBA", "L", "P", "1", "CMYK", "F"):
        assert Image.of(json_value(pillow.new(mode, (4, 3)))).pil().size == (4, 3)


def test_other_values_stay_as_they_are_and_dates_become_text() -> None:
    row = {"a": 1, "b": [None, "x", 2.5], "c": {"bytes": "no image", "path": "x", "more": True}}
    assert json_value(row) == row
    dates = [date(2026, 1, 2), datetime(2026, 1, 2, 3), timedelta(hours=1)]
    assert json_value(dates) == ["2026-01-02", "2026-01-02 03:00:00", "1:00:00"]


def test_what_json_has_no_word_for_is_none_or_text() -> None:
    row = {"nan": float("nan"), "far": float("-inf"), "price": Decimal("1.50"), "picture": {"bytes": None, "path": None}}
    found = json_value(row)
    assert found == {"nan": None, "far": None, "price": "1.50", "picture": None}
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_bytes_that_are_no_image_name_their_column() -> None:
    with pytest.raises(ConfigError, match="column 'sound' holds what no task can"):
        JsonRows([{"text": "a", "sound": b"RIFFxxxxWAVE"}])[0]


def test_a_dataset_with_images_gives_json_tasks_also_with_renamed_columns(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"picture": datasets.Image(), "n": datasets.Value("int64")})
    rows = datasets.Dataset.from_dict({"picture": [{"bytes": png(), "path": None}] * 3, "n": [1, 2, 3]}, features=features)
    rows.to_parquet(str(tmp_path / "rows.parquet"))
    tasks = load_tasks(str(tmp_path / "rows.parquet"), columns={"image": "picture"}, limit=2).first(5)
    assert [json.loads(json.dumps(task))["n"] for task in tasks] == [1, 2]
    assert all(Image.of(task["image"]).pil().size == (4, 3) for task in tasks)
