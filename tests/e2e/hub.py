"""A hub with one repository, `owner/name`: just enough of its interface to fetch a checkpoint from a folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from tests.http_server import answering

COMMIT = "a" * 40


@contextmanager
def hub(folder: Path) -> Iterator[str]:
    """The address of a hub whose repository holds the files of `folder`."""
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}

    class Answers(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if "/tree/" in path:
                self.answer(
                    [
                        {"type": "file", "path": name, "size": file.stat().st_size, "oid": etag_of(file)}
                        for name, file in files.items()
                    ]
                )
            elif path.startswith("/api/models/"):
                self.answer({"id": "owner/name", "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]})
            else:
                file = files[path.partition(f"/resolve/{COMMIT}/")[2]]
                self.send(file.read_bytes(), etag=f'"{etag_of(file)}"')

        def answer(self, content: object) -> None:
            self.send(json.dumps(content).encode(), etag='"none"')

        def send(self, data: bytes, *, etag: str) -> None:
            self.send_response(200)
            for name, value in {"content-length": len(data), "etag": etag, "x-repo-commit": COMMIT}.items():
                self.send_header(name, str(value))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

    with answering(Answers) as url:
        yield url


def etag_of(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()
