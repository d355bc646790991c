# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Memory, open files and free slots of the server while clients read replies and streams, or disconnect.

    python -m experiments.lab.benchmarks.benchmark_serving_memory
    python -m experiments.lab.benchmarks.benchmark_serving_memory --rounds 30 --requests 200

The server is `python -m marin_rl.serve` with random weights. Of six requests two are whole, two are streamed, and two
clients disconnect: one before its reply, one after the first event of a stream.
"""

import asyncio
import contextlib
import dataclasses
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import jax
import numpy as np

from experiments.lab.benchmarks.benchmark_serving import PROMPT_TOKENS, ask, make_requests, request_bytes
from experiments.lab.benchmarks.measurement import BenchmarkedRunError, benchmark_parser, load_config, make_report, say
from marin_rl.learner.policy_model import initialize_policy, save_hf_policy
from marin_rl.sampling.sampler import SampleRequest
from marin_rl.utils.devices.setup import start_devices

NAMES = ("sequences", "slots")
"""Metrics of the server, without their prefix."""
SETTLE_SECONDS = 0.5
"""Time without a change of open files and sequences after which the clients of a round are gone."""


@dataclasses.dataclass(frozen=True)
class State:
    """The server after a round, when its clients are gone."""

    requests: int
    """Requests since the start."""
    seconds: float
    """Duration of the round."""
    resident_bytes: int
    """Resident memory of the process."""
    open_files: int
    """Open file descriptors, sockets included."""
    threads: int
    """Threads of the process."""
    free_slots: int
    """Slots without a sequence."""


async def play(port: int, requests: Sequence[SampleRequest], concurrent: int) -> None:
    """Send requests, `concurrent` of them at the same time; see the head of this file for their kinds."""
    waiting = enumerate(requests)

    async def play_some() -> None:
        for index, request in waiting:
            kind = index % 6
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
            data = request_bytes(request, stream=kind in (2, 3, 5))
            if kind < 4:
                await ask(reader, writer, data)
            else:
                writer.write(data)
                await (reader.readuntil(b"data: ") if kind == 5 else writer.drain())
            writer.close()

    await asyncio.gather(*(play_some() for _ in range(concurrent)))


@contextlib.contextmanager
def served(folder: Path, arguments: Sequence[str], log: Path) -> Iterator[tuple[int, int]]:
    """Start `marin_rl.serve` and yield its process id and its port."""
    command = [sys.executable, "-m", "marin_rl.serve", "--model", str(folder), "--port", "0", *arguments]
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        try:
            while (found := re.search(r"serving \S+ at http://127\.0\.0\.1:(\d+)/", log.read_text())) is None:
                if process.poll() is not None:
                    raise BenchmarkedRunError(f"{command} ended with status {process.returncode}:\n{log.read_text()}")
                time.sleep(0.1)
            yield process.pid, int(found[1])
        finally:
            process.terminate()


def state(pid: int, port: int, requests: int, seconds: float) -> State:
    """Return the state of the server when it has no clients any more."""
    before, since = None, time.monotonic()
    while before is None or before[0] or time.monotonic() - since < SETTLE_SECONDS:
        metrics = httpx.get(f"http://127.0.0.1:{port}/metrics").text
        sequences, slots = (int(float(re.findall(rf"^marin_rl_{name} (\S+)", metrics, re.M)[0])) for name in NAMES)
        now = sequences, len(os.listdir(f"/proc/{pid}/fd"))
        if now != before:
            before, since = now, time.monotonic()
        time.sleep(0.05)
    status = dict(line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
    resident = 1024 * int(status["VmRSS"].split()[0])
    return State(requests, seconds, resident, before[1], int(status["Threads"]), slots - before[0])


def growth(states: Sequence[State]) -> float:
    """Return the bytes of memory that a request adds: the slope of a line through the second half of the states."""
    half = states[len(states) // 2 :]
    return float(np.polyfit([one.requests for one in half], [one.resident_bytes for one in half], 1)[0])


def measure(
    folder: Path, requests: Sequence[SampleRequest], rounds: int, concurrent: int, arguments: Sequence[str]
) -> list[State]:
    """Return the state after each round of all requests."""
    states: list[State] = []
    with served(folder, arguments, folder / "log.txt") as (pid, port):
        for index in range(1, rounds + 1):
            start = time.perf_counter()
            asyncio.run(play(port, requests, concurrent))
            states.append(state(pid, port, index * len(requests), time.perf_counter() - start))
            say(str(states[-1]))
    return states


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print one JSON object."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = benchmark_parser("Memory of the server; other flags are those of marin_rl.train")
    parser.add_argument("--rounds", type=int, default=20, help="rounds, with a record after each")
    parser.add_argument("--requests", type=int, default=300, help="requests of a round")
    parser.add_argument("--concurrent", type=int, default=64, help="requests at the same time")
    parser.add_argument("--slots", type=int, default=32, help="slots of the sampler")
    parser.add_argument("--new_tokens", type=int, default=64, help="maximum number of new tokens of a request")
    options, rest = parser.parse_known_args(argv)
    context = PROMPT_TOKENS + options.new_tokens
    config = load_config([*rest, f"--model.seq_len={context}"])
    assert config.model is not None
    trainer = start_devices(config.trainer, rows_per_device=config.rollouts.sizes.rows_per_device)
    tokenizer = config.tokenizer.build()
    model = initialize_policy(config.model, tokenizer, trainer, key=jax.random.PRNGKey(0))
    requests = make_requests(options.requests, options.new_tokens, tokenizer.vocab_size)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory) / "policy"
        save_hf_policy(model, tokenizer, folder, trainer)
        states = measure(folder, requests, options.rounds, options.concurrent, ["--max_seqs", str(options.slots)])
    figures: dict[str, Any] = {
        "resident_bytes_per_request": growth(states),
        "open_files": sorted({one.open_files for one in states}),
        "free_slots": sorted({one.free_slots for one in states}),
        "states": [dataclasses.asdict(one) for one in states],
    }
    print(make_report("benchmark_serving_memory", argv, vars(options), figures))


if __name__ == "__main__":
    main()
