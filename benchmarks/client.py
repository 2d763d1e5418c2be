"""One client of a live server: asks for a picture as a `Kind` says and notes how that ended."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

import httpx
import numpy as np

from benchmarks.pictures import condition_picture, pixels_of
from benchmarks.traffic import GUIDANCE_SCALE, Kind

FAILED = 0  # status of a request that got no answer
WORDS = ("a", "red", "circle", "and", "blue", "square", "on", "plain", "white", "background", "with", "green", "star")


@dataclass(frozen=True, slots=True)
class Answer:
    """How a request ended. `pixels` are those of its picture, None without one."""

    status: int
    sent_s: float
    answered_s: float
    retry_after_s: float | None = None
    seed: int | None = None
    pixels: np.ndarray | None = None
    error: str = ""

    @property
    def latency_s(self) -> float:
        return self.answered_s - self.sent_s


class Client:
    """Sends requests and never retries. `num_steps` None means the server's default."""

    def __init__(self, http: httpx.AsyncClient, num_steps: int | None) -> None:
        self._http = http
        self._num_steps = num_steps
        self._picture = condition_picture()

    async def ask(self, kind: Kind, seed: int, *, keep_pixels: bool = False) -> Answer:
        """Every seed comes with a prompt of its own, so that answers that were mixed up show."""
        fields = self._fields(kind, seed)
        sent_s = time.monotonic()
        try:
            if kind.num_condition_images:
                form = {name: value if isinstance(value, str) else json.dumps(value) for name, value in fields.items()}
                files = [("image[]", ("in.png", self._picture, "image/png"))] * kind.num_condition_images
                response = await self._http.post("/v1/images/edits", data=form, files=files)
            else:
                response = await self._http.post("/v1/images/generations", json=fields)
        except httpx.HTTPError as error:
            return Answer(FAILED, sent_s, time.monotonic(), error=repr(error))
        answered_s = time.monotonic()
        if response.status_code != 200:
            retry_after_s = wait_of(response.headers)
            return Answer(response.status_code, sent_s, answered_s, retry_after_s, error=response.text[:200])
        picture = response.json()["data"][0]
        pixels = pixels_of(picture["b64_json"]) if keep_pixels else None
        return Answer(200, sent_s, answered_s, seed=picture["seed"], pixels=pixels)

    def _fields(self, kind: Kind, seed: int) -> dict[str, object]:
        words = [WORDS[(seed + index * (1 + seed % 7)) % len(WORDS)] for index in range(kind.prompt_tokens)]
        fields: dict[str, object] = {
            "prompt": f"{seed} {' '.join(words)}",
            "seed": seed,
            "size": f"{kind.side_px}x{kind.side_px}",
        }
        if self._num_steps is not None:
            fields["num_inference_steps"] = self._num_steps
        if kind.guided:
            fields |= {"negative_prompt": "blurry", "true_cfg_scale": GUIDANCE_SCALE}
        return fields


def wait_of(headers: httpx.Headers) -> float | None:
    """Seconds after which a refused client should come again: from the finer header, which the SDK prefers as well."""
    if milliseconds := headers.get("retry-after-ms"):
        return float(milliseconds) / 1000
    seconds = headers.get("retry-after")
    return float(seconds) if seconds else None
