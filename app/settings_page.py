"""docs/settings.md, written from the settings themselves: `python -m app.settings_page > docs/settings.md`."""

from __future__ import annotations

from typing import get_origin

from pydantic.fields import FieldInfo

from app.cli import flag_of
from app.settings import ENV_PREFIX, Settings

HEAD = """# Settings

Each is a flag of `easel serve`, an environment variable and a key of the YAML file that `--config` names. A flag beats
a variable, a variable the file. A name that nobody knows is an error. Lists are comma-separated in flags and variables.
This page is written from the settings: `make settings-page`.

| flag | variable | key | default | meaning |
|---|---|---|---|---|
"""


def page() -> str:
    return HEAD + "".join(row(name, field) for name, field in Settings.model_fields.items())


def row(name: str, field: FieldInfo) -> str:
    text = f"{field.description}".replace("|", "\\|")
    return f"| `{flag_of(name)}` | `{ENV_PREFIX}{name.upper()}` | `{name}` | {default_of(field)} | {text} |\n"


def default_of(field: FieldInfo) -> str:
    if field.default in (None, ()):
        return ""
    is_list = get_origin(field.annotation) is tuple
    return f"`{','.join(field.default) if is_list else field.default}`"


if __name__ == "__main__":
    print(page(), end="")
