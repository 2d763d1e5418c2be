"""Pictures behind http(s) URLs: from where they are fetched, and everything that they are not fetched from."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from ipaddress import ip_address

import pytest
import trustme
from PIL import Image

from app.addresses import is_public
from app.errors import ApiError
from app.fetching import MAX_FETCHES, Fetcher
from app.settings import SettingsError, load_settings
from app.sources import RemoteImage
from tests.waiting import until

URL = "/v1/images/edits"
LOOPBACK = "127.0.0.1"
Respond = Callable[[asyncio.StreamWriter, bytes], Awaitable[None]]


def answer(body: bytes = b"", status: str = "200 OK", **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body


class Site:
    """A web server on this machine that says what it is told to say, and keeps the heads of what it was asked."""

    def __init__(self) -> None:
        self.says: bytes | Respond = b""
        self.asked: list[bytes] = []
        self.num_connections = self.num_open = 0
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.num_open += 1
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            self.asked.append(head)
            if isinstance(self.says, bytes):
                writer.write(self.says)
                await writer.drain()
            else:
                await self.says(writer, head)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.num_open -= 1
            writer.close()

    def url(self, host: str = LOOPBACK, path: str = "/a.png", scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self.port}{path}"


@contextlib.asynccontextmanager
async def site_at(host: str = LOOPBACK, port: int = 0, tls: ssl.SSLContext | None = None) -> AsyncIterator[Site]:
    site = Site()
    server = await asyncio.start_server(site.serve, host, port, ssl=tls)
    site.port = server.sockets[0].getsockname()[1]
    async with server:
        yield site


@pytest.fixture
async def site(png) -> AsyncIterator[Site]:
    async with site_at() as site:
        site.says = answer(png, content_type="text/html")
        yield site


def fetcher_for(site: Site, *hosts: str, **options) -> Fetcher:
    """One that takes loopback for the internet."""
    options = {"max_bytes": 10_000, "may_connect": lambda address: str(address) == LOOPBACK, **options}
    return Fetcher([f"{host}:{site.port}" for host in hosts or (LOOPBACK, "*.example")], **options)


@pytest.fixture
def names(monkeypatch) -> dict[str, list[str]]:
    """What names mean: addresses by name, one for each time that it is asked for, the last one ever after. An address
    means itself, and asking for another name fails the test."""
    table: dict[str, list[str]] = {}
    original = socket.getaddrinfo

    def getaddrinfo(host, port, *args, **options):
        with contextlib.suppress(ValueError):
            ip_address(host)
            return original(host, port, *args, **options)
        meanings = table[host]
        meaning = meanings.pop(0) if len(meanings) > 1 else meanings[0]
        return [place for address in meaning.split() for place in original(address, port, *args, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return table


async def refusal(fetcher: Fetcher, url: str, code: str = "image_fetch_failed") -> str:
    with pytest.raises(ApiError) as caught:
        await fetcher.fetch(RemoteImage(url, "image"))
    assert (caught.value.status, caught.value.detail.code, caught.value.detail.param) == (400, code, "image")
    return caught.value.detail.message


@pytest.mark.parametrize("way", ["images", "image", "form", "chat"])
async def test_a_picture_by_its_url(connect, engine, site, way):
    client = await connect(fetcher=fetcher_for(site))
    url = site.url(path="/a%20b?c=d#e")
    if way == "form":
        response = await client.post(URL, data={"prompt": "a"}, files={"url": (None, url)})
    elif way == "chat":
        part = {"type": "image_url", "image_url": {"url": url}}
        message = {"role": "user", "content": [{"type": "text", "text": "a"}, part]}
        response = await client.post("/v1/chat/completions", json={"messages": [message]})
    else:
        response = await client.post(URL, json={"prompt": "a", way: [{"image_url": url}] if way == "images" else url})
    assert response.status_code == 200, response.text
    assert [picture.size for picture in engine.received[0].condition_images] == [(48, 40)]
    [head] = site.asked
    assert head.startswith(b"GET /a%20b?c=d HTTP/1.1\r\n")
    assert f"host: {LOOPBACK}:{site.port}".encode() in head.lower()


async def test_order_is_kept_and_nothing_of_ours_goes_along(connect, engine, site, encoded, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")

    async def by_path(writer, head):
        width = int(head.split()[1].strip(b"/"))
        await asyncio.sleep(0.1 if width == 32 else 0)
        writer.write(answer(encoded(Image.new("RGB", (width, 40))), set_cookie="a=b; Path=/"))

    site.says = by_path
    client = await connect(fetcher=fetcher_for(site), api_key=("one",))
    images = [{"image_url": site.url(path=f"/{width}")} for width in (32, 48, 64)]
    headers = {"authorization": "Bearer one", "cookie": "c=d"}
    for _ in range(2):
        response = await client.post(URL, json={"prompt": "a", "images": images}, headers=headers)
        assert response.status_code == 200, response.text
    assert [picture.width for picture in engine.received[0].condition_images] == [32, 48, 64]
    assert not any(word in head.lower() for head in site.asked for word in (b"authorization", b"cookie", b"one"))


async def test_fetching_is_off_by_default_and_asks_no_name_server(client, engine, refused, names, site):
    for url in ("http://pictures.example/a.png", "https://pictures.example/a.png", site.url()):
        response = await client.post(URL, json={"prompt": "a", "images": [{"image_url": url}]})
        refused(response, 400, param="images", code="url_not_allowed")
    assert (site.num_connections, engine.received) == (0, [])


async def test_only_what_has_its_place_is_fetched(connect, engine, refused, site):
    client = await connect(fetcher=fetcher_for(site))
    images = [{"image_url": site.url()}]
    engine.is_full = True
    refused(await client.post(URL, json={"prompt": "a", "images": images}), 429)
    engine.is_full = False
    refused(await client.post(URL, json={"prompt": "a", "images": images, "n": 11}), 400, param="n")
    refused(await client.post(URL, json={"prompt": "a", "images": images * 5}), 400, param="image")
    elsewhere = {"image_url": "http://elsewhere.test/a.png"}
    response = await client.post(URL, json={"prompt": "a", "images": [*images, elsewhere]})
    refused(response, 400, param="images", code="url_not_allowed")
    assert site.num_connections == 0


async def test_a_client_that_leaves_ends_its_fetch(serve, engine, site):
    site.says = dripping
    client = await serve(fetcher=fetcher_for(site, timeout_s=60))
    request = asyncio.create_task(client.post(URL, json={"prompt": "a", "image": site.url()}))
    await until(lambda: site.asked)
    request.cancel()
    await until(lambda: site.num_open == 0)
    assert engine.received == []


NOT_PUBLIC = [
    *("0.0.0.0", "10.0.0.1", "100.64.0.1", "100.127.255.255", "127.0.0.1", "127.255.255.255", "169.254.169.254"),
    *("172.16.0.1", "172.31.255.255", "192.0.0.192", "192.0.2.1", "192.88.99.1", "192.168.0.1", "198.18.0.1"),
    *("198.51.100.1", "203.0.113.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "168.63.129.16"),
    *("::", "::1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::a00:1"),
    *("100::1", "2001::1", "2001:0:7f00:1::", "2001:db8::1", "2002:7f00:1::", "2002:a00:1::1", "3fff::1", "5f00::1"),
    *("fc00::1", "fd00:ec2::254", "fe80::1", "fec0::1", "ff02::1", "2606:4700::1%eth0"),
]


@pytest.mark.parametrize("address", NOT_PUBLIC)
async def test_addresses_that_are_not_public(address, names):
    assert not is_public(ip_address(address))
    names["pictures.example"] = [address.partition("%")[0]]
    fetcher = Fetcher(["*"], max_bytes=1, timeout_s=1)
    if "%" not in address:
        host = f"[{address}]" if ":" in address else address
        await refusal(fetcher, f"http://{host}/")
        await refusal(fetcher, "https://pictures.example/")


@pytest.mark.parametrize("address", ["1.1.1.1", "100.63.255.255", "172.32.0.1", "2606:4700:4700::1111", "2a00::1"])
def test_public_addresses(address):
    assert is_public(ip_address(address))


@pytest.mark.parametrize(
    "host",
    [
        *("2130706433", "0x7f000001", "0x7f.1", "0X7F.0.0.1", "017700000001", "0177.0.0.1", "127.1", "127.0.1", "0"),
        *("127.0.0.1.", "127.0.0.1..", "１２７.0.0.1", "①②⑦.0.0.1", "127。0。0。1", "%31%32%37.0.0.1", "127.0.0.1%00"),
        *("user@127.0.0.1", "user:pw@127.0.0.1", "1.1.1.1@127.0.0.1", "1.1.1.1%2f@127.0.0.1", "1.1.1.1\\@127.0.0.1"),
        *("[::1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[0:0:0:0:0:0:0:1]", "[::1%25lo]", "[::127.0.0.1]"),
        *("[64:ff9b::127.0.0.1]", "[::1", "localhost", "LOCALHOST.", "127.0.0.1\t", "127.0.0.1\0.example", ""),
        *("a" * 64 + ".example", "a." * 200 + "example", "-", ".", "a..example", "xn--\u2603", "256.256.256.256"),
    ],
)
async def test_notations_of_loopback(connect, refused, names, host):
    """With every host and port on the list, and a server at each way to say loopback: it sees nothing."""
    names["localhost"] = [LOOPBACK]
    async with site_at(LOOPBACK) as site:
        client = await connect(allow_fetch=("*", f"*:{site.port}"))
        for url in (f"http://{host}:{site.port}/a.png", f"https://{host}/a.png"):
            response = await client.post(URL, json={"prompt": "a", "images": [{"image_url": url}]})
            refused(response, 400, param="images")
        assert site.num_connections == 0


async def test_a_name_with_one_private_address_is_refused(site, names):
    names["pictures.example"] = [f"{LOOPBACK} 10.0.0.1"]
    await refusal(fetcher_for(site), site.url("pictures.example"))
    assert site.num_connections == 0


async def test_what_was_checked_is_connected_to(site, names):
    """The name means something else the second time; there is no second time."""
    async with site_at("127.0.0.2", site.port) as other:
        names["pictures.example"] = [LOOPBACK, "127.0.0.2"]
        await fetcher_for(site).fetch(RemoteImage(site.url("Pictures.EXAMPLE."), "image"))
        assert (site.num_connections, other.num_connections) == (1, 0)
        assert f"host: pictures.example:{site.port}\r\n".encode() in site.asked[0].lower()
        await refusal(fetcher_for(site), site.url("pictures.example"))
        assert (site.num_connections, other.num_connections) == (1, 0)


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"])
@pytest.mark.parametrize(
    "place",
    ["http://127.0.0.2:{port}/", "//127.0.0.2:{port}/", "http://2130706434:{port}/", "http://private.example:{port}/"],
)
async def test_redirect_to_a_private_address(site, names, status, place):
    names["private.example"] = ["127.0.0.2"]
    async with site_at("127.0.0.2", site.port) as private:
        site.says = answer(status=status, location=place.format(port=site.port))
        with pytest.raises(ApiError) as caught:
            await fetcher_for(site, LOOPBACK, "127.0.0.2", "*.example").fetch(RemoteImage(site.url(), "image"))
        assert caught.value.status == 400
        assert (site.num_connections, private.num_connections) == (1, 0)


@pytest.mark.parametrize(
    "place", ["file:///etc/passwd", "ftp://a.example/", "http://elsewhere.test/", "http://[", "\x01"]
)
async def test_redirect_to_where_nothing_is_fetched(site, names, place):
    site.says = answer(status="302 Found", location=place)
    with pytest.raises(ApiError) as caught:
        await fetcher_for(site).fetch(RemoteImage(site.url(), "image"))
    assert caught.value.status == 400


async def test_redirects_are_followed_a_few_times(site, png):
    async def count_down(writer, head):
        left = int(head.split()[1].strip(b"/"))
        writer.write(answer(status="302 Found", location=f"../{left - 1}") if left else answer(png))

    site.says = count_down
    assert await fetcher_for(site).fetch(RemoteImage(site.url(path="/3"), "image")) == png
    assert "redirects" in await refusal(fetcher_for(site), site.url(path="/4"))


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


@pytest.mark.parametrize("certified", ["pictures.example", "other.example", LOOPBACK])
async def test_https_is_verified_against_the_name(authority, names, png, certified):
    names["pictures.example"] = [LOOPBACK]
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(certified).configure_cert(tls)
    async with site_at(tls=tls) as site:
        site.says = answer(png)
        image = RemoteImage(site.url("pictures.example", scheme="https"), "image")
        fetcher = fetcher_for(site, ssl_context=trusting(authority))
        if certified == "pictures.example":
            assert await fetcher.fetch(image) == png
            site.says = answer(status="302 Found", location=site.url("pictures.example"))
            await refusal(fetcher, image.url, "url_not_allowed")  # back to http
            assert site.num_connections == 2
        else:
            await refusal(fetcher, image.url)
        await refusal(fetcher_for(site), image.url)  # an authority that nobody knows
        assert len(site.asked) == (2 if certified == "pictures.example" else 0)


async def endless_body(writer, head):
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"3e8\r\n" + bytes(1000) + b"\r\n")
        await writer.drain()


async def dripping(writer, head):
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9000\r\n\r\n")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.02)


async def endless_head(writer, head):
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"x-header: " + b"a" * 1000 + b"\r\n")
        await writer.drain()


async def only_preludes(writer, head):
    while True:
        writer.write(b"HTTP/1.1 103 Early Hints\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(0.01)


async def silence(writer, head):
    await asyncio.sleep(60)


@pytest.mark.parametrize(
    "says",
    [
        *(endless_body, dripping, endless_head, only_preludes, silence),
        *(b"", b"HTTP/1.1 200", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nabc"),
        *(b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n"),
        b"HTTP/1.1 200 OK\r\ncontent-length: " + b"9" * 5000 + b"\r\n\r\n",
        answer(bytes(10_001)),
        answer(gzip.compress(bytes(1_000_000)), content_encoding="gzip"),
        *(answer(b"a", status) for status in ("404 Not Found", "500 Error", "204 Gone", "206 Partial", "302 Found")),
    ],
    ids=lambda says: getattr(says, "__name__", None),
)
async def test_answers_that_are_no_picture(site, says):
    site.says = says
    message = await refusal(fetcher_for(site, timeout_s=0.4), site.url())
    assert str(site.port) not in message
    await until(lambda: site.num_open == 0 or says is silence)


async def test_a_slow_name_server(site, names, monkeypatch):
    may_answer = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: may_answer.wait(20) and [])
    await refusal(fetcher_for(site, timeout_s=0.1), site.url("pictures.example"))
    assert await asyncio.wait_for(asyncio.to_thread(lambda: 1), 5) == 1  # its thread is none of those that draw
    may_answer.set()


async def test_the_limit_is_exact(site):
    site.says = answer(bytes(10_000))
    assert len(await fetcher_for(site).fetch(RemoteImage(site.url(), "image"))) == 10_000


async def test_a_few_at_a_time(site, png):
    may_answer = asyncio.Event()

    async def when_it_may(writer, head):
        await may_answer.wait()
        writer.write(answer(png))

    site.says = when_it_may
    fetcher = fetcher_for(site)
    fetches = [asyncio.create_task(fetcher.fetch(RemoteImage(site.url(), "image"))) for _ in range(MAX_FETCHES + 9)]
    await until(lambda: len(site.asked) == MAX_FETCHES)
    await asyncio.sleep(0.05)
    assert site.num_connections == MAX_FETCHES
    may_answer.set()
    assert await asyncio.gather(*fetches) == [png] * (MAX_FETCHES + 9)


@pytest.mark.parametrize(
    ("entry", "url", "admitted"),
    [
        ("a.example", "http://a.example/", True),
        ("A.example", "https://a.EXAMPLE./", True),
        ("a.example", "http://b.a.example/", False),
        ("a.example", "http://a.example:8080/", False),
        ("a.example", "http://a.example.evil.test/", False),
        ("a.example:8080", "http://a.example:8080/", True),
        ("a.example:8080", "http://a.example/", False),
        ("*.a.example", "http://b.a.example/", True),
        ("*.a.example", "http://c.b.a.example/", True),
        ("*.a.example", "http://a.example/", False),
        ("*.a.example", "http://evila.example/", False),
        ("*", "http://anything.test/", True),
        ("*", "http://anything.test:443/", True),
        ("*", "http://anything.test:22/", False),
        ("*", "http://anything.test:0/", False),
        ("*", "http://user@anything.test/", False),
        ("*:22", "http://anything.test:22/", True),
        ("xn--bcher-kva.example", "http://bücher.example/", True),
        ("[2606:4700::1111]", "http://[2606:4700::1111]/", True),
        ("[2606:4700::1111]:81", "http://[2606:4700:0::1111]:81/", False),
        ("*", "http://" + "a" * 9000 + "/", False),
    ],
)
def test_the_list(entry, url, admitted):
    fetcher = Fetcher(load_settings(allow_fetch=[entry]).allow_fetch, max_bytes=1)
    if admitted:
        fetcher.check(RemoteImage(url, "image"))
    else:
        with pytest.raises(ApiError):
            fetcher.check(RemoteImage(url, "image"))


@pytest.mark.parametrize(
    "entry", ["", "http://a.example", "a.example/x", "*a.example", "a.*", "a.example:", "a:b", "bü.x"]
)
def test_what_is_no_entry(entry):
    with pytest.raises(SettingsError, match=r"^allow_fetch: "):
        load_settings(allow_fetch=[entry])
