# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Throughput of weight transfer to a worker, compared with a plain socket and a copy, and the cost of publishing.

    python -m experiments.lab.benchmarks.benchmark_weight_transfer
    python -m experiments.lab.benchmarks.benchmark_weight_transfer --sizes_mb 4000 --servers 1 4 --streams 8

Servers are separate processes on this machine, with equal shares of the rows of every array. In each round the
transfer, one plain socket per server and a copy alternate, all into fresh memory as in a worker, so that other load
affects all of them equally and each round gives one ratio. The transfer ends with arrays on the device.
Publishing is measured in the training step of the config.

For the config's model, the whole path of a new version is measured too: from its announcement to the coordinator, an
actor under Ray, until the sampler of a rollout worker has the weights. The worker is a thread of this process.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import queue
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import jax
import numpy as np
import ray

from experiments.lab.benchmarks.benchmark_training_step import pack, random_rollouts
from experiments.lab.benchmarks.measurement import (
    benchmark_parser,
    load_config,
    make_report,
    ratios,
    say,
    spread,
    take_turns,
    timed,
    without_compilation_cache,
)
from experiments.lab.benchmarks.weight_servers import Share
from marin_rl.config.train_config import TrainConfig
from marin_rl.config.workers_config import WeightTransferConfig
from marin_rl.distributed.coordinator import Coordinator
from marin_rl.distributed.coordinator_client import CoordinatorClient
from marin_rl.distributed.ray_node import connected_to_local_node
from marin_rl.distributed.ray_workers import RayClient
from marin_rl.distributed.weight_receiver import open_receiver
from marin_rl.distributed.weight_sender import TrainingHost, open_sender
from marin_rl.distributed.weight_server import make_secret
from marin_rl.learner.policy_model import initialize_policy
from marin_rl.learner.policy_spec import PolicySpec
from marin_rl.learner.train_step import Learner
from marin_rl.parts.rl import RunParts
from marin_rl.training.worker import RolloutWorker, WorkerPolicy
from marin_rl.utils.devices.arrays import numeric_arrays
from marin_rl.utils.devices.setup import start_devices

ARRAYS, COLUMNS = 16, 1024
"""Number of arrays of synthetic weights, and columns of each."""


def synthetic_shapes(rows: int) -> dict[str, tuple[int, ...]]:
    """Return shapes of synthetic weights by name."""
    return {f"['{number}']": (rows, COLUMNS) for number in range(ARRAYS)}


class Server:
    """A weight server in a separate process."""

    def __init__(self, share: Share) -> None:
        """Start the process.

        Args:
            share: weights of the server; version 1 is published.
        """
        command = [
            sys.executable,
            "-m",
            "experiments.lab.benchmarks.weight_servers",
            json.dumps(dataclasses.asdict(share)),
        ]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @functools.cached_property
    def _ports(self) -> dict[str, int]:
        return json.loads(self._read())

    @property
    def address(self) -> str:
        """Address of the weight server."""
        return f"grpc+tls://127.0.0.1:{self._ports['flight']}"

    def read_plainly(self) -> None:
        """Read the same bytes over a plain socket into fresh memory."""
        memory = memoryview(np.empty(self._ports["num_bytes"], np.uint8).data)
        with socket.create_connection(("127.0.0.1", self._ports["socket"])) as connection:
            while memory:
                memory = memory[connection.recv_into(memory) :]

    def publish(self, version: int) -> None:
        """Publish the same weights as another version; returns when they are available."""
        # The process prints its ports first.
        assert self._ports
        assert self.process.stdin is not None
        self.process.stdin.write(f"{version}\n")
        self.process.stdin.flush()
        assert int(self._read()) == version

    def _read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


@contextlib.contextmanager
def weight_servers(secret: str, shapes: dict[str, tuple[int, ...]], count: int) -> Iterator[list[Server]]:
    """Server processes that hold the weights together."""
    servers: list[Server] = []
    try:
        servers += [Server(Share(secret, host, count, shapes)) for host in range(count)]
        yield servers
    finally:
        for server in servers:
            server.process.communicate()


def read_all_plainly(servers: Sequence[Server]) -> None:
    """Read from every server concurrently."""
    with ThreadPoolExecutor(len(servers)) as threads:
        list(threads.map(Server.read_plainly, servers))


def measure_transfer(rows: int, servers: int, rounds: int, config: WeightTransferConfig) -> dict[str, Any]:
    """Return the throughput in gigabytes (1e9) per second for one size and number of servers.

    Args:
        rows: rows of each array.
        servers: number of servers that share the rows.
        rounds: timed rounds, after a warm-up round.
        config: number of streams.
    """
    secret = make_secret()
    like = {str(number): jax.ShapeDtypeStruct((rows, COLUMNS), np.float32) for number in range(ARRAYS)}
    num_bytes = ARRAYS * rows * COLUMNS * 4
    source = np.ones(num_bytes, np.uint8)
    target = np.ones(num_bytes, np.uint8)
    with weight_servers(secret, synthetic_shapes(rows), servers) as started:
        receiver = open_receiver(config, [server.address for server in started], secret)
        kinds: dict[str, Callable[[], object]] = {
            "transfer": lambda: jax.block_until_ready(receiver.receive(like)),
            "socket": lambda: read_all_plainly(started),
            "copy_to_fresh_memory": source.copy,
            "copy_to_used_memory": lambda: np.copyto(target, source),
        }
        # The first round warms up.
        seconds = {kind: taken[1:] for kind, taken in take_turns(kinds, rounds + 1).items()}
    figures = {f"{kind}_gb_per_second": spread([num_bytes / taken / 1e9 for taken in seconds[kind]]) for kind in kinds}
    for other in ("socket", "copy_to_fresh_memory"):
        figures[f"transfer_over_{other}"] = ratios(seconds[other], seconds["transfer"])
    return {"bytes": num_bytes, **figures}


class TimedPolicy(WorkerPolicy):
    """A worker's policy that records when its sampler gets new weights."""

    arrivals: queue.Queue[float | None]
    """Times of weight updates, in the clock of `time.perf_counter`; None at the end of the worker."""

    def fetch(self, addresses: Sequence[str]) -> bool:
        """Fetch the newest weights; see `WorkerPolicy`."""
        arrived = super().fetch(addresses)
        if arrived:
            self.arrivals.put(time.perf_counter())
        return arrived


@contextlib.contextmanager
def coordinator(heartbeat_timeout: float) -> Iterator[CoordinatorClient]:
    """The coordinator of a run: an actor under Ray on this machine."""
    with connected_to_local_node(num_cpus=1):
        # The worker's long poll and heartbeat must not block the trainer's calls.
        coordinator_actor = cast(Any, ray.remote(Coordinator)).options(num_cpus=0, max_concurrency=8)
        yield RayClient(coordinator_actor.remote(heartbeat_timeout), heartbeat_timeout)


def measure_arrival(config: TrainConfig, servers: int, rounds: int, way: WeightTransferConfig) -> dict[str, Any]:
    """Time the announcement of a version until a worker samples with it, and the transfer alone.

    Args:
        config: model and sampler.
        servers: number of training hosts.
        rounds: timed rounds, after a warm-up round.
        way: number of streams.
    """
    config, secret = dataclasses.replace(config, weights=way), make_secret()
    assert config.model is not None
    trainer = start_devices(config.trainer, rows_per_device=config.rollouts.sizes.rows_per_device, alone=True)
    vocab_size = config.tokenizer.build().vocab_size
    like = PolicySpec(config.model, vocab_size, trainer).policy
    shapes = {name: leaf.shape for name, leaf in numeric_arrays(like).items()}
    num_bytes = sum(4 * math.prod(shape) for shape in shapes.values())
    with (
        coordinator(config.workers.heartbeat_timeout) as client,
        weight_servers(secret, shapes, servers) as started,
        contextlib.closing(
            TimedPolicy(config, vocab_size, "", secret, lambda: client.call(Coordinator.announced))
        ) as policy,
        ThreadPoolExecutor(1, "worker") as threads,
    ):
        addresses = [server.address for server in started]
        receiver = open_receiver(way, addresses, secret)
        policy.arrivals = queue.Queue()
        worker = threads.submit(RolloutWorker(client, "worker-0", policy).run, config.workers.heartbeat_timeout)
        worker.add_done_callback(lambda _: policy.arrivals.put(None))
        versions = itertools.count(2)

        def arrive() -> None:
            version = next(versions)
            for server in started:
                server.publish(version)
            announced = time.perf_counter()
            client.call(Coordinator.announce, version, addresses)
            arrived = policy.arrivals.get()
            if arrived is None:
                worker.result()
            assert arrived is not None, "the worker ended before the run"
            arrivals.append(arrived - announced)

        arrivals: list[float] = []
        kinds = {
            "arrival": arrive,
            "transfer": lambda: jax.block_until_ready(receiver.receive(like)),
            "socket": lambda: read_all_plainly(started),
        }
        try:
            seconds = take_turns(kinds, rounds + 1)
        finally:
            client.call(Coordinator.stop)
    # Servers publish before the announcement.
    seconds["arrival"] = arrivals
    seconds = {kind: taken[1:] for kind, taken in seconds.items()}
    return {
        "bytes": num_bytes,
        **{f"{kind}_seconds": spread(taken) for kind, taken in seconds.items()},
        "arrival_over_transfer": ratios(seconds["arrival"], seconds["transfer"]),
    }


def measure_publishing(config: TrainConfig, steps: int, way: WeightTransferConfig) -> dict[str, Any]:
    """Measure the cost of publishing after every step for the learner.

    Steps with and without publishing alternate. The call itself blocks the learner; its background work may slow down
    the next step.

    Args:
        config: model, batch and optimizer.
        steps: timed steps of each kind.
        way: configuration of publishing.
    """
    assert config.model is not None
    trainer = start_devices(config.trainer, rows_per_device=config.rollouts.sizes.rows_per_device)
    tokenizer = config.tokenizer.build()
    lengths = np.full(config.rollouts.rollouts_per_step, config.rollouts.max_length)
    rollouts = random_rollouts(
        lengths, tokenizer.vocab_size, config.sampling.max_new_tokens, config.rollouts.max_length
    )
    advantages = np.random.default_rng(0).normal(size=len(lengths)).tolist()
    passes = pack(config, trainer, rollouts, advantages, packed=config.rollouts.packing).microbatches
    learner = Learner(trainer, config.optimizer, RunParts(config, trainer).loss, num_updates=1_000_000)
    model = initialize_policy(config.model, tokenizer, trainer, key=jax.random.PRNGKey(0))
    state = learner.initial_state(model, jax.random.PRNGKey(1))
    sender = open_sender(way, make_secret(), TrainingHost.current())

    def step() -> None:
        nonlocal state
        state, measured = learner.update(state, passes)
        # A run reads every metric.
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
        "publish_call_over_step": ratios(calls, without),
        "next_step_over_step": ratios(with_publishing, without),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print one JSON object."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = benchmark_parser("Weights to a worker, and what publishing costs; other flags are those of marin_rl.train")
    parser.add_argument("--sizes_mb", type=int, nargs="+", default=[100, 400, 1000], help="megabytes (1e6) of weights")
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2, 4], help="training hosts")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of each kind")
    parser.add_argument("--streams", type=int, default=WeightTransferConfig.streams, help="streams for each server")
    parser.add_argument("--steps", type=int, default=20, help="timed training steps of each kind")
    arguments, rest = parser.parse_known_args(argv)
    train_config = load_config(rest)
    without_compilation_cache()
    way = WeightTransferConfig(streams=arguments.streams)
    figures: dict[str, Any] = {"publishing": measure_publishing(train_config, arguments.steps, way)}
    say(f"publishing: {figures['publishing']['publish_call_over_step']} of a step")
    for servers in arguments.servers:
        measured = measure_arrival(train_config, servers, arguments.rounds, way)
        figures[f"arrival_from_{servers}"] = measured
        say(f"announcement to arrival from {servers}: {measured['arrival_seconds']['median']:.3f} s")
    for size in arguments.sizes_mb:
        for servers in arguments.servers:
            # Every server holds the same number of rows.
            rows = servers * max(1, round(size * 1e6 / (ARRAYS * COLUMNS * 4) / servers))
            measured = measure_transfer(rows, servers, arguments.rounds, way)
            figures[f"{size}_mb_from_{servers}"] = measured
            say(f"{size} MB from {servers}: {measured['transfer_gb_per_second']['median']:.2f} GB/s")
    print(make_report("benchmark_weight_transfer", argv, vars(arguments), figures))


if __name__ == "__main__":
    main()
