# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Games of other packages, each in a separate process.

```
training process ── control socket ── game server ── one process per game
        └─────────────── one socket per game ──────────────┘
```

The game server is a process without jax and threads, which imports the game's class once and is forked for each game.
A game that hangs or crashes, or uses the global random state, then affects no other game and not the training process.
Requests and results are lines of JSON.
"""

import asyncio
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

from marin_rl.environments.external import run_in_thread
from marin_rl.errors import UserError, describe, explain
from marin_rl.event_loop import gather_all
from marin_rl.rewards.grading_process import process_environment

_COMMAND = struct.Struct("!cQ")
"""A command to the game server: `_START` or `_STOP`, and the number of the game. `_START` also carries a socket."""
_START, _STOP = b"+", b"-"
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
        self._count = 0
        self._control: socket.socket | None = None
        self._end: weakref.finalize | None = None

    async def start(self) -> "GameProcess":
        """Start a process with a new game.

        Raises:
            GameServerError: if the game's class cannot be imported or prepared.
        """
        ours, theirs = socket.socketpair()
        sending = asyncio.ensure_future(asyncio.to_thread(self._send_start, theirs))
        try:
            # The thread goes on after a cancellation, and still needs its socket.
            number = await asyncio.shield(sending)
        except BaseException:
            ours.close()
            sending.add_done_callback(self._stop_unused)
            raise
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=_MAX_LINE)
        return GameProcess(self, number, reader, writer)

    def _stop_unused(self, sending: "asyncio.Future[int]") -> None:
        if not sending.cancelled() and sending.exception() is None:
            self.stop(sending.result())

    def stop(self, number: int) -> None:
        """End the process of a game, if it still runs: SIGTERM, and SIGKILL after `GRACE_SECONDS`. Does not wait."""
        # A thread, because another one may hold the lock until the server has started.
        threading.Thread(target=self._send_stop, args=(number,), daemon=True).start()

    def _send_stop(self, number: int) -> None:
        with self._lock:
            if self._control is not None:
                try:
                    self._control.sendall(_COMMAND.pack(_STOP, number))
                except OSError:
                    # The server has ended, and its games end when their sockets are closed.
                    self._close()

    def close(self) -> None:
        """End all games and the server; a later `start` starts another."""
        with self._lock:
            self._close()

    def _send_start(self, connection: socket.socket) -> int:
        with connection, self._lock:
            self._count += 1
            message = _COMMAND.pack(_START, self._count)
            try:
                socket.send_fds(self._started(), [message], [connection.fileno()])
            except OSError:
                self._close()
                socket.send_fds(self._started(), [message], [connection.fileno()])
            return self._count

    def _started(self) -> socket.socket:
        """Return the control socket of a running server."""
        if self._control is None:
            control, theirs = socket.socketpair()
            with theirs:
                arguments = str(theirs.fileno()), str(GRACE_SECONDS), self._game, *self._arguments
                process = subprocess.Popen(
                    [sys.executable, "-c", _MAIN, *arguments],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=process_environment(),
                    # Ctrl-C reaches the training process only, which ends the server.
                    start_new_session=True,
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

    def __init__(
        self, server: GameServer, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._server = server
        self._number = number
        self._reader = reader
        self._writer = writer

    async def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of the game and return its result.

        Args:
            method: name of the method.
            **arguments: its arguments; JSON values.

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

    async def close(self) -> None:
        """End the process, also during a call that was cancelled; see `GameServer.stop`."""
        self._server.stop(self._number)
        self._writer.close()


def call_each(server: GameServer, method: str, arguments: list[dict[str, Any]]) -> list[Any]:
    """Call a method of one new game for each set of arguments, on all CPU cores, and return the results in order.

    Works in threads with and without a running event loop.

    Raises:
        GameError: if a call raised.
    """
    cores = asyncio.Semaphore(os.cpu_count() or 1)

    async def call(own: dict[str, Any]) -> Any:
        async with cores:
            game = await server.start()
            try:
                return await game.call(method, **own)
            finally:
                await game.close()

    return run_in_thread(gather_all(map(call, arguments)))


def _end(control: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    """End a server by closing its control socket."""
    control.close()
    try:
        process.wait(GRACE_SECONDS + _STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


_MAIN = """
import sys, marin_rl.environments.game_process as module
module.run_server(int(sys.argv[1]), float(sys.argv[2]), *sys.argv[3:])
"""


def run_server(control_fd: int, grace_seconds: float, game: str, *arguments: str) -> None:
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
    processes: dict[int, int] = {}
    ending: dict[int, float] = {}
    while True:
        if ending:
            _reap(ending)
            if not select.select([control], [], [], _POLL_SECONDS)[0]:
                continue
        message, descriptors, _, _ = socket.recv_fds(control, _COMMAND.size, 1)
        if not message:
            break
        command, number = _COMMAND.unpack(message)
        if command == _STOP:
            # A server that was restarted does not have the games of its predecessor.
            if number in processes:
                _terminate(processes.pop(number), ending, grace_seconds)
            continue
        pid = os.fork()
        if pid == 0:
            try:
                control.close()
                _run_game(socket.socket(fileno=descriptors[0]), factory)
            finally:
                os._exit(0)
        os.close(descriptors[0])
        processes[number] = pid
    for pid in processes.values():
        _terminate(pid, ending, grace_seconds)
    while ending:
        _reap(ending)
        time.sleep(_POLL_SECONDS)


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
