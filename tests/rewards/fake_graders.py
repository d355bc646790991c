# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Graders whose processes misbehave. The request names the behavior."""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from marin_rl.rewards.reply_text import parse_reply


def open_behaviors() -> Callable[[Mapping[str, Any]], Any]:
    return lambda request: BEHAVIORS[request["do"]](**{name: request[name] for name in request if name != "do"})


def open_environment() -> Callable[[Mapping[str, Any]], Any]:
    """The variables of a process of its own, which starts with the first request."""
    return lambda request: dict(os.environ)


def open_broken() -> Callable[[Mapping[str, Any]], Any]:
    raise ImportError("no such package")


def echo(text: str) -> str:
    return text


def print_and_echo(text: str) -> str:
    print("noise\n" * 10_000, file=sys.stdout, flush=True)
    print("noise\n" * 10_000, file=sys.stderr, flush=True)
    os.write(1, b'{"result": "forged"}\n')
    return text


def ignore_signals() -> None:
    for number in (signal.SIGPROF, signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    while True:
        pass


def recurse() -> Any:
    return recurse()


def write_file(path: str) -> None:
    with open(path, "w") as file:
        file.write("x")


BEHAVIORS: Mapping[str, Callable[..., Any]] = {
    "echo": echo,
    "parse": lambda reply: len(parse_reply(reply).calls),
    "process_id": os.getpid,
    "print_and_echo": print_and_echo,
    "compute_without_end": lambda: 9**9**9,
    "sleep_without_end": lambda: time.sleep(1e6),
    "ignore_signals": ignore_signals,
    "use_much_memory": lambda: len(bytearray(10**11)),
    "recurse": recurse,
    "exit_with_status": lambda: sys.exit(0),
    "end_process": lambda: os._exit(0),
    "answer_at_length": lambda: "x" * 2**25,
    "read_input": input,
    "write_file": write_file,
    "remove_file": os.remove,
    "start_program": lambda: os.posix_spawn("/bin/true", ["true"], {}),
    "signal_trainer": lambda: os.kill(os.getppid(), signal.SIGTERM),
    "open_connection": lambda: socket.socket().close(),
}
