"""Pages of other origins may call only where the operator says so, and then they can read errors as well."""

from __future__ import annotations

import pytest

from app.settings import SettingsError, load_settings
from engine.errors import QueueFull

URL = "/v1/images/generations"
PAGE = "https://page.example"
ASKED = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, x-stainless-os"}


def allowed(response) -> str | None:
    return response.headers.get("access-control-allow-origin")


async def test_off_unless_set(client):
    assert allowed(await client.post(URL, json={"prompt": "a"}, headers={"origin": PAGE})) is None
    assert (await client.options(URL, headers={"origin": PAGE, **ASKED})).status_code == 405


@pytest.mark.parametrize("path", [URL, "/v1/images/edits", "/v1/chat/completions", "/v1/models"])
async def test_a_browser_asks_beforehand_without_a_key(connect, path):
    client = await connect(api_key=("one",), cors_origin=("https://other.example", PAGE))
    response = await client.options(path, headers={"origin": PAGE, **ASKED})
    assert (response.status_code, allowed(response)) == (200, PAGE)
    assert {"GET", "POST", "DELETE"} <= set(response.headers["access-control-allow-methods"].split(", "))
    assert "authorization" in response.headers["access-control-allow-headers"]
    assert response.headers["x-request-id"]
    assert "access-control-allow-credentials" not in response.headers


@pytest.mark.parametrize("origin", ["https://evil.example", "https://page.example.evil.example", "null", "x" * 5000])
async def test_other_origins_are_refused(connect, refused, origin):
    client = await connect(cors_origin=(PAGE,))
    response = await client.options(URL, headers={"origin": origin, **ASKED})
    refused(response, 400, code="origin_not_allowed")
    assert allowed(response) is None
    assert allowed(await client.post(URL, json={"prompt": "a"}, headers={"origin": origin})) is None


async def test_pages_can_read_every_answer(connect, engine):
    client = await connect(api_key=("one",), cors_origin=(PAGE,))
    headers = {"origin": PAGE, "authorization": "Bearer one"}
    seen = [await client.post(URL, json={"prompt": "a"}, headers={"origin": PAGE})]
    for error in (None, QueueFull("full", retry_after_s=2), RuntimeError("a bug")):
        engine.error = error
        seen.append(await client.post(URL, json={"prompt": "a"}, headers=headers))
    seen.append(await client.post("/nowhere", headers=headers))
    assert [response.status_code for response in seen] == [401, 200, 429, 500, 404]
    for response in seen:
        assert allowed(response) == PAGE and response.headers["x-request-id"]
        exposed = response.headers["access-control-expose-headers"].split(", ")
        assert {"x-request-id", "retry-after", "retry-after-ms"} <= set(exposed)


async def test_all_origins(connect):
    client = await connect(cors_origin=("*",))
    assert allowed(await client.post(URL, json={"prompt": "a"}, headers={"origin": PAGE})) == "*"


@pytest.mark.parametrize("origin", ["page.example", "https://page.example/", "https://*.example/x", "ftp://a", ""])
def test_what_is_no_origin(origin):
    with pytest.raises(SettingsError, match=r"^cors_origin: "):
        load_settings(cors_origin=[origin])


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
@pytest.mark.parametrize("path", [URL, "/v1/images/edits", "/v1/chat/completions"])
async def test_forms_of_other_sites_draw_nothing(connect, engine, refused, path, site):
    """No browser asks before it sends a form, whose text may well be JSON."""
    client = await connect(cors_origin=(PAGE,))
    headers = {"origin": "https://evil.example", "sec-fetch-site": site, "content-type": "text/plain"}
    refused(await client.post(path, content=b'{"prompt": "a"}', headers=headers), 403, code="origin_not_allowed")
    assert not engine.received


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": PAGE, "sec-fetch-site": "cross-site"},
        {"origin": "http://easel", "sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "none"},
        {},
    ],
)
async def test_allowed_pages_the_playground_and_other_clients_draw(connect, headers):
    client = await connect(cors_origin=(PAGE,))
    assert (await client.post(URL, json={"prompt": "a"}, headers=headers)).status_code == 200
    assert (await client.get("/", headers={"sec-fetch-site": "cross-site"})).status_code == 200


async def test_forms_of_other_sites_where_every_page_may_call(connect):
    client = await connect(cors_origin=("*",))
    headers = {"origin": PAGE, "sec-fetch-site": "cross-site"}
    assert (await client.post(URL, json={"prompt": "a"}, headers=headers)).status_code == 200
