"""The page of settings says what the settings are."""

from __future__ import annotations

from pathlib import Path

from app.settings import Settings
from app.settings_page import page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run: make settings-page"


def test_every_setting_is_on_it() -> None:
    assert all(f"| `{name}` |" in page() for name in Settings.model_fields)
