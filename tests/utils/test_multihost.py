# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Communication between processes, with one process in both roles; tests/learner/test_distributed.py uses two."""

import contextlib
import json
from collections.abc import Callable

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from marin_rl.utils import multihost


class Wire:
    """Records the broadcasts of the first of two processes."""

    def __init__(self) -> None:
        self.sent: list[np.ndarray] = []

    def broadcast(self, array: np.ndarray) -> np.ndarray:
        self.sent.append(array)
        return array

    @property
    def texts(self) -> list[str]:
        """The messages; for each, the two parts of its length and then its bytes were sent."""
        lengths, padded = self.sent[::2], self.sent[1::2]
        return [data.tobytes()[: int(length[1])].decode() for length, data in zip(lengths, padded, strict=True)]


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


def test_an_interrupt_of_the_main_process_reaches_the_waiting_processes(first_of_two: Wire) -> None:
    with pytest.raises(KeyboardInterrupt):
        multihost.on_main(raising(KeyboardInterrupt("at work")))
    assert [json.loads(text) for text in first_of_two.texts] == [{"error": "KeyboardInterrupt: at work"}]


def test_messages_are_padded_to_few_sizes_and_unchanged(first_of_two: Wire) -> None:
    messages = ["x" * length + "ä" for length in range(0, 3000, 7)]
    assert [multihost.on_main(lambda text=text: text) for text in messages] == messages
    assert [json.loads(text)["result"] for text in first_of_two.texts] == messages
    # Each size compiles one program.
    assert len({array.shape for array in first_of_two.sent[1::2]}) <= 5


@pytest.mark.parametrize("result", ["text\n\ud83d", None, b"", bytes(range(256)) + b"\n{}"])
def test_the_other_processes_receive_the_result(
    first_of_two: Wire, result: str | bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert multihost.on_main(lambda: result) == result
    sent = iter(first_of_two.sent)
    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", lambda array: next(sent))
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert multihost.on_main(raising(AssertionError("called in the main process only"))) == result


@pytest.mark.parametrize("altered", [[], ["advantages"], ["tokens", "advantages"]])
def test_a_value_that_differs_between_processes_is_named_in_all(
    first_of_two: Wire, altered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"tokens": b"12", "mask": b"1", "advantages": b"0.5"}
    rows: list[np.ndarray] = []

    def gather(own: np.ndarray) -> np.ndarray:
        rows.append(own)
        return np.stack([rows[0], own])

    monkeypatch.setattr(multihost_utils, "process_allgather", gather)
    # The first call is made by the main process, the second by the other process.
    multihost.require_equal(values, "the batch of step 3")
    other = {name: value + b"0" if name in altered else value for name, value in values.items()}
    expected = (
        f"the batch of step 3 is not the same .* it differs in process 1 in {', '.join(altered)}. .* last checkpoint"
    )
    with pytest.raises(multihost.ProcessesDifferError, match=expected) if altered else contextlib.nullcontext():
        multihost.require_equal(other, "the batch of step 3")
    assert len(rows) == 2
