# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A server that is killed again and again computes what one that is never killed computes."""

import contextlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from marin_rl.serving.tinker.journal import Journal
from marin_rl.serving.tinker.messages import (
    canonical_bytes,
    message_class,
    parse_forward_backward,
    read_forward_backward,
    write_outputs,
)
from marin_rl.serving.tinker.records import AdamParams, ModelSpec
from tests.free_port import free_port
from tests.serving.tinker.fake_trainer import FakeTrainer, start_server
from tests.serving.tinker.killed_service import SOCKET, SPEC
from tests.serving.tinker.wire import Wire, body

KILLS = 20
RATE = 0.25
WINDOW = 12
"""Number of operations without an answer."""


class Client:
    """Sends gradients to the processes of `killed_service`, one after the other."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.model, self.random = folder, "", random.Random(seed)
        self.sent: dict[int, bytes] = {}
        self.answered: set[int] = set()
        self.result: dict[str, Any] = {}
        command = [sys.executable, "-m", "tests.serving.tinker.killed_service", str(folder)]
        self.program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, name: str, number: int, seconds: float, count: int) -> int:
        """Send up to `count` operations and a step to a process that may die; return its exit status."""
        assert self.program.stdin is not None
        assert self.program.stdout is not None
        address = self.folder / SOCKET
        address.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(address))
            listener.listen()
            print(json.dumps([name, number, seconds]), file=self.program.stdin, flush=True)
            with listener.accept()[0] as connection, contextlib.suppress(ConnectionError):
                self._exchange(connection, count)
        return int(self.program.stdout.readline())

    def _exchange(self, connection: socket.socket, count: int) -> None:
        replies = connection.makefile("rb")
        if not (model := replies.readline().decode().strip()):
            return
        assert self.model in ("", model)
        self.model = model
        waiting = list(self.sent.keys() - self.answered)
        while len(self.answered) < count:
            while len(self.sent) < min(count, len(self.answered) + WINDOW):
                seq = len(self.sent) + 1
                tokens = [[seq % 91, *self.random.choices(range(99), k=self.random.choice([1, 30, 30, 3000, 20_000]))]]
                self.sent[seq] = canonical_bytes(parse_forward_backward(body(self.model, seq, tokens)))
                waiting.append(seq)
            self.random.shuffle(waiting)
            while waiting:
                line = f"{waiting[-1]} forward_backward {self.sent[waiting.pop()].hex()}\n".encode()
                # The last answers of a dead process can still be read.
                with contextlib.suppress(ConnectionError):
                    # Some requests are repeated at once, as if their promises were lost.
                    connection.sendall(line * self.random.choice([1, 1, 2]))
            if not (reply := replies.readline()).endswith(b"\n"):
                return
            self.answered.add(int(reply))
        step = json.dumps({"model_id": self.model, "seq_id": count + 1, "adam_params": {"learning_rate": RATE}})
        connection.sendall(f"{count + 1} optim_step {step.encode().hex()}\n".encode())
        while not (reply := replies.readline()).startswith(b"{"):
            assert reply
        self.result = json.loads(reply)

    def check(self) -> None:
        """Check the journal of a process that has died."""
        journal = Journal(self.folder / ".server/journal")
        recorded = [(header["seq"], body) for header, body in journal.records() if header["record"] == "operation"]
        journal.close()
        operations = dict(recorded)
        assert len(operations) == len(recorded)
        assert self.answered <= operations.keys() <= {0, *self.sent}
        assert all(body == self.sent.get(seq, body) for seq, body in recorded)


@pytest.mark.medium
def test_answered_operations_are_recorded_once(tmp_path: Path) -> None:
    client, generator = Client(tmp_path, 0), random.Random(0)
    with client.program:
        for kill in range(KILLS):
            event, seconds = ("append", "answer")[kill % 2], 10 ** generator.uniform(-5, -2)
            status = client.run(event, generator.randrange(1, 30), seconds, 10**6)
            assert status == -signal.SIGKILL
            client.check()
        count = len(client.sent) + WINDOW
        assert client.run("append", 0, 0.0, count) == 0
    trainer = FakeTrainer()
    trainer.create(SPEC)
    for seq in range(1, count + 1):
        trainer.forward_backward(read_forward_backward(client.sent[seq]))
    assert client.result == {"metrics": trainer.optim_step(AdamParams(RATE))}


class Training:
    """Sends steps to a server, and the same steps to a trainer in this process."""

    def __init__(self, wire: Wire) -> None:
        self.wire, self.session = wire, wire.session()
        self.model = wire.model(self.session)
        self.trainer, self.seq, self.step = FakeTrainer(), itertools.count(1), 0
        self.trainer.create(ModelSpec(8, 0, True, True, True))
        self.saved = dict(self.trainer.values)

    def run_step(self) -> None:
        """Send chunks in any order, a step, and a save now and then; compare all results."""
        self.step += 1
        generator = random.Random(self.step)
        chunks = [next(self.seq) for _ in range(3)]
        expected: dict[str, Any] = {}
        data = {
            seq: body(self.model, seq, [[seq % 91, generator.randrange(99)]] * 2, forward_only=seq % 7 == 0)
            for seq in chunks
        }
        for seq in chunks:
            expected[f"{self.model}:{seq}"] = write_outputs(
                self.trainer.forward_backward(read_forward_backward(data[seq]))
            )
        step = next(self.seq)
        expected[f"{self.model}:{step}"] = {"metrics": self.trainer.optim_step(AdamParams(RATE))}
        for seq in generator.sample(chunks, 3):
            # Some of the promises get lost.
            for _ in range(generator.choice([1, 1, 2])):
                assert self.wire.ask("forward_backward", data[seq]).is_success
        self.wire.operate("optim_step", self.model, step, adam_params={"learning_rate": RATE})
        if self.step % 3 == 0:
            self._sample(expected)
        if self.step % 4 == 0:
            seq, self.saved = next(self.seq), dict(self.trainer.values)
            self.wire.operate("save_weights", self.model, seq, path="last", overwrite=True)
            expected[f"{self.model}:{seq}"] = {"path": f"tinker://{self.model}/weights/last"}
        if self.step % 10 == 0:
            seq, path = next(self.seq), f"tinker://{self.model}/weights/last"
            self.trainer.values = {**self.saved, "steps": 0.0}
            self.wire.operate("load_weights", self.model, seq, path=path, optimizer=False)
            expected[f"{self.model}:{seq}"] = {"model_id": self.model, "path": path}
        for id, result in expected.items():
            found = self.wire.result(id)
            if isinstance(result, bytes):
                found, result = (message_class("ForwardBackwardOutput").FromString(one) for one in (found, result))
            assert found == result, id

    def _sample(self, expected: dict[str, Any]) -> None:
        seq = next(self.seq)
        # A second try, as that of the SDK, has another number.
        for number in (seq, seq + 10**6)[: 1 + seq % 2]:
            id = self.wire.operate("save_weights_for_sampler", self.model, seq, sampling_session_seq_id=number)
        sampler = self.wire.result(id)["sampling_session_id"]
        expected[f"{self.model}:{seq}"] = {"sampling_session_id": sampler}
        assert sampler in [f"{self.session}:sample:{number}" for number in (seq, seq + 10**6)]
        assert self.wire.weight(sampler) == np.float32(self.trainer.values["weight"])


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_kills_neither_lose_nor_double_gradients(tmp_path: Path, seed: int) -> None:
    generator, port = random.Random(seed), free_port()
    # One half dies by itself at an operation of the file system, the other half by a signal after some time.
    deaths = [generator.randrange(3, 80) if seed == 0 else 0 for _ in range(KILLS)] + [0]
    server = start_server(tmp_path, port, state_seconds=0.02, seconds=0.002, deaths=deaths)
    assert server.stdout is not None
    children: list[int] = []

    def kill() -> None:
        assert server.stdout is not None
        for line in server.stdout:
            children.append(int(line))
            if len(children) <= KILLS and deaths[len(children) - 1] == 0:
                time.sleep(generator.uniform(0.05, 0.5))
                os.kill(children[-1], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        training = Training(Wire(f"http://127.0.0.1:{port}"))
        while len(children) <= KILLS:
            training.run_step()
        training.run_step()
    finally:
        os.kill(children[-1], signal.SIGTERM)
        server.wait(30)
        killer.join(30)
        server.stdout.close()
    assert len(children) == KILLS + 1
    assert training.step > 5
