# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Updates of preference pairs, in several layouts. Run by test_preference_loss.py, also on 8 fake CPU devices:
`python -m tests.learner.preference_cases FILE`.
"""

import functools
import sys
from pathlib import Path

import numpy as np

from marin_rl.batching.packing import RowLayout
from marin_rl.batching.rl_example import pack_batch
from marin_rl.batching.rollout_batch import RolloutBatch, join_batches, make_batch
from marin_rl.learner.preference_loss import PreferenceLoss
from marin_rl.learner.train_step import Learner
from marin_rl.objectives.aggregation import SequenceMeanConfig
from marin_rl.objectives.preference import PreferenceLossConfig
from tests import tiny_learner as tiny

CONFIGS = {
    "plain": PreferenceLossConfig(beta=0.3),
    "smoothed": PreferenceLossConfig(beta=0.3, label_smoothing=0.2),
    "length_normalized": PreferenceLossConfig(beta=2.0, label_smoothing=0.1, length_normalized=True),
}
ALL = "length_normalized"
"""The case with all options."""
LENGTHS = [(2, 7, 3), (1, 1, 8), (4, 5, 5), (3, 8, 1), (2, 2, 6), (5, 4, 3), (1, 9, 4)]
"""Tokens of the prompt, the chosen and the rejected answer of each pair."""
LAYOUTS = {
    "one microbatch": RowLayout(12, 16, packed=False),
    "packed": RowLayout(16, 8, packed=True),
    "microbatches": RowLayout(12, 8, packed=False),
    "packed microbatches": RowLayout(16, 2, packed=True),
}
OF_MESH = {"data8": RowLayout(12, 8, packed=False), "data8 packed": RowLayout(16, 8, packed=True)}


def make_pairs(config: PreferenceLossConfig, *, seed: int = 0) -> RolloutBatch:
    """Random pairs with random log-probs of the reference."""
    rng = np.random.default_rng(seed)
    return join_batches([_make_pair(rng, f"pair {i}", config, *lengths) for i, lengths in enumerate(LENGTHS)])


def _make_pair(
    rng: np.random.Generator, id: str, config: PreferenceLossConfig, prompt: int, *answers: int
) -> RolloutBatch:
    shared = rng.integers(1, tiny.VOCAB, prompt)
    ids = [token for answer in answers for token in (*shared, *rng.integers(1, tiny.VOCAB, answer))]
    signs = [
        factor / (answer if config.length_normalized else 1)
        for sign, answer in zip((1, -1), answers, strict=True)
        for factor in ([0] * prompt + [sign] * answer)
    ]
    turns = np.where(np.array(signs) == 0, -1, 0).astype(np.int32)
    reference = np.where(turns == 0, -rng.uniform(3, 6, turns.shape), 0).astype(np.float32)
    return make_batch(
        [id],
        [[prompt + answer for answer in answers]],
        input_ids=np.array(ids, np.int32),
        turn_ids=turns,
        advantages=np.array(signs, np.float64),
        reference_logprobs=reference,
    )


@functools.cache
def make_learner(config: PreferenceLossConfig, rows: int) -> Learner:
    return Learner(tiny.make_trainer(rows), tiny.SgdConfig(), PreferenceLoss(config, 5), num_updates=1, capacity=8)


def update(
    config: PreferenceLossConfig, layout: RowLayout, pairs: RolloutBatch | None = None
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Return metrics and gradient of one update of the tiny llama."""
    learner = make_learner(config, layout.rows_per_microbatch)
    state = tiny.fresh_state(learner)
    before = tiny.arrays_by_path(state.model)
    packed = pack_batch(make_pairs(config) if pairs is None else pairs, SequenceMeanConfig(), layout, pad_token_id=0)
    state, metrics = learner.update(state, packed.microbatches)
    after = tiny.arrays_by_path(state.model)
    measured = {name: float(metric) for name, metric in metrics.items()}
    return measured, {name: before[name] - after[name] for name in before}


def main(file: Path) -> None:
    import jax

    assert jax.device_count() == 8
    found = {}
    for name, layout in OF_MESH.items():
        metrics, gradient = update(CONFIGS[ALL], layout)
        found |= {f"{name}/{key}": value for key, value in (metrics | gradient).items()}
    np.savez(file, **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
