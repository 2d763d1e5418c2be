"""Everything that clients do to a service, one kind of visit after the other, each with its own verdict.

A visit ends with the status that its client saw. Every picture is compared with the same one drawn alone beforehand, so
that an answer which belongs to somebody else shows.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from benchmarks.pictures import condition_picture, pixels_of, psnr_db

GENERATIONS, EDITS, CHAT = "/v1/images/generations", "/v1/images/edits", "/v1/chat/completions"
JOBS = "/v1/images/requests"
SMALL = {"size": "64x64", "num_inference_steps": 3}
NUM_PICTURES = 12  # that visitors ask for again and again
MIN_PSNR_DB = 40.0  # other neighbours in a batch round differently; another picture has some 10
REFUSED = (429, 503)
LEFT = 0  # status of a visit whose client did not wait
BURST = 24
SLOW_UPLOAD_S = 1.5
BAD: tuple[tuple[str, str, dict[str, Any], int], ...] = (
    ("POST", GENERATIONS, {"json": {}}, 400),
    ("POST", GENERATIONS, {"json": {"prompt": "a", "n": 11}}, 400),
    ("POST", GENERATIONS, {"json": {"prompt": "a", "size": "0x64"}}, 400),
    ("POST", GENERATIONS, {"json": {"prompt": "a", "model": "nobody"}}, 404),
    ("POST", GENERATIONS, {"content": b'{"prompt"', "headers": {"content-type": "application/json"}}, 400),
    ("POST", GENERATIONS, {"content": b"a"}, 415),
    ("POST", EDITS, {"data": {"prompt": "a"}, "files": {"image": b"GIF89a"}}, 400),
    ("POST", EDITS, {"data": {"prompt": "a"}, "files": [("image", b"")] * 5}, 400),
    ("POST", CHAT, {"json": {"messages": []}}, 400),
    ("GET", f"{JOBS}/nobody", {}, 404),
    ("GET", "/files/nothing.png", {}, 404),
    ("PUT", GENERATIONS, {}, 405),
)


class Unexpected(Exception):
    """What a service must not do."""


@dataclass(slots=True)
class Visitors:
    """Clients of one service. `delivered` counts pictures that arrived, `unseen` requests whose clients may have left
    before theirs did. `drawn` and `edited` hold what is asked for, as it is drawn alone, (height, width, 4) uint8."""

    dice: random.Random
    delivered: int = 0
    unseen: int = 0
    worst_psnr_db: float = float("inf")
    drawn: dict[int, np.ndarray] = field(default_factory=dict)
    edited: dict[int, np.ndarray] = field(default_factory=dict)
    _picture: bytes = field(default_factory=lambda: condition_picture(64))

    async def learn(self, http: httpx.AsyncClient) -> None:
        """Have every picture drawn alone."""
        for seed in range(NUM_PICTURES):
            answer = await http.post(GENERATIONS, json=self._order(seed) | {"deterministic": True})
            self.drawn[seed] = pixels_of(answer.raise_for_status().json()["data"][0]["b64_json"])
            answer = await http.post(EDITS, data=self._form(seed) | {"deterministic": "true"}, files=self._files())
            self.edited[seed] = pixels_of(answer.raise_for_status().json()["data"][0]["b64_json"])

    def kinds(self) -> dict[Callable[[httpx.AsyncClient], Awaitable[int]], int]:
        """Every kind of visit and how often it comes among them."""
        return {
            self.generation: 30,
            self.edit: 12,
            self.stream: 12,
            self.chat: 10,
            self.link: 8,
            self.job: 8,
            self.bad_request: 20,
            self.disconnect: 14,
            self.slow_upload: 4,
            self.stalled_upload: 1,
            self.burst: 1,
            self.probe: 8,
        }

    async def generation(self, http: httpx.AsyncClient) -> int:
        seed = self._seed()
        answer = await http.post(GENERATIONS, json=self._order(seed))
        if answer.status_code == 200:
            [picture] = answer.json()["data"]
            self._check(picture["b64_json"], self.drawn[seed])
        return self._answered(answer)

    async def edit(self, http: httpx.AsyncClient) -> int:
        seed = self._seed()
        answer = await http.post(EDITS, data=self._form(seed), files=self._files())
        if answer.status_code == 200:
            [picture] = answer.json()["data"]
            self._check(picture["b64_json"], self.edited[seed])
        return self._answered(answer)

    async def stream(self, http: httpx.AsyncClient) -> int:
        seed = self._seed()
        order = self._order(seed) | {"stream": True, "partial_images": 1}
        async with http.stream("POST", GENERATIONS, json=order) as answer:
            if answer.status_code != 200:
                await answer.aread()
                return self._answered(answer)
            lines = [line async for line in answer.aiter_lines() if line.startswith("data: ")]
        events = [json.loads(line.removeprefix("data: ")) for line in lines]
        told = [event.get("type") for event in events]
        if told[-1:] != ["image_generation.completed"] or told[:-1] not in ([], ["image_generation.partial_image"]):
            raise Unexpected(f"a stream of {told}")  # a preview that comes too late is left out
        self._check(events[-1]["b64_json"], self.drawn[seed])
        return self._answered(answer)

    async def chat(self, http: httpx.AsyncClient) -> int:
        seed = self._seed()
        order = self._order(seed)
        order["messages"] = [{"role": "user", "content": order.pop("prompt")}]
        answer = await http.post(CHAT, json=order)
        if answer.status_code == 200:
            [image] = answer.json()["choices"][0]["message"]["images"]
            self._check(image["image_url"]["url"].partition(",")[2], self.drawn[seed])
        return self._answered(answer)

    async def link(self, http: httpx.AsyncClient) -> int:
        seed = self._seed()
        answer = await http.post(GENERATIONS, json=self._order(seed) | {"response_format": "url"})
        if answer.status_code == 200:
            [picture] = answer.json()["data"]
            files = [await http.get(picture["url"]) for _ in range(2)]
            if [file.status_code for file in files] != [200, 200] or files[0].content != files[1].content:
                raise Unexpected(f"a link that answers {[file.status_code for file in files]}")
            self._check(base64.b64encode(files[0].content).decode(), self.drawn[seed])
        return self._answered(answer)

    async def job(self, http: httpx.AsyncClient) -> int:
        """Order, come back until it is done, throw it away, and find it gone."""
        seed, name = self._seed(), uuid.uuid4().hex
        answer = await http.post(
            GENERATIONS, json=self._order(seed) | {"background_job": True}, headers={"x-request-id": name}
        )
        if answer.status_code != 202:
            return self._answered(answer)
        while (result := await http.get(f"{JOBS}/{name}/result")).status_code == 202:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        if result.status_code != 200:
            raise Unexpected(f"a job that was taken ended with {result.status_code}")
        self._check(result.json()["data"][0]["b64_json"], self.drawn[seed])
        gone = [(await http.delete(f"{JOBS}/{name}")).status_code, (await http.get(f"{JOBS}/{name}")).status_code]
        if gone != [200, 404]:
            raise Unexpected(f"a job that is deleted answers {gone}")
        return self._answered(result)

    async def bad_request(self, http: httpx.AsyncClient) -> int:
        method, path, content, expected = self.dice.choice(BAD)
        answer = await http.request(method, path, **content)
        if answer.status_code not in (expected, *REFUSED) or "error" not in answer.json():
            raise Unexpected(f"{method} {path} {content} is answered {answer.status_code}")
        return answer.status_code

    async def disconnect(self, http: httpx.AsyncClient) -> int:
        path, content = self.dice.choice(
            [
                (GENERATIONS, {"json": self._order(self._seed()) | {"num_inference_steps": 20}}),
                (GENERATIONS, {"json": self._order(self._seed()) | {"num_inference_steps": 20, "stream": True}}),
                (EDITS, {"data": self._form(self._seed()), "files": self._files()}),
            ]
        )
        self.unseen += 1
        try:
            async with asyncio.timeout(self.dice.uniform(0, 0.5)):
                return (await http.post(path, **content)).status_code
        except TimeoutError:
            return LEFT

    async def slow_upload(self, http: httpx.AsyncClient) -> int:
        """A body that comes in small pieces."""
        seed = self._seed()
        body = json.dumps(self._order(seed)).encode()
        pieces = [body[start : start + 16] for start in range(0, len(body), 16)]

        async def drip() -> Any:
            for piece in pieces:
                await asyncio.sleep(SLOW_UPLOAD_S / len(pieces))
                yield piece

        answer = await http.post(GENERATIONS, content=drip(), headers={"content-type": "application/json"})
        if answer.status_code == 200:
            self._check(answer.json()["data"][0]["b64_json"], self.drawn[seed])
        return self._answered(answer)

    async def stalled_upload(self, http: httpx.AsyncClient) -> int:
        """A body that never ends: 408."""
        reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
        fields = "host: a\r\ncontent-type: application/json\r\ncontent-length: 999"
        writer.write(f'POST {GENERATIONS} HTTP/1.1\r\n{fields}\r\n\r\n{{"prompt"'.encode())
        async with asyncio.timeout(60):
            answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        if not answer.startswith(b"HTTP/1.1 408 "):
            raise Unexpected(f"a body that stalls is answered {answer[:50]!r}")
        return 408

    async def burst(self, http: httpx.AsyncClient) -> int:
        """More at once than the queue holds; the worst status of all."""
        return max(await asyncio.gather(*(self.generation(http) for _ in range(BURST))))

    async def probe(self, http: httpx.AsyncClient) -> int:
        paths = ("/health/live", "/health/ready", "/metrics", "/v1/models")
        return max([(await http.get(path)).status_code for path in paths])

    def _seed(self) -> int:
        return self.dice.randrange(NUM_PICTURES)

    def _order(self, seed: int) -> dict[str, Any]:
        return {**SMALL, "prompt": f"picture {seed}", "seed": seed}

    def _form(self, seed: int) -> dict[str, str]:
        return {name: str(value) for name, value in self._order(seed).items()} | {"resolution": "64"}

    def _files(self) -> dict[str, bytes]:
        return {"image": self._picture}

    def _check(self, b64_file: str, alone: np.ndarray) -> None:
        found_db = psnr_db(pixels_of(b64_file), alone)
        self.worst_psnr_db = min(self.worst_psnr_db, found_db)
        if found_db < MIN_PSNR_DB:
            raise Unexpected(f"a picture is {found_db:.1f} dB from the one that was asked for")

    def _answered(self, answer: httpx.Response) -> int:
        """Account for an answer to a request for one picture."""
        if answer.status_code == 200:
            self.delivered += 1
        elif answer.status_code not in REFUSED or "retry-after" not in answer.headers:
            raise Unexpected(f"status {answer.status_code}, {dict(answer.headers)}: {answer.text[:200]}")
        return answer.status_code
