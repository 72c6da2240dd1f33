"""A small server on 127.0.0.1 that speaks as much of the Hub's API as a download needs.

Model info with file sizes and sha256 sums, and files at ``resolve`` with HEAD, GET
and Range. It can be told to break off transfers, to ask for consent, or to send
other bytes than it promised; it records what it was asked.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "c0ffee" + "0" * 34


@dataclass
class Hub:
    """The repositories of a test and how the server behaves."""

    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    forbidden: set[str] = field(default_factory=set)
    failing: set[str] = field(default_factory=set)  # answers 500
    large_from: int = 1000  # files from this size on have a sha256, as Git LFS has it
    break_after: int | None = None  # bytes of a GET body after which the connection drops
    breaks_left: int = 0
    stalled: threading.Event | None = None  # set once a large file stops half-way, for good
    damaged: bool = False  # sends zeros instead of the file
    requests: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, Range
    commit: str = COMMIT
    url: str = ""

    def got(self, name: str) -> list[str]:
        """The Range headers of the GETs of a file; empty strings where there was none."""
        return [r for m, path, r in self.requests if m == "GET" and path.endswith(f"/{name}")]


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    state: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        hub = self.state
        path = self.path.partition("?")[0]
        hub.requests.append((self.command, path, self.headers.get("Range", "")))
        parts = path.strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        repo = "/".join(parts[2:4] if api else parts[:2])
        if repo in hub.failing:
            return self.error(500, "", "out of order")
        if repo in hub.gated:
            return self.error(403, "GatedRepo", "Access to this model is restricted")
        if repo in hub.forbidden:
            return self.error(403, "", "Forbidden")
        if repo not in hub.files:
            return self.error(401, "RepoNotFound", "Repository not found")
        files = hub.files[repo]
        revision = parts[5] if api and len(parts) > 5 else parts[3] if not api else "main"
        if revision not in ("main", hub.commit):
            return self.error(404, "RevisionNotFound", "Revision not found")
        if api:
            return self.send_json(self.model_info(repo, files))
        name = "/".join(parts[4:])
        if name not in files:
            return self.error(404, "EntryNotFound", "Entry not found")
        return self.send_file(files[name])

    def model_info(self, repo: str, files: dict[str, bytes]) -> dict[str, Any]:
        siblings = []
        for name, data in files.items():
            entry: dict[str, Any] = {
                "rfilename": name,
                "size": len(data),
                "blobId": hashlib.sha1(data).hexdigest(),
            }
            if len(data) >= self.state.large_from:
                digest = hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"size": len(data), "sha256": digest, "pointerSize": 130}
            siblings.append(entry)
        return {
            "_id": "0", "id": repo, "modelId": repo, "sha": self.state.commit, "private": False,
            "gated": False, "disabled": False, "downloads": 0, "likes": 0, "tags": [],
            "siblings": siblings,
        }  # fmt: skip

    def send_file(self, data: bytes) -> None:
        hub = self.state
        large = len(data) >= hub.large_from
        etag = (hashlib.sha256 if large else hashlib.sha1)(data).hexdigest()
        start = 0
        if (range_ := self.headers.get("Range", "")).startswith("bytes="):
            start = int(range_.removeprefix("bytes=").partition("-")[0])
        body = data[start:]
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", hub.commit)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(body)))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        if large and hub.damaged:
            body = bytes(len(body))
        if large and hub.break_after is not None and hub.breaks_left > 0:
            hub.breaks_left -= 1
            self.wfile.write(body[: hub.break_after])
            self.wfile.flush()
            self.close_connection = True
            return
        if large and hub.stalled is not None:
            self.wfile.write(body[: hub.break_after])
            self.wfile.flush()
            hub.stalled.set()
            self.rfile.read(1)  # until the client goes away
            self.close_connection = True
            return
        self.wfile.write(body)

    def send_json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def error(self, status: int, code: str, message: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()
