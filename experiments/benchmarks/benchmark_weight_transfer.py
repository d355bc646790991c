# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""How fast weights reach a worker, beside a plain socket and a copy in memory, and what publishing costs a step.

    python -m experiments.benchmarks.benchmark_weight_transfer
    python -m experiments.benchmarks.benchmark_weight_transfer --sizes_mb 4000 --servers 1 4 --streams 8

Servers are processes of their own on this machine, with equal shares of the rows of every array. In each round the
transfer, one plain socket for each server and a copy take turns, all into fresh memory, as a worker needs it; so each
round gives one ratio, and whatever else the machine does falls on all of them. The transfer ends with arrays on the
device, each checksum verified. Publishing is measured in the training step of the config.
"""

import contextlib
import dataclasses
import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from experiments.benchmarks.benchmark_training_step import pack, random_rollouts
from experiments.benchmarks.measurement import (
    benchmark_parser,
    load_config,
    make_report,
    say,
    spread,
    timed,
    without_compilation_cache,
)
from experiments.benchmarks.weight_servers import ARRAYS, COLUMNS, Share, shape_of_arrays
from marin_rl.learner.policy_model import initialize_policy
from marin_rl.learner.train_step import Learner
from marin_rl.runtime.config import TrainConfig
from marin_rl.runtime.devices import start_devices
from marin_rl.runtime.open_run import make_loss
from marin_rl.weights.config import ArrowFlightConfig, SharedFilesConfig, WeightTransferConfig
from marin_rl.weights.snapshot import TrainingHost
from marin_rl.weights.token import make_token


@dataclasses.dataclass(frozen=True)
class Ports:
    """Where one server listens."""

    flight: int
    """As a run's weight server."""
    socket: int
    """For plain bytes."""


@contextlib.contextmanager
def weight_servers(token: str, rows: int, count: int, chunk_mb: int) -> Iterator[list[Ports]]:
    """Processes that hold the weights together."""
    processes = []
    try:
        for host in range(count):
            share = json.dumps(dataclasses.asdict(Share(token, host, count, rows, chunk_mb)))
            command = [sys.executable, "-m", "experiments.benchmarks.weight_servers", share]
            processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        yield [_ports_of(process) for process in processes]
    finally:
        for process in processes:
            process.communicate()


def _ports_of(server: subprocess.Popen[str]) -> Ports:
    assert server.stdout is not None
    return Ports(**json.loads(server.stdout.readline()))


def read_plainly(port: int, num_bytes: int) -> None:
    """Read bytes over a plain socket into fresh memory."""
    memory = memoryview(np.empty(num_bytes, np.uint8).data)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while memory:
            memory = memory[connection.recv_into(memory) :]


def read_all_plainly(ports: Sequence[Ports], num_bytes: int) -> None:
    """Read an equal share from every server at the same time."""
    with ThreadPoolExecutor(len(ports)) as threads:
        list(threads.map(lambda server: read_plainly(server.socket, num_bytes // len(ports)), ports))


def measure_transfer(rows: int, servers: int, rounds: int, config: ArrowFlightConfig) -> dict[str, Any]:
    """Gigabytes a second (1e9) of one size from some servers.

    Args:
        rows: of each array.
        servers: how many share the rows.
        rounds: timed rounds, after one that is not.
        config: streams and chunks.
    """
    token = make_token()
    shape = shape_of_arrays(rows)
    like = {str(number): jax.ShapeDtypeStruct(shape, np.float32) for number in range(ARRAYS)}
    num_bytes = ARRAYS * rows * COLUMNS * 4
    source = np.ones(num_bytes, np.uint8)
    target = np.ones(num_bytes, np.uint8)
    with weight_servers(token, rows, servers, config.chunk_mb) as ports:
        receiver = config.open_receiver([f"grpc+tls://127.0.0.1:{server.flight}" for server in ports], token)
        kinds: dict[str, Callable[[], object]] = {
            "transfer": lambda: jax.block_until_ready(receiver.receive(like)),
            "socket": lambda: read_all_plainly(ports, num_bytes),
            "copy_to_fresh_memory": source.copy,
            "copy_to_used_memory": lambda: np.copyto(target, source),
        }
        seconds = _take_turns(kinds, rounds)
    figures = {f"{kind}_gb_per_second": spread([num_bytes / taken / 1e9 for taken in seconds[kind]]) for kind in kinds}
    for other in ("socket", "copy_to_fresh_memory"):
        ratios = [theirs / ours for ours, theirs in zip(seconds["transfer"], seconds[other], strict=True)]
        figures[f"transfer_over_{other}"] = spread(ratios)
    return {"bytes": num_bytes, **figures}


def _take_turns(kinds: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each kind in every round but the first; who begins moves on from round to round."""
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    order = list(kinds)
    for round_number in range(rounds + 1):
        for kind in order:
            taken = timed(kinds[kind])
            if round_number:
                seconds[kind].append(taken)
        order = [*order[1:], order[0]]
    return seconds


def measure_files(rows: int, rounds: int) -> dict[str, Any]:
    """Gigabytes a second to and from files in the temporary folder, one training host."""
    weights = {str(number): np.ones(shape_of_arrays(rows), np.float32) for number in range(ARRAYS)}
    like = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in weights.items()}
    num_bytes = sum(array.nbytes for array in weights.values())
    token = make_token()
    rates: dict[str, list[float]] = {"publish": [], "receive": []}
    with tempfile.TemporaryDirectory() as folder:
        config = SharedFilesConfig(folder=folder)
        sender = config.open_sender(token, TrainingHost.current())
        receiver = config.open_receiver([sender.address], token)
        for version in range(rounds):

            def publish(version: int = version) -> None:
                sender.publish(weights, version)
                sender.flush()

            rates["publish"].append(num_bytes / timed(publish) / 1e9)
            rates["receive"].append(num_bytes / timed(lambda: jax.block_until_ready(receiver.receive(like))) / 1e9)
        sender.close()
    return {f"{name}_gb_per_second": spread(measured) for name, measured in rates.items()}


def measure_publishing(config: TrainConfig, steps: int, way: WeightTransferConfig) -> dict[str, Any]:
    """What publishing after every step costs the learner.

    Steps with and without publishing take turns. The call itself holds the learner up; what goes on in the background
    may slow the step that follows.

    Args:
        config: model, batch and optimizer.
        steps: timed steps of each kind.
        way: how weights are published.
    """
    assert config.model is not None
    trainer = start_devices(config.trainer_config(), rows_per_device=config.rollouts.rows_per_device)
    tokenizer = config.tokenizer.build()
    lengths = np.full(config.rollouts.rollouts_per_step, config.rollouts.max_length)
    rollouts = random_rollouts(
        lengths, tokenizer.vocab_size, config.sampling.max_new_tokens, config.rollouts.max_length
    )
    advantages = np.random.default_rng(0).normal(size=len(rollouts)).tolist()
    passes = pack(config, trainer, rollouts, advantages, packed=config.rollouts.packing).passes
    learner = Learner(trainer, config.optimizer, make_loss(config), num_updates=1_000_000)
    model = initialize_policy(config.model, tokenizer, trainer, key=jax.random.PRNGKey(0))
    state = learner.initial_state(model, jax.random.PRNGKey(1))
    sender = way.open_sender(make_token(), TrainingHost.current())

    def step() -> None:
        nonlocal state
        state, measured = learner.step(state, passes)
        # A run reads every metric back.
        for metric in measured.values():
            float(metric)

    step()
    sender.publish(state.model, 0)
    sender.flush()
    calls, with_publishing, without = [], [], []
    for version in range(1, steps + 1):
        sender.flush()
        without.append(timed(step))
        published = state.model
        calls.append(timed(lambda published=published, version=version: sender.publish(published, version)))
        with_publishing.append(timed(step))
    sender.close()
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state.model) if isinstance(leaf, jax.Array))
    return {
        "bytes": num_bytes,
        "step_seconds": spread(without),
        "publish_call_seconds": spread(calls),
        "publish_call_over_step": spread([call / alone for call, alone in zip(calls, without, strict=True)]),
        "next_step_over_step": spread([after / alone for after, alone in zip(with_publishing, without, strict=True)]),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print one JSON object."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = benchmark_parser("Weights to a worker, and what publishing costs; other flags are those of marin_rl.train")
    parser.add_argument("--sizes_mb", type=int, nargs="+", default=[100, 400, 1000], help="megabytes (1e6) of weights")
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2, 4], help="training hosts")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of each kind")
    parser.add_argument("--streams", type=int, default=ArrowFlightConfig.streams, help="streams for each server")
    parser.add_argument("--chunk_mb", type=int, default=ArrowFlightConfig.chunk_mb, help="mebibytes of a chunk")
    parser.add_argument("--steps", type=int, default=20, help="timed training steps of each kind")
    arguments, rest = parser.parse_known_args(argv)
    train_config = load_config(rest)
    without_compilation_cache()
    way = ArrowFlightConfig(streams=arguments.streams, chunk_mb=arguments.chunk_mb)
    figures: dict[str, Any] = {"publishing": measure_publishing(train_config, arguments.steps, way)}
    say(f"publishing: {figures['publishing']['publish_call_over_step']} of a step")
    for size in arguments.sizes_mb:
        for servers in arguments.servers:
            # Every server holds as many rows.
            rows = servers * max(1, round(size * 1e6 / (ARRAYS * COLUMNS * 4) / servers))
            measured = measure_transfer(rows, servers, arguments.rounds, way)
            figures[f"{size}_mb_from_{servers}"] = measured
            say(f"{size} MB from {servers}: {measured['transfer_gb_per_second']['median']:.2f} GB/s")
        rows = max(1, round(size * 1e6 / (ARRAYS * COLUMNS * 4)))
        figures[f"{size}_mb_in_files"] = measure_files(rows, arguments.rounds)
    print(make_report("benchmark_weight_transfer", argv, vars(arguments), figures))


if __name__ == "__main__":
    main()
