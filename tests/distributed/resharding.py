# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Run by test_weight_transfer.py on 8 fake CPU devices, in a separate process; prints one line of JSON."""

import json


def measure() -> dict[str, object]:
    """Publish a sharded model from four training hosts and receive it on other meshes."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

    from marin_rl.config.workers_config import WeightTransferConfig
    from marin_rl.distributed.weight_receiver import open_receiver
    from marin_rl.distributed.weight_sender import TrainingHost, open_sender
    from marin_rl.distributed.weight_server import make_secret

    devices = np.array(jax.devices())
    training = Mesh(devices.reshape(4, 2), ("data", "model"))
    noise = np.random.default_rng(0)
    values = {
        "both": noise.normal(size=(16, 8)).astype(np.float32),
        "data": noise.normal(size=(8, 3)).astype(np.float32),
        "model": noise.normal(size=(5, 6)).astype(np.float32),
        "whole": noise.normal(size=7).astype(np.float32),
        "scalar": np.float32(2.5),
    }
    specs = {
        "both": PartitionSpec("data", "model"),
        "data": PartitionSpec("data"),
        "model": PartitionSpec(None, "model"),
        "whole": PartitionSpec(),
        "scalar": PartitionSpec(),
    }
    weights = {name: jax.device_put(values[name], NamedSharding(training, spec)) for name, spec in specs.items()}

    secret = make_secret()
    config = WeightTransferConfig()
    hosts = [TrainingHost(row, frozenset(devices[2 * row : 2 * row + 2])) for row in range(4)]
    senders = [open_sender(config, secret, host) for host in hosts]
    for sender in senders:
        sender.publish(weights, 1)
    # The learner continues and overwrites the published arrays.
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0 - 1, tree), donate_argnums=0)
    jax.block_until_ready(overwrite(weights))
    for sender in senders:
        sender.flush()
    receiver = open_receiver(config, [sender.address for sender in senders], secret)

    flat = Mesh(devices, ("data",))
    turned = Mesh(devices[::-1].reshape(2, 4), ("data", "model"))
    targets = {
        "same": lambda name: NamedSharding(training, specs[name]),
        "turned": lambda name: NamedSharding(turned, specs[name] if name != "model" else PartitionSpec()),
        "flat": lambda name: NamedSharding(flat, PartitionSpec(*["data"] * (name in ("both", "data")))),
        "part": lambda name: NamedSharding(Mesh(devices[2:4], ("model",)), PartitionSpec()),
        "single": lambda name: SingleDeviceSharding(devices[5]),
    }
    equal, placed = {}, {}
    for target, sharding in targets.items():
        like = {
            name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding(name))
            for name, value in values.items()
        }
        received, _ = receiver.receive(like)
        equal[target] = all(np.asarray(received[name]).tobytes() == values[name].tobytes() for name in values)
        placed[target] = all(received[name].sharding == sharding(name) for name in values)
    for sender in senders:
        sender.close()
    return {"devices": len(devices), "equal": equal, "placed": placed}


if __name__ == "__main__":
    print(json.dumps(measure()))
