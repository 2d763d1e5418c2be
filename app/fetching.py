"""Pictures behind http(s) URLs, from the hosts that the operator allows.

Such a URL comes from a client and may point at what only this machine can reach. So its host has to be on the list and
to have public addresses alone (`app.addresses`), and so has that of every redirect. Nothing of this machine goes out
with a request: no credentials, no cookies, no proxy of its environment. What comes back is bounded in time and bytes,
is not unpacked, and is whatever picture its content is (`app.images`).
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from ipaddress import ip_address

import httpcore2
import httpx2

from app.addresses import AddressCheck, CheckedNetwork, is_public
from app.errors import ApiError, invalid
from app.sources import DataUrl, ImageSource, RemoteImage, url_not_allowed

TIMEOUT_S = 5.0
MAX_FETCHES = 16  # at a time, of all requests; the others wait
MAX_REDIRECTS = 3
MAX_URL_CHARS = 8192
PORTS = {"http": 80, "https": 443}
REDIRECTS = (301, 302, 303, 307, 308)
HEADERS = [
    (b"accept", b"image/png, image/jpeg, image/webp"),
    (b"accept-encoding", b"identity"),
    (b"connection", b"close"),
    (b"user-agent", b"easel"),
]
LABEL = r"(?!-)[a-z0-9_-]{1,63}(?<!-)"
NAME = re.compile(rf"{LABEL}(\.{LABEL}){{0,30}}")
NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")


@dataclass(frozen=True, slots=True)
class AllowedHost:
    """An entry of the list: a host, `*.` and a name for what is below it, or `*` for any. Without a port of its own it
    stands for the two usual ones."""

    pattern: str
    port: int | None

    @classmethod
    def parse(cls, text: str) -> AllowedHost:
        pattern, colon, port = text.lower().rpartition(":")
        if not colon or text.endswith("]"):
            return cls(text.lower().strip("[]"), None)
        return cls(pattern.strip("[]"), int(port))

    def admits(self, host: str, port: int) -> bool:
        if port not in (PORTS.values() if self.port is None else (self.port,)):
            return False
        below = self.pattern.removeprefix("*")
        return host.endswith(below) if below != self.pattern else host == self.pattern


class Fetcher:
    """Fetches from the hosts that `allowed` lists; `may_connect` judges addresses, `ssl_context` verifies hosts."""

    def __init__(
        self,
        allowed: Sequence[str],
        *,
        max_bytes: int,
        timeout_s: float = TIMEOUT_S,
        may_connect: AddressCheck = is_public,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self._allowed = [AllowedHost.parse(text) for text in allowed]
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._network = CheckedNetwork(may_connect)
        self._ssl_context = ssl_context
        self._places = asyncio.Semaphore(MAX_FETCHES)

    @cached_property
    def _verifying(self) -> ssl.SSLContext:
        return self._ssl_context or httpcore2.default_ssl_context()

    def check(self, image: RemoteImage) -> httpx2.URL:
        """The URL, if its host is on the list. Raises `ApiError` with status 400."""
        if len(image.url) > MAX_URL_CHARS:
            raise url_not_allowed(image.param)
        try:
            return self._checked(httpx2.URL(image.url), image)
        except httpx2.InvalidURL as error:
            raise url_not_allowed(image.param) from error

    async def fetch(self, image: RemoteImage) -> bytes:
        """The file behind a URL. Raises `ApiError` with status 400, which says little of what the network is like."""
        async with self._places:
            pool = httpcore2.AsyncConnectionPool(
                self._verifying, max_keepalive_connections=0, network_backend=self._network
            )
            try:
                async with asyncio.timeout(self._timeout_s), pool:
                    return await self._follow(image, pool)
            except TimeoutError as error:
                raise failed(f"takes longer than {self._timeout_s:g} seconds", image) from error
            except httpx2.InvalidURL as error:
                raise url_not_allowed(image.param) from error
            except (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException) as error:
                raise failed("is not there", image) from error

    async def _follow(self, image: RemoteImage, pool: httpcore2.AsyncConnectionPool) -> bytes:
        url = self.check(image)
        for _ in range(1 + MAX_REDIRECTS):
            place = httpcore2.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path)
            async with pool.stream("GET", place, headers=[(b"host", url.netloc), *HEADERS]) as response:
                headers = {name.lower(): value for name, value in response.headers}
                if response.status == 200:
                    return await self._read(response, headers, image)
                if response.status not in REDIRECTS or b"location" not in headers:
                    raise failed("is not there", image)
            following = url.join(headers[b"location"].decode("utf-8", "replace"))
            if url.scheme == "https" and following.scheme != "https":
                raise url_not_allowed(image.param)
            url = self._checked(following, image)
        raise failed("is behind too many redirects", image)

    def _checked(self, url: httpx2.URL, image: RemoteImage) -> httpx2.URL:
        """The URL with its host as the list has it, if it is on the list. Addresses are judged on connecting."""
        host = url.raw_host.decode("ascii").removesuffix(".")
        if url.scheme not in PORTS or url.userinfo or not is_plain(host):
            raise url_not_allowed(image.param)
        port = PORTS[url.scheme] if url.port is None else url.port
        if not any(entry.admits(host, port) for entry in self._allowed):
            raise url_not_allowed(image.param)
        return url.copy_with(host=host)

    async def _read(self, response: httpcore2.Response, headers: dict[bytes, bytes], image: RemoteImage) -> bytes:
        if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
            raise failed("is compressed", image)
        too_large = failed(f"is larger than {self._max_bytes} bytes", image)
        if int(headers.get(b"content-length", b"0")) > self._max_bytes:
            raise too_large
        content = bytearray()
        async for chunk in response.aiter_stream():
            content += chunk
            if len(content) > self._max_bytes:
                raise too_large
        return bytes(content)


async def fetched(sources: Sequence[ImageSource], fetcher: Fetcher) -> list[bytes | DataUrl]:
    """The sources with what is behind URLs in place of the URLs, all at once. The first failure ends the others."""

    async def at_hand(source: ImageSource) -> bytes | DataUrl:
        return await fetcher.fetch(source) if isinstance(source, RemoteImage) else source

    tasks = [asyncio.ensure_future(at_hand(source)) for source in sources]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def is_plain(host: str) -> bool:
    """Whether a host is a DNS name or an address in its one usual notation: no 0x7f.1, which some read as 127.0.0.1."""
    last = host.rpartition(".")[2]
    if ":" not in host and not NUMBER.fullmatch(last):
        return NAME.fullmatch(host) is not None
    try:
        return str(ip_address(host)) == host or ":" in host
    except ValueError:
        return False


def failed(what: str, image: RemoteImage) -> ApiError:
    return invalid(f"The image at a URL {what}.", param=image.param, code="image_fetch_failed")
