# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_rl.rewards.sandbox import frames

VALUES = st.dictionaries(st.text(), st.text() | st.integers() | st.lists(st.text()))


def through_a_pipe(data: bytes) -> list[object]:
    reading, writing = os.pipe()
    thread = threading.Thread(target=lambda: (os.write(writing, data), os.close(writing)))
    thread.start()
    found = []
    while (message := frames.read(reading)) is not None:
        found.append(message)
    thread.join()
    os.close(reading)
    return found


@given(messages=st.lists(VALUES, max_size=4))
def test_messages_survive_a_round_trip(messages):
    assert through_a_pipe(b"".join(frames.encode(message) for message in messages)) == messages


def test_messages_larger_than_the_pipe_buffer():
    message = {"text": "ü" * 1_000_000}
    reading, writing = os.pipe()
    thread = threading.Thread(target=frames.write, args=(writing, message))
    thread.start()
    assert frames.read(reading) == message
    thread.join()
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize("cut", [0, 1, 3, 4, 5, 11])
def test_truncated_message_reads_as_end_of_pipe(cut: int):
    assert through_a_pipe(frames.encode({"a": 1})[:cut]) == []
