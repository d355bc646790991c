# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The forkserver: it holds a user's file, loaded once, and forks a child for every call.

So a call pays for no import, its limits are its own, and what it changes, leaks or breaks ends with it. The file is
loaded in a process of its own, which forks the forkserver and is then ended by the worker: threads and processes that
the file started end with it.
"""

import contextlib
import gc
import importlib.util
import json
import os
import signal
import socket
import struct
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Mapping
from typing import Any

from marin_rl.rewards.sandbox import frames, kernel
from marin_rl.rewards.sandbox.landlock import restrict_files, restrict_writes
from marin_rl.rewards.sandbox.limits import limit_call, limit_import
from marin_rl.rewards.sandbox.seccomp import SystemCalls, restrict_system_calls
from marin_rl.rewards.sandbox.spec import WorkerSpec

CONFINED = b"confined\n"
"""What a call's process answers before anything else, once it is confined and no line of the call's has run. A call
cannot take it back, so that none can pretend that it was not run."""

ENDED, GO_ON = b"e", b"g"
"""What the forkserver says when a call's process has ended, and what it waits for before it reaps it."""

_DESCRIPTORS = 4
_ANSWER = 3
_DEVICES_READ = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


def run(spec: WorkerSpec, source: str, connection: socket.socket, parent: int) -> None:
    """Load the file and fork the forkserver, which serves calls until the worker is gone.

    Args:
        spec: what the worker was told.
        source: the bytes of the file, in Latin-1.
        connection: to the worker.
        parent: the worker's process.
    """
    connection = _leave_worker(connection, parent)
    _confine_import(spec)
    sys.path.extend(spec.python_path)
    try:
        module = None if spec.file is None else _load(spec.file, source)
    except BaseException as error:
        connection.sendall(frames.encode({"forkserver": None, "failed": _explain(error)}))
        return
    # A fork has one thread, the one that forked. Where nothing ends the loading process, it serves calls itself.
    if kernel.IS_LINUX and os.fork() != 0:
        while True:
            signal.pause()
    _serve(spec, connection, module, parent)


def _serve(spec: WorkerSpec, connection: socket.socket, module: types.ModuleType | None, parent: int) -> None:
    if kernel.IS_LINUX:
        os.setsid()
        # A file that the user's code opened could be a second descriptor for the connection.
        os.closerange(_ANSWER + 1, os.sysconf("SC_OPEN_MAX"))
    functions = {} if module is None else _reward_functions(module)
    # Objects that every child shares with this process stay untouched by its garbage collector, and so unshared.
    gc.collect()
    gc.freeze()
    connection.sendall(frames.encode({"forkserver": os.getpid(), "failed": None}))
    if not connection.recv(len(GO_ON)):
        return
    if kernel.IS_LINUX:
        kernel.end_with_parent(parent)
    while _serve_one(spec, connection, functions):
        pass


def parse_ready(data: bytes) -> tuple[int | None, str | None]:
    """The forkserver's process as the loading process named it, and why the file was not loaded; one of them is None.

    The file's own code ran in that process, so the message is checked like a stranger's.
    """
    message = _parse(data)
    if isinstance(message.get("failed"), str):
        return None, message["failed"]
    if type(message.get("forkserver")) is int:
        return message["forkserver"], None
    return None, "the process that loaded it answered something else than the forkserver's process"


def parse_functions(data: bytes) -> tuple[dict[str, Any], str | None]:
    """The functions that a call found in the loaded file, and why it found none, or None."""
    message = _parse(data)
    if isinstance(message.get("functions"), dict):
        return message["functions"], None
    if isinstance(message.get("raised"), str):
        return {}, message["raised"]
    return {}, "the process that holds it did not describe its reward functions"


def _parse(data: bytes) -> dict[str, Any]:
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        message = None
    return message if isinstance(message, dict) else {}


def _leave_worker(connection: socket.socket, parent: int) -> socket.socket:
    """Let go of everything that the worker holds, its pipes to the trainer above all."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if kernel.IS_LINUX:
        kernel.end_with_parent(parent)
    os.setsid()
    kept = os.dup2(connection.detach(), _ANSWER)
    os.closerange(_ANSWER + 1, os.sysconf("SC_OPEN_MAX"))
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    os.close(nothing)
    return socket.socket(fileno=kept)


def _confine_import(spec: WorkerSpec) -> None:
    limit_import(spec.limits)
    if spec.landlock:
        restrict_files((*spec.read, *_DEVICES_READ), (spec.scratch, os.devnull), spec.landlock)
    if spec.seccomp:
        kernel.drop_capabilities()
        # It has to fork, and its children set limits of their own.
        restrict_system_calls(SystemCalls(processes=True, signals=_may_signal(spec), limits=True))


def _confine_call(spec: WorkerSpec, folder: str, taken: int) -> None:
    limit_call(spec.limits, taken, spec.has_namespaces)
    if spec.landlock:
        restrict_writes((folder, os.devnull), spec.landlock)
    if spec.seccomp:
        restrict_system_calls(SystemCalls(processes=spec.limits.processes > 0, signals=_may_signal(spec), limits=False))


def _may_signal(spec: WorkerSpec) -> bool:
    # Only those that start processes have something to end, and only in a namespace there is nobody else to reach.
    return spec.limits.processes > 0 and spec.has_namespaces


def _load(file: str, source: str) -> types.ModuleType:
    sys.path.append(os.path.dirname(file))
    name = "reward_file_" + os.path.basename(file).removesuffix(".py")
    found = importlib.util.spec_from_file_location(name, file)
    if found is None or found.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    exec(compile(source.encode("latin-1"), file, "exec", dont_inherit=True), module.__dict__)
    return module


def _reward_functions(module: types.ModuleType) -> dict[str, Any]:
    from marin_rl.rewards.functions import RewardFunction

    return {name: value for name, value in vars(module).items() if isinstance(value, RewardFunction)}


def _describe(function: Any) -> dict[str, Any]:
    from marin_rl.rewards.functions import required_options

    return {"mode": function.mode.value, "required": required_options(function)}


def _serve_one(spec: WorkerSpec, connection: socket.socket, functions: Mapping[str, Any]) -> bool:
    header, descriptors, _, _ = socket.recv_fds(connection, frames.HEADER_BYTES, _DESCRIPTORS)
    if len(header) < frames.HEADER_BYTES:
        return False
    data = bytearray()
    size = frames.length(header)
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            return False
        data += part
    own = os.getpid()
    child = os.fork()
    if child == 0:
        _be_child(spec, json.loads(data), descriptors, functions, own)
    for descriptor in descriptors:
        os.close(descriptor)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    # Until it is reaped its number, and so that of its group, is nobody else's: the worker ends what is left of both.
    connection.sendall(ENDED)
    if not connection.recv(len(GO_ON)):
        return False
    _, status, usage = os.wait4(child, 0)
    _reap_siblings()
    connection.sendall(struct.pack("=id", status, usage.ru_utime + usage.ru_stime))
    return True


def _reap_siblings() -> None:
    """Reap the children that a call made for this process with CLONE_PARENT; the worker has ended them."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG | kernel.WAIT_ALL)[0]:
            pass


def _be_child(
    spec: WorkerSpec, request: dict[str, Any], descriptors: list[int], functions: Mapping[str, Any], parent: int
) -> None:
    """Run one call and exit."""
    status = 1
    try:
        if kernel.IS_LINUX:
            kernel.end_with_parent(parent)
            # A group of its own, so that it can be ended with all that it starts, at once.
            os.setsid()
        _take_descriptors(descriptors)
        os.environ |= {"TMPDIR": request["folder"], "HOME": request["folder"]}
        tempfile.tempdir = None
        os.chdir(request["folder"])
        _confine_call(spec, request["folder"], request["taken"])
        os.write(_ANSWER, CONFINED)
        if request["kind"] == "python":
            os.close(_ANSWER)
            status = _run_program(request["code"], spec)
        else:
            _answer(request, functions)
            status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        _flush()
        os._exit(status)


def _take_descriptors(descriptors: list[int]) -> None:
    # The pipes came with numbers above those that they get, so none is overwritten before it is moved.
    for wanted, descriptor in enumerate(descriptors):
        os.dup2(descriptor, wanted)
    os.closerange(_DESCRIPTORS, max(descriptors) + 1)


def _answer(request: dict[str, Any], functions: Mapping[str, Any]) -> None:
    try:
        if request["kind"] == "describe":
            answer = json.dumps({"functions": {name: _describe(function) for name, function in functions.items()}})
        else:
            answer = _run_function(request, functions)
    except MemoryError:
        answer = '{"memory": true}'
    except BaseException as error:
        answer = json.dumps({"raised": _explain(error)})
    rest = memoryview(answer.encode("utf-8", errors="replace"))
    while rest:
        rest = rest[os.write(_ANSWER, rest) :]


def _run_function(request: dict[str, Any], functions: Mapping[str, Any]) -> str:
    from marin_rl.rewards.functions import RewardRequest, evaluate

    if request["function"] not in functions:
        raise LookupError(f"{request['function']} is not a reward function of the loaded file")
    requests = [RewardRequest(**one) for one in request["requests"]]
    results = evaluate(functions[request["function"]], requests, request["options"])
    return '{"results": [' + ", ".join(result.model_dump_json() for result in results) + "]}"


def _run_program(code: str, spec: WorkerSpec) -> int:
    """Run a program as `python main.py` would; its exit status. Functions registered with `atexit` are not run."""
    for name in [name for name in sys.modules if name.split(".")[0] == "marin_rl"]:
        del sys.modules[name]
    sys.path[:] = [path for path in sys.path if path not in spec.hidden_path]
    sys.argv = ["main.py"]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    try:
        exec(compile(code, "main.py", "exec"), main.__dict__)
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
    except SystemExit as error:
        return _exit_status(error.code)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _exit_status(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # The call may have closed or replaced them; what it printed is then its own loss.
        with contextlib.suppress(BaseException):
            stream.flush()


def _explain(error: BaseException) -> str:
    """The error's type and message, and the end of its traceback, as the user would see them.

    A surrogate alone has no place in JSON, and is written as an escape. The user's `__str__` may raise itself.
    """
    traced = "".join(traceback.format_tb(error.__traceback__, limit=-3))
    try:
        message = str(error)
    except BaseException as failed:
        message = f"<its __str__ raised {type(failed).__name__}>"
    text = f"{type(error).__name__}: {message}"[:2000] + f"\n{traced}"[-2000:]
    return text.encode("utf-8", errors="backslashreplace").decode()
