# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Requests and tokens per second of the server, compared with the bare sampler.

    python -m experiments.lab.benchmarks.benchmark_serving
    python -m experiments.lab.benchmarks.benchmark_serving --requests 64 --new_tokens 64

Weights and prompts are random, which does not affect the time per token. The clients are in a process of their own, and
send their next request when a response is complete. The server is compared with the bare sampler with all requests in
its queue, and with the same number of clients in the sampler's process, without HTTP and without text. An empty request
on a kept-alive connection is compared with the same request to a plain uvicorn.
"""

import asyncio
import contextlib
import dataclasses
import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import uvicorn
from starlette.types import Receive, Scope, Send

from experiments.lab.benchmarks.measurement import (
    benchmark_parser,
    load_config,
    make_report,
    ratios,
    spread,
    timed,
)
from marin_rl.learner.policy_model import initialize_policy
from marin_rl.parts.rl import RunParts
from marin_rl.sampling.group_sampler import GroupSampler
from marin_rl.sampling.sampler import SampleRequest
from marin_rl.serving.http_server import HttpServer, listen
from marin_rl.serving.openai.app import Server
from marin_rl.serving.openai.engine import Engine, EngineRequest
from marin_rl.serving.openai.protocol import RequestLimits
from marin_rl.serving.options import CALL_SECONDS
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.utils.devices.setup import exempt_from_collection, start_devices

PROMPT_TOKENS = 32
EMPTY_REQUEST = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
EMPTY_REQUESTS = 100
"""Empty requests of a round."""


def make_requests(count: int, new_tokens: int, vocab_size: int) -> list[SampleRequest]:
    """Return requests with random prompts and seeds."""
    prompts = np.random.default_rng(0).integers(vocab_size, size=(count, PROMPT_TOKENS)).tolist()
    return [SampleRequest(tuple(prompt), seed, new_tokens) for seed, prompt in enumerate(prompts)]


def request_bytes(request: SampleRequest, stream: bool) -> bytes:
    """Return a request over HTTP."""
    body = {
        "model": "policy",
        "prompt": list(request.prompt_tokens),
        "max_tokens": request.max_new_tokens,
        "seed": request.seed,
        "logprobs": 0,
        "return_token_ids": True,
        "stream": stream,
    }
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> None:
    """Send a request over an open connection and read its response, without the cost of a client library.

    Raises:
        RuntimeError: if the response is an error.
    """
    writer.write(data)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if not head.startswith(b"http/1.1 200"):
        raise RuntimeError(f"the server responds {head.decode()}")
    if b"content-length:" in head:
        await reader.readexactly(int(head.partition(b"content-length:")[2].partition(b"\r\n")[0]))
    else:
        await reader.readuntil(b"0\r\n\r\n")


async def ask_all(port: int, requests: Sequence[bytes], concurrent: int) -> list[float]:
    """Send requests over `concurrent` connections, the next one when a response is complete.

    Returns:
        Seconds of each request.
    """
    waiting, seconds = iter(requests), []

    async def ask_some() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
        for data in waiting:
            start = time.perf_counter()
            await ask(reader, writer, data)
            seconds.append(time.perf_counter() - start)
        writer.close()

    await asyncio.gather(*(ask_some() for _ in range(concurrent)))
    return seconds


async def reply_to_all(engine: Engine, requests: Sequence[SampleRequest], concurrent: int) -> list[float]:
    """Request replies in this process from `concurrent` coroutines, the next one when a reply is complete.

    Returns:
        Seconds of each request.
    """
    waiting, seconds = iter(requests), []

    async def reply_to_some() -> None:
        for request in waiting:
            start = time.perf_counter()
            async for _ in engine.reply(EngineRequest(request), streamed=False):
                pass
            seconds.append(time.perf_counter() - start)

    await asyncio.gather(*(reply_to_some() for _ in range(concurrent)))
    return seconds


def run_client() -> None:
    """Answer each line `PORT COUNT CONCURRENT NEW_TOKENS VOCAB STREAM` on standard input.

    The answer is a line with the seconds of all requests together, the CPU seconds of this process, and the seconds of
    each request.
    """
    for line in sys.stdin:
        port, count, concurrent, new_tokens, vocab, stream = map(int, line.split())
        data = [request_bytes(one, bool(stream)) for one in make_requests(count, new_tokens, vocab)]
        start, cpu = time.perf_counter(), time.process_time()
        latencies = asyncio.run(ask_all(port, data, concurrent))
        print(json.dumps([time.perf_counter() - start, time.process_time() - cpu, latencies]), flush=True)


@contextlib.contextmanager
def running_server(engine: Engine, tokenizer: ChatTokenizer, limits: RequestLimits) -> Iterator[int]:
    """Serve on a free port of this machine, in a thread, until the end of the block."""
    listener = listen("127.0.0.1", 0, 60.0)
    port = listener.getsockname()[1]
    app = Server(engine, tokenizer, limits, model="policy", key=None, max_sequences=4096, client_seconds=60.0).app()
    server = HttpServer(app, 60.0, drain_seconds=1.0)
    thread = threading.Thread(target=server.run, args=[engine, listener])
    thread.start()
    try:
        yield port
    finally:
        server.stop()
        thread.join()


async def plain_app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer any request with a short JSON object."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"15")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b'{"status":"ok"}'})


@contextlib.contextmanager
def running_uvicorn() -> Iterator[int]:
    """Serve `plain_app` with uvicorn, on the same event loop and parser as `HttpServer`, until the end of the block."""
    server = uvicorn.Server(
        uvicorn.Config(plain_app, port=0, loop="asyncio", http="h11", lifespan="off", log_config=None, access_log=False)
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


def measure_empty_requests(port: int, rounds: int) -> dict[str, Any]:
    """Compare the latency of an empty request to the server with that of a plain uvicorn, median by median."""
    with running_uvicorn() as plain:
        ports = {"server": port, "uvicorn": plain}
        medians: dict[str, list[float]] = {kind: [] for kind in ports}
        for _ in range(rounds):
            for kind, to in ports.items():
                seconds = asyncio.run(ask_all(to, [EMPTY_REQUEST] * EMPTY_REQUESTS, 1))
                medians[kind].append(float(np.median(seconds)))
    milliseconds = {f"{kind}_ms": spread([1000 * one for one in values]) for kind, values in medians.items()}
    return {**milliseconds, "server_over_uvicorn": ratios(medians["server"], medians["uvicorn"])}


@contextlib.contextmanager
def running_engine(sampler: GroupSampler) -> Iterator[Engine]:
    """Start an engine that decodes no text, until the end of the block."""
    engine = Engine(sampler, lambda tokens, skip: "")
    engine.start()
    try:
        yield engine
    finally:
        engine.close()


@dataclasses.dataclass
class Rounds:
    """Measurements of one way to sample, one entry for each round."""

    seconds: list[float] = dataclasses.field(default_factory=list)
    """Until all requests have ended."""
    cpu_seconds: list[float] = dataclasses.field(default_factory=list)
    """CPU seconds of the server's process."""
    client_cpu_seconds: list[float] = dataclasses.field(default_factory=list)
    """CPU seconds of the clients' process."""
    latencies: list[float] = dataclasses.field(default_factory=list)
    """Seconds of each request."""
    slots_in_use: list[float] = dataclasses.field(default_factory=list)
    """Share of the sampler's slots that sampled tokens."""


Measurement = tuple[float, float, list[float]]
"""Seconds, CPU seconds of the clients, and seconds of each request."""


def sample_closed_loop(engine: Engine, requests: Sequence[SampleRequest], concurrent: int) -> Measurement:
    """Measure `reply_to_all`, whose clients have no process of their own."""
    start = time.perf_counter()
    latencies = asyncio.run(reply_to_all(engine, requests, concurrent))
    return time.perf_counter() - start, 0.0, latencies


def measure(kinds: Mapping[str, tuple[Callable[[], Measurement], GroupSampler]], rounds: int) -> dict[str, Rounds]:
    """Measure every kind in each round, after one that compiles; the order rotates from round to round.

    Args:
        kinds: a function that samples a round, and the sampler that it uses, by name.
        rounds: number of measured rounds.
    """
    measured, order = {kind: Rounds() for kind in kinds}, list(kinds)
    for index in range(rounds + 1):
        for kind in order:
            run, sampler = kinds[kind]
            cpu, work = time.process_time(), dataclasses.replace(sampler.work)
            seconds, client_cpu, latencies = run()
            if index:
                sampled = sampler.work.sampled_tokens - work.sampled_tokens
                measured[kind].slots_in_use.append(sampled / (sampler.work.slot_steps - work.slot_steps))
                measured[kind].seconds.append(seconds)
                measured[kind].cpu_seconds.append(time.process_time() - cpu)
                measured[kind].client_cpu_seconds.append(client_cpu)
                measured[kind].latencies += latencies
        order = [*order[1:], order[0]]
    return measured


def figures_of(rounds: Rounds, measured: Mapping[str, Rounds], count: int, tokens: int) -> dict[str, Any]:
    """Summarize the measurements of one kind, and compare them with those of the kinds without a server."""
    bare, closed_loop = measured["bare"], measured["closed_loop"]
    figures: dict[str, Any] = {
        "tokens_per_second": spread([tokens / one for one in rounds.seconds]),
        "requests_per_second": spread([count / one for one in rounds.seconds]),
        "cpu_ms_per_request": spread([1000 * one / count for one in rounds.cpu_seconds]),
        "slots_in_use": spread(rounds.slots_in_use),
    }
    if rounds is bare:
        return figures
    p50, p99 = np.percentile(rounds.latencies, [50, 99]).tolist()
    return figures | {
        "seconds_over_bare": ratios(rounds.seconds, bare.seconds),
        "cpu_over_bare": ratios(rounds.cpu_seconds, bare.cpu_seconds),
        "seconds_over_closed_loop": ratios(rounds.seconds, closed_loop.seconds),
        "cpu_over_closed_loop": ratios(rounds.cpu_seconds, closed_loop.cpu_seconds),
        "client_cpu_ms_per_request": spread([1000 * one / count for one in rounds.client_cpu_seconds]),
        "latency_p50_seconds": p50,
        "latency_p99_seconds": p99,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print one JSON object."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = benchmark_parser("Throughput of the server; other flags are those of marin_rl.train")
    parser.add_argument("--requests", type=int, default=512, help="requests of a round")
    parser.add_argument("--concurrent", type=int, default=64, help="requests at the same time")
    parser.add_argument("--slots", type=int, help="slots of the sampler (default: those of --concurrent)")
    parser.add_argument("--new_tokens", type=int, default=128, help="maximum number of new tokens of a request")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds")
    arguments, rest = parser.parse_known_args(argv)
    count, concurrent, new_tokens = arguments.requests, arguments.concurrent, arguments.new_tokens
    context, slots = PROMPT_TOKENS + new_tokens, arguments.slots or concurrent
    sizes = [
        f"--model.seq_len={context}",
        f"--rollouts.max_length={context}",
        f"--sampling.max_new_tokens={new_tokens}",
    ]
    config = load_config([*rest, *sizes, f"--sampling.max_seqs={slots}"])
    assert config.model is not None
    trainer = start_devices(config.trainer, rows_per_device=config.rollouts.sizes.rows_per_device)
    tokenizer = config.tokenizer.build()
    model = initialize_policy(config.model, tokenizer, trainer, key=jax.random.PRNGKey(0))
    bare, closed, served = (
        RunParts(config, trainer).open_group_sampler(model, version=0, call_seconds=seconds)
        for seconds in (math.inf, CALL_SECONDS, CALL_SECONDS)
    )
    requests = make_requests(count, new_tokens, tokenizer.vocab_size)
    tokens = sum(len(generation.token_ids) for generation in bare.sample(requests))
    limits = RequestLimits(context, new_tokens, concurrent, tokenizer.vocab_size, frozenset(tokenizer.stop_token_ids))
    command = [
        sys.executable,
        "-c",
        "from experiments.lab.benchmarks.benchmark_serving import run_client; run_client()",
    ]
    with (
        exempt_from_collection(),
        running_engine(closed) as engine,
        running_server(Engine(served, tokenizer.decode_reply), tokenizer, limits) as port,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client,
    ):
        assert client.stdin is not None
        assert client.stdout is not None
        send, answers = client.stdin, client.stdout

        def sample_bare() -> Measurement:
            return timed(lambda: bare.sample(requests)), 0.0, []

        def ask_server(stream: bool) -> Measurement:
            print(port, count, concurrent, new_tokens, tokenizer.vocab_size, int(stream), file=send, flush=True)
            return tuple(json.loads(answers.readline()))

        kinds = {
            "bare": (sample_bare, bare),
            "closed_loop": (lambda: sample_closed_loop(engine, requests, concurrent), closed),
            "whole": (lambda: ask_server(False), served),
            "streamed": (lambda: ask_server(True), served),
        }
        measured = measure(kinds, arguments.rounds)
        send.close()
        empty = measure_empty_requests(port, arguments.rounds)
    figures = {kind: figures_of(rounds, measured, count, tokens) for kind, rounds in measured.items()}
    figures["empty_request"] = empty
    print(make_report("benchmark_serving", argv, vars(arguments), {"tokens_per_round": tokens, **figures}))


if __name__ == "__main__":
    main()
