# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import os
import threading
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from marin_rl.rewards.sandbox import protocol
from marin_rl.rewards.sandbox.protocol import CallLimits, WorkerSpec

VALUES = st.dictionaries(st.text(), st.text() | st.integers() | st.lists(st.text()))


def through_a_pipe(data: bytes) -> list[object]:
    reading, writing = os.pipe()
    thread = threading.Thread(target=lambda: (os.write(writing, data), os.close(writing)))
    thread.start()
    found = []
    while (message := protocol.read(reading)) is not None:
        found.append(message)
    thread.join()
    os.close(reading)
    return found


@given(messages=st.lists(VALUES, max_size=4))
def test_messages_survive_a_round_trip(messages):
    assert through_a_pipe(b"".join(protocol.encode(message) for message in messages)) == messages


def test_messages_larger_than_the_pipe_buffer():
    message = {"text": "ü" * 1_000_000}
    reading, writing = os.pipe()
    thread = threading.Thread(target=protocol.write, args=(writing, protocol.encode(message)))
    thread.start()
    assert protocol.read(reading) == message
    thread.join()
    os.close(reading)
    os.close(writing)


def test_truncated_message_reads_as_end_of_pipe():
    data = protocol.encode({"a": 1})
    for cut in range(len(data)):
        assert through_a_pipe(data[:cut]) == []


TEXT = st.text(max_size=8)
# Finite numbers survive JSON exactly.
SECONDS = st.floats(min_value=0, allow_infinity=False)
COUNT = st.integers(0, 2**63)
FIELDS = st.fixed_dictionaries(
    {
        "file": st.none() | TEXT,
        "scratch": TEXT,
        **{name: st.lists(TEXT).map(tuple) for name in ("read", "python_path", "hidden_path")},
        "has_namespaces": st.booleans(),
        "landlock": st.integers(0, 9),
        "seccomp": st.booleans(),
        "start_seconds": SECONDS,
    }
)
LIMITS = st.builds(
    CallLimits,
    wall_seconds=SECONDS,
    cpu_seconds=SECONDS,
    memory_bytes=COUNT,
    processes=COUNT,
    file_bytes=COUNT,
    output_bytes=COUNT,
)


@given(FIELDS, LIMITS)
def test_spec_survives_json(fields: dict[str, Any], limits: CallLimits):
    spec = WorkerSpec(**fields, limits=limits)
    text = spec.to_json()
    assert "\n" not in text
    assert WorkerSpec.from_json(text) == spec


@given(FIELDS, LIMITS)
def test_can_start_processes(fields: dict[str, Any], limits: CallLimits):
    none = dataclasses.replace(limits, processes=0)
    assert not WorkerSpec(**{**fields, "seccomp": True}, limits=none).can_start_processes
    assert WorkerSpec(**{**fields, "seccomp": False}, limits=none).can_start_processes
    one = dataclasses.replace(limits, processes=1)
    assert WorkerSpec(**fields, limits=one).can_start_processes
