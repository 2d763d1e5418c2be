"""LiteLLM as a client. `make test` gives it an environment of its own."""

from __future__ import annotations

import base64
import io
import json
import subprocess
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from PIL import Image

from tests.server import serving
from tests.tiny_checkpoint import TinySpec, build_checkpoint

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
STEPS = {"seed": 5, "num_inference_steps": 2}

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="there is no .venv-clients: make test makes it")


def decoded(encoded: str) -> bytes:
    data = base64.b64decode(encoded.rpartition(",")[2])
    with Image.open(io.BytesIO(data)) as picture:
        assert picture.size == (64, 64)
    return data


def documented_models(base_url: str) -> str:
    """The proxy's models as the documentation configures them, as JSON."""
    document = (ROOT / "docs" / "clients.md").read_text()
    block = document.partition("```yaml\n")[2].partition("```")[0]
    return json.dumps(yaml.safe_load(block.replace("http://localhost:8000/v1", base_url))["model_list"])


def test_generations_edits_and_chat(tmp_path: Path) -> None:
    with serving(build_checkpoint(tmp_path / "tiny", TinySpec(resolution=64)), tmp_path) as server:
        proxied = documented_models(f"{server.url}/v1")
        program = [PYTHON, ROOT / "tests" / "clients" / "litellm_client.py", f"{server.url}/v1", proxied]
        quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # else it asks the network for prices
        ran = subprocess.run(program, capture_output=True, text=True, timeout=200, env=quiet)
        assert ran.returncode == 0, ran.stderr
        drawn, edited, chatted, routed = json.loads(ran.stdout.splitlines()[-1])
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
            first, second = (decoded(image["b64_json"]) for image in drawn["data"])
            assert first != second
            assert decoded(routed["data"][0]["b64_json"]) == first
            again = client.images.edit(prompt="make it blue", image=first, extra_body={**STEPS, "size": "64x64"})
    assert again.data and decoded(edited["data"][0]["b64_json"]) == decoded(again.data[0].b64_json or "")
    for answer in (drawn, edited):
        usage: dict[str, Any] = answer["usage"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > 0
        assert all(isinstance(count, int) for name, count in usage.items() if name.endswith("_tokens"))
    assert drawn["quality"] == "low"
    message = chatted["choices"][0]["message"]
    assert decoded(message["images"][0]["image_url"]["url"]) == first
    assert chatted["usage"]["total_tokens"] > 0
