"""The reference page tells the truth about the config."""

from pathlib import Path

from opentinker.config.reference import render

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == render(), "run: python -m opentinker.config.reference > docs/configuration.md"
