# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The client against servers that send a script, byte for byte, and read nothing but the first part of a request."""

import asyncio
import contextlib
import gc
import gzip
import itertools
import socket
import threading
import time
from collections.abc import Iterable, Iterator

import pytest

from marin_rl.utils.http_client import (
    JsonResponse,
    NoResponseError,
    open_client,
    post_json,
    response_limit,
    without_key,
)

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
MIB = b" " * 2**20
PATIENCE = 300.0
"""Seconds until a test fails whose client does not end."""


class Script:
    """A server that sends the same bytes to every client until it leaves."""

    def __init__(self, parts: Iterable[bytes], *, pause: float = 0.0) -> None:
        self._parts, self._pause = parts, pause
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.sent = 0

    def serve(self) -> None:
        client, _ = self._listener.accept()
        with client, contextlib.suppress(OSError):
            client.recv(65536)
            for part in self._parts:
                client.sendall(part)
                self.sent += len(part)
                time.sleep(self._pause)
            # A close before the whole request is read would reset the connection.
            client.shutdown(socket.SHUT_WR)
            while client.recv(65536):
                pass

    def close(self) -> None:
        self._listener.close()


@contextlib.contextmanager
def running(script: Script) -> Iterator[Script]:
    thread = threading.Thread(target=script.serve, daemon=True)
    thread.start()
    try:
        yield script
    finally:
        thread.join(PATIENCE)
        script.close()
    assert not thread.is_alive()


def ask(port: int, *, seconds: float = PATIENCE, scheme: str = "http") -> JsonResponse:
    async def post() -> JsonResponse:
        async with open_client(None) as client:
            return await post_json(client, f"{scheme}://127.0.0.1:{port}/v1", {}, seconds=seconds, tokens=4)

    return asyncio.run(asyncio.wait_for(post(), 2 * PATIENCE))


def endless(first: bytes, part: bytes) -> Iterable[bytes]:
    return itertools.chain([first], itertools.repeat(part))


TOO_SLOW = {
    "a byte at a time": endless(OK + b"Content-Length: 100000\r\n\r\n", b" "),
    "a head, a byte at a time": endless(OK + b"X: ", b"a"),
    "interim responses": endless(b"", b"HTTP/1.1 102 Processing\r\n\r\n"),
    "chunks of one byte": endless(CHUNKED, b"1\r\n \r\n"),
}


@pytest.mark.parametrize("name", TOO_SLOW)
def test_the_time_limit_is_that_of_the_whole_response(name: str):
    problem = r"no complete response within 0\.3 s"
    with running(Script(TOO_SLOW[name], pause=0.01)) as script, pytest.raises(NoResponseError, match=problem):
        ask(script.port, seconds=0.3)


@pytest.mark.filterwarnings("ignore:.*unclosed:pytest.PytestUnraisableExceptionWarning", "ignore:.*unclosed")
def test_the_time_limit_includes_the_tls_handshake():
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(NoResponseError, match=r"within 0\.3 s"):
        ask(silent.getsockname()[1], seconds=0.3, scheme="https")
    # anyio leaves the socket of a cancelled handshake to the garbage collector.
    gc.collect()


TOO_LONG = {
    "a gigabyte": (endless(OK + b"Content-Length: 1073741824\r\n\r\n", MIB), f"more than {2**20 + 4 * 2**10} bytes"),
    "chunks": (endless(CHUNKED, b"100000\r\n" + MIB + b"\r\n"), "more than 1052672 bytes"),
    "until the connection closes": (endless(OK + b"\r\n", MIB), "more than 1052672 bytes"),
    "a compressed body": (
        [OK + b"Content-Encoding: gzip\r\n\r\n" + gzip.compress(b" " * 2**26)],
        "the content encoding 'gzip', which was not accepted",
    ),
    "headers": (endless(OK, b"X-A: b\r\n" * 1000), "RemoteProtocolError"),
    "one header": (endless(OK + b"X-A: ", b"b" * 65536), "RemoteProtocolError"),
    "an extension of a chunk": (endless(CHUNKED + b"1;", b"x" * 65536), "RemoteProtocolError"),
    "trailers": (endless(CHUNKED + b"0\r\n", b"X-A: b\r\n" * 1000), "RemoteProtocolError"),
}


@pytest.mark.parametrize("name", TOO_LONG)
def test_a_long_response_is_not_read_to_its_end(name: str):
    parts, problem = TOO_LONG[name]
    with running(Script(parts)) as script, pytest.raises(NoResponseError, match=problem):
        ask(script.port)
    # The rest fits the buffers of the sockets.
    assert script.sent < 2**26


@pytest.mark.parametrize(
    "data",
    [
        OK + b"Content-Length: 400\r\n\r\n{}",
        OK + b"Content-Length: -1\r\n\r\n{}",
        OK + b"Content-Length: 2\r\nContent-Length: 5\r\n\r\n{}",
        b"HTTP/1.1 307 Temporary Redirect\r\nLocation: http://[::1\r\n\r\n",
        CHUNKED + b"zz\r\n",
        b"HTTP/1.1 99 X\r\n\r\n",
        b"HTTP/1.1 200",
        b"SSH-2.0-OpenSSH\r\n",
        b"",
    ],
)
def test_a_broken_response_is_one_error(data: bytes):
    with running(Script([data])) as script, pytest.raises(NoResponseError, match="Error: "):
        ask(script.port)


def test_a_name_that_is_no_host_is_one_error():
    async def post() -> None:
        async with open_client(None) as client:
            await post_json(client, "http://a..b/v1", {}, seconds=PATIENCE, tokens=0)

    with pytest.raises(NoResponseError, match="Error: "):
        asyncio.run(post())


def test_a_response_is_complete_and_redirects_are_not_followed():
    body = b" " * (response_limit(4) - 2) + b"{}"
    with running(Script([OK + b"Content-Length: %d\r\n\r\n" % len(body) + body])) as script:
        assert ask(script.port).parse() == {}
    moved = b"HTTP/1.1 307 Temporary Redirect\r\nLocation: /v1\r\nContent-Length: 0\r\n\r\n"
    with running(Script([moved])) as script:
        assert ask(script.port) == (307, b"")


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"a":' * 100_000, b'"\xff"', b"1" * 10_000, b"", b"<html>"])
def test_what_is_not_json_is_one_error(content: bytes):
    with pytest.raises(ValueError, match=r"JSON|char|codec|digits"):
        JsonResponse(200, content).parse()


def test_a_key_is_replaced_in_every_form():
    assert without_key(r'a"/b a\"/b a\"\/b', 'a"/b') == "*** *** ***"
