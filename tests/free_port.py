# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import socket


def free_port() -> int:
    """Find a free port of the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
