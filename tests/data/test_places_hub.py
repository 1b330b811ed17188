"""Files of the Hugging Face hub are read by hf:// URLs, from a stub of the hub's API."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("huggingface_hub")
CONTENT = b'{"text": "one"}\n{"text": "two"}\n'
COMMIT = "1" * 40
FILE = {"type": "file", "path": "text/a.jsonl", "size": len(CONTENT), "oid": "0" * 40}
FOLDER = {"type": "directory", "path": "text", "size": 0, "oid": COMMIT}
DATASET = {"id": "org/name", "_id": "1", "sha": COMMIT, "siblings": [], "private": False, "tags": [], "downloads": 0}


class Hub(BaseHTTPRequestHandler):
    """Answers about the dataset org/name with one file."""

    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        headers = {"Content-Type": "application/json"}
        status = 200
        if self.path.startswith("/datasets/org/name/resolve/"):
            first, last = self.headers.get("Range", "bytes=0-99").removeprefix("bytes=").split("-")
            status, body = 206, CONTENT[int(first) : int(last) + 1]
        elif self.path.startswith("/api/datasets/org/name"):
            tree = [FILE] if "/main/text" in self.path else [FOLDER]
            body = json.dumps(tree if "/tree/" in self.path else DATASET).encode()
        else:
            status, body = 404, b"{}"
            headers["X-Error-Code"] = "RepoNotFound"
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def __getattr__(self, name: str) -> object:
        if name in ("do_GET", "do_POST"):
            return self.answer
        raise AttributeError(name)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("repository", ["name", "none"])
def test_text_of_hub_is_prepared(hub: str, repository: str, tmp_path: Path) -> None:
    url = f"hf://datasets/org/{repository}/text"
    command = [
        sys.executable,
        "-m",
        "phalanx",
        "data",
        "prepare",
        url,
        "--tokenizer",
        "bytes",
        "--json",
        "--out",
        "pair",
    ]
    places = {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "hf"), "HOME": str(tmp_path)}
    environment = {**os.environ, "HF_HUB_OFFLINE": "0", **places}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    if repository == "none":
        assert result.returncode == 2
        assert f"SOURCE = '{url}' does not exist" in result.stderr
    else:
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout)["documents"] == 2
