# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Games of other packages, each in a separate process.

```
training process ── control socket ── game server ── one process per game
        └────── two sockets per game: calls, and lifetime ─────┘
```

The game server is a process without jax and threads, which imports the game's class once and is forked for each game.
A game that hangs or crashes, or uses the global random state, then affects no other game and not the training process.
Calls and results are lines of JSON; what a game prints is discarded. The server ends a game when the other end of its
lifetime socket is closed, so a game outlives neither its episode nor the training process.
"""

import asyncio
import contextlib
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import threading
import time
import weakref
from typing import Any

from marin_rl.rewards.grading_process import start_process
from marin_rl.utils.errors import UserError, describe, explain
from marin_rl.utils.event_loop import gather_all, run_in_thread

_START = b"+"
"""Asks the server for a game; sent with the sockets of the game."""
_MAX_LINE = 2**24
"""Maximum number of bytes of a result."""
GRACE_SECONDS = 10.0
"""Seconds after SIGTERM in which a game may end the programs that it started, before it is killed."""
_STOP_SECONDS = 5.0
"""Further seconds for which `GameServer.close` waits for the server."""
_POLL_SECONDS = 0.02


class GameError(RuntimeError):
    """A game raised an error, or its process ended; the message names the game's error."""


class GameServerError(UserError):
    """The game server cannot import or prepare the game; the message names the error."""


class GameServer:
    """Starts processes of one kind of game. The server's own process starts with the first game.

    Used from any number of threads and event loops.
    """

    def __init__(self, game: str, *arguments: str) -> None:
        """Create a server that is not started yet.

        Args:
            game: class of the games as `module:class`. Its static method `prepare` is called once in the server, for
                imports and caches. It is constructed without arguments in each process; the public methods take and
                return JSON values. A game that starts programs ends them at SIGTERM.
            *arguments: arguments of `prepare`.
        """
        self._game = game
        self._arguments = arguments
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._end: weakref.finalize | None = None

    async def start(self) -> "GameProcess":
        """Start a process with a new game.

        Raises:
            GameServerError: if the game's class cannot be imported or prepared.
        """
        with contextlib.ExitStack() as opened:
            (calls, their_calls), (lifetime, their_lifetime) = socket.socketpair(), socket.socketpair()
            for one in (calls, lifetime):
                opened.callback(one.close)
            # Shielded, because the thread goes on after a cancellation, and closes its sockets.
            await asyncio.shield(asyncio.to_thread(self._send, their_calls, their_lifetime))
            reader, writer = await asyncio.open_unix_connection(sock=calls, limit=_MAX_LINE)
            opened.pop_all()
        return GameProcess(reader, writer, lifetime)

    async def begin(self, method: str, **arguments: Any) -> tuple["GameProcess", Any]:
        """Start a game and call its first method; return the game and the result.

        Raises:
            GameError: if the method raised; the game is closed.
        """
        game = await self.start()
        try:
            return game, await game.call(method, **arguments)
        except BaseException:
            game.close()
            raise

    def close(self) -> None:
        """End all games and the server; a later `start` starts another."""
        with self._lock:
            self._close()

    def _send(self, *connections: socket.socket) -> None:
        """Send the sockets of a new game to the server, and close them here."""
        with contextlib.ExitStack() as opened, self._lock:
            descriptors = [opened.enter_context(one).fileno() for one in connections]
            try:
                socket.send_fds(self._started(), [_START], descriptors)
            except OSError:
                self._close()
                socket.send_fds(self._started(), [_START], descriptors)

    def _started(self) -> socket.socket:
        """Return the control socket of a running server."""
        if self._control is None:
            control, process = start_process(
                "marin_rl.environments.game_process:run_server",
                *(str(GRACE_SECONDS), self._game, *self._arguments),
                stderr=subprocess.DEVNULL,
            )
            self._control, self._end = control, weakref.finalize(self, _end, control, process)
            with control.makefile("r") as answer:
                problem = answer.readline()
            if problem != "\n":
                self._close()
                raise GameServerError(problem.strip() or f"the game server for {self._game} ended while it started")
        return self._control

    def _close(self) -> None:
        if self._end is not None:
            self._end()
        self._control = self._end = None


class GameProcess:
    """A game in a separate process. Used from one event loop; `close` it at the end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, lifetime: socket.socket) -> None:
        self._reader = reader
        self._writer = writer
        self._lifetime = lifetime

    async def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of the game, with JSON values as arguments, and return its result.

        Raises:
            GameError: if the method raised or the process ended.
        """
        try:
            self._writer.write(json.dumps({"method": method, "arguments": arguments}).encode() + b"\n")
            await self._writer.drain()
            line = await self._reader.readline()
        except OSError as error:
            raise GameError(f"the game's process ended before {method}: {error}") from error
        except ValueError as error:
            raise GameError(f"the result of {method} is longer than {_MAX_LINE} bytes") from error
        if not line:
            raise GameError(f"the game's process ended during {method}; it crashed, or was killed for lack of memory")
        answer = json.loads(line)
        if "error" in answer:
            raise GameError(answer["error"])
        return answer["result"]

    def close(self) -> None:
        """End the process, also during a call: SIGTERM, and SIGKILL after `GRACE_SECONDS`. Does not wait."""
        self._writer.close()
        self._lifetime.close()


def call_each(server: GameServer, method: str, arguments: list[dict[str, Any]]) -> list[Any]:
    """Call a method of one new game for each set of arguments, on all CPU cores, and return the results in order.

    Works in threads with and without a running event loop.

    Raises:
        GameError: if a call raised.
    """
    cores = asyncio.Semaphore(os.cpu_count() or 1)

    async def call(own: dict[str, Any]) -> Any:
        async with cores:
            with contextlib.closing(await server.start()) as game:
                return await game.call(method, **own)

    return run_in_thread(gather_all(map(call, arguments)))


def _end(control: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    """End a server by closing its control socket."""
    control.close()
    try:
        process.wait(GRACE_SECONDS + _STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def run_server(control_fd: int, grace_seconds: str, game: str, *arguments: str) -> None:
    """Run a game server until its control socket is closed.

    Args:
        control_fd: file descriptor of the control socket.
        grace_seconds: see `GRACE_SECONDS`.
        game: class of the games as `module:class`.
        *arguments: arguments of its method `prepare`.
    """
    control = socket.socket(fileno=control_fd)
    module, _, name = game.partition(":")
    try:
        factory = getattr(importlib.import_module(module), name)
        factory.prepare(*arguments)
    except BaseException as error:
        control.sendall(describe(error).replace("\n", " ").encode() + b"\n")
        return
    control.sendall(b"\n")
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    ending: dict[int, float] = {}
    is_open = True
    while is_open:
        for key, _ in selector.select(_POLL_SECONDS if ending else None):
            if key.fileobj is not control:
                selector.unregister(key.fileobj)
                os.close(key.fd)
                _terminate(key.data, ending, float(grace_seconds))
                continue
            message, descriptors, _, _ = socket.recv_fds(control, len(_START), 2)
            is_open = bool(message)
            if is_open:
                calls, lifetime = descriptors
                selector.register(lifetime, selectors.EVENT_READ, data=_fork(control, calls, factory))
        _reap(ending)
    for key in selector.get_map().values():
        if key.fileobj is not control:
            _terminate(key.data, ending, float(grace_seconds))
    while ending:
        _reap(ending)
        time.sleep(_POLL_SECONDS)


def _fork(control: socket.socket, calls: int, factory: Any) -> int:
    """Start the process of a game, and return its id; the descriptor of its calls is closed here."""
    pid = os.fork()
    if pid == 0:
        try:
            control.close()
            _run_game(socket.socket(fileno=calls), factory)
        finally:
            os._exit(0)
    os.close(calls)
    return pid


def _terminate(pid: int, ending: dict[int, float], grace_seconds: float) -> None:
    """Send SIGTERM to a game, and add the time of its SIGKILL to `ending`."""
    # Until the process is waited for, no other process has its id.
    os.kill(pid, signal.SIGTERM)
    ending[pid] = time.monotonic() + grace_seconds


def _reap(ending: dict[int, float]) -> None:
    """Remove the processes that have ended, and kill those whose time is over."""
    for pid, deadline in list(ending.items()):
        if os.waitpid(pid, os.WNOHANG)[0]:
            del ending[pid]
        elif time.monotonic() >= deadline:
            os.kill(pid, signal.SIGKILL)


def _run_game(connection: socket.socket, factory: Any) -> None:
    """Answer the requests of one game until its socket is closed."""
    game = None
    with connection, connection.makefile("rw", encoding="utf-8") as stream:
        for line in stream:
            request = json.loads(line)
            try:
                if game is None:
                    game = factory()
                answer = {"result": getattr(game, request["method"])(**request["arguments"])}
                text = json.dumps(answer)
            except BaseException as error:
                text = json.dumps({"error": explain(error)})
            stream.write(text + "\n")
            stream.flush()
