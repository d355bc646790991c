# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Runs the HTTP application until a signal arrives."""

import asyncio
import logging
import math
import signal
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    from marin_rl.serving.engine import Engine

_ERROR_SECONDS = 5
"""Seconds in which clients read the errors of requests that did not complete in time."""


def listen(host: str, port: int, client_seconds: float) -> socket.socket:
    """Open the server's socket.

    Args:
        host: name or address of the interface.
        port: port; 0 for any free one.
        client_seconds: seconds after which a client that does not read its response is disconnected (Linux only).

    Raises:
        ValueError: if the address is not available; the message names it.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ValueError(f"cannot listen on {host}:{port}: {error}; choose another host or port") from error
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # Accepted connections inherit it. It also counts while the client's receive window is full.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * client_seconds))
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the base URL of the server."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _protocol_with_limit(seconds: float) -> type[H11Protocol]:
    """Return uvicorn's protocol, which closes connections that do not complete the head of a request in time."""

    class _Protocol(H11Protocol):
        _late: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            H11Protocol.connection_made(self, transport)
            self._limit_time()

        def data_received(self, data: bytes) -> None:
            # A part of a head cancels uvicorn's time limit for idle connections.
            H11Protocol.data_received(self, data)
            self._limit_time()

        def connection_lost(self, exc: Exception | None) -> None:
            H11Protocol.connection_lost(self, exc)
            self._cancel()

        def _limit_time(self) -> None:
            if self.conn.their_state is not h11.IDLE:
                self._cancel()
            elif self._late is None:
                self._late = self.loop.call_later(seconds, self.transport.close)

        def _cancel(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

    return _Protocol


class _Server(uvicorn.Server):
    """Uvicorn's server, which calls a function when the requests in progress have not ended in time."""

    def __init__(self, config: uvicorn.Config, drain_seconds: float, on_late: Callable[[], None]) -> None:
        uvicorn.Server.__init__(self, config)
        self._drain_seconds = drain_seconds
        self._on_late = on_late

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        late = asyncio.get_running_loop().call_later(self._drain_seconds, self._on_late)
        try:
            await uvicorn.Server.shutdown(self, sockets)
        finally:
            late.cancel()


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    return record.exc_info is None or not isinstance(record.exc_info[1], asyncio.CancelledError)


class HttpServer:
    """An HTTP server with an engine.

    On SIGTERM or SIGINT it accepts no further connections, completes the requests in progress, and returns. Requests
    that do not end in time get an error.
    """

    def __init__(self, app: ASGIApp, engine: "Engine", drain_seconds: float, client_seconds: float = 60.0) -> None:
        """Configure the server.

        Args:
            app: application.
            engine: started and closed by `run`. Its failure ends the server.
            drain_seconds: seconds after which requests in progress fail at the end.
            client_seconds: seconds after which a connection without a complete request head is closed.
        """
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http=_protocol_with_limit(client_seconds),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=math.ceil(drain_seconds) + _ERROR_SECONDS,
        )
        self._server = _Server(config, drain_seconds, engine.stop)
        self._engine = engine
        engine.on_failure = self.stop
        # Malformed requests are logged as warnings there.
        logger = logging.getLogger("uvicorn.error")
        logger.setLevel(logging.ERROR)
        # Requests that are cancelled at the end, each of which has a traceback.
        logger.addFilter(_is_no_cancellation)

    def stop(self) -> None:
        """Make `run` complete the requests in progress and return. Thread-safe."""
        self._server.should_exit = True

    def run(self, listener: socket.socket) -> None:
        """Serve until a signal or `stop`.

        Args:
            listener: the socket; closed at the end.

        Raises:
            Exception: the error of the sampler, if it failed.
        """
        if threading.current_thread() is threading.main_thread():
            # Uvicorn handles these signals while it serves, and raises them again at its end.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: self.stop())
        self._engine.start()
        try:
            self._server.run(sockets=[listener])
        finally:
            self._engine.close()
            listener.close()
        if self._engine.failure is not None:
            raise self._engine.failure
