# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Run by test_train_step.py on 8 fake CPU devices in a separate process: `mesh_cases.py FOLDER`.

Writes the loss, metrics and gradient of every case to `FOLDER/CASE.npz`, a checkpoint that one mesh saved and another
loaded, and the effect of shared prompts with the kernel of TPUs, interpreted.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from marin_rl.utils.levanter_line import seq_len

CASES = {
    # name: model_axis_size, microbatches; 32 rows in all
    "data8-passes4": (1, 4),
    "data4-model2-passes2": (2, 2),
}


def main(folder: Path) -> None:
    import jax
    import numpy as np

    from marin_rl.runs.checkpoint import CheckpointConfig, Checkpoints
    from tests import tiny_learner as tiny
    from tests.learner import stream_cases as streams

    states = {}
    facts = {"devices": jax.device_count()}
    for name, (model_axis, microbatches) in CASES.items():
        trainer = tiny.make_trainer(tiny.MESH_ROWS // microbatches, model_axis=model_axis)
        learner = tiny.make_learner(trainer, optimizer=tiny.SgdConfig())
        measured, gradient, state = tiny.loss_and_gradient(learner, microbatches)
        np.savez(folder / f"{name}.npz", **gradient)
        up_proj = state.model.transformer.layers.stacked.mlp.up_proj.weight.array
        facts[name] = {
            "measured": measured,
            "mesh": dict(learner.trainer.device_mesh.shape),
            "shards": len({str(shard.index) for shard in up_proj.addressable_shards}),
        }
        states[model_axis] = learner, state
        # The three streams, with a teacher that the same mesh shards.
        of_streams = streams.make_stream_learner(tiny.make_trainer(streams.ON_MESHES.rows, model_axis=model_axis))
        measured, gradient = streams.update(of_streams, streams.pack(streams.ON_MESHES))
        np.savez(folder / f"{name}-streams.npz", **gradient)
        facts[name]["streams"] = measured

    checkpoints = Checkpoints(folder / "checkpoints", CheckpointConfig())
    _, saved = states[1]
    checkpoints.save(saved, 1, {})
    learner, other = states[2]
    restored = checkpoints.open(1).restore(learner.state_shape(other.model), learner.trainer)
    tiny.assert_same_bits(restored, saved)
    restored = learner.place(restored)
    tiny.assert_same_bits(restored, saved)
    facts["restored on the other mesh"] = tiny.placements(restored) == tiny.placements(other)
    facts["meshes differ"] = tiny.placements(restored.model) != tiny.placements(saved.model)
    _, microbatches = CASES["data4-model2-passes2"]
    with tiny.counted_compiles() as compiled:
        learner.update(restored, tiny.split_rows(tiny.make_example(tiny.MESH_ROWS), microbatches))
    facts["compiled after the restore"] = len(compiled)
    facts["shared prompts"] = differences_of_shared_prompts()
    (folder / "facts.json").write_text(json.dumps(facts))


def differences_of_shared_prompts() -> list[tuple[float, float]]:
    """Return the largest difference and value of the log-probs, and of the gradient of each array.

    Rows of a prompt and two answers, in the kernel of TPUs, against rows of one sequence, with XLA. Both on a mesh of
    data 4 x model 2.
    """
    import equinox as eqx
    import haliax as hax
    import jax
    import numpy as np
    from levanter.layers.attention import AttentionBackend

    from marin_rl.batching.packing import GroupRow, RowLayout
    from marin_rl.batching.rl_example import RlExample, pack_batch
    from marin_rl.batching.rollout_batch import join_batches
    from marin_rl.learner.attention_layers import with_attention_kernel
    from marin_rl.learner.logprobs import token_logprobs
    from marin_rl.learner.placement import place
    from marin_rl.objectives.aggregation import TokenMeanConfig
    from marin_rl.utils.devices.setup import start_devices
    from tests import tiny_learner as tiny

    axes = {"model_axis_size": 2, "tensor_parallel_axes": ["kv_head", "heads"], "per_device_parallelism": -1}
    trainer = start_devices(dataclasses.replace(tiny.make_trainer(8), **axes), rows_per_device=1)
    rng = np.random.default_rng(0)
    lengths = [
        (prompt, answer) for prompt, both in ((100, (20, 128)), (129, (127, 3)), (60, (9, 1))) for answer in both
    ]
    prompts = [rng.integers(2, tiny.VOCAB, 129) for _ in range(3)]
    sequences = [
        tiny.one_sequence(np.concatenate([prompts[i // 2][:prompt], rng.integers(2, tiny.VOCAB, answer)]), prompt)
        for i, (prompt, answer) in enumerate(lengths)
    ]
    rollouts = join_batches(sequences)
    alone = RowLayout(256, 8, packed=False)
    group = GroupRow(128, 2, 128)
    groups = RowLayout(group.row_length, 4, packed=True, group=group)

    def logprobs_and_gradient(layout: RowLayout, backend: AttentionBackend) -> list[np.ndarray]:
        config = dataclasses.replace(tiny.QWEN3, **seq_len(256), num_layers=1, attn_backend=backend)
        batch = pack_batch(rollouts, TokenMeanConfig(), layout, pad_token_id=0)
        (example,) = batch.microbatches
        assert (example.group is None) == (layout is alone)

        def loss(model: Any, example: RlExample) -> tuple[jax.Array, jax.Array]:
            with hax.axis_mapping(trainer.compute_axis_mapping):
                run = with_attention_kernel(model, example, interpret=True)
                inputs = example.to_inputs(example.input_ids), example.attention_mask
                computed = run.activations(*inputs, key=None, pos_ids=example.to_inputs(example.position_ids))
                activations = example.from_inputs(computed)
                logprobs, _ = token_logprobs(activations, model.get_lm_head(), example, temperature=1.0, block_size=64)
            return hax.sum(hax.sin(logprobs)).scalar(), logprobs.array

        with trainer.use_device_mesh():
            mesh = trainer.device_mesh
            model = place(tiny.make_model(trainer, config), mesh, trainer.parameter_axis_mapping)
            differentiate = eqx.filter_jit(eqx.filter_value_and_grad(loss, has_aux=True))
            (_, logprobs), gradient = differentiate(model, place(example, mesh, trainer.compute_axis_mapping))
        tokens = batch.unpack(np.asarray(logprobs)[None])[rollouts.loss_mask]
        return [tokens, *map(np.asarray, jax.tree.leaves(gradient))]

    shared = dataclasses.replace(alone, row_cost=1.0, alternatives=(groups,))
    found = logprobs_and_gradient(shared, AttentionBackend.SPLASH)
    expected = logprobs_and_gradient(alone, AttentionBackend.JAX_FLASH)
    return [
        (float(np.abs(ours - theirs).max()), float(np.abs(theirs).max()))
        for ours, theirs in zip(found, expected, strict=True)
    ]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
