# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import contextlib
import random
import socket

PORTS = range(20_000, 32_000)
"""Below the ports that Linux gives to clients and to servers without a fixed port, which may take any free one."""


def free_port() -> int:
    """Find a free port of the loopback interface, which other programs are unlikely to take before its use."""
    # Not the global generator: hypothesis seeds it alike in every process of the tests.
    for port in random.SystemRandom().sample(PORTS, 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError(f"no free port in {PORTS}")
