# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The processes of one training, and what they tell one another.

On several training hosts one process runs on each, and together they hold the mesh. All of them run the same program on
the same numbers; the first, the main process, alone writes files and talks to anybody else. What is told
(`on_main`, `gather_texts`, `agree`, `fetch`) is told by all processes together, each calling the same functions in the
same order; with one process nothing is sent.
"""

import atexit
import contextlib
import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding


class MainProcessError(RuntimeError):
    """What the main process was to do failed; the other processes end too."""


class ProcessesDifferError(RuntimeError):
    """A value that all training processes compute is not the same in all of them; names the processes and values."""


def several() -> bool:
    """Whether there is more than one; brings up no device where jax's distributed runtime was not started.

    >>> several()
    False
    """
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_main() -> bool:
    """Whether this is the process that writes files and talks to others; with one process it is.

    >>> is_main()
    True
    """
    return not several() or jax.process_index() == 0


def on_main(work: Callable[[], str]) -> str:
    """Have the main process do something while the others wait, and tell them what came of it.

    Args:
        work: called in the main process alone.

    Returns:
        What it returned, in every process.

    Raises:
        MainProcessError: in the others, if it raised; in the main process its own error goes on.

    >>> on_main(lambda: "done")
    'done'
    """
    if not several():
        return work()
    if not is_main():
        told = json.loads(_broadcast(""))
        if "error" in told:
            raise MainProcessError(f"the main training process ended with an error: {told['error']}")
        return told["came"]
    try:
        came = work()
    except BaseException as error:
        _broadcast(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        raise
    _broadcast(json.dumps({"came": came}))
    return came


def gather_texts(text: str) -> tuple[str, ...]:
    """What each process says, in their order.

    >>> gather_texts("alone")
    ('alone',)
    """
    if not several():
        return (text,)
    data = text.encode()
    sizes = multihost_utils.process_allgather(np.int32(len(data)))
    said = multihost_utils.process_allgather(_padded(data, int(sizes.max())))
    return tuple(_unpadded(row, int(size)) for row, size in zip(said, sizes, strict=True))


def agree(wish: bool) -> bool:
    """Whether any process wishes it.

    >>> agree(True), agree(False)
    (True, False)
    """
    return "y" in gather_texts("y" if wish else "n")


def require_equal(values: Mapping[str, bytes], what: str) -> None:
    """Check in one exchange that named values are the same in all processes.

    Args:
        values: the same names in all processes; compared by a digest of 128 bits.
        what: the values as a whole, for the error.

    Raises:
        ProcessesDifferError: in every process, naming the processes that differ from the main one, and in which values.

    >>> require_equal({"tokens": b"12"}, "the batch of step 1")
    """
    if not several():
        return
    digests = [hashlib.blake2b(value, digest_size=16).digest() for value in values.values()]
    own = np.frombuffer(b"".join(digests), np.uint8).reshape(len(digests), 16)
    main, *others = multihost_utils.process_allgather(own)
    differing = [
        f"process {index} in {', '.join(wrong)}"
        for index, other in enumerate(others, start=1)
        if (wrong := [name for name, row, of_main in zip(values, other, main, strict=True) if any(row != of_main)])
    ]
    if differing:
        raise ProcessesDifferError(
            f"{what} is not the same in all training processes; compared with the main process (0), it differs in "
            f"{'; in '.join(differing)}. All processes compute it from the same rollouts, so their config, data files, "
            "software or processors differ: make them the same on all training hosts, and run the same command again "
            "to go on from the last checkpoint"
        )


@contextlib.contextmanager
def leaving_on_error() -> Iterator[None]:
    """After an error, let this process end without waiting for the others, which may be waiting for it.

    Jax would wait five minutes. The others end as soon as jax misses this one.
    """
    try:
        yield
    except BaseException:
        if several():
            # What is registered last is called first, and so before jax's own.
            atexit.register(_end)
        raise


@contextlib.contextmanager
def explaining_errors() -> Iterator[None]:
    """Where there are several processes, add to jax's own errors what they mean if another process was lost."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if several():
            error.add_note(
                f"This is training process {jax.process_index()} of {jax.process_count()}. If what failed is a "
                "connection, another of them has ended or is out of reach, and its own output or machine says why; "
                "the same command on all hosts goes on from the last checkpoint."
            )
        raise


def _end() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def put(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Put an array where a sharding says.

    Args:
        array: spread over the same processes, or on each of them the same and whole.
        sharding: over any devices of theirs.
    """
    if sharding.is_fully_addressable or not array.is_fully_addressable:
        return jax.device_put(array, sharding)
    # `device_put` compares the array over all processes first, which takes an exchange for each.
    whole = np.asarray(array)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: whole[index])


def fetch(array: jax.Array) -> np.ndarray:
    """A whole array on every process's host, wherever its shards are.

    >>> fetch(jax.numpy.arange(3)).tolist()
    [0, 1, 2]
    """
    if array.is_fully_addressable:
        return np.asarray(array)
    return multihost_utils.process_allgather(array, tiled=True)


def _broadcast(text: str) -> str:
    data = text.encode()
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(data))))
    return _unpadded(multihost_utils.broadcast_one_to_all(_padded(data, size)), size)


def _padded(data: bytes, size: int) -> np.ndarray:
    # Sizes of few kinds: each is a program of its own to compile.
    room = 2 ** math.ceil(math.log2(max(size, 256)))
    return np.frombuffer(data.ljust(room, b"\0"), np.uint8)


def _unpadded(data: np.ndarray, size: int) -> str:
    return np.asarray(data).tobytes()[:size].decode()
