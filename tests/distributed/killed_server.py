# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Run by test_weight_server.py: serves weights that equal their version until it is killed; prints its port.

With `gated`, it sends only the first chunk of each stream.
"""

import sys
import threading


def main(secret: str, port: str, version: str, gate: str) -> None:
    import numpy as np

    from marin_rl.distributed.weight_sender import take_snapshot
    from marin_rl.distributed.weight_server import WeightServer

    class GatedServer(WeightServer):
        def send_chunks(self, version, chunks):
            for batch in super().send_chunks(version, chunks):
                yield batch
                if gate == "gated":
                    threading.Event().wait()

    server = GatedServer(secret, "the killed host", host="127.0.0.1", port=int(port))
    weights = {"['w']": np.full(2**20, int(version), np.float32)}
    server.put(take_snapshot(weights, int(version), frozenset(), 2**18))
    print(server.port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
