# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Emulator of the JSON API of Google Cloud Storage on the loopback interface, with faults on demand.

It implements the calls that gcsfs makes for objects: get, list with prefix and delimiter, download with ranges, delete,
multipart and resumable uploads, and the precondition `ifGenerationMatch`. Writes are atomic and listings consistent, as
in the real service.
"""

import contextlib
import dataclasses
import itertools
import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import fsspec
import pytest

BUCKET = "bucket"
"""The only bucket."""


@dataclasses.dataclass
class Fault:
    """Requests to fail."""

    pattern: str
    """Searched in `<method> <object or path>`."""
    status: int
    """HTTP status of the answer."""
    times: float = float("inf")
    """Number of requests to fail."""


@dataclasses.dataclass
class Gcs:
    """Content and behaviour of the emulator."""

    objects: dict[str, tuple[bytes, int]] = dataclasses.field(default_factory=dict)
    """Content and generation by name."""
    faults: list[Fault] = dataclasses.field(default_factory=list)
    """Faults, in order."""
    watched: list[tuple[str, Callable[[], object]]] = dataclasses.field(default_factory=list)
    """Functions to call before a request that matches a pattern is served, once; if true, it is not served."""
    requests: list[str] = dataclasses.field(default_factory=list)
    """`<method> <object or path>` of all requests."""
    downloads: dict[str, list[tuple[int, int]]] = dataclasses.field(default_factory=dict)
    """Byte ranges of the successful downloads by name."""
    host: str = ""
    """Host and port."""
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    uploads: dict[str, tuple[str, str | None, bytearray]] = dataclasses.field(default_factory=dict)
    numbers: Iterator[int] = dataclasses.field(default_factory=lambda: itertools.count(1))

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that make gcsfs use the emulator."""
        return {
            "STORAGE_EMULATOR_HOST": self.host,
            "FSSPEC_GS_TOKEN": "anon",
            "FSSPEC_GCS_TOKEN": "anon",
        }

    def download(self, prefix: str, folder: Path) -> None:
        """Write the objects with a prefix to a local folder."""
        for name in self.names(prefix):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(self.read(prefix + name))

    def names(self, prefix: str) -> list[str]:
        """Names of the objects with a prefix, without it."""
        return sorted(name.removeprefix(prefix) for name in self.objects if name.startswith(prefix))

    def read(self, name: str) -> bytes:
        return self.objects[name][0]

    def put(self, name: str, data: bytes, generation: str | None = None) -> bool:
        """Write an object; return whether the precondition holds."""
        with self.lock:
            _, current = self.objects.get(name, (b"", 0))
            if generation is not None and int(generation) != current:
                return False
            self.objects[name] = (data, next(self.numbers))
            return True

    def fault(self, request: str) -> int | None:
        """Status of a fault for this request, if any; -1 if it is not answered."""
        with self.lock:
            self.requests.append(request)
            due = [item for item in self.watched if re.search(item[0], request)]
            self.watched = [item for item in self.watched if item not in due]
        if any(call() for _, call in due):
            return -1
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.pattern, request):
                    fault.times -= 1
                    return fault.status
        return None


def _handler(gcs: Gcs) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1

        def log_message(self, *arguments: object) -> None:
            pass

        def answer(self, status: int, body: bytes | dict[str, Any] = b"", **headers: str) -> None:
            data = json.dumps(body).encode() if isinstance(body, dict) else body
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def fail(self, status: int) -> None:
            self.answer(status, {"error": {"code": status, "message": f"emulated {status}"}})

        def serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            url = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(url.query).items()}
            bucket, _, name = url.path.partition("/b/")[2].partition("/o")
            name = unquote(name.removeprefix("/")) or query.get("name", "")
            upload = {}
            if "/upload/" in url.path and query.get("uploadType") == "multipart":
                head, _, rest = body.partition(b"\n\n")[2].partition(b"\n--==0==\n")
                upload["name"] = name = json.loads(head)["name"]
                upload["data"] = rest.partition(b"\n\n")[2].removesuffix(b"\n--==0==--")
            if url.path.startswith("/resumable/"):
                name = gcs.uploads[url.path][0]
            if (status := gcs.fault(f"{self.command} {name or url.path}")) is not None:
                self.close_connection = status < 0
                return None if status < 0 else self.fail(status)
            if url.path.startswith("/resumable/"):
                return self.resume(url.path, body)
            if bucket != BUCKET:
                return self.fail(404)
            if upload:
                done = gcs.put(name, upload["data"], query.get("ifGenerationMatch"))
                return self.answer(200, self.describe(name)) if done else self.fail(412)
            if query.get("uploadType") == "resumable":
                location = f"/resumable/{next(gcs.numbers):020d}"
                gcs.uploads[location] = (name, query.get("ifGenerationMatch"), bytearray())
                return self.answer(200, Location=f"http://{gcs.host}{location}")
            if not name:
                return self.answer(200, self.list(query) if url.path.endswith("/o") else {"name": bucket})
            if name not in gcs.objects:
                return self.fail(404)
            if self.command == "DELETE":
                gcs.objects.pop(name, None)
                return self.answer(204)
            return self.download(name) if query.get("alt") == "media" else self.answer(200, self.describe(name))

        do_GET = do_POST = do_DELETE = do_PUT = serve

        def describe(self, name: str) -> dict[str, Any]:
            data, generation = gcs.objects[name]
            return {"name": name, "size": str(len(data)), "generation": str(generation), "etag": f"e{generation}"}

        def list(self, query: dict[str, str]) -> dict[str, Any]:
            prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
            items, prefixes = [], set()
            for name in sorted(gcs.objects):
                if not name.startswith(prefix):
                    continue
                head, found, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
                if found:
                    prefixes.add(f"{prefix}{head}{delimiter}")
                else:
                    items.append(self.describe(name))
            return {"items": items, "prefixes": sorted(prefixes)}

        def download(self, name: str) -> None:
            data = gcs.read(name)
            first, last = 0, len(data) - 1
            if wanted := self.headers.get("Range"):
                low, _, high = wanted.removeprefix("bytes=").partition("-")
                first, last = int(low), min(int(high or last), last)
            with gcs.lock:
                gcs.downloads.setdefault(name, []).append((first, last + 1))
            self.answer(206 if wanted else 200, data[first : last + 1])

        def resume(self, location: str, body: bytes) -> None:
            name, generation, content = gcs.uploads[location]
            content += body
            span, _, total = self.headers["Content-Range"].removeprefix("bytes ").partition("/")
            if len(content) < int(total):
                return self.answer(308, Range=f"bytes=0-{len(content) - 1}")
            assert span.endswith(f"-{int(total) - 1}")
            done = gcs.put(name, bytes(content), generation)
            return self.answer(200, self.describe(name)) if done else self.fail(412)

    return Handler


@contextlib.contextmanager
def gcs_emulator() -> Iterator[Gcs]:
    """Serve an empty bucket until the end of the block."""
    gcs = Gcs()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(gcs))
    server.daemon_threads = True
    gcs.host = f"http://127.0.0.1:{server.server_port}".removeprefix("http://")
    thread = threading.Thread(target=server.serve_forever, name="gcs", daemon=True)
    thread.start()
    try:
        yield gcs
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def gcs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gcs]:
    """An empty bucket, to which `gs://bucket` refers in this process and its children."""
    # Imported late, because pytest imports this file before it installs jaxtyping's import hook.
    from marin_rl.utils import remote_path

    with gcs_emulator() as emulator:
        for name, value in emulator.environment.items():
            monkeypatch.setenv(name, value)
        # The configuration of fsspec was read when it was imported.
        monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon"})
        remote_path._filesystem.cache_clear()
        yield emulator
    remote_path._filesystem.cache_clear()
    fsspec.get_filesystem_class("gs").clear_instance_cache()
