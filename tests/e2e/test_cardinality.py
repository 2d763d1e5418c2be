"""However odd the requests, `/metrics` shows the series that are known beforehand, and no more of them."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.metrics import Outcome
from models.decoding import GraphResult
from tests.e2e.endurance import SMALL, URL
from tests.server import Server, serving

KEY = "the-right-one"
NUM_REQUESTS = 600
FLAGS = ("--api-key", KEY, "--metrics-open", "true", "--max-side", "160", "--max-output-pixels", "25600")
POSTS = (URL, "/v1/images/edits", "/v1/chat/completions")
KNOWN = {  # the labels of each family that has any, and all values that they may take
    "easel_requests": {"endpoint": {"create_image", "edit_image", "chat_completion"}, "outcome": set(Outcome)},
    "easel_decode_graph": {"result": set(GraphResult)},
    "easel_prompt_cache": {"result": {"hit", "miss"}},
    "easel_gpu_memory_bytes": {"kind": {"allocated", "reserved", "total"}},
}
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(checkpoint, tmp_path_factory.mktemp("server"), *FLAGS) as running:
        yield running


def series(client: httpx.Client) -> Series:
    """Every series that Prometheus would keep; each is checked against what is known."""
    found: Series = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        known: dict[str, set[str]] = KNOWN.get(family.name.removesuffix("_created"), {})
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "le"}
            assert labels.keys() == known.keys(), (sample.name, labels)
            assert all(value in known[name] for name, value in labels.items()), (sample.name, labels)
            found[sample.name, frozenset(sample.labels.items())] = sample.value
    return found


class Dice:
    """Makes up requests; each is unlike all others."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def word(self, alphabet: str = string.ascii_letters + string.digits) -> str:
        return "".join(self._random.choices(alphabet, k=self._random.randint(1, 40)))

    def path(self) -> str:
        stem = self._random.choice(
            ["", "v1", "v1/images", "v1/images/requests", "v1/models", "files", "health", *POSTS]
        )
        return f"/{stem}/{self.word()}".replace("//", "/") + self._random.choice(["", f"?{self.word()}={self.word()}"])

    def body(self) -> dict[str, Any]:
        """What is drawn if all of its odd fields happen to be allowed."""
        number = self._random.randint(-(2**40), 2**40)
        odd: list[dict[str, Any]] = [
            {"prompt": self.word(), "seed": abs(number) % 2**31},
            {"user": self.word()},
            {"model": self.word()},
            {"size": f"{abs(number) % 9999}x{abs(number) % 777}"},
            {"size": f"{64 + 32 * (number % 3)}x{64 + 32 * (number % 4)}"},
            {"n": number % 40 - 20},
            {"quality": self.word()},
            {"response_format": self.word()},
            {"output_format": self._random.choice(["png", "webp", "jpeg", self.word()])},
            {self.word(): self.word()},
            {"messages": [{"role": self.word(), "content": self.word()}]},
            {"timeout_s": abs(number) % 5 / 1000},
        ]
        fields = dict(SMALL, num_inference_steps=1)
        for more in self._random.sample(odd, self._random.randint(0, 2)):
            fields |= more
        return fields

    def request(self, client: httpx.Client) -> httpx.Request:
        headers = {
            "authorization": f"Bearer {self._random.choice([KEY] * 9 + [self.word()])}",
            "user-agent": self.word(string.ascii_letters + "/.;()"),
            "x-request-id": self.word(),
            f"x-{self.word()}": self.word(),
            "host": f"{self.word()}.example",
        }
        kind = self._random.choice(["post", "post", "path", "method"])
        if kind == "post":
            path = self._random.choice(POSTS)
            return client.build_request("POST", path, headers=headers, json=self.body())
        method = (
            self.word(string.ascii_uppercase) if kind == "method" else self._random.choice(["GET", "DELETE", "PUT"])
        )
        return client.build_request(method, self.path() if kind == "path" else URL, headers=headers)


def test_the_series_are_known_and_do_not_grow(server: Server) -> None:
    dice = Dice(seed=8)
    with httpx.Client(base_url=server.url, timeout=60) as client:
        counts, statuses = [], set()
        for number in range(NUM_REQUESTS):
            statuses.add(client.send(dice.request(client)).status_code)
            if number % 100 == 99:
                counts.append(len(series(client)))
        answered = sum(value for (name, _), value in series(client).items() if name == "easel_requests_total")
    assert {200, 400, 401, 404, 405} <= statuses <= {200, 400, 401, 404, 405, 504}
    assert answered > NUM_REQUESTS / 4  # the routes that count were really asked
    assert len(set(counts[2:])) == 1, counts
