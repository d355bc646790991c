# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A real server on loopback with a tiny model and the byte-level tokenizer."""

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
from levanter.models.lm_model import LmHeadModel

from marin_rl.sampling.config import SamplingConfig
from marin_rl.sampling.group_sampler import GroupSampler
from marin_rl.sampling.sampler import Sampler, WeightPoll
from marin_rl.serving.http_server import HttpServer, listen, url_of
from marin_rl.serving.openai.app import Server
from marin_rl.serving.openai.engine import Engine
from marin_rl.serving.openai.protocol import RequestLimits
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import byte_tokenizer
from tests.sampling.families import FAMILIES, random_model

CONTEXT = 256
SLOTS = 16
MAX_NEW = 128
TIMEOUT = 600.0
"""Timeout in seconds, for a busy machine."""
TOKENIZER = ChatTokenizer(byte_tokenizer())


def tiny_model(seed: int = 0) -> LmHeadModel:
    """A model with random weights."""
    return random_model(FAMILIES["llama"], seed, vocab=TOKENIZER.vocab_size)


def tiny_sampler(weight_poll: WeightPoll | None = None, slots: int = SLOTS) -> GroupSampler:
    """A sampler with random weights."""
    return GroupSampler(
        tiny_model(),
        config=SamplingConfig(max_new_tokens=MAX_NEW, max_seqs=slots),
        stop_token_ids=TOKENIZER.stop_token_ids,
        max_context=CONTEXT,
        weight_poll=weight_poll,
    )


def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition is true."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, f"the condition did not become true in {TIMEOUT:g} s"
        time.sleep(0.002)


def has_ended(pid: int) -> bool:
    """Whether a process has ended; its parent may not have waited for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


@dataclasses.dataclass(frozen=True)
class Serving:
    """A running server."""

    url: str
    """Address without a path."""
    engine: Engine
    """Its engine."""


@contextlib.contextmanager
def serving(
    sampler: Sampler,
    *,
    key: str | None = None,
    drain_seconds: float = TIMEOUT,
    client_seconds: float = TIMEOUT,
    send_buffer: int | None = None,
    context: int = CONTEXT,
    **options: Any,
) -> Iterator[Serving]:
    """Serve until the end of the block; fails if the server leaves sequences behind.

    Args:
        sampler: samples the replies.
        key: API key.
        drain_seconds: as in `HttpServer`.
        client_seconds: as in `listen` and `HttpServer`.
        send_buffer: bytes that the kernel holds of each response; its default if None.
        context: maximum number of tokens of a sequence.
        options: other arguments of `Server`.
    """
    limits = RequestLimits(context, MAX_NEW, 64, TOKENIZER.vocab_size, frozenset(TOKENIZER.stop_token_ids), 13)
    values = {"max_sequences": 4096, "max_body_bytes": 100_000, "client_seconds": client_seconds, **options}
    engine = Engine(sampler, TOKENIZER.decode_reply)
    app = Server(engine, TOKENIZER, limits, model="policy", key=key, **values).app()
    listener = listen("127.0.0.1", 0, client_seconds)
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    server = HttpServer(app, client_seconds, drain_seconds)
    thread = threading.Thread(target=server.run, args=[engine, listener])
    thread.start()
    try:
        yield Serving(url_of(listener), engine)
    finally:
        server.stop()
        thread.join()
    assert engine.in_progress == 0
