"""The commands and programs of the documentation, run as they stand, against an engine that draws at once."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
URL = "http://localhost:8000"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PICTURES = {
    "README.md": {"out.png"},
    "docs/api.md": {"generated.png", "edited.png"},
    "docs/clients.md": {
        *("circle.png", "blue.png", "both.png", "circle-0.png", "circle-1.png", "edited.png"),
        *("preview-0.png", "preview-1.png", "preview-2.png", "finished.png", "star.png"),
    },
}


def examples(document: str, language: str, url: str) -> str:
    """All of one language that speak to the service, in their order; programs go on where the one before has ended."""
    blocks = [text for name, text in BLOCK.findall((ROOT / document).read_text()) if name == language]
    blocks = [text for text in blocks if URL in text or language == "python"]
    assert blocks
    return "\n".join(blocks).replace(URL, url)


@pytest.mark.parametrize("document", PICTURES)
async def test_examples_run(serve, tmp_path, document):
    client = await serve()
    url = str(client.base_url).rstrip("/")
    for interpreter, language in ((["bash", "-e"], "bash"), ([sys.executable], "python")):
        environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        process = await asyncio.create_subprocess_exec(
            *interpreter,
            *("-c", examples(document, language, url)),
            cwd=tmp_path,
            env=environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        async with asyncio.timeout(120):
            output, _ = await process.communicate()
        assert process.returncode == 0, output.decode()
    assert {path.name for path in tmp_path.glob("*.png")} == PICTURES[document]
    for path in tmp_path.glob("*.png"):
        Image.open(path).load()
