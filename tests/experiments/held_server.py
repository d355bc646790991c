# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Run by test_soak.py: holds versions 1 and 2 of some weights, in a server that can be paused; prints its address."""

import sys
import threading
from pathlib import Path


def main(hold: str, token: str) -> None:
    import numpy as np

    from experiments.soak_train import PausedWeightServer
    from marin_rl.distributed.weights.publish import take_snapshot

    server = PausedWeightServer(Path(hold), token, "the held host", host="127.0.0.1", port=0)
    for version in (1, 2):
        server.put(take_snapshot({"w": np.full(4096, version, np.uint8)}, version, frozenset(), 1024))
    print(server.address, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
