# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Run by test_train_step.py on 8 fake CPU devices in a separate process: `mesh_cases.py FOLDER`.

Writes the loss, metrics and gradient of every case to `FOLDER/CASE.npz`, and a checkpoint that one mesh saved and
another loaded.
"""

import json
import sys
from pathlib import Path

CASES = {
    # name: model_axis_size, microbatches; 32 rows in all
    "data8-passes4": (1, 4),
    "data4-model2-passes2": (2, 2),
}


def main(folder: Path) -> None:
    import conftest as tiny
    import jax
    import numpy as np

    from marin_rl.learner.checkpoint import CheckpointConfig, Checkpoints

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

    checkpoints = Checkpoints(folder / "checkpoints", CheckpointConfig())
    _, saved = states[1]
    checkpoints.save(saved, 1, {})
    learner, other = states[2]
    restored = checkpoints.open(1).restore(learner.state_shape(other.model), learner.trainer.config)
    tiny.assert_same_bits(restored, saved)
    restored = learner.place(restored)
    tiny.assert_same_bits(restored, saved)
    facts["restored on the other mesh"] = tiny.placements(restored) == tiny.placements(other)
    facts["meshes differ"] = tiny.placements(restored.model) != tiny.placements(saved.model)
    _, microbatches = CASES["data4-model2-passes2"]
    with tiny.counted_compiles() as compiled:
        learner.step(restored, tiny.split_rows(tiny.make_example(tiny.MESH_ROWS), microbatches))
    facts["compiled after the restore"] = len(compiled)
    (folder / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
