# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Run by test_arrow_flight.py: serves weights that equal their version until it is killed; prints its port."""

import sys


def main(token: str, port: str, version: str) -> None:
    import numpy as np

    from marin_rl.weights.config import ArrowFlightConfig
    from marin_rl.weights.snapshot import TrainingHost

    sender = ArrowFlightConfig(port=int(port), chunk_mb=1).open_sender(token, TrainingHost.current())
    sender.publish({"w": np.full(2**23, int(version), np.float32)}, int(version))
    sender.flush()
    print(sender.address.rsplit(":", 1)[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
