"""docs/api.md names every field, and its examples are answered as it says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from app.schemas import ImageRequest

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text()
ROWS = re.findall(r"^\| (`[a-z_`, ]+`) \| `(\{.*?\})` \|", PAGE, re.MULTILINE)
EXAMPLES = {names: json.loads(example) for names, example in ROWS}


def test_every_field_is_there() -> None:
    named = {name for names in EXAMPLES for name in re.findall(r"\w+", names)}
    assert named == set(ImageRequest.model_fields)


@pytest.mark.parametrize("names", EXAMPLES)
async def test_examples_are_taken(client, names: str) -> None:
    example = EXAMPLES[names]
    assert set(re.findall(r"\w+", names)) & example.keys()
    answer = await client.post("/v1/images/generations", json={"prompt": "a"} | example)
    if "mask" in names:
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_parameter")
        return
    assert answer.status_code == (202 if "background_job" in example else 200), answer.text
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| {names} |"))
    if not example.get("stream") and "background_job" not in example:
        assert ("no effect" in row) == bool(answer.json()["warnings"])
