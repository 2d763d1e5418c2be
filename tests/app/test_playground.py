"""The files of the playground as the server sends them. `tests/e2e/test_playground.py` tests what the page does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import app

FOLDER = Path(app.__file__).parent / "playground"
MAX_FILE_LINES = 200
MEDIA_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
PARTS = sorted(path.name for path in FOLDER.iterdir() if path.suffix in MEDIA_TYPES)


async def test_the_page_may_reach_this_service_alone(client):
    response = await client.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["x-content-type-options"] == "nosniff"
    policy = dict(rule.split(" ", 1) for rule in response.headers["content-security-policy"].split("; "))
    assert policy.pop("default-src") == policy.pop("base-uri") == policy.pop("form-action") == "'none'"
    assert policy.pop("frame-ancestors") == "'none'"
    assert policy.pop("img-src") == "'self' blob:"
    assert policy == dict.fromkeys(("script-src", "style-src", "connect-src"), "'self'")


@pytest.mark.parametrize("name", PARTS)
async def test_each_part_is_sent_with_its_type_and_policy(client, name):
    page = await client.get("/")
    response = await client.get(f"/playground/{name}")
    assert response.status_code == 200
    assert response.content == (FOLDER / name).read_bytes()
    assert response.headers["content-type"].partition(";")[0] == MEDIA_TYPES[Path(name).suffix]
    assert response.headers["content-security-policy"] == page.headers["content-security-policy"]


async def test_an_unchanged_page_is_not_sent_again(client):
    first = await client.get("/")
    assert first.headers["cache-control"] == "no-cache"
    again = await client.get("/", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert (await client.get("/", headers={"if-none-match": '"another"'})).content == first.content
    head = await client.head("/")
    assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", first.headers["etag"])


@pytest.mark.parametrize("path", ["", "nothing.js", "%2e%2e", "%2e%2e%2fmain.py", "..%2fmain.py", "a/b", "a%00b"])
async def test_nothing_else_is_sent(client, refused, path):
    refused(await client.get(f"/playground/{path}"), 404, code="route_not_found")
    refused(await client.post("/"), 405, code="method_not_allowed")


def test_parts_name_each_other_relatively_and_are_all_used():
    """So that the page works in a folder of a proxy, and nothing is shipped in vain."""
    texts = {path.name: path.read_text() for path in FOLDER.iterdir()}
    named = re.findall(r'(?:src|href)="([^"]*)"', texts["index.html"])
    named += [f"playground/{name}" for text in texts.values() for name in re.findall(r'from "\./([^"]+)"', text)]
    ours = {name for name in named if name and not name.startswith("#") and name != "openapi.json"}
    assert ours == {f"playground/{name}" for name in PARTS}
    for name, text in texts.items():
        assert "://" not in text.replace("http://www.w3.org/2000/svg", ""), name


@pytest.mark.parametrize("name", ["index.html", *PARTS])
def test_lengths(name):
    assert len((FOLDER / name).read_text().splitlines()) <= MAX_FILE_LINES
