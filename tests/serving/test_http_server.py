# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Load and abuse: nothing leaks, and other clients are served."""

import asyncio
import contextlib
import gc
import json
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
import pytest
from starlette.applications import Starlette

from experiments.lab.benchmarks.benchmark_serving import ask_all, request_bytes
from marin_rl.sampling.sampler import SampleRequest, WeightPoll
from marin_rl.serving.http_server import HttpServer, listen
from marin_rl.serving.openai import app
from marin_rl.serving.openai.engine import Engine
from marin_rl.types import Generation
from marin_rl.utils.seeds import derive_seed
from tests.scripted_sampler import TokenSampler
from tests.serving.serving_cases import (
    MAX_NEW,
    TIMEOUT,
    TOKENIZER,
    Serving,
    serving,
    tiny_sampler,
    until,
)
from tests.serving.tinker import wire


class Held:
    """A sampler that samples two tokens at a time, and only while the gate is open."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.before: Callable[[], None] = lambda: None
        self.sampler = tiny_sampler(WeightPoll(self._wait, 2))

    def _wait(self) -> None:
        self.before()
        self.open.wait()


@pytest.fixture(scope="module")
def held() -> Held:
    return Held()


@pytest.fixture
def server(held: Held) -> Iterator[Serving]:
    held.open.set()
    held.before = lambda: None
    with serving(held.sampler, max_sequences=1200) as started:
        yield started
        held.open.set()


def body(seed: int = 0, **changes: object) -> dict[str, object]:
    # The end token does not end a reply at this seed and length.
    return {"model": "policy", "prompt": "ab", "seed": seed, "max_tokens": MAX_NEW, **changes}


def open_sockets() -> int:
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum(link.startswith("socket:") for link in links)


def raw_request(
    server: Serving, data: dict[str, object], receive_buffer: int | None = None, missing: int = 0
) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    client = socket.socket()
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.connect((host, int(port)))
    content = json.dumps(data).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += "Connection: close\r\n"
    client.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content[: len(content) - missing])
    return client


def ask_server(server: Serving, count: int, concurrent: int) -> list[float]:
    """Send short requests, every fourth of them streamed; an error fails the test."""
    requests = [SampleRequest(tuple(b"ab"), seed, 2) for seed in range(count)]
    data = [request_bytes(request, stream=request.seed % 4 == 0) for request in requests]
    return asyncio.run(ask_all(int(server.url.rpartition(":")[2]), data, concurrent))


@pytest.mark.medium
@pytest.mark.parametrize("stream", [False, True])
def test_disconnected_clients_free_their_slots(server: Serving, held: Held, stream: bool):
    """More clients than slots disconnect while the first tokens are sampled."""
    assert httpx.get(f"{server.url}/health", timeout=TIMEOUT).status_code == 200
    sockets = open_sockets()
    held.open.clear()
    clients = [raw_request(server, body(seed, stream=stream)) for seed in range(40)]
    until(lambda: server.engine.in_progress == 40)
    for client in clients:
        client.close()
    until(lambda: server.engine.in_progress == 0)
    held.open.set()
    sampled = held.sampler.work.sampled_tokens
    assert httpx.post(f"{server.url}/v1/completions", json=body(), timeout=TIMEOUT).status_code == 200
    # The dropped requests took no part in the decode steps.
    assert held.sampler.work.sampled_tokens - sampled < 2 * MAX_NEW + 40 * 2
    until(lambda: open_sockets() <= sockets)


@pytest.mark.medium
@pytest.mark.parametrize("stream", [False, True])
def test_abandoned_requests_are_counted_as_such(server: Serving, held: Held, stream: bool):
    assert httpx.post(f"{server.url}/v1/completions", json=body(stream=stream), timeout=TIMEOUT).status_code == 200
    held.open.clear()
    with raw_request(server, body(stream=stream)):
        until(lambda: server.engine.in_progress == 1)

    def count(status: int) -> bool:
        line = f'marin_rl_requests_total{{path="/v1/completions",status="{status}"}} 1.0'
        return line in httpx.get(f"{server.url}/metrics", timeout=TIMEOUT).text

    until(lambda: server.engine.in_progress == 0)
    until(lambda: count(200) and count(499))
    held.open.set()


@pytest.mark.medium
def test_two_thousand_requests_leave_nothing_behind(server: Serving, held: Held):
    """No slot, socket, task or other object remains."""

    def objects() -> int:
        until(lambda: server.engine.in_progress == 0 and open_sockets() <= sockets)
        gc.collect()
        return len(gc.get_objects())

    assert httpx.get(f"{server.url}/health", timeout=TIMEOUT).status_code == 200
    sockets = open_sockets()
    ask_server(server, 200, concurrent=32)
    before = objects()
    # With 16 slots, slots that are not freed would block later requests.
    ask_server(server, 2000, concurrent=32)
    assert objects() - before < 500


@pytest.mark.medium
def test_a_client_that_does_not_read_delays_nobody(held: Held):
    """Its response is complete later, and the server holds little of it meanwhile."""
    data = body(stream=True, n=16, logprobs=0, return_token_ids=True)
    with serving(held.sampler, send_buffer=4096) as server:
        held.open.set()
        with raw_request(server, data, receive_buffer=4096) as slow:
            until(lambda: server.engine.in_progress == 16)
            for stream in (False, True):
                response = httpx.post(f"{server.url}/v1/completions", json=body(stream=stream), timeout=TIMEOUT)
                assert response.status_code == 200
            # Its slots are free, although its response is not sent.
            assert server.engine.in_progress > 0
            received = b"".join(iter(lambda: slow.recv(2**16), b""))
    tokens: list[list[int]] = [[] for _ in range(16)]
    for line in received.decode().splitlines():
        if line.startswith("data: {"):
            [choice] = json.loads(line.removeprefix("data: "))["choices"]
            tokens[choice["index"]] += choice["token_ids"]
    seeds = [derive_seed(0, index) if index else 0 for index in range(16)]
    wanted = tiny_sampler().sample([SampleRequest(tuple(b"ab"), seed, MAX_NEW) for seed in seeds])
    assert [tuple(ids) for ids in tokens] == [generation.token_ids for generation in wanted]
    assert received.endswith(b"0\r\n\r\n")


@pytest.mark.medium
@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux can end such a connection")
def test_a_client_that_never_reads_is_disconnected(held: Held):
    data = body(stream=True, n=16, logprobs=0, return_token_ids=True)
    with serving(held.sampler, send_buffer=4096, client_seconds=0.5) as server:
        # The gate is open only after the requests were counted, because they may end at once.
        held.open.clear()
        with raw_request(server, data, receive_buffer=4096):
            until(lambda: server.engine.in_progress == 16)
            held.open.set()
            until(lambda: server.engine.in_progress == 0)


def test_requests_above_the_limit_are_refused(held: Held):
    held.open.clear()
    with serving(held.sampler, max_sequences=3) as server:
        client = raw_request(server, body(n=2))
        until(lambda: server.engine.in_progress == 2)
        response = httpx.post(f"{server.url}/v1/completions", json=body(n=2), timeout=TIMEOUT)
        assert (response.status_code, response.headers["Retry-After"]) == (429, "1")
        assert response.json()["error"]["code"] == "rate_limit_exceeded"
        client.close()
        held.open.set()


def test_bodies_above_the_limit_of_all_are_refused(held: Held, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(app, "MAX_BODIES", 2)
    held.open.clear()
    large = body(metadata={"text": "a" * 1800})
    with serving(held.sampler, max_body_bytes=2000) as server:
        # A part of a body counts, and a body whose reply is sampled.
        parts = raw_request(server, large, missing=10)
        sampled = raw_request(server, large)
        until(lambda: server.engine.in_progress == 1)

        def ask() -> httpx.Response:
            return httpx.post(f"{server.url}/v1/completions", json=large, timeout=TIMEOUT)

        refused = ask()
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        parts.close()
        held.open.set()
        until(lambda: ask().status_code == 200)
        sampled.close()


@pytest.mark.medium
@pytest.mark.parametrize("stream", [False, True])
def test_simultaneous_requests_do_not_exceed_the_limit(held: Held, stream: bool):
    """The limit counts sequences that have not started; all of them are released at the end of the responses."""
    counts: list[int] = []

    async def ask_all(url: str) -> list[int]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT, limits=limits) as client:

            async def ask(**changes: object) -> int:
                return (await client.post("/v1/completions", json=body(stream=stream, **changes))).status_code

            statuses = await asyncio.gather(*(ask(n=16, max_tokens=64) for _ in range(40)))
            return [*statuses, await ask(n=32, max_tokens=1)]

    held.open.set()
    with serving(held.sampler, max_sequences=32) as server:
        held.before = lambda: counts.append(server.engine.in_progress)
        statuses = asyncio.run(ask_all(server.url))
        held.before = lambda: None
    assert max(counts) <= 32
    assert set(statuses) <= {200, 429}
    assert statuses[-1] == 200


def test_an_incomplete_body_times_out(held: Held):
    with serving(held.sampler, client_seconds=0.5) as server, raw_request(server, body(), missing=1) as client:
        assert client.recv(100).startswith(b"HTTP/1.1 408")


def trickles_in_vain(client: socket.socket) -> bool:
    """Send one byte; return whether the server has closed the connection."""
    try:
        client.sendall(b"x")
        return client.recv(1000) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


@pytest.mark.medium
def test_a_client_without_a_whole_request_head_is_disconnected(held: Held):
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    with serving(held.sampler, client_seconds=0.5) as server:
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        for sent in (b"", head):
            with socket.create_connection(address, timeout=60.0) as client:
                client.sendall(sent)
                assert client.recv(100) == b""
        # The next request of a connection has the same limit.
        with socket.create_connection(address, timeout=60.0) as client:
            client.sendall(head + b"\r\n")
            assert client.recv(1000).startswith(b"HTTP/1.1 200")
            client.sendall(head)
            assert b"".join(iter(lambda: client.recv(1000), b"")).count(b"HTTP/1.1") == 0
        # A body that nobody reads may not keep the connection open either.
        with socket.create_connection(address, timeout=60.0) as client:
            client.sendall(head + b"Content-Length: 1000000\r\n\r\n")
            assert client.recv(1000).startswith(b"HTTP/1.1 200")
            client.settimeout(0.05)
            until(lambda: trickles_in_vain(client))
        # A request whose reply takes longer than the limit is answered.
        held.open.clear()
        threading.Timer(1.0, held.open.set).start()
        response = httpx.post(f"{server.url}/v1/completions", json=body(max_tokens=4), timeout=TIMEOUT)
        assert response.status_code == 200


def test_requests_in_progress_complete_before_the_end(held: Held):
    held.open.clear()
    responses: list[httpx.Response] = []

    def ask(url: str) -> None:
        responses.append(httpx.post(f"{url}/v1/completions", json=body(max_tokens=8), timeout=TIMEOUT))

    with serving(held.sampler) as server:
        client = threading.Thread(target=ask, args=[server.url])
        client.start()
        until(lambda: server.engine.in_progress == 1)
        threading.Timer(0.1, held.open.set).start()
    client.join()
    assert [response.status_code for response in responses] == [200]


class Endless(TokenSampler):
    """A sampler that never completes a request."""

    def advance(self) -> list[tuple[int, Generation]]:
        return []


@pytest.mark.parametrize("stream", [False, True])
def test_requests_that_do_not_end_in_time_get_an_error(stream: bool, caplog: pytest.LogCaptureFixture):
    with serving(Endless(length=1), drain_seconds=0.05) as server:
        client = raw_request(server, body(stream=stream))
        until(lambda: server.engine.in_progress == 1)
    with client:
        response = b"".join(iter(lambda: client.recv(2**16), b"")).decode()
    assert response.startswith("HTTP/1.1 200" if stream else "HTTP/1.1 503")
    assert "the sampler has stopped: the server shuts down" in response
    assert caplog.records == []


def test_a_server_may_have_more_connections_than_the_usual_soft_limit():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        listen("127.0.0.1", 0, TIMEOUT).close()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard if 0 < hard < 2**16 else 2**16, hard)
        # A higher limit stays.
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        listen("127.0.0.1", 0, TIMEOUT).close()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def accepted_options(port: int, option: int) -> list[int]:
    """Return a TCP option of the connections that this process has accepted at a port."""
    found = []
    for file in Path("/proc/self/fd").iterdir():
        # A duplicate of another file would stay open, and a program that reads from it would not end.
        if not os.path.realpath(file).rpartition("/")[2].startswith("socket:"):
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(file.name))) as one:
            if one.getpeername() and one.family == socket.AF_INET and one.getsockname()[1] == port:
                found.append(one.getsockopt(socket.IPPROTO_TCP, option))
    return found


@pytest.mark.parametrize("kind", ["openai", "tinker"])
def test_small_responses_are_sent_at_once(kind: str, tmp_path: Path):
    """With Nagle's algorithm, a response in two parts waits for the client's delayed acknowledgement."""
    with contextlib.ExitStack() as stack:
        if kind == "openai":
            url, path = stack.enter_context(serving(TokenSampler(length=1))).url, "/health"
        else:
            url, path = stack.enter_context(wire.serving(tmp_path))[0], "/api/v1/healthz"
        client = stack.enter_context(httpx.Client())
        assert client.get(url + path, timeout=TIMEOUT).status_code == 200
        assert accepted_options(int(url.rpartition(":")[2]), socket.TCP_NODELAY) == [1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_first_request_can_be_accepted_ends_the_server(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
):
    engine = Engine(TokenSampler(length=1), TOKENIZER.decode_reply)
    start = engine.start

    def start_with_signal() -> None:
        start()
        signal.raise_signal(number)

    monkeypatch.setattr(engine, "start", start_with_signal)
    server = HttpServer(Starlette(), TIMEOUT, drain_seconds=1.0)
    handlers = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    late = threading.Timer(60.0, server.stop)
    late.start()
    try:
        server.run(engine, listen("127.0.0.1", 0, TIMEOUT))
        assert late.is_alive()
    finally:
        late.cancel()
        for each, handler in handlers.items():
            signal.signal(each, handler)
