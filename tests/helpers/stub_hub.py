"""A server with the endpoints of the Hugging Face hub that huggingface_hub calls to download a model."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit


@dataclass
class StubRepo:
    """A model on the stub."""

    directory: Path
    """Its files."""
    commit: str = "a" * 40
    token: str | None = None
    """The token that reads it; None: everyone may."""
    gated: bool = False
    """True if no token is enough."""
    cuts: dict[str, int] = field(default_factory=dict)
    """The number of times that the connection ends in the middle of a file, by its name."""


@dataclass
class StubHub:
    """A hub and what it was asked for."""

    repos: dict[str, StubRepo]
    address: str = ""
    requests: list[str] = field(default_factory=list)
    """Method and path of each request."""

    @property
    def downloads(self) -> list[str]:
        """Names of the files that were sent."""
        return sorted(
            {line.rpartition("/")[2] for line in self.requests if line.startswith("GET") and "/resolve/" in line}
        )

    def environment(self, cache: Path, **variables: str) -> dict[str, str]:
        """Return the environment of a process that uses this hub and a cache."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        return inherited | {"HF_ENDPOINT": self.address, "HF_HOME": str(cache), **variables}


@contextmanager
def serve_hub(**repos: StubRepo) -> Iterator[StubHub]:
    """Serve models under the names org/NAME."""
    hub = StubHub({f"org/{name}": repo for name, repo in repos.items()})

    class Handler(_Handler):
        def __init__(self, *args) -> None:
            self.hub = hub
            super().__init__(*args)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: StubHub

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        match = re.fullmatch(r"/(?:api/models/)?(org/[^/]+)/(revision|tree|resolve)/([^/]+)(?:/(.*))?", path)
        repo = self.hub.repos.get(match[1]) if match else None
        if repo is None or match is None:
            self.fail(401, "RepoNotFound")
        elif repo.gated:
            self.fail(403, "GatedRepo")
        elif repo.token and self.headers.get("Authorization") != f"Bearer {repo.token}":
            self.fail(401, "RepoNotFound")
        elif match[3] not in ("main", repo.commit):
            self.fail(404, "RevisionNotFound")
        elif match[2] == "resolve":
            self.send_file(repo, match[4])
        else:
            files = [file for file in sorted(repo.directory.rglob("*")) if file.is_file()]
            names = {str(file.relative_to(repo.directory)): file for file in files}
            tree = [
                {"type": "file", "path": name, "size": file.stat().st_size, "oid": self.etag(file)}
                for name, file in names.items()
            ]
            info = {
                "id": match[1],
                "modelId": match[1],
                "sha": repo.commit,
                "siblings": [{"rfilename": name} for name in names],
            }
            self.send(
                200, json.dumps(tree if match[2] == "tree" else info).encode(), {"Content-Type": "application/json"}
            )

    def fail(self, status: int, code: str) -> None:
        self.send(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

    def etag(self, file: Path) -> str:
        return hashlib.sha1(file.read_bytes()).hexdigest()

    def send_file(self, repo: StubRepo, name: str) -> None:
        file = repo.directory / name
        headers = {"X-Repo-Commit": repo.commit, "Accept-Ranges": "bytes"}
        if not file.is_file():
            self.send(404, b"", headers | {"X-Error-Code": "EntryNotFound"})
            return
        content = file.read_bytes()
        headers["ETag"] = f'"{self.etag(file)}"'
        start = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if start:
            first = int(start[1])
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
            content = content[first:]
        is_cut = self.command == "GET" and repo.cuts.get(name, 0) > 0
        if is_cut:
            repo.cuts[name] -= 1
        self.send(206 if start else 200, content, headers, len(content) // 2 if is_cut else None)

    def send(self, status: int, content: bytes, headers: dict[str, str], sent_bytes: int | None = None) -> None:
        """Send an answer; with `sent_bytes`, only the start of it before the connection ends."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[:sent_bytes])
        if sent_bytes is not None:
            self.close_connection = True
            self.wfile.flush()
