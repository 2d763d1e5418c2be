"""Links to finished pictures: absolute, signed, good for a while, and open to whoever has one.

The signature is the permission, so that a browser, which sends no key, can show the picture. It is made with a key that
this process draws for itself: like the pictures, links end with it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import parse_qs

from app.images import OutputFormat
from app.shelf import Shelf

FILES_PATH = "/v1/images/files/"
MAX_FILES = 10_000


@dataclass(frozen=True, slots=True)
class PictureFile:
    """A picture as it is sent."""

    data: bytes
    format: OutputFormat

    @property
    def media_type(self) -> str:
        return f"image/{self.format}"


class Links:
    """Keeps files for `lifetime_s` at most, and the newest `max_bytes` of them."""

    def __init__(self, *, max_bytes: int, lifetime_s: float, clock: Callable[[], float] = time.time) -> None:
        self._files: Shelf[PictureFile] = Shelf(
            max_items=MAX_FILES, max_bytes=max_bytes, max_age_s=lifetime_s, clock=clock
        )
        self._lifetime_s = lifetime_s
        self._clock = clock
        self._key = secrets.token_bytes(32)

    def publish(self, file: PictureFile, base_url: str) -> str:
        """Keep a file and return its address under `base_url`, the root of this service as its clients see it."""
        name = f"{secrets.token_urlsafe(18)}.{file.format}"
        expires = str(int(self._clock() + self._lifetime_s))
        self._files.put(name, file, len(file.data))
        return f"{base_url.rstrip('/')}{FILES_PATH}{name}?expires={expires}&signature={self._sign(name, expires)}"

    def open(self, name: str) -> PictureFile | None:
        return self._files.get(name)

    def admits(self, path: str, query: str) -> bool:
        """Whether a request for `path` carries a signature of ours that has not expired."""
        if not path.startswith(FILES_PATH):
            return False
        fields = parse_qs(query, max_num_fields=10) if query.count("&") < 10 else {}
        [expires], [signature] = fields.get("expires", [""])[:1], fields.get("signature", [""])[:1]
        expected = self._sign(path.removeprefix(FILES_PATH), expires)
        is_ours = hmac.compare_digest(signature.encode(), expected.encode())
        return is_ours and self._clock() < int(expires)  # what we have signed is a number

    def _sign(self, name: str, expires: str) -> str:
        return hmac.new(self._key, f"{name}\n{expires}".encode(), hashlib.sha256).hexdigest()
