# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Runs an HTTP application until a signal arrives."""

import asyncio
import logging
import math
import resource
import signal
import socket
import threading
from collections.abc import Callable
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

_ERROR_SECONDS = 5
"""Seconds in which clients read the errors of requests that did not complete in time."""
_OPEN_FILES = 2**16
"""Number of files and connections that the process may have open, if its hard limit allows it."""
_POLL_SECONDS = 0.1
"""Seconds after which the end of the server is noticed, as in uvicorn."""


class Worker(Protocol):
    """Works for an application in its own thread."""

    failure: Exception | None
    """Error that ended the thread."""
    on_failure: Callable[[], None]
    """Called in the thread when it fails."""

    def start(self) -> None:
        """Start the thread."""
        ...

    def stop(self) -> None:
        """Answer requests in progress with an error."""
        ...

    def close(self) -> None:
        """End the thread."""
        ...


def listen(host: str, port: int, client_seconds: float) -> socket.socket:
    """Open the server's socket, and allow the process many connections.

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
    # The usual soft limit of 1,024 is less than the requests of one client that samples, each with its connection.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    # Accepted connections inherit these. asyncio sets this one only if the socket's protocol is known, not for 0.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # It also counts while the client's receive window is full.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * client_seconds))
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the base URL of the server."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class HttpServer:
    """An HTTP server, which closes the connections of clients that do not complete a request."""

    def __init__(self, app: ASGIApp, client_seconds: float, drain_seconds: float = 0.0) -> None:
        """Configure the server.

        Args:
            app: application.
            client_seconds: seconds after which a connection without a complete request head is closed, at most twice
                as many.
            drain_seconds: seconds that requests in progress have at the end.
        """
        self._client_seconds, self._drain_seconds = client_seconds, drain_seconds
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=math.ceil(client_seconds),
            timeout_graceful_shutdown=math.ceil(drain_seconds) + _ERROR_SECONDS,
        )
        self._server = uvicorn.Server(config)
        # Malformed requests are logged as warnings there.
        logger = logging.getLogger("uvicorn.error")
        logger.setLevel(logging.ERROR)
        # Requests that are cancelled at the end, each of which has a traceback.
        logger.addFilter(_is_no_cancellation)

    def stop(self) -> None:
        """Make the server accept no further connections, complete the requests in progress, and end. Thread-safe."""
        self._server.should_exit = True

    async def serve(self, listener: socket.socket, on_late: Callable[[], None] = lambda: None) -> None:
        """Serve until SIGTERM, SIGINT or `stop`, or until the task is cancelled.

        Args:
            listener: the socket; closed at the end.
            on_late: makes requests fail that are in progress after `drain_seconds`.
        """
        tasks = [asyncio.create_task(self._close_waiting()), asyncio.create_task(self._drain(on_late))]
        with listener:
            try:
                await self._server.serve(sockets=[listener])
            except asyncio.CancelledError:
                # Uvicorn leaves its sockets open.
                for accepting in self._server.servers if self._server.started else ():
                    accepting.close()
                for connection in list(self._server.server_state.connections):
                    connection.shutdown()
                raise
            finally:
                for task in tasks:
                    task.cancel()

    def run(self, worker: Worker, listener: socket.socket) -> None:
        """Serve until a signal, `stop`, or a failure of the worker. Late requests get an error.

        Args:
            worker: works for the application, such as a sampling engine; started and closed here.
            listener: the socket; closed at the end.

        Raises:
            Exception: the error of the worker, if it failed.
        """
        if threading.current_thread() is threading.main_thread():
            # Uvicorn handles these signals while it serves, and raises them again at its end.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: self.stop())
        worker.on_failure = self.stop
        worker.start()
        try:
            asyncio.run(self.serve(listener, worker.stop))
        finally:
            worker.close()
        if worker.failure is not None:
            raise worker.failure

    async def _close_waiting(self) -> None:
        """Close connections that have had no request since the last round.

        Uvicorn's timeout for idle connections ends with any byte: a part of a head, or the rest of a body that no
        response depends on.
        """
        waiting: dict[H11Protocol, object] = {}
        while True:
            await asyncio.sleep(self._client_seconds)
            connections = [one for one in self._server.server_state.connections if isinstance(one, H11Protocol)]
            now: dict[H11Protocol, object] = {
                one: one.cycle for one in connections if one.cycle is None or one.cycle.response_complete
            }
            for connection, last_request in now.items():
                if connection in waiting and waiting[connection] is last_request:
                    connection.transport.close()
            waiting = now

    async def _drain(self, on_late: Callable[[], None]) -> None:
        while not self._server.should_exit:
            await asyncio.sleep(_POLL_SECONDS)
        await asyncio.sleep(self._drain_seconds)
        on_late()


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    return record.exc_info is None or not isinstance(record.exc_info[1], asyncio.CancelledError)
