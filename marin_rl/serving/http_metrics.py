# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Metrics of an HTTP application in the format of Prometheus."""

from collections.abc import Callable

import prometheus_client as prometheus
from starlette.requests import Request
from starlette.responses import Response


class HttpMetrics:
    """Counts and times of requests, and the counters and gauges that an application adds."""

    def __init__(self) -> None:
        """Start without requests."""
        self._registry = registry = prometheus.CollectorRegistry()
        names = ("path", "status")
        self._requests = prometheus.Counter("marin_rl_requests", "HTTP requests.", names, registry=registry)
        self._seconds = prometheus.Histogram(
            "marin_rl_request_seconds", "Time of an HTTP request.", ("path",), registry=registry
        )

    def counter(self, name: str, text: str) -> Callable[[float], None]:
        """Add a counter; return the function that increments it."""
        return prometheus.Counter(f"marin_rl_{name}", text, registry=self._registry).inc

    def gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Add a gauge with the value of a function."""
        prometheus.Gauge(f"marin_rl_{name}", text, registry=self._registry).set_function(value)

    def count(self, path: str, status: int, seconds: float) -> None:
        """Count a request."""
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    async def show(self, request: Request) -> Response:
        """Return all metrics, as an endpoint."""
        return Response(prometheus.generate_latest(self._registry), media_type=prometheus.CONTENT_TYPE_LATEST)
