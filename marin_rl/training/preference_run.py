# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Direct preference optimization: a run that trains on pairs of answers.

The log-probabilities of the reference, the policy of step 0, are computed before the first step, and kept in the
checkpoint of step 0.
"""

import dataclasses
import functools
import hashlib
import io
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jaxtyping import Float32
from levanter.models.lm_model import LmHeadModel

from marin_rl.batching.rollout_batch import RolloutBatch
from marin_rl.config.supervised_config import DpoConfig
from marin_rl.data.dataset import Batches, Data, join_pairs
from marin_rl.data.rows import Example
from marin_rl.learner.preference_loss import PAIR_MEAN
from marin_rl.learner.scoring import Scorer
from marin_rl.objectives.preference import pair_sums, preference_metrics
from marin_rl.parts.supervised import PreferenceParts
from marin_rl.runs.checkpoint import Checkpoints
from marin_rl.runs.saved_checkpoint import DamagedCheckpointError
from marin_rl.training.open_run import Start, restore_policy
from marin_rl.training.supervised_run import HELD_OUT, SupervisedRun, SupervisedTask, open_on_data, score_examples
from marin_rl.utils.timing import notice_if_long

REFERENCE = "reference_logprobs.npz"
"""File of the log-probabilities of the reference in the checkpoint of step 0."""


def open_preferences(kind: type[PreferenceParts], config: DpoConfig, data: Data, start: Start) -> SupervisedRun:
    """Start a run of direct preference optimization, or resume it; see `open_on_data`."""

    def make_task(parts: PreferenceParts, checkpoints: Checkpoints, policy: LmHeadModel | None) -> SupervisedTask:
        join = functools.partial(join_pairs, length_normalized=config.loss.length_normalized)
        count = len(data.train.examples)
        pairs, file = with_reference(parts, [*data.train.examples, *data.held_out.examples], checkpoints, policy)
        measure = functools.partial(measure_pairs, parts, join, pairs[count:])
        return SupervisedTask(Batches(pairs[:count], config.batch.size, config.seed), join, measure, {REFERENCE: file})

    return open_on_data(kind, config, data, start, make_task)


def measure_pairs(
    parts: PreferenceParts,
    join: Callable[[Sequence[Example]], RolloutBatch],
    pairs: Sequence[Example],
    policy: LmHeadModel,
) -> dict[str, float]:
    """Return the loss and the metrics of held-out pairs, means over the pairs."""
    loss, batch = parts.config.loss, join(pairs)
    logprobs = batch.from_actions("log-probabilities", _score(parts.scorer, policy, pairs, parts.config.batch.size))
    ids = np.repeat(np.arange(len(pairs)), np.diff(batch.token_offsets))
    weights = np.where(batch.loss_mask, PAIR_MEAN.loss_weights(batch.num_loss_tokens)[ids], 0)

    @jax.jit
    def measure(*arrays: jax.Array) -> dict[str, jax.Array]:
        sums = pair_sums(*arrays)
        return {name: sums.weights @ values for name, values in preference_metrics(sums, loss).items()}

    arrays = (logprobs, batch.reference_logprobs, batch.advantages, weights)
    means = measure(*(array.astype(np.float32) for array in arrays), ids.astype(np.int32))
    return {f"{HELD_OUT}/{name}": float(value) for name, value in means.items()}


def with_reference(
    parts: PreferenceParts, pairs: Sequence[Example], checkpoints: Checkpoints, policy: LmHeadModel | None
) -> tuple[list[Example], bytes]:
    """Return the pairs with the log-probabilities of the reference, and the file of these.

    A run that resumes reads them in the checkpoint of step 0. If this is lost, or the pairs were changed, they are
    computed again, with the policy in that checkpoint or, without it, with the initial weights of the config. `policy`
    is the reference of a new run; None if the run resumes.
    """
    tokens = hashlib.sha256(b"".join(pair.input_ids.tobytes() + pair.loss_mask.tobytes() for pair in pairs)).digest()
    if policy is None:
        try:
            first = checkpoints.open(0)
            file = first.read(REFERENCE)
            stored = np.load(io.BytesIO(file))
            if stored["tokens"].tobytes() == tokens:
                ends = np.cumsum([np.count_nonzero(pair.loss_mask) for pair in pairs])
                return _with(pairs, np.split(stored["logprobs"], ends[:-1])), file
            parts.report(f"the reference in {first.path} is of other pairs; it is computed again")
            policy = restore_policy(parts, first)
        except DamagedCheckpointError as error:
            parts.report(f"{error}; the reference is computed again from the initial weights of the config")
            policy = parts.assemble(parts.first_policy())
    with notice_if_long(parts.report, f"computing the reference's log-probabilities of {len(pairs):,} pairs ..."):
        logprobs = _score(parts.scorer, policy, pairs, parts.config.batch.size)
    written = io.BytesIO()
    np.savez(written, logprobs=np.concatenate(logprobs), tokens=np.frombuffer(tokens, np.uint8))
    return _with(pairs, logprobs), written.getvalue()


def score_reference(scorer: Scorer, reference: LmHeadModel, pairs: Sequence[Example], size: int) -> list[Example]:
    """Return pairs with the log-probabilities of a reference policy, which scores `size` pairs at once."""
    return _with(pairs, _score(scorer, reference, pairs, size))


def _with(pairs: Sequence[Example], logprobs: Sequence[np.ndarray]) -> list[Example]:
    return [dataclasses.replace(pair, reference=of_pair) for pair, of_pair in zip(pairs, logprobs, strict=True)]


def _score(
    scorer: Scorer, model: LmHeadModel, pairs: Sequence[Example], size: int
) -> list[Float32[np.ndarray, " actions"]]:
    """Compute the log-probabilities (nats) of the tokens with loss of each pair."""
    scored = score_examples(scorer, model, pairs, size)
    return [of_pair for batch, scores in scored for of_pair in batch.actions(scores.logprobs)]
