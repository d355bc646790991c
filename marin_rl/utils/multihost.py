# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Communication between the processes of a multi-host training run.

Each training host runs one process, and all processes share the device mesh and run the same program on the
same data. Only the main process (process 0) writes files and talks to other services. `on_main`, `gather_bytes`,
`gather_texts`, `any_process`, `require_equal` and `fetch` are collective: all processes must call them in the same
order. One process alone sends nothing.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax._src import distributed
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from marin_rl.utils.errors import UserError

Result = TypeVar("Result", bound=str | bytes | None)

EXCHANGE_BYTES = 256 * 2**20
"""Bytes that a device holds of all processes together in one round of an exchange."""


class MainProcessError(UserError):
    """The main process failed, so that the other processes end too."""


class ProcessesDifferError(UserError):
    """A value differs between training processes that should compute the same; names the processes and values."""


def is_multihost() -> bool:
    """Whether the run has more than one process. Initializes no device if jax's distributed runtime is not in use.

    >>> is_multihost()
    False
    """
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_main() -> bool:
    """Whether this is the main process, which writes files; always true with one process.

    >>> is_main()
    True
    """
    return not is_multihost() or jax.process_index() == 0


def index_and_count() -> tuple[int, int]:
    """Return the index of this process and the number of processes.

    >>> index_and_count()
    (0, 1)
    """
    return (jax.process_index(), jax.process_count()) if is_multihost() else (0, 1)


def on_main(work: Callable[[], Result]) -> Result:
    """Call a function only in the main process and broadcast its result to all; the other processes wait.

    Raises:
        MainProcessError: in the other processes, if the function raised. The main process raises the original error.

    >>> on_main(lambda: "done")
    'done'
    """
    if not is_multihost():
        return work()
    if not is_main():
        header, newline, data = _broadcast(b"").partition(b"\n")
        message = json.loads(header)
        if "error" in message:
            raise MainProcessError(f"the main training process ended with an error: {message['error']}")
        return cast(Result, data if newline else message["result"])
    try:
        result = work()
    except BaseException as error:
        _broadcast(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        raise
    # One line of JSON; bytes follow it.
    is_bytes = isinstance(result, bytes)
    _broadcast(b"{}\n" + result if is_bytes else json.dumps({"result": result}).encode())
    return result


def gather_bytes(data: bytes) -> tuple[bytes, ...]:
    """Gather the bytes of every process, in process order.

    >>> gather_bytes(b"alone")
    (b'alone',)
    """
    if not is_multihost():
        return (data,)
    sizes = [_size_of(row) for row in multihost_utils.process_allgather(_as_row(len(data)))]
    room = exchange_room(max(sizes), len(sizes))
    parts: list[list[bytes]] = [[] for _ in sizes]
    for start in range(0, max(sizes), room):
        rows = multihost_utils.process_allgather(_padded(data[start : start + room], room))
        for part, row, size in zip(parts, rows, sizes, strict=True):
            part.append(_unpadded(row, size - start))
    return tuple(map(b"".join, parts))


def exchange_room(largest: int, senders: int) -> int:
    """Return the bytes that each process sends in one round of an exchange of messages.

    They are a power of two up to `largest`, which bounds the number of programs to compile, and so few that no device
    holds much more than `EXCHANGE_BYTES` of all processes together.

    >>> exchange_room(1000, 4), exchange_room(10**9, 512)
    (1024, 524288)
    """
    whole = 2 ** math.ceil(math.log2(max(largest, 256)))
    return min(whole, max(2 ** int(math.log2(EXCHANGE_BYTES // senders)), 2**16))


def gather_texts(text: str) -> tuple[str, ...]:
    """Gather one text per process, in process order.

    >>> gather_texts("alone")
    ('alone',)
    """
    return tuple(data.decode() for data in gather_bytes(text.encode()))


def any_process(flag: bool) -> bool:
    """Whether `flag` is true in any process.

    >>> any_process(True), any_process(False)
    (True, False)
    """
    return "y" in gather_texts("y" if flag else "n")


def require_equal(values: Mapping[str, bytes], name: str) -> None:
    """Check with one all-gather that named values are equal in all processes.

    All processes have the same names; values are compared by a 128-bit digest. `name` is that of the values, for the
    message.

    Raises:
        ProcessesDifferError: in every process; names the processes and values that differ from the main process.

    >>> require_equal({"tokens": b"12"}, "the batch of step 1")
    """
    if not is_multihost():
        return
    digests = [hashlib.blake2b(value, digest_size=16).digest() for value in values.values()]
    own = np.frombuffer(b"".join(digests), np.uint8).reshape(len(digests), 16)
    main, *others = multihost_utils.process_allgather(own)
    differing = [
        f"process {index} in {', '.join(wrong)}"
        for index, other in enumerate(others, start=1)
        if (wrong := [key for key, row, of_main in zip(values, other, main, strict=True) if any(row != of_main)])
    ]
    if differing:
        raise ProcessesDifferError(
            f"{name} is not the same in all training processes; compared with the main process (0), it differs in "
            f"{'; in '.join(differing)}. All processes compute it from the same inputs, so their config, data files, "
            "software or processors differ: make them equal on all training hosts, and run the same command again "
            "to resume from the last checkpoint"
        )


def put(array: jax.Array | np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Place an array with a sharding.

    Args:
        array: sharded over the same processes, or the same whole array on the host or devices of each process.
        sharding: a sharding over devices of these processes.

    Returns:
        The array with that sharding.
    """
    if sharding.is_fully_addressable or (isinstance(array, jax.Array) and not array.is_fully_addressable):
        return jax.device_put(array, sharding)
    # `device_put` would first compare the array across all processes, with one collective per array.
    whole = np.asarray(array)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: whole[index])


def fetch(array: jax.Array) -> np.ndarray:
    """Gather a sharded array to the host of every process.

    >>> fetch(jax.numpy.arange(3)).tolist()
    [0, 1, 2]
    """
    if array.is_fully_addressable:
        return np.asarray(array)
    return multihost_utils.process_allgather(array, tiled=True)


def _broadcast(data: bytes) -> bytes:
    size = _size_of(multihost_utils.broadcast_one_to_all(_as_row(len(data))))
    room = exchange_room(size, 1)
    return b"".join(
        _unpadded(multihost_utils.broadcast_one_to_all(_padded(data[start : start + room], room)), size - start)
        for start in range(0, size, room)
    )


def _as_row(size: int) -> np.ndarray:
    # jax would convert a 64-bit integer to 32 bits.
    return np.array(divmod(size, 2**30), np.int32)


def _size_of(row: np.ndarray) -> int:
    high, low = np.asarray(row).tolist()
    return high * 2**30 + low


def _padded(data: bytes, room: int) -> np.ndarray:
    return np.frombuffer(data.ljust(room, b"\0"), np.uint8)


def _unpadded(data: np.ndarray, size: int) -> bytes:
    return np.asarray(data).tobytes()[: max(size, 0)]


def commit_in_background(
    key: str, work: Callable[[], str], commit: Callable[[list[str]], None], timeout: float
) -> None:
    """Call `work` in every process, then `commit` in the main process with the results of all, in process order.

    Uses no devices, so it may run in a thread while the program trains.

    Args:
        key: name of this call, the same in all processes and never used before.
        work: called in every process.
        commit: called in the main process if no process failed.
        timeout: seconds to wait for another process.

    Raises:
        OSError: if another process failed, or did not answer in time. An error of this process is raised unchanged.
    """
    if not is_multihost():
        commit([work()])
        return
    results = _exchange(f"{key}/written", work, timeout)
    _exchange(f"{key}/committed", lambda: commit(results) if is_main() else None, timeout)
    if is_main():
        # All processes have read the results.
        coordination_client().key_value_delete(f"marin_rl/{key}/written/")


def _exchange(key: str, work: Callable[[], Any], timeout: float) -> list[Any]:
    """Call `work` in every process and return the results of all, in process order, through jax's key-value store.

    Waits for the other processes before it raises an error of `work`, so that they learn of it.
    """
    client, folder = coordination_client(), f"marin_rl/{key}/"
    answer, own = dict[str, Any](), None
    try:
        answer["result"] = work()
    except Exception as error:
        answer["error"], own = f"{type(error).__name__}: {error}", error
    client.key_value_set(f"{folder}{jax.process_index():06d}", json.dumps(answer))
    try:
        client.wait_at_barrier(folder, int(1000 * timeout))
    except jax.errors.JaxRuntimeError as error:
        raise own or OSError(f"a training process did not answer within {timeout:g} s: {error}") from error
    if own is not None:
        raise own
    answers = [json.loads(text) for _, text in sorted(client.key_value_dir_get(folder))]
    for process, answer in enumerate(answers):
        if "error" in answer:
            raise OSError(f"training process {process} failed: {answer['error']}")
    return [answer["result"] for answer in answers]


def coordination_client() -> Any:
    """Return the client of jax's coordination service, which has a key-value store and barriers."""
    return cast(Any, distributed.global_state.client)
