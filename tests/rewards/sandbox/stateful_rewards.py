# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Reward functions that change the state of their process as the reply requests. Run them only in a sandbox."""

import _thread
import atexit
import builtins
import collections
import contextlib
import ctypes
import decimal
import functools
import gc
import json
import locale
import logging
import math
import os
import pickle
import signal
import sqlite3
import sys
import tempfile
import threading
import time
import types
import warnings

import numpy

from marin_rl.rewards import EvaluateResult, reward_function

CALLS = []
TABLE = sqlite3.connect(":memory:")
TABLE.execute("CREATE TABLE seen (reply TEXT)")
BUFFER = ctypes.create_string_buffer(1)
MAIN = os.getpid()


class Counter:
    count = 0


def stateful(function):
    """Turn the default argument, the closure and the code of a function into a state."""
    cell = [0]

    def called(default=[]):  # noqa: B006
        cell.append(0)
        default.append(0)
        return len(cell) - 2 + len(default) - 1

    return called


CLOSURE = stateful(None)
GENERATOR = iter(range(1000))
cached = functools.lru_cache(object)


def constant():
    return 0


def changed(read, change):
    """Return the state that a call finds, and change it."""

    def action():
        found = read()
        change()
        return found

    return action


def leave_files():
    for folder in (os.getcwd(), tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"):
        with contextlib.suppress(OSError), open(os.path.join(folder, "left_by_a_call"), "w") as file:
            file.write("x")


def files_left():
    folders = (os.getcwd(), tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm")
    return sum(os.path.exists(os.path.join(folder, "left_by_a_call")) for folder in folders)


def leave_threads():
    threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()
    _thread.start_new_thread(time.sleep, (1e6,))


def leave_a_timer():
    signal.signal(signal.SIGALRM, lambda *_: CALLS.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    time.sleep(0.01)


def forge():
    """Answer for later calls: when objects are deleted, at exit, and on every descriptor."""

    class Forger:
        def __del__(self):
            for descriptor in range(3, 64):
                with contextlib.suppress(OSError):
                    os.write(descriptor, b'{"results": [{"score": 99}]}')

    CALLS.append(Forger())
    atexit.register(Forger().__del__)
    gc.set_threshold(1)


def patch(module, name, value):
    return changed(lambda: float(getattr(module, name) is value), lambda: setattr(module, name, value))


def nothing(*arguments, **keywords):
    return None


ACTIONS = {
    "list": changed(lambda: len(CALLS), lambda: CALLS.append(1)),
    "class attribute": changed(lambda: Counter.count, lambda: setattr(Counter, "count", 1)),
    "closure and default": CLOSURE,
    "generator": lambda: next(GENERATOR),
    "lru_cache": changed(lambda: cached.cache_info().currsize, cached),
    "code": changed(constant, lambda: setattr(constant, "__code__", (lambda: 1).__code__)),
    "globals": changed(lambda: float("new" in globals()), lambda: globals().update(new=1)),
    "sqlite": changed(
        lambda: TABLE.execute("SELECT count(*) FROM seen").fetchone()[0],
        lambda: TABLE.execute("INSERT INTO seen VALUES ('1')"),
    ),
    "C memory": changed(lambda: BUFFER.raw[0], lambda: ctypes.memset(BUFFER, 1, 1)),
    "sys.modules": changed(lambda: float("new" in sys.modules), lambda: sys.modules.update(new=math)),
    "import": changed(lambda: float("colorsys" in sys.modules), lambda: __import__("colorsys")),
    "sys.path": changed(lambda: float("/new" in sys.path), lambda: sys.path.insert(0, "/new")),
    "math.sqrt": patch(math, "sqrt", nothing),
    "json.loads": patch(json, "loads", nothing),
    "builtins": patch(builtins, "sorted", nothing),
    "os.fork": patch(os, "fork", nothing),
    "method": patch(collections.Counter, "total", nothing),
    "excepthook": patch(sys, "excepthook", nothing),
    "stdout": patch(sys, "stdout", sys.stderr),
    "environment": changed(lambda: float("NEW" in os.environ), lambda: os.environ.update(NEW="1")),
    "locale": changed(
        lambda: float(locale.setlocale(locale.LC_NUMERIC) != "C"),
        lambda: locale.setlocale(locale.LC_NUMERIC, "C.UTF-8"),
    ),
    "decimal": changed(lambda: float(decimal.getcontext().prec == 3), lambda: setattr(decimal.getcontext(), "prec", 3)),
    "recursion limit": changed(lambda: float(sys.getrecursionlimit() == 999), lambda: sys.setrecursionlimit(999)),
    "warnings": changed(lambda: float(warnings.filters[0][0] == "error"), lambda: warnings.simplefilter("error")),
    "logging": changed(lambda: float(logging.root.level == 1), lambda: logging.root.setLevel(1)),
    "numpy errors": changed(lambda: float(numpy.geterr()["over"] == "call"), lambda: numpy.seterr(over="call")),
    "numpy.random": lambda: float(numpy.random.random() != numpy.random.RandomState(7).random()),
    "gc": changed(lambda: float(not gc.isenabled()), gc.disable),
    "umask": changed(lambda: float(os.umask(0o22) == 0o77), lambda: os.umask(0o77)),
    "working directory": changed(lambda: float(os.getcwd() == "/"), lambda: os.chdir("/")),
    "files": changed(files_left, leave_files),
    "descriptors": changed(lambda: float(os.path.exists("/dev/fd/40")), lambda: os.dup2(0, 40)),
    "threads": changed(lambda: threading.active_count() - 1, leave_threads),
    "low-level threads": changed(lambda: len(sys._current_frames()) - 1, leave_threads),
    "timer": changed(lambda: signal.getitimer(signal.ITIMER_REAL)[0] + len(CALLS), leave_a_timer),
    "signal handler": changed(
        lambda: float(signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL),
        lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    ),
    "audit hook": changed(lambda: len(CALLS), lambda: sys.addaudithook(lambda *_: CALLS.append(1))),
    "trace": changed(lambda: float(sys.gettrace() is not None), lambda: sys.settrace(lambda *_: None)),
    "forgery": changed(lambda: 0.0, forge),
}
numpy.random.seed(7)


@reward_function
def finds(messages, ground_truth, **kwargs):
    """Return the state that an action finds; the same call in a new process finds 0."""
    return float(ACTIONS[messages[-1]["content"]]())


def with_exec(text):
    space = {}
    exec(text, space)
    return space["score"]


class Reduced:
    def __init__(self, text):
        self.text = text

    def __reduce__(self):
        return exec, (self.text,)


def from_a_pickle(text):
    pickle.loads(pickle.dumps(Reduced(text)))
    return 1.0


def assigns(text):
    """A small language: each line assigns a number to an attribute of a module."""
    for line in text.splitlines():
        module, name, value = line.split()
        setattr(sys.modules[module], name, lambda *_, value=float(value): value)
    return 1.0


def raises(text):
    raise ValueError(f"cannot score {text}")


def hangs_once(path):
    if os.path.exists(path):
        os.remove(path)
        time.sleep(1e6)
    return 1.0


def hangs_together(text):
    """Hangs in a process that has made another call."""
    CALLS.append(text)
    if len(CALLS) > 1:
        time.sleep(1e6)
    return 1.0


def takes_long(text):
    """Ends after the last start of calls in a shared process, according to the clock."""
    time.monotonic = lambda: 1e12
    return 1.0


def prints(text):
    while True:
        print("x" * 1000)


def acts(messages, ground_truth, **kwargs):
    """Return the number in the reply, or the result of the function that it names, with the rest as argument."""
    name, _, text = messages[-1]["content"].partition(" ")
    action = REPLIES.get(name)
    result = float(name) if action is None else action(text)
    if type(result) in (EvaluateResult, object):
        return result
    return EvaluateResult(score=result, reason=str(os.getpid()))


REPLIES = {name: value for name, value in globals().items() if isinstance(value, types.FunctionType)} | {
    "allocates": lambda _: float(len(bytearray(10 * 2**30))),
    "exits": lambda _: os._exit(0),
    "answers_an_object": lambda _: object(),
    "crashes": lambda _: ctypes.string_at(0),
    "is_killed": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "answers_much": lambda _: EvaluateResult(score=1.0, reason="x" * 10_000_000),
    "answers_twice": lambda _: os.write(3, b'["{}"]') and 1.0,
    "closes_descriptors": lambda _: os.closerange(0, 100) or 1.0,
}
separate = reward_function(acts)
stateless = reward_function(stateless=True)(acts)
# Further ones, because a function whose calls are slow does not share processes again in a run.
slow, hanging = (reward_function(stateless=True)(acts) for _ in range(2))


@reward_function(stateless=True)
def changes_its_options(messages, ground_truth, bonus, **kwargs):
    bonus["score"] += 1.0
    return bonus["score"]


@reward_function(stateless=True)
def names_metrics(messages, ground_truth, **kwargs):
    reply = messages[-1]["content"]
    return EvaluateResult(score=1.0, metrics={f"{reply}_{index}": 1.0 for index in range(40)})
