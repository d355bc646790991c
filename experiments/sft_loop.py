# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Supervised fine-tuning on worked sums in one file: copy it, and change the copy.

    python -m experiments.sft_loop

Losses are those of experiments/sft.yaml with `--model.gradient_checkpointing true`, bit for bit.
"""

from typing import Any

import haliax as hax
import jax
from levanter.models.llama import LlamaConfig
from levanter.optim.config import AdamConfig

from marin_rl import Learner, RlExample, learner_logprobs, load_policy, pack_batch, row_layout, start_devices
from marin_rl.data.config import DataConfig
from marin_rl.data.dataset import Batches, join_examples, read_examples
from marin_rl.objectives import TokenMeanConfig
from marin_rl.utils.levanter_line import seq_len

LLAMA = LlamaConfig(**seq_len(16), hidden_dim=128, intermediate_dim=384, num_layers=3, num_heads=4, num_kv_heads=4)
SUMS = DataConfig("experiments/data/sums.jsonl", held_out=0.1)
ADAM = AdamConfig(1e-3, lr_schedule="cosine", min_lr_ratio=0.1, warmup=20, weight_decay=0.0, max_grad_norm=1.0)


def cross_entropy(model: Any, batch: RlExample) -> tuple[jax.Array, dict]:
    """Return `Σ w · -log π` over the tokens with loss of a microbatch; w is 1 / their number in the whole batch."""
    return -hax.sum(batch.loss_weights * learner_logprobs(model, batch)).array, {}


def main(start=LLAMA, source=SUMS, adam=ADAM, *, epochs=8, batch_size=64, max_length=16):
    """Train the policy in `start`: a folder or hub name in Hugging Face format, or an architecture."""
    trainer = start_devices()
    policy, tokenizer = load_policy(start, trainer)
    data = read_examples(source, tokenizer, max_length)
    batches = Batches(data.train.examples, batch_size, seed=0)
    layout = row_layout(policy.config, trainer, max_length, batch_size)
    num_steps, capacity = batches.steps(epochs), layout.microbatches(batch_size)
    learner = Learner(trainer, adam, num_updates=num_steps, capacity=capacity)
    state = learner.start(policy)
    for step in range(1, num_steps + 1):
        batch = join_examples(batches.of_step(step))
        packed = pack_batch(batch, TokenMeanConfig(), layout, pad_token_id=tokenizer.pad_token_id)
        state, loss, _ = learner.forward_backward(state, packed.microbatches, cross_entropy)
        state, _ = learner.step(state)
        print(f"step {step}: loss {float(loss)}")


if __name__ == "__main__":
    main()
