# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import socket


def free_port() -> int:
    """A port of the loopback interface on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
