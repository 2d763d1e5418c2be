"""A program that uses LiteLLM alone: it draws, edits, and chats, and prints what it got as JSON.

It runs in an environment of its own (`tests/clients/requirements.txt`), because LiteLLM's dependencies do not go
together with the service's.
"""

from __future__ import annotations

import base64
import json
import sys
from typing import Any

import litellm


def main(base_url: str, proxied: str) -> None:
    """Draw at `base_url` directly, and as a proxy with the models of `proxied` would."""
    access: dict[str, Any] = {"api_base": base_url, "api_key": "any", "max_retries": 0}
    steps = {"seed": 5, "num_inference_steps": 2}
    drawn = litellm.image_generation(
        model="openai/gpt-image-1", prompt="a red circle", size="64x64", n=2, quality="low", extra_body=steps, **access
    )
    picture = base64.b64decode(drawn.data[0].b64_json)
    edited = litellm.image_edit(
        model="openai/gpt-image-1", prompt="make it blue", image=picture, size="64x64", extra_body=steps, **access
    )
    chatted = litellm.completion(
        model="openai/gpt-image-1", messages=[{"role": "user", "content": "a red circle"}], extra_body=steps, **access
    )
    router = litellm.Router(model_list=json.loads(proxied), num_retries=0)
    routed = router.image_generation(prompt="a red circle", model="easel", size="64x64", extra_body=steps)
    answers = [drawn, edited, chatted, routed]
    print(json.dumps([answer.model_dump(mode="json") for answer in answers]))


if __name__ == "__main__":
    main(*sys.argv[1:])
