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
    return lambda request: globals()[request["do"]](**{name: request[name] for name in request if name != "do"})


def open_environment() -> Callable[[Mapping[str, Any]], Any]:
    """The variables of a process of its own, which starts with the first request."""
    return lambda request: dict(os.environ)


def open_broken() -> Callable[[Mapping[str, Any]], Any]:
    raise ImportError("no such package")


def echo(text: str) -> str:
    return text


def parse(reply: str) -> int:
    return len(parse_reply(reply).calls)


def process_id() -> int:
    return os.getpid()


def print_and_echo(text: str) -> str:
    print("noise\n" * 10_000, file=sys.stdout, flush=True)
    print("noise\n" * 10_000, file=sys.stderr, flush=True)
    os.write(1, b'{"result": "forged"}\n')
    return text


def compute_without_end() -> int:
    return 9**9**9


def sleep_without_end() -> None:
    time.sleep(1e6)


def ignore_signals() -> None:
    for number in (signal.SIGPROF, signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    while True:
        pass


def use_much_memory() -> int:
    return len(bytearray(10**11))


def recurse() -> Any:
    return recurse()


def exit_with_status() -> None:
    sys.exit(0)


def end_process() -> None:
    os._exit(0)


def answer_at_length() -> str:
    return "x" * 2**25


def read_input() -> str:
    return input()


def write_file(path: str) -> None:
    with open(path, "w") as file:
        file.write("x")


def remove_file(path: str) -> None:
    os.remove(path)


def start_program() -> None:
    os.posix_spawn("/bin/true", ["true"], {})


def signal_trainer() -> None:
    os.kill(os.getppid(), signal.SIGTERM)


def open_connection() -> None:
    socket.socket()
