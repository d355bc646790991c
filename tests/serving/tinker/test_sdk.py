# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The server with the SDK of Tinker: of this environment, or of the Python that `MARIN_RL_TINKER_PYTHON` names."""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

from marin_rl.serving.tinker.trainer_thread import Limits
from tests.free_port import free_port
from tests.serving.tinker.fake_trainer import start_server
from tests.serving.tinker.test_service import fake_loss, gradient
from tests.serving.tinker.test_trainer import dense_logs, tiny_trainer
from tests.serving.tinker.wire import serving

PYTHON = os.environ.get("MARIN_RL_TINKER_PYTHON") or (sys.executable if importlib.util.find_spec("tinker") else None)

SECONDS = 300.0
"""Time after which a client is killed that does not end."""

pytestmark = [
    pytest.mark.skipif(PYTHON is None, reason="the package tinker is not installed"),
    pytest.mark.medium,
]


def options(url: str) -> dict[str, str]:
    """Return the environment variables of a client."""
    # The path is for versions of the SDK that are not installed.
    client = {"PYTHONPATH": os.environ.get("MARIN_RL_TINKER_PATH", ""), "TINKER_API_KEY": "tml-none"}
    return {**os.environ, **client, "TINKER_BASE_URL": url, "TINKER_TELEMETRY": "0"}


def python(*arguments: str, url: str = "") -> "subprocess.CompletedProcess[str]":
    """Run the Python of the SDK."""
    command = [str(PYTHON), "-W", "ignore", *arguments]
    return subprocess.run(command, env=options(url), capture_output=True, text=True, timeout=SECONDS, check=False)


def run(program: str, url: str, *arguments: str) -> str:
    """Run a program of this folder with the SDK; return what it prints."""
    done = python(str(Path(__file__).with_name(program)), *arguments, url=url)
    assert done.returncode == 0, done.stderr
    return done.stdout


def client(scenario: str, url: str) -> Any:
    """Run a client, and return what it prints last."""
    return json.loads(run("sdk_client.py", url, scenario).splitlines()[-1])


@contextlib.contextmanager
def started(scenario: str, url: str) -> Iterator[tuple["subprocess.Popen[str]", IO[str]]]:
    """Start a client, and yield it and its output; it is killed at the end."""
    command = [str(PYTHON), "-W", "ignore", str(Path(__file__).with_name("sdk_client.py")), scenario]
    with subprocess.Popen(command, env=options(url), stdout=subprocess.PIPE, text=True) as process:
        watchdog = threading.Timer(SECONDS, process.kill)
        watchdog.start()
        try:
            assert process.stdout is not None
            yield process, process.stdout
        finally:
            watchdog.cancel()
            process.kill()


def test_a_session(tmp_path: Path) -> None:
    with serving(tmp_path) as (url, _):
        found = client("session", url)
    assert found["models"] == ["base"]
    assert found["info"] == "base"
    small = [[1, 2, 3], [4]]
    for logprobs, sequence in zip(found["outputs"], small, strict=True):
        np.testing.assert_array_equal(np.float32(logprobs), -0.01 * np.float32(sequence))
    first = 0.9 * 9 + 0.5 * fake_loss(small)
    assert found["loss"] == -fake_loss(small)
    assert found["step"] == {"weight": first, "gradient": 0.0, "steps": 1.0}
    tokens = [[n % 97, n % 89] for n in range(2500)]
    np.testing.assert_array_equal(np.float32(found["many"]), -0.01 * np.float32(tokens))
    second = 0.9 * first + 0.5 * gradient(*(fake_loss(tokens[start : start + 1024]) for start in (0, 1024, 2048)))
    assert found["many_step"]["weight"] == second
    assert "gspo" in found["refused"]
    assert "vocabulary" in found["failed"]
    assert "no checkpoint" in found["missing"]
    # Samplers are frozen, and the base is the base.
    assert found["samples"] == [float(np.float32(second))] * 120
    assert found["prompt"] == [None, *[float(np.float32(-second))] * 2]
    assert found["topk"] == [None, *[[[1, float(np.float32(-second))]] * 2] * 2]
    assert found["base"] == [0.0]
    assert found["loaded"] == found["again"] == {"weight": 0.9 * second, "gradient": 0.0, "steps": 3.0}
    assert found["run"] == {"renderer_name": "r"}
    assert found["runs"] == found["session"] == 2
    assert found["checkpoints"] == ["sampler_weights/one", "weights/one"]
    assert found["expiring"] == [True, True]
    assert found["left"] == ["sampler_weights/one"]


def test_likeliest_tokens_of_a_prompt(tmp_path: Path) -> None:
    trainer, prompt = tiny_trainer(tmp_path / "model"), np.array([70, 71, 72, 73], np.int32)
    logs = dense_logs(trainer._base, prompt)
    with serving(tmp_path / "server", trainer) as (url, _):
        (no_top, *tops), (no_logprob, *logprobs) = client("likeliest", url)
    assert no_top is no_logprob is None
    np.testing.assert_allclose(logprobs, logs[np.arange(3), prompt[1:]], atol=1e-5)
    for found, row in zip(tops, logs[:-1], strict=True):
        ids, values = zip(*found, strict=True)
        np.testing.assert_allclose(values, np.sort(row)[::-1][:5], atol=1e-5)
        np.testing.assert_allclose(row[list(ids)], values, atol=1e-5)


def test_a_killed_client_can_be_started_again_at_once(tmp_path: Path) -> None:
    with serving(tmp_path, limits=Limits(session=4.0)) as (url, _):
        with started("steps", url) as (_, output):
            output.readline()
        assert client("steps", url)["steps"] == 10


@pytest.mark.slow
def test_a_killed_server(tmp_path: Path) -> None:
    port = free_port()
    # Operations take a while, so that the server is killed during the step that follows.
    server = start_server(tmp_path, port, state_seconds=0.5, seconds=0.1, deaths=[0] * 4)
    assert server.stdout is not None
    child = int(server.stdout.readline())
    metrics: list[dict[str, float]] = []
    try:
        with started("steps", f"http://127.0.0.1:{port}") as (process, output):
            for line in output:
                metrics.append(json.loads(line))
                if len(metrics) in (2, 5, 8):
                    os.kill(child, 9)
                    child = int(server.stdout.readline())
            assert process.wait() == 0
    finally:
        os.kill(child, 15)
        server.wait(30)
        server.stdout.close()
    weight, expected = 9.0, []
    for number in range(10):
        weight = 0.9 * weight + 0.5 * fake_loss([[number + 1, number + 2]])
        expected.append({"weight": weight, "gradient": 0.0, "steps": number + 1.0})
    assert metrics == expected
