# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Prometheus metrics of a server."""

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from marin_rl.serving.engine import Engine

_PATHS = ("/health", "/metrics", "/v1/models", "/v1/completions", "/v1/chat/completions", "/inference/v1/generate")


class ServerMetrics:
    """Counts requests and tokens."""

    def __init__(self, engine: Engine) -> None:
        """Create the metrics of an engine."""
        self._registry = CollectorRegistry()
        names, prefix = ("path", "status"), "marin_rl_"
        self._requests = Counter(f"{prefix}requests", "HTTP requests.", names, registry=self._registry)
        self._seconds = Histogram(
            f"{prefix}request_seconds", "Time of an HTTP request.", ("path",), registry=self._registry
        )
        self.prompt_tokens = Counter(f"{prefix}prompt_tokens", "Tokens of accepted prompts.", registry=self._registry)
        sampled_tokens = Counter(f"{prefix}sampled_tokens", "Tokens of replies.", registry=self._registry)
        engine.on_sampled = sampled_tokens.inc
        sequences = Gauge(
            f"{prefix}sequences", "Sequences that are sampled or wait for a slot.", registry=self._registry
        )
        sequences.set_function(lambda: engine.in_progress)
        slots = Gauge(f"{prefix}slots", "Sequences that are decoded together.", registry=self._registry)
        slots.set(engine.num_slots)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def count(self, app: ASGIApp) -> ASGIApp:
        """Return an application that counts its requests; those without a whole response have status 499 or 500.

        A client that disconnects before the end of its response, also of a stream, is counted with status 499.
        """

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            # Few labels, whatever paths clients invent.
            path = scope["path"] if scope["path"] in _PATHS else "other"
            status, is_whole, start = 499, False, time.monotonic()

            async def watched(message: Message) -> None:
                nonlocal status, is_whole
                if message["type"] == "http.response.start":
                    status = message["status"]
                await send(message)
                is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)

            try:
                await app(scope, receive, watched)
            except Exception:
                status, is_whole = 500, True
                raise
            finally:
                self._requests.labels(path, str(status if is_whole else 499)).inc()
                self._seconds.labels(path).observe(time.monotonic() - start)

        return counted
