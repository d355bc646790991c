# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Compares a run on `verifiers_digits` with traces of verifiers: those of its own episodes, and those of `vf-eval`.

    python -m experiments.external.verifiers_tokens --run runs/verifiers --traces runs/traces.jsonl --vf_eval FILE

Tokens, masks and log-probs of the training rollouts must be equal bit for bit, and scores of the last greedy evaluation
must be those of `vf-eval` at temperature 0.
"""

import argparse
import collections
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

from marin_rl.batching.rollout_batch import batch_rollouts
from marin_rl.runs.rollout_store import EVALUATION, TRAINING, read_rollouts
from marin_rl.runs.stored_rollout import groups_of_table
from marin_rl.types import Rollout


def trained(rollout: Rollout) -> list[bytes]:
    """Return tokens, loss mask and log-probs of the sequences of a rollout."""
    batch = batch_rollouts([rollout], max_length=rollout.num_tokens)
    values, bounds = (batch.input_ids, batch.loss_mask, batch.policy_logprobs), batch.sequence_offsets.tolist()
    return [joined(*(value[start:end] for value in values)) for start, end in itertools.pairwise(bounds)]


def joined(tokens: Any, mask: Any, logprobs: Any) -> bytes:
    """Return the bytes of the arrays."""
    return np.array([tokens, mask, np.asarray(logprobs, np.float32)], np.float64).tobytes()


def stored(run: str, purpose: str) -> list[Rollout]:
    """Return the stored rollouts of a run."""
    tables = read_rollouts(Path(run, "rollouts"), purposes=(purpose,))
    groups = [group for table in tables for group in groups_of_table(table).groups]
    return [rollout for group in groups for rollout in group.rollouts]


def compare_scores(rollouts: list[Rollout], traces: Path) -> None:
    """Print how many evaluated problems have the score that `vf-eval` reports."""
    episodes = map(json.loads, traces.read_text(encoding="utf-8").splitlines())
    scores = {
        episode["task"]["data"]["prompt"]: episode["traces"][0]["rewards"]["correct"]["score"] for episode in episodes
    }
    # The last evaluation has the last rollout of each problem.
    last = {prompt_of(rollout): rollout for rollout in rollouts if "-greedy-" in rollout.id}
    equal = sum(scores[prompt] == rollout.rewards["correct"] for prompt, rollout in last.items())
    print(f"vf-eval: {len(scores)} problems, mean score {sum(scores.values()) / len(scores):.4f}")
    print(f"{equal} of {len(last)} problems of the last greedy evaluation have the same score")


def prompt_of(rollout: Rollout) -> str:
    """Return the three digits of a rollout's problem, from its first prompt."""
    tokens = rollout.turns[0].observation_tokens
    return bytes(token for token in tokens if token < 256).decode()


def main() -> None:
    """Print how many rollouts have an equal trace."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--run", required=True, help="run directory")
    parser.add_argument("--traces", type=Path, required=True, help="the file in TRACES")
    parser.add_argument("--vf_eval", type=Path, required=True, help="traces.jsonl of vf-eval")
    arguments = parser.parse_args()
    branches = [branch for line in arguments.traces.read_text().splitlines() for branch in json.loads(line)]
    reported = collections.Counter(joined(*branch.values()) for branch in branches)
    rollouts = stored(arguments.run, TRAINING)
    recorded = collections.Counter(sequence for rollout in rollouts for sequence in trained(rollout))
    print(f"{len(branches)} branches of traces; {len(rollouts)} training rollouts with {recorded.total()} sequences")
    print(f"{(recorded & reported).total()} sequences have a branch with equal tokens, mask and log-probs")
    compare_scores(stored(arguments.run, EVALUATION), arguments.vf_eval)


if __name__ == "__main__":
    main()
