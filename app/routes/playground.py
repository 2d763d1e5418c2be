"""The playground: a page at `/` and the few files that it is made of, sent as they lie in `app/playground`.

Its policy tells the browser to fetch from this service alone and to run no script but these files.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import Response
from fastapi.staticfiles import StaticFiles

POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "connect-src": "'self'",
    "img-src": "'self' blob:",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
HEADERS = {
    "content-security-policy": "; ".join(f"{name} {value}" for name, value in POLICY.items()),
    "cache-control": "no-cache",  # a new page must not meet the scripts of the old one; the tag spares the transfer
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}

router = APIRouter(include_in_schema=False)
files = StaticFiles(directory=Path(__file__).parent.parent / "playground", check_dir=False)


@router.api_route("/", methods=["GET", "HEAD"])
@router.api_route("/playground/{name}", methods=["GET", "HEAD"])
async def playground(request: Request, name: str = "index.html") -> Response:
    response = await files.get_response(name, request.scope)
    response.headers.update(HEADERS)
    return response
