# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""An update with all three streams: plain functions, which `mesh_cases.py` runs on 8 devices."""

import dataclasses

import jax
import numpy as np

from marin_rl.batching.rl_example import PackedBatch, pack_batch
from marin_rl.batching.rollout_batch import RolloutBatch, join_batches
from marin_rl.learner.loss import RlLoss
from marin_rl.learner.train_step import Frozen, Learner
from marin_rl.objectives.aggregation import SequenceSumConfig
from marin_rl.objectives.divergence import Divergence
from marin_rl.objectives.kl import ExactKlConfig
from marin_rl.objectives.policy_loss import ReinforceLossConfig
from marin_rl.utils.devices.trainer_config import TrainerConfig
from tests import tiny_learner as tiny
from tests.learner.invariance_cases import Arrangement, arrange, make_episodes

ON_MESHES = Arrangement(8, packed=True)
LOSS = RlLoss(
    ReinforceLossConfig().per_token, ExactKlConfig(0.7, Divergence.JENSEN_SHANNON, 0.3), 0.8, 5, ce_coefficient=0.5
)


def make_rollouts(arrangement: Arrangement) -> RolloutBatch:
    """Return rollouts of several turns with an advantage for each."""
    episodes = [
        (index, episode)
        for index, episode in enumerate(make_episodes())
        if not (arrangement.one_sequence and episode.rewritten)
    ]
    batch = join_batches([arrange(episode, str(index), arrangement) for index, episode in episodes])
    scores = np.repeat([episode.score for _, episode in episodes], np.diff(batch.token_offsets))
    assert batch.observation_mask.sum() > 5
    return dataclasses.replace(batch, advantages=scores * batch.loss_mask)


def pack(arrangement: Arrangement) -> PackedBatch:
    batch = make_rollouts(arrangement)
    streams = {"ce_mask": batch.observation_mask, "ref_kl_mask": batch.loss_mask}
    return pack_batch(batch, SequenceSumConfig(), arrangement.layout, pad_token_id=0, **streams)


def make_stream_learner(trainer: TrainerConfig, loss: RlLoss = LOSS) -> Learner:
    """Return a learner whose teacher has another architecture than the policy."""
    teacher = tiny.make_model(trainer, tiny.QWEN3, seed=7)
    return Learner(trainer, tiny.SgdConfig(), loss, num_updates=10, capacity=4, frozen=Frozen(teacher=teacher))


def update(learner: Learner, packed: PackedBatch) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Return the metrics and the gradient of one step of gradient descent."""
    state = learner.initial_state(tiny.make_model(learner.trainer), jax.random.PRNGKey(1))
    before = tiny.arrays_by_path(state.model)
    state, metrics = learner.update(state, packed.microbatches)
    after = tiny.arrays_by_path(state.model)
    measured = {name: float(metric) for name, metric in metrics.items()}
    return measured, {name: before[name] - after[name] for name in before}
