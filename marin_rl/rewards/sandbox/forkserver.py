# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Forkserver: loads a user's file once and forks a child process for every call.

A call therefore pays for no import, starts from the state after the file was loaded, has its own limits, and cannot
affect later ones. Several calls of a function that is declared stateless can have one process. The file is loaded in a
separate process, which forks the forkserver. The worker then kills the loading process with all threads and processes
that the file started.
"""

import atexit
import contextlib
import gc
import importlib.util
import json
import linecache
import os
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Mapping
from typing import Any, cast

from marin_rl.rewards.sandbox import protocol
from marin_rl.rewards.sandbox.isolation import IS_LINUX, confine_call, confine_import, exit_with_parent, prepare_call
from marin_rl.rewards.sandbox.protocol import WorkerSpec
from marin_rl.utils.errors import describe, explain, own_frames

CONFINED = b"confined\n"
"""First bytes on the answer pipe of a call, written after its process is confined and before it runs user code. A call
cannot remove them, and so cannot pretend that it was not run."""

ENDED, CONTINUE = b"e", b"g"
"""Message of the forkserver when a call's process has ended, and the reply that lets it reap the process."""

STATUS = "=id"
"""Format of the forkserver's last message about a call: its exit status and CPU seconds."""

_DESCRIPTORS = 4
"""Descriptors of a call: stdin, stdout, stderr and the answer pipe."""
_ANSWER = 3
_WAIT_ALL = 0x40000000
"""`__WALL` for waitpid: also wait for children that were cloned without SIGCHLD (Linux)."""


def run(spec: WorkerSpec, source: str, connection: socket.socket, parent: int) -> None:
    """Load the file and fork the forkserver, which serves calls until the worker exits.

    `source` is the content of the file, decoded as Latin-1; `parent` is the process id of the worker, to which the
    socket is connected.
    """
    connection = _leave_worker(connection, parent)
    maps = _open_maps(spec)
    confine_import(spec)
    sys.path.extend(spec.python_path)
    try:
        module = None if spec.file is None else _load(spec.file, source)
        if maps is not None:
            _check_maps(maps)
        functions = {} if module is None else dict(vars(module))
        described = {} if module is None else _describe(functions)
    except BaseException as error:
        connection.sendall(protocol.encode({"failed": _explain(error, spec)}))
        return
    # A forked process has only the thread that forked. Off Linux the loading process itself serves calls.
    if IS_LINUX and os.fork() != 0:
        while True:
            signal.pause()
    _serve(spec, connection, functions, described, parent)


def _leave_worker(connection: socket.socket, parent: int) -> socket.socket:
    """Close all descriptors inherited from the worker, in particular its pipes to the trainer."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if IS_LINUX:
        exit_with_parent(parent)
    os.setsid()
    descriptor = os.dup2(connection.detach(), _ANSWER)
    os.closerange(_ANSWER + 1, os.sysconf("SC_OPEN_MAX"))
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    os.close(null)
    return socket.socket(fileno=descriptor)


def _open_maps(spec: WorkerSpec) -> int | None:
    """Open the list of this process's mappings, which is not readable once the process is confined."""
    return os.open("/proc/self/maps", os.O_RDONLY) if spec.seccomp and spec.file is not None else None


def _check_maps(maps: int) -> None:
    """Check that this process shares no memory with the processes that will be forked from it."""
    with open(maps, encoding="utf-8", errors="replace") as lines:
        shared = [line.strip() for line in lines if line.split()[1] in ("rw-s", "rwxs")]
    if shared:
        raise RuntimeError(
            f"the file maps shared memory when it is imported ({shared[0]}), through which calls could affect each "
            "other; map it in the function, or use a private mapping (mmap.MAP_PRIVATE)"
        )


def _load(file: str, source: str) -> types.ModuleType:
    sys.path.append(os.path.dirname(file))
    name = "reward_file_" + os.path.basename(file).removesuffix(".py")
    module_spec = importlib.util.spec_from_file_location(name, file)
    if module_spec is None or module_spec.loader is None:
        raise ValueError("it is not a Python file; its name must end with .py")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    # The lines that errors quote; the file may have been changed since it was read.
    linecache.cache[file] = (
        len(source),
        None,
        source.encode("latin-1").decode(errors="replace").splitlines(True),
        file,
    )
    exec(compile(source.encode("latin-1"), file, "exec", dont_inherit=True), module.__dict__)
    return module


def _serve(
    spec: WorkerSpec, connection: socket.socket, functions: Mapping[str, Any], described: dict[str, Any], parent: int
) -> None:
    if IS_LINUX:
        os.setsid()
        # A descriptor that the user's code opened could be a duplicate of the connection.
        os.closerange(_ANSWER + 1, os.sysconf("SC_OPEN_MAX"))
    prepare_call(spec)
    # With a handler of the file, its code would run here when a call ends.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Freeze the objects, so that the garbage collector of a child does not write to pages that it shares with this
    # process.
    gc.collect()
    gc.freeze()
    connection.sendall(protocol.encode({"forkserver": os.getpid(), "functions": described}))
    if not connection.recv(len(CONTINUE)):
        return
    if IS_LINUX:
        exit_with_parent(parent)
    while _serve_one(spec, connection, functions):
        pass


def parse_ready(data: bytes) -> tuple[int, dict[str, Any]] | str:
    """Parse the message of the loading process.

    The user's code ran in that process, so the message is untrusted.

    Returns:
        The process id of the forkserver and the descriptions of the file's reward functions; or the error that
        prevented loading the file.
    """
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        message = None
    match message:
        case {"failed": str(failed)}:
            return failed
        case {"forkserver": int(process), "functions": dict(functions)} if type(process) is int:
            return process, functions
    return "the loading process sent an invalid message instead of the forkserver's process id"


def _serve_one(spec: WorkerSpec, connection: socket.socket, functions: Mapping[str, Any]) -> bool:
    header, descriptors, _, _ = socket.recv_fds(connection, protocol.HEADER_BYTES, _DESCRIPTORS)
    if len(header) < protocol.HEADER_BYTES:
        return False
    data = protocol.read_exactly(connection.fileno(), protocol.length(header))
    if data is None:
        return False
    own = os.getpid()
    child = os.fork()
    if child == 0:
        _be_child(spec, json.loads(data), descriptors, functions, own)
    for descriptor in descriptors:
        os.close(descriptor)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    # The ids of the process and its group are not reused before it is reaped, so the worker can now kill the rest of
    # the group.
    connection.sendall(ENDED)
    if not connection.recv(len(CONTINUE)):
        return False
    _, status, usage = os.wait4(child, 0)
    # Reap processes that the call made children of this one with CLONE_PARENT; the worker has killed them.
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG | (_WAIT_ALL if IS_LINUX else 0))[0]:
            pass
    connection.sendall(struct.pack(STATUS, status, usage.ru_utime + usage.ru_stime))
    return True


def _be_child(
    spec: WorkerSpec, request: dict[str, Any], descriptors: list[int], functions: Mapping[str, Any], parent: int
) -> None:
    """Run one call and exit."""
    status = 1
    try:
        if IS_LINUX:
            exit_with_parent(parent)
            # A separate process group, so that the worker can kill the call and its children at once.
            os.setsid()
        # The received descriptors have larger numbers than their targets, so none is overwritten before it is moved.
        for target, descriptor in enumerate(descriptors):
            os.dup2(descriptor, target)
        os.closerange(_DESCRIPTORS, max(descriptors) + 1)
        os.environ |= {"TMPDIR": request["folder"], "HOME": request["folder"]}
        tempfile.tempdir = None
        os.chdir(request["folder"])
        confine_call(spec, request["folder"], request["loaded_bytes"])
        os.write(_ANSWER, CONFINED)
        if request["kind"] == "python":
            os.close(_ANSWER)
            status = _run_program(request["code"], spec)
        else:
            run = _run_calls if request["kind"] == "calls" else _answer
            answer = run(request, functions, spec)
            protocol.write(_ANSWER, answer.encode("utf-8", errors="replace"))
            status = 0
    except BaseException as error:
        print(describe(error), file=sys.stderr)
    finally:
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            # The call may have closed or replaced the streams; its output is then lost.
            with contextlib.suppress(BaseException):
                cast(Any, stream).flush()
        os._exit(status)


def _answer(request: dict[str, Any], functions: Mapping[str, Any], spec: WorkerSpec) -> str:
    try:
        return _run_function(request, functions)
    except MemoryError:
        return '{"memory": true}'
    except BaseException as error:
        return json.dumps(_failure(error, spec))


def _failure(error: BaseException, spec: WorkerSpec) -> dict[str, str]:
    """Describe an error of a call; the description continues a sentence that begins with the function's name."""
    import pydantic

    from marin_rl.rewards.sandbox.functions import EvaluateResult, RewardFunctionError, StepOutput, describe_invalid

    if isinstance(error, RewardFunctionError) and not own_frames(error):
        return {"invalid": str(error)}
    if isinstance(error, pydantic.ValidationError) and error.title in (EvaluateResult.__name__, StepOutput.__name__):
        return {"invalid": explain(error, f"created an invalid {describe_invalid(error)}")}
    return {"raised": f"raised {_explain(error, spec)}"}


def _describe(functions: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the reward functions of the file by name."""
    # Imported before the fork, once for all calls.
    from marin_rl.rewards.sandbox.functions import RewardFunction, required_options

    return {
        name: {
            "mode": value.mode.value,
            "required": [] if value.problem else required_options(value),
            "stateless": value.stateless,
            "problem": value.problem,
        }
        for name, value in functions.items()
        if isinstance(value, RewardFunction)
    }


def _run_calls(request: dict[str, Any], functions: Mapping[str, Any], spec: WorkerSpec) -> str:
    """Make several calls in this process, and return a JSON list of their answers.

    No call starts after half of the time limit, so there can be fewer answers than calls.
    """
    last_start = time.monotonic() + request["seconds"] / 2
    options = json.dumps(request["options"])
    answers: list[str] = []
    for fields in request["requests"]:
        if answers and time.monotonic() > last_start:
            break
        # A call can change its options, so each gets a copy.
        answers.append(_answer({**request, "requests": [fields], "options": json.loads(options)}, functions, spec))
    return json.dumps(answers)


def _run_function(request: dict[str, Any], functions: Mapping[str, Any]) -> str:
    from marin_rl.rewards.sandbox.functions import RewardFunction, RewardFunctionError, RewardRequest, evaluate

    function = functions.get(request["function"])
    if not isinstance(function, RewardFunction):
        raise RewardFunctionError("is not a reward function of the loaded file")
    requests = [RewardRequest(**fields) for fields in request["requests"]]
    try:
        results = evaluate(function, requests, request["options"])
    except RewardFunctionError as error:
        # The message continues a sentence that names the function and its file.
        message = str(error).removeprefix(f"{function.name} ")
        raise RewardFunctionError(message).with_traceback(error.__traceback__) from None
    return '{"results": [' + ", ".join(result.model_dump_json() for result in results) + "]}"


def _run_program(code: str, spec: WorkerSpec) -> int:
    """Run a program like `python main.py` and return its exit status."""
    # Functions of this process are not the program's.
    atexit._clear()
    status = _run_main(code, spec)
    atexit._run_exitfuncs()
    return status


def _run_main(code: str, spec: WorkerSpec) -> int:
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
        if error.code is None:
            return 0
        if isinstance(error.code, int):
            return error.code & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _explain(error: BaseException, spec: WorkerSpec) -> str:
    """Explain an error of the user's code, with a hint if the sandbox can be its cause."""
    hint = None
    if isinstance(error, ImportError):
        hint = (
            "packages must be installed; modules next to the file, or in a folder of sandbox.read_paths, are imported "
            "by their plain names"
        )
    elif isinstance(error, OSError) and spec.seccomp:
        hint = (
            "in the sandbox, code reads the file's folder and sandbox.read_paths, writes in its working folder, and "
            "has no network and only as many processes as sandbox.processes allows"
        )
    elif isinstance(error, MemoryError):
        hint = "sandbox.memory_mb is the limit"
    description = describe(error)
    return explain(error, description if hint is None else f"{description} ({hint})")
