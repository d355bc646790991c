# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Direct preference optimization: a run that trains on pairs of answers.

The log-probabilities of the reference, the policy of step 0, are computed once, before the first step. The checkpoint
of step 0 keeps them.
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

from marin_rl.batching.rl_example import PackedBatch, pack_batch
from marin_rl.batching.rollout_batch import RolloutBatch
from marin_rl.config.train_config import DpoConfig
from marin_rl.data.dataset import Batches, describe, join_pairs
from marin_rl.data.rows import Example
from marin_rl.objectives.aggregation import SequenceMeanConfig
from marin_rl.objectives.preference import pair_sums, preference_metrics
from marin_rl.runs.run_directory import CheckpointError
from marin_rl.supervised_parts import DpoParts
from marin_rl.training.supervised_run import (
    HELD_OUT,
    Start,
    SupervisedRun,
    SupervisedTask,
    open_supervised,
    read_data,
    score_examples,
)
from marin_rl.utils.devices.setup import own_rows
from marin_rl.utils.timing import notice_if_long

REFERENCE = "reference_logprobs.npz"
"""File of the log-probabilities of the reference in the checkpoint of step 0."""


def prepare_dpo(config: DpoConfig) -> tuple[DpoConfig, Callable[..., SupervisedRun]]:
    """Read and tokenize the pairs of a run; see `Prepare` in `marin_rl.training.session`.

    Returns:
        The config with `num_steps`, and the function that opens the run.

    Raises:
        ValueError: if the data is invalid; the message names the file, the line and the column.
    """
    config, train, held_out = read_data(config)
    join = functools.partial(join_pairs, length_normalized=config.loss.length_normalized)

    def make_task(parts: DpoParts, start: Start) -> SupervisedTask:
        parts.report(describe(train, held_out))
        pairs, file = with_reference(parts, [*train.examples, *held_out.examples], start)
        count = len(train.examples)
        batches, measured = Batches(pairs[:count], config.batch.size, config.seed), pairs[count:]
        return SupervisedTask(
            batch=lambda step: join(batches.of_step(step)),
            pack=lambda batch: pack_pairs(batch, parts),
            epochs=batches.epochs,
            measure=(lambda policy: measure_pairs(parts, join(measured), measured, policy)) if measured else None,
            first_files={REFERENCE: file},
        )

    return config, functools.partial(open_supervised, config, DpoParts, make_task)


def pack_pairs(batch: RolloutBatch, parts: DpoParts) -> PackedBatch:
    """Pack a batch of pairs for the mean of their losses."""
    return pack_batch(
        batch,
        SequenceMeanConfig(),
        parts.layout,
        pad_token_id=parts.tokenizer.pad_token_id,
        own_rows=own_rows(parts.trainer),
    )


def measure_pairs(
    parts: DpoParts, batch: RolloutBatch, pairs: Sequence[Example], policy: LmHeadModel
) -> dict[str, float]:
    """Return the loss and the metrics of held-out pairs, means over the pairs."""
    logprobs = batch.from_actions("log-probabilities", _score(parts, policy, pairs))
    ids = np.repeat(np.arange(len(pairs)), np.diff(batch.token_offsets))
    weights = np.where(batch.loss_mask, SequenceMeanConfig().loss_weights(batch.num_loss_tokens)[ids], 0)

    @jax.jit
    def measure(*arrays: jax.Array) -> dict[str, jax.Array]:
        sums = pair_sums(*arrays)
        return {name: sums.weights @ values for name, values in preference_metrics(sums, parts.config.loss).items()}

    arrays = (logprobs, batch.reference_logprobs, batch.advantages, weights)
    means = measure(*(array.astype(np.float32) for array in arrays), ids.astype(np.int32))
    return {f"{HELD_OUT}/{name}": float(value) for name, value in means.items()}


def with_reference(parts: DpoParts, pairs: Sequence[Example], start: Start) -> tuple[list[Example], bytes]:
    """Return the pairs with the log-probabilities of the reference, which are computed or read, and their file.

    Raises:
        CheckpointError: if the file of a run that resumes is of other pairs.
    """
    tokens = hashlib.sha256(b"".join(pair.input_ids.tobytes() + pair.loss_mask.tobytes() for pair in pairs)).digest()
    if start.policy is None:
        first = start.checkpoints.open(0)
        file = first.read(REFERENCE)
        stored = np.load(io.BytesIO(file))
        if stored["tokens"].tobytes() != tokens:
            raise CheckpointError(
                f"the pairs are not those whose reference is in {first.path}: the data, the tokenizer or a limit of "
                "lengths has changed since; restore it, or choose another run_dir"
            )
        ends = np.cumsum([np.count_nonzero(pair.loss_mask) for pair in pairs])
        logprobs = np.split(stored["logprobs"], ends[:-1])
    else:
        with notice_if_long(parts.report, f"computing the reference's log-probabilities of {len(pairs):,} pairs ..."):
            logprobs = _score(parts, start.policy, pairs)
        written = io.BytesIO()
        np.savez(written, logprobs=np.concatenate(logprobs), tokens=np.frombuffer(tokens, np.uint8))
        file = written.getvalue()
    return [dataclasses.replace(pair, reference=of) for pair, of in zip(pairs, logprobs, strict=True)], file


def _score(parts: DpoParts, model: LmHeadModel, pairs: Sequence[Example]) -> list[Float32[np.ndarray, " actions"]]:
    """Compute the log-probabilities (nats) of the tokens with loss of each pair."""
    scored = []
    for batch, scores in score_examples(parts, model, pairs):
        scored += batch.actions(scores.logprobs)
    return scored
