# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Requests and tokens per second of the server, compared with the bare sampler.

    python -m experiments.benchmarks.benchmark_serving
    python -m experiments.benchmarks.benchmark_serving --concurrent 16 --new_tokens 64

Weights and prompts are random, which does not affect the time per token. The clients are in a process of their own.
"""

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import httpx
import jax
import numpy as np

from experiments.benchmarks.measurement import (
    benchmark_parser,
    load_config,
    make_report,
    ratios,
    spread,
    take_turns,
)
from marin_rl.distributed.samplers import open_group_sampler
from marin_rl.learner.devices import start_devices
from marin_rl.learner.policy_model import initialize_policy
from marin_rl.sampling.sampler import SampleRequest
from marin_rl.serving.app import Server, ServerOptions
from marin_rl.serving.engine import Engine
from marin_rl.serving.http_server import HttpServer, listen, url_of
from marin_rl.serving.protocol import Limits

PROMPT_TOKENS = 32


def make_requests(count: int, new_tokens: int, vocab_size: int) -> list[SampleRequest]:
    """Return requests with random prompts and seeds."""
    prompts = np.random.default_rng(0).integers(vocab_size, size=(count, PROMPT_TOKENS)).tolist()
    return [SampleRequest(tuple(prompt), seed, new_tokens) for seed, prompt in enumerate(prompts)]


async def ask_all(url: str, requests: Sequence[SampleRequest], stream: bool) -> list[float]:
    """Send all requests at the same time and return the seconds of each."""

    async def ask(client: httpx.AsyncClient, request: SampleRequest) -> float:
        body = {
            "model": "policy",
            "prompt": list(request.prompt_tokens),
            "max_tokens": request.max_new_tokens,
            "seed": request.seed,
            "logprobs": 0,
            "return_token_ids": True,
            "stream": stream,
        }
        start = time.perf_counter()
        (await client.post(f"{url}/v1/completions", json=body)).raise_for_status()
        return time.perf_counter() - start

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=600) as client:
        return await asyncio.gather(*(ask(client, request) for request in requests))


def run_client() -> None:
    """Answer each line `URL COUNT NEW_TOKENS VOCAB STREAM` on standard input with the seconds of its requests."""
    for line in sys.stdin:
        url, count, new_tokens, vocab, stream = line.split()
        requests = make_requests(int(count), int(new_tokens), int(vocab))
        print(json.dumps(asyncio.run(ask_all(url, requests, stream == "True"))), flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print one JSON object."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = benchmark_parser("Throughput of the server; other flags are those of marin_rl.train")
    parser.add_argument("--concurrent", type=int, default=64, help="requests at the same time")
    parser.add_argument("--new_tokens", type=int, default=128, help="maximum number of new tokens of a request")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds")
    arguments, rest = parser.parse_known_args(argv)
    count, new_tokens = arguments.concurrent, arguments.new_tokens
    context = PROMPT_TOKENS + new_tokens
    sizes = [
        f"--model.seq_len={context}",
        f"--rollouts.max_length={context}",
        f"--sampling.max_new_tokens={new_tokens}",
    ]
    config = load_config([*rest, *sizes, f"--sampling.max_seqs={count}"])
    assert config.model is not None
    trainer = start_devices(config.trainer_config(), rows_per_device=config.rollouts.rows_per_device)
    tokenizer = config.tokenizer.build()
    model = initialize_policy(config.model, tokenizer, trainer, key=jax.random.PRNGKey(0))
    bare, served = (open_group_sampler(config, model, tokenizer, trainer, version=0) for _ in range(2))
    requests = make_requests(count, new_tokens, tokenizer.vocab_size)
    tokens = sum(len(generation.token_ids) for generation in bare.sample(requests))
    limits = Limits(context, new_tokens, count, tokenizer.vocab_size, frozenset(tokenizer.stop_token_ids))
    engine = Engine(served, tokenizer.decode_reply)
    options = ServerOptions("policy", None, limits, max_sequences=count, max_body_bytes=2**20, body_seconds=60.0)
    listener = listen("127.0.0.1", 0, 60.0)
    url = url_of(listener)
    server = HttpServer(Server(engine, tokenizer, options).app(), engine, drain_seconds=1.0)
    thread = threading.Thread(target=server.run, args=[listener])
    thread.start()
    command = [sys.executable, "-c", "from experiments.benchmarks.benchmark_serving import run_client; run_client()"]
    latencies: dict[bool, list[float]] = {False: [], True: []}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        send, answers = client.stdin, client.stdout

        def ask(stream: bool) -> None:
            print(url, count, new_tokens, tokenizer.vocab_size, stream, file=send, flush=True)
            latencies[stream] += json.loads(answers.readline())

        kinds = {"bare": lambda: bare.sample(requests), "whole": lambda: ask(False), "streamed": lambda: ask(True)}
        take_turns(kinds, 1)
        for seconds in latencies.values():
            seconds.clear()
        spent = take_turns(kinds, arguments.rounds)
        send.close()
    server.stop()
    thread.join()
    figures: dict[str, Any] = {"tokens_per_round": tokens}
    for kind, seconds in spent.items():
        figures[kind] = {
            "tokens_per_second": spread([tokens / one for one in seconds]),
            "requests_per_second": spread([count / one for one in seconds]),
        }
    for kind, stream in (("whole", False), ("streamed", True)):
        p50, p99 = np.percentile(latencies[stream], [50, 99]).tolist()
        figures[kind] |= {
            "seconds_over_bare": ratios(spent[kind], spent["bare"]),
            "latency_p50_seconds": p50,
            "latency_p99_seconds": p99,
        }
    print(make_report("benchmark_serving", argv, vars(arguments), figures))


if __name__ == "__main__":
    main()
