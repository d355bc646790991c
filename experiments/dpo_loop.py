# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Direct preference optimization on pairs of sums in one file: copy it, and change the copy.

    python -m marin_rl.sft --config experiments/sft.yaml
    python -m experiments.dpo_loop runs/sft

Losses are those of experiments/dpo.yaml, bit for bit.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
from levanter.optim.config import AdamConfig

from marin_rl import Learner, RlExample, learner_logprobs, load_policy, pack_batch, row_layout, start_devices
from marin_rl.data.config import DataConfig
from marin_rl.data.dataset import Batches, join_pairs, read_examples
from marin_rl.learner.scoring import Scorer
from marin_rl.objectives import SequenceMeanConfig, pair_sums
from marin_rl.training.preference_run import score_reference

BETA = 1.0
PAIRS = DataConfig("experiments/data/sum_pairs.jsonl", held_out=0.1)
ADAM = AdamConfig(1e-5, lr_schedule="constant", warmup=0, weight_decay=0.0, max_grad_norm=1.0)


def preference_loss(model: Any, batch: RlExample) -> tuple[jax.Array, dict]:
    """Return `Σ w · -log σ(β · m)` over the pairs of a microbatch; w is 1 / their number in the whole batch.

    m is the sum of `log π - log π_ref` over the chosen answer minus that over the rejected one.
    """
    per_token = batch.reference_logprobs, batch.advantages, batch.loss_weights, batch.rollout_ids
    pairs = pair_sums(learner_logprobs(model, batch).array, *(named.array for named in per_token))
    return jnp.sum(pairs.weights * -jax.nn.log_sigmoid(BETA * pairs.margins)), {}


def main(start: str, source=PAIRS, adam=ADAM, *, epochs=1, batch_size=32, max_length=16):
    """Train the policy in `start`: a run directory, or a folder or hub name in Hugging Face format."""
    trainer = start_devices()
    policy, tokenizer = load_policy(start, trainer)
    data = read_examples(source, tokenizer, max_length, pairs=True)
    layout = row_layout(policy.config, trainer, max_length, 2 * batch_size, sequences_per_item=2)
    scorer = Scorer(trainer, layout, pad_token_id=tokenizer.pad_token_id)
    train, held_out = data.train.examples, data.held_out.examples
    pairs = score_reference(scorer, policy, [*train, *held_out], batch_size)
    batches = Batches(pairs[: len(train)], batch_size, seed=0)
    num_steps, capacity = batches.steps(epochs), layout.microbatches(2 * batch_size)
    learner = Learner(trainer, adam, num_updates=num_steps, capacity=capacity)
    state = learner.start(policy)
    for step in range(1, num_steps + 1):
        batch = join_pairs(batches.of_step(step))  # Its advantages are 1 in chosen answers, and -1 in rejected ones.
        packed = pack_batch(batch, SequenceMeanConfig(), layout, pad_token_id=tokenizer.pad_token_id)
        state, loss, _ = learner.forward_backward(state, packed.microbatches, preference_loss)
        state, _ = learner.step(state)
        print(f"step {step}: loss {float(loss)}")


if __name__ == "__main__":
    main(sys.argv[1])
