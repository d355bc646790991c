# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The weights behind the tokens of a run with a checkpoint of every step."""

from pathlib import Path

import numpy as np

from marin_rl.batching.rollout_batch import batch_rollouts
from marin_rl.runs.rollout_store import TRAINING, read_rollouts
from marin_rl.runs.stored_rollout import groups_of_table
from marin_rl.sessions.earlier_run import load_run
from marin_rl.sessions.served_policy import open_parts
from marin_rl.training.open_run import restore_policy
from marin_rl.types import Rollout


def each_of_one_version(run_dir: Path, max_staleness: int) -> None:
    """Check that all trained tokens were sampled with the checkpoint of their recorded version, which is not too old.

    The sampler's log-probabilities must be those that a scorer computes with the weights in the checkpoint.
    """
    config, checkpoints = load_run(str(run_dir), None)
    parts = open_parts(config)
    policies = {step: restore_policy(parts, checkpoints.open(step)) for step in checkpoints.steps()}
    sampled: dict[int, list[Rollout]] = {}
    ages = set()
    for table in read_rollouts(run_dir / "rollouts", None, None, [TRAINING]):
        [step] = set(table["step"].to_pylist())
        for rollout in (rollout for group in groups_of_table(table).groups for rollout in group.rollouts):
            generations = [turn.generation for turn in rollout.turns]
            [version] = {version for one in generations for version in (one.first_version, one.last_version)}
            sampled.setdefault(version, []).append(rollout)
            ages.add(step - 1 - version)
    assert max(ages) == max_staleness
    assert min(ages) >= 0

    def difference(version: int, rollouts: list[Rollout]) -> float:
        batch = batch_rollouts(rollouts, max_length=config.rows.max_length)
        scores = parts.scorer.score(policies[version], batch)
        return float(np.abs(scores.logprobs - batch.policy_logprobs)[batch.loss_mask].max())

    # Both compute in float32.
    assert max(difference(version, rollouts) for version, rollouts in sampled.items()) < 1e-4
    # Under another version they differ.
    assert max(difference(version + 1, rollouts) for version, rollouts in sampled.items()) > 1e-3
