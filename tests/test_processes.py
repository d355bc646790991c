# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""What two real processes tell one another is in tests/learner/test_distributed.py; here one stands in for both."""

import atexit
import contextlib
import json
import traceback
from collections.abc import Callable

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from marin_rl import processes


class Wire:
    """What the first of two processes sends, and the second one's share of an exchange."""

    def __init__(self) -> None:
        self.sent: list[np.ndarray] = []

    def broadcast(self, array: np.ndarray) -> np.ndarray:
        self.sent.append(array)
        return array

    @property
    def texts(self) -> list[str]:
        """The messages: of each its length and then its bytes were sent."""
        lengths, padded = self.sent[::2], self.sent[1::2]
        return [data.tobytes()[: int(length)].decode() for length, data in zip(lengths, padded, strict=True)]


@pytest.fixture
def first_of_two(monkeypatch: pytest.MonkeyPatch) -> Wire:
    wire = Wire()
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", wire.broadcast)
    return wire


def raising(error: BaseException) -> Callable[[], str]:
    def work() -> str:
        raise error

    return work


def test_an_interrupt_of_the_main_process_is_told_to_those_who_wait_for_it(first_of_two: Wire) -> None:
    with pytest.raises(KeyboardInterrupt):
        processes.on_main(raising(KeyboardInterrupt("at work")))
    assert [json.loads(text) for text in first_of_two.texts] == [{"error": "KeyboardInterrupt: at work"}]


def test_messages_have_few_sizes_and_lose_nothing(first_of_two: Wire) -> None:
    messages = ["x" * length + "ä" for length in range(0, 3000, 7)]
    assert [processes.on_main(lambda text=text: text) for text in messages] == messages
    assert [json.loads(text)["came"] for text in first_of_two.texts] == messages
    # Each size is a program to compile.
    assert len({array.shape for array in first_of_two.sent[1::2]}) <= 5


@pytest.mark.parametrize(
    ("count", "error", "is_explained"),
    [
        (2, jax.errors.JaxRuntimeError("Connection reset by peer"), True),
        (1, jax.errors.JaxRuntimeError("Out of memory"), False),
        (2, OSError("pulled the plug"), False),
    ],
)
def test_where_jax_fails_in_one_of_several_processes_the_error_says_what_to_look_for(
    first_of_two: Wire, count: int, error: Exception, is_explained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: count)
    with pytest.raises(type(error)) as raised, processes.explaining_errors():
        raise error
    said = "".join(traceback.format_exception(raised.value))
    assert (
        "This is training process 0 of 2. If what failed is a connection, another of them has ended or is out of reach"
        in said
    ) == is_explained


@pytest.mark.parametrize("count", [1, 2])
def test_after_an_error_one_of_several_processes_ends_without_waiting(
    first_of_two: Wire, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[Callable[[], object]] = []
    monkeypatch.setattr(jax, "process_count", lambda: count)
    monkeypatch.setattr(atexit, "register", registered.append)
    with processes.leaving_on_error():
        pass
    assert registered == []
    with pytest.raises(OSError, match="pulled the plug"), processes.leaving_on_error():
        raise OSError("pulled the plug")
    assert len(registered) == count - 1
    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    for end in registered:
        end()
    assert ended == [1] * (count - 1)


@pytest.mark.parametrize("altered", [[], ["advantages"], ["tokens", "advantages"]])
def test_a_value_that_differs_in_another_process_is_named_in_all(
    first_of_two: Wire, altered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"tokens": b"12", "mask": b"1", "advantages": b"0.5"}
    rows: list[np.ndarray] = []

    def gather(own: np.ndarray) -> np.ndarray:
        rows.append(own)
        return np.stack([rows[0], own])

    monkeypatch.setattr(multihost_utils, "process_allgather", gather)
    # The first call is the main process's, the second one the other's.
    processes.require_equal(values, "the batch of step 3")
    other = {name: value + b"0" if name in altered else value for name, value in values.items()}
    expected = (
        f"the batch of step 3 is not the same .* it differs in process 1 in {', '.join(altered)}. .* last checkpoint"
    )
    with pytest.raises(processes.ProcessesDifferError, match=expected) if altered else contextlib.nullcontext():
        processes.require_equal(other, "the batch of step 3")
    assert len(rows) == 2
