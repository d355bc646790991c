# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Two processes that share a mesh of four devices compute the same as one process with four devices."""

import contextlib
import dataclasses
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from marin_rl.config.workers_config import WeightTransferConfig
from marin_rl.distributed.weight_receiver import open_receiver
from marin_rl.distributed.weight_server import FlightSource
from marin_rl.runs.run_directory import CheckpointError
from marin_rl.runs.saved_checkpoint import open_checkpoint
from tests.cpu_host import cpu_host
from tests.fork_server import ForkedProcess, popen
from tests.free_port import free_port
from tests.learner.distributed_training import DEVICES

pytestmark = pytest.mark.slow

TOKEN = "0123456789abcdef" * 4
SECONDS = 900.0
"""Seconds after which a hanging process is killed."""


@dataclasses.dataclass(frozen=True)
class Process:
    """One of the processes, which serves its weights until it is closed."""

    facts: dict[str, Any]
    arrays: dict[str, np.ndarray]


def start(folder: Path, index: int, count: int, port: int) -> ForkedProcess:
    command = [sys.executable, "-m", "tests.learner.distributed_training", *map(str, (folder, index, count, port))]
    outputs = (folder / f"facts-{index}.txt", folder / f"said-{index}.txt")
    with outputs[0].open("wb") as stdout, outputs[1].open("wb") as stderr:
        return popen(command, stdout=stdout, stderr=stderr, env={**os.environ, **cpu_host(DEVICES // count)})


def read_facts(process: ForkedProcess, file: Path) -> str:
    """Wait for the line of JSON; an empty string if the process fails. Gloo writes to the same stream."""
    while True:
        has_ended = process.poll() is not None
        for line in file.read_text().splitlines(keepends=True):
            if line.startswith("{") and line.endswith("\n"):
                return line
        if has_ended:
            return ""
        time.sleep(0.05)


@contextlib.contextmanager
def training(folders: dict[int, Path]) -> Iterator[dict[int, list[Process]]]:
    """Train in each of these numbers of processes, all at the same time, with a folder for each."""
    with contextlib.ExitStack() as opened:
        running: dict[int, list[ForkedProcess]] = {}
        for count, folder in folders.items():
            port = free_port()
            running[count] = [start(folder, index, count, port) for index in range(count)]
        for process in itertools.chain(*running.values()):
            opened.callback(process.kill)
            timer = threading.Timer(SECONDS, process.kill)
            opened.callback(timer.cancel)
            timer.start()
        found: dict[int, list[Process]] = {}
        for count, processes in running.items():
            lines = [
                read_facts(process, folders[count] / f"facts-{index}.txt") for index, process in enumerate(processes)
            ]
            for index, line in enumerate(lines):
                assert line, f"process {index} of {count}: {said(folders[count], index)}"
            found[count] = [
                Process(json.loads(line), dict(np.load(folders[count] / f"process-{index}.npz")))
                for index, line in enumerate(lines)
            ]
        yield found
        for count, processes in running.items():
            # Close all of them: each waits for the others at its end.
            for process in processes:
                process.terminate()
            for index, process in enumerate(processes):
                assert process.wait() == 0, said(folders[count], index)


def said(folder: Path, index: int) -> str:
    return (folder / f"said-{index}.txt").read_text()[-4000:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[dict[int, list[Process]]]:
    with training({1: tmp_path_factory.mktemp("alone"), 2: folder}) as processes:
        yield processes


@pytest.fixture
def alone(trained: dict[int, list[Process]]) -> Process:
    return trained[1][0]


@pytest.fixture
def two(trained: dict[int, list[Process]]) -> list[Process]:
    return trained[2]


@pytest.mark.medium
def test_each_process_holds_its_share_of_the_same_mesh(alone: Process, two: list[Process]) -> None:
    assert alone.facts["devices"] == [4, 4]
    assert alone.facts["own elements"] == alone.facts["elements"]
    for process in two:
        assert process.facts["devices"] == [2, 4]
        assert process.facts["mesh"] == alone.facts["mesh"] == {"replica": 1, "data": 4, "model": 1}
        assert process.facts["elements"] == alone.facts["elements"]
        assert 2 * process.facts["own elements"] == process.facts["elements"]


def test_jax_does_not_ignore_a_signal_to_end(alone: Process, two: list[Process]) -> None:
    assert [process.facts["ends at SIGTERM"] for process in (alone, *two)] == [True] * 3


def test_result_of_the_main_process_is_broadcast(two: list[Process]) -> None:
    assert [process.facts["main"] for process in two] == [True, False]
    for process in two:
        assert process.facts["said"] == ["0", "ä" * 300 + "0", "ä" * 2**18 + "0"]
        assert process.facts["gathered"] == ["0", "1" * 200_001]
        assert process.facts["agreed"] == [True, False]
    assert [process.facts["error"] for process in two] == [
        "OSError: pulled the plug",
        "MainProcessError: the main training process ended with an error: OSError: pulled the plug",
    ]


def test_different_batches_are_an_error_in_all_processes(alone: Process, two: list[Process]) -> None:
    assert alone.facts["differs"] == ""
    for process in two:
        assert process.facts["differs"].startswith(
            "the batch of step 5 is not the same in all training processes; compared with the main process (0), it "
            "differs in process 1 in advantages, experts. "
        )


def test_losses_and_weights_match_a_single_process(alone: Process, two: list[Process]) -> None:
    # Not bit-identical: the sums over devices are added in another order.
    for process in two:
        assert len(process.facts["measured"]) == 3
        for found, expected in zip(process.facts["measured"], alone.facts["measured"], strict=True):
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert found[name] == pytest.approx(value, rel=1e-6), name
        assert process.arrays.keys() == alone.arrays.keys()
        for name, array in alone.arrays.items():
            np.testing.assert_allclose(process.arrays[name], array, rtol=1e-5, atol=1e-6, err_msg=name)
            assert process.arrays[name].tobytes() == two[0].arrays[name].tobytes(), name
    assert two[0].facts["measured"] == two[1].facts["measured"]
    losses = [step["loss/total"] for step in alone.facts["measured"]]
    assert len(set(losses)) == 3


def test_checkpoint_is_written_and_read_by_both_processes(folder: Path, alone: Process, two: list[Process]) -> None:
    for process in two:
        assert process.facts["restored"] == alone.facts["restored"] > 20
    [saved] = (folder / "checkpoints").iterdir()
    manifest = json.loads((saved / "manifest.json").read_text())
    assert (saved.name, manifest["progress"], "more" in manifest["files"]) == ("step-00000003", {"saved by": 2}, True)
    # Each file is written once. The two devices of each process hold every second of the four chunks.
    [first, second] = [process.facts["written"] for process in two]
    assert sorted([*first, *second]) == sorted(Path(name).name for name in manifest["files"] if name != "more")
    chunks = [f"model.transformer.layers.stacked.mlp.up_proj.weight-0.0.{number}.bin" for number in range(4)]
    assert [name in first for name in chunks] == [True, False, True, False]
    (saved / "state" / chunks[-1]).unlink()
    with pytest.raises(CheckpointError, match=f"state/{chunks[-1]} is missing"):
        open_checkpoint(saved)


def test_the_main_process_exports_the_weights_of_both(folder: Path, two: list[Process]) -> None:
    files = [path for path in folder.iterdir() if path.suffix == ".safetensors"]
    assert len(files) > 1
    exported = {name: array for path in files for name, array in load_file(path).items()}
    arrays = {name.removesuffix("[<flat index 0>]"): array for name, array in two[0].arrays.items()}
    stacked = ".model.transformer.layers.stacked"
    expected = {
        "lm_head.weight": arrays[".model.lm_head.weight"],
        "model.embed_tokens.weight": arrays[".model.embeddings.token_embeddings.weight"],
        "model.layers.0.mlp.up_proj.weight": arrays[f"{stacked}.mlp.up_proj.weight"][0],
        "model.layers.0.input_layernorm.weight": arrays[f"{stacked}.input_layernorm.weight"][0],
    }
    for name, array in expected.items():
        np.testing.assert_array_equal(exported[name], array, err_msg=name)


def test_no_device_copies_a_whole_array_for_the_export(alone: Process, two: list[Process]) -> None:
    row = 64 * 4
    for process in (alone, *two):
        assert process.facts["bytes to take a row"] < 4 * row


def test_each_process_feeds_its_own_rows(alone: Process, two: list[Process]) -> None:
    [of_all, expected] = alone.facts["fed"]
    assert of_all == expected
    for process in two:
        assert process.facts["rows"] == [alone.facts["rows"][0], alone.facts["rows"][1] // 2]
        # The whole batch in each process gives the same arrays on the devices.
        assert process.facts["fed"][1] == process.facts["fed"][0]
        assert process.facts["fed"][1] == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert expected["grad_norm"] > 0
    for process in (alone, *two):
        assert process.facts["experts"] == [True, True]


def test_each_process_samples_on_its_own_devices(alone: Process, two: list[Process]) -> None:
    for process in two:
        for found, expected in zip(process.facts["sampled"], alone.facts["sampled"], strict=True):
            assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
            for (_, logprobs), (_, of_one) in zip(found, expected, strict=True):
                assert logprobs == pytest.approx(of_one, abs=1e-5)


def test_processes_read_their_shards_of_a_checkpoint(alone: Process, two: list[Process]) -> None:
    for process in (alone, *two):
        assert process.facts["more"] == "of the main process"
    assert alone.facts["bytes read"] == alone.facts["bytes saved"] > 10_000
    # Both read the arrays that are not sharded, such as the norms' weights.
    for process in two:
        assert 0.5 <= process.facts["bytes read"] / process.facts["bytes saved"] < 0.55


@pytest.mark.medium
def test_each_server_serves_its_own_shards_and_a_worker_assembles_them(
    tiny: Any, model: Any, two: list[Process]
) -> None:
    addresses = two[0].facts["addresses"]
    assert len(set(addresses)) == 2
    assert two[1].facts["addresses"] == addresses
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), eqx.filter(model, eqx.is_array))
    receiver = open_receiver(WeightTransferConfig(), addresses, TOKEN)
    received, version = receiver.receive(shapes)
    assert version == 3
    found = tiny.arrays_by_path(received)
    assert found
    for name, array in found.items():
        assert array.tobytes() == two[0].arrays[f".model{name}"].tobytes(), name

    total = sum(array.nbytes for array in found.values())
    served = []
    for address in addresses:
        manifest = FlightSource(address, TOKEN, streams=1).manifest(3)
        served.append(sum(piece.num_bytes for piece in manifest.pieces))
    assert sum(served) == total  # each byte once
    # The first process serves the arrays that are not sharded, such as the norms' weights.
    assert 0.45 * total < served[1] <= served[0] < 0.55 * total
