# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Run by test_distributed.py, once per process: `distributed_training.py FOLDER INDEX COUNT PORT`.

All processes together have four fake CPU devices, which alternate in the mesh, as on a TPU slice the devices of a host
need not be adjacent. They make a few updates, score some rollouts, sample, save and load a
checkpoint, and serve the weights, each its own shards, until SIGTERM. Each prints its results as a JSON line.
"""

import dataclasses
import json
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DEVICES, UPDATES, PASSES = 4, 3, 2
MODEL_AXES = (1, 2, 4)
"""Sizes of the model axis; all but the first span both processes."""
TOKEN = "0123456789abcdef" * 4


def sample(model_axis: int) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """Sample in each process with the learner's weights; more requests than slots,."""
    from marin_rl.sampling.config import SamplingConfig
    from marin_rl.sampling.group_sampler import GroupSampler
    from marin_rl.sampling.sampler import SampleRequest
    from tests import tiny_learner as tiny

    trainer = tiny.make_trainer(8, model_axis=model_axis)
    trainer = dataclasses.replace(trainer, tensor_parallel_axes=["mlp", "kv_head"] if model_axis > 1 else None)
    sampler = GroupSampler(
        tiny.make_model(trainer),
        config=SamplingConfig(max_new_tokens=4, max_seqs=8),
        stop_token_ids=[3],
        max_context=12,
        trainer=trainer,
    )
    sampler.prepare()
    requests = [SampleRequest((5, 6, 7 + seed // 4), seed, 4, (0.0, 0.9)[seed % 2]) for seed in range(12)]
    return [(generation.token_ids, generation.logprobs) for generation in sampler.sample(requests)]


def alternate_devices() -> None:
    """Let the first and the second half of the devices alternate in the mesh of every trainer."""
    from marin_rl.utils.devices import trainer_config

    arrange = trainer_config.arrange_devices

    def arrange_alternating(*sizes: Sequence[int]) -> Any:
        devices = arrange(*sizes)
        return devices.reshape(2, -1).T.reshape(devices.shape)

    trainer_config.arrange_devices = arrange_alternating


def hide_memory_of_other_processes() -> None:
    """Let devices of other processes have no default memory, as in XLA's runtime for GPUs."""
    import jax

    default_memory = jax.Device.default_memory

    def own_memory(device: jax.Device) -> Any:
        assert device.process_index == jax.process_index(), f"{device} has no default memory"
        return default_memory(device)

    jax.Device.default_memory = own_memory


def has_handler(number: int) -> bool:
    """Return whether this process has a handler of a signal, also one that Python does not know."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [caught] = [line.split()[1] for line in lines if line.startswith("SigCgt:")]
    return bool(int(caught, 16) >> (number - 1) & 1)


def record_files() -> tuple[set[str], list[int]]:
    """Record the names of the files of arrays that are written, and the sizes of those that are read, from now on."""
    written: set[str] = set()
    sizes: list[int] = []
    read_bytes, write_bytes = Path.read_bytes, Path.write_bytes

    def read(path: Path) -> bytes:
        data = read_bytes(path)
        if path.suffix == ".bin":
            sizes.append(len(data))
        return data

    def write(path: Path, data: bytes) -> int:
        if path.suffix == ".bin":
            written.add(path.name)
        return write_bytes(path, data)

    Path.read_bytes, Path.write_bytes = read, write
    return written, sizes


def bytes_to_take_rows(rows: int, columns: int) -> int:
    """Return the bytes that a device needs to take rows of an array whose 4,096 rows are sharded."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from marin_rl.learner.hf_export import take_rows
    from tests import tiny_learner as tiny

    mesh = tiny.make_trainer().device_mesh
    array = jax.ShapeDtypeStruct((4096, columns), "float32", sharding=NamedSharding(mesh, PartitionSpec("data")))
    program = take_rows.lower(array, 0, rows, NamedSharding(mesh, PartitionSpec())).compile()
    return program.memory_analysis().temp_size_in_bytes


def main(folder: Path, index: int, count: int, port: str) -> None:
    import equinox as eqx
    import jax
    import numpy as np

    from marin_rl.batching.packing import RowLayout
    from marin_rl.batching.rl_example import OwnRows, PackedBatch, pack_batch
    from marin_rl.config.workers_config import WeightTransferConfig
    from marin_rl.distributed.weight_sender import TrainingHost, open_sender
    from marin_rl.learner import hf_export
    from marin_rl.learner.hf_export import DeviceWeights, write_weights
    from marin_rl.learner.placement import place_batch, stack_microbatches
    from marin_rl.learner.scoring import Scorer
    from marin_rl.objectives.aggregation import SequenceMeanConfig
    from marin_rl.runs.checkpoint import CheckpointConfig, Checkpoints
    from marin_rl.training.shared_run import require_same_batch
    from marin_rl.utils import multihost
    from marin_rl.utils.devices.setup import join_processes, own_rows
    from marin_rl.utils.devices.trainer_config import DistributedConfig, TrainerConfig
    from tests import tiny_learner as tiny
    from tests.learner.test_scoring import make_rollouts

    # So small that large messages take several rounds.
    multihost.EXCHANGE_BYTES = 2**17
    if count > 1:
        address = f"127.0.0.1:{port}"
        shared = DistributedConfig(address, count, index, initialize_jax_distributed=True)
        join_processes(TrainerConfig(distributed=shared))
    alternate_devices()
    hide_memory_of_other_processes()
    rows = tiny.MESH_ROWS // PASSES
    trainer = tiny.make_trainer(rows)
    learner = tiny.make_learner(trainer)
    state = tiny.fresh_state(learner)
    measured = []
    for update in range(UPDATES):
        microbatches = tiny.split_rows(tiny.make_example(tiny.MESH_ROWS, seed=update), PASSES)
        state, measures = learner.update(state, microbatches)
        measured.append({name: float(metric) for name, metric in measures.items()})

    def on_host(tree: object) -> dict[str, np.ndarray]:
        arrays = jax.tree_util.tree_leaves_with_path(eqx.filter(tree, eqx.is_array))
        return {jax.tree_util.keystr(path): multihost.fetch(array) for path, array in arrays}

    weights = on_host(state)
    scorer = Scorer(trainer, RowLayout(16, rows, packed=True), pad_token_id=0, temperature=0.8, block_size=4)
    rollouts = make_rollouts(tiny.VOCAB)
    scores = rollouts.split(scorer.score(state.model, rollouts).logprobs)

    hf_export.SLICE_BYTES = 1000
    write_weights(DeviceWeights(state.model, trainer), folder, 20_000)
    written, bytes_read = record_files()
    checkpoints = Checkpoints(folder / "checkpoints", CheckpointConfig())
    checkpoints.save(state, UPDATES, {"saved by": count}, {"more": b"of the main process"} if index == 0 else {})
    checkpoints.flush()
    checkpoint = checkpoints.open(UPDATES)
    more = checkpoint.read("more").decode()
    restored = checkpoint.restore(learner.state_shape(state.model), learner.trainer)
    restored = on_host(learner.place(restored))
    same = [restored[name].tobytes() == array.tobytes() for name, array in weights.items()]

    def fail() -> str:
        raise OSError("pulled the plug")

    advantages = [np.linspace(-1, 1, count) for count in rollouts.num_loss_tokens]
    batch = rollouts.with_advantages(advantages, [2 * array for array in advantages])
    experts = np.random.default_rng(1).integers(256, size=(batch.input_ids.size, 2, 3)).astype(np.uint8)
    batch = dataclasses.replace(batch, experts=experts)

    def pack(own: OwnRows | None) -> PackedBatch:
        return pack_batch(batch, SequenceMeanConfig(), layout, pad_token_id=0, own_rows=own)

    layout = RowLayout(16, rows, packed=True)
    whole, own = pack(None), pack(own_rows(trainer))
    fed, placed_experts = [], []
    for packed, num_rows in ((whole, None), (own, own.layout.rows_per_microbatch)):
        fresh = tiny.fresh_state(learner)
        _, update = learner.dispatch(fresh, packed.microbatches, num_rows)
        fed.append({name: float(metric) for name, metric in update.wait().items()})
        stacked = stack_microbatches(packed.microbatches, len(packed.microbatches))
        with trainer.use_device_mesh():
            placed = place_batch(stacked, learner.trainer, num_rows).experts
        assert placed is not None
        placed_experts.append(packed.unpack(multihost.fetch(placed.array)[..., 1, 2]))

    require_same_batch(4, batch, [own])
    if index:
        batch = dataclasses.replace(batch, advantages=np.nextafter(batch.advantages, 2), experts=experts ^ 1)
    try:
        require_same_batch(5, batch, [own])
        differs = ""
    except multihost.ProcessesDifferError as raised:
        differs = str(raised)

    try:
        error = multihost.on_main(fail)
    except (OSError, multihost.MainProcessError) as raised:
        error = f"{type(raised).__name__}: {raised}"

    sender = open_sender(WeightTransferConfig(), TOKEN, TrainingHost.current())
    sender.publish(state.model, UPDATES)
    sender.flush()
    up_proj = state.model.transformer.layers.stacked.mlp.up_proj.weight.array
    np.savez(folder / f"process-{index}.npz", *scores, **weights)
    facts = {
        "devices": [jax.local_device_count(), jax.device_count()],
        "mesh": dict(learner.trainer.device_mesh.shape),
        "measured": measured,
        "elements": up_proj.size,
        "own elements": sum(shard.data.size for shard in up_proj.addressable_shards),
        "more": more,
        "bytes read": sum(bytes_read),
        "bytes saved": sum(file.size for name, file in checkpoint.files.items() if name != "more"),
        "written": sorted(written),
        "restored": len(same) if all(same) else "differs",
        "said": [multihost.on_main(lambda size=size: "ä" * size + str(index)) for size in (0, 300, 2**18)],
        "error": error,
        "differs": differs,
        "rows": [packed.microbatches[0].input_ids.axis_size("batch") for packed in (whole, own)],
        "fed": fed,
        "experts": [np.array_equal(placed, experts[:, 1, 2]) for placed in placed_experts],
        "bytes to take a row": bytes_to_take_rows(8, 64) / 8,
        "gathered": multihost.gather_texts(f"{index}" * (1 + 200_000 * index)),
        "agreed": [multihost.any_process(index == 1), multihost.any_process(False)],
        "main": multihost.is_main(),
        "ends at SIGTERM": not has_handler(signal.SIGTERM),
        "sampled": [sample(model_axis) for model_axis in MODEL_AXES],
        "addresses": multihost.gather_texts(sender.address),
    }
    closed = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: closed.set())
    print(json.dumps(facts), flush=True)
    closed.wait()
    sender.close()


if __name__ == "__main__":
    folder, index, count, port = sys.argv[1:]
    main(Path(folder), int(index), int(count), port)
