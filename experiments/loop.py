# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""RL on verified sums, with the whole algorithm in one file: copy it, and change the copy.

    python -m marin_rl.train --config experiments/rloo.yaml --num_steps 0 --run_dir runs/start
    python -m experiments.loop runs/start

The first command teaches a small model a quarter of the sums: without right answers there is nothing to reinforce.
Losses and rewards are those of experiments/rloo.yaml with `--initialize_from runs/start`, `--model null` and
`--warm_start.max_steps 0`, bit for bit.
"""

import sys

from levanter.optim.config import AdamConfig

from marin_rl import (
    GroupSampler,
    Learner,
    Limits,
    RlLoss,
    RolloutRunner,
    SamplingConfig,
    batch_rollouts,
    load_policy,
    pack_batch,
    row_layout,
    run_tasks,
    start_devices,
)
from marin_rl.environments import ReasoningGymConfig
from marin_rl.objectives import PolicyTerms, SequenceSumConfig, TokenBatch, rloo_advantages, unclipped
from marin_rl.training.evaluation import evaluate

SUMS = ReasoningGymConfig(
    task="basic_arithmetic",
    options={"max_terms": 2, "max_digits": 2, "operators": ["+"], "allow_parentheses": False, "allow_negation": False},
    size=20_000,
    prompt_regex=r"Calculate (.*)\.",
    remove_whitespace=True,
    reverse_answer=True,
    exact_answer=True,
)
SEED = 0
ADAM = AdamConfig(learning_rate=3e-4, lr_schedule="constant", warmup=0, weight_decay=0.0, max_grad_norm=1.0)


def policy_gradient(tokens: TokenBatch) -> PolicyTerms:
    """Return -A · log π of every sampled token; the loss is their sum over a rollout, and the mean over rollouts."""
    return unclipped(-tokens.advantages * tokens.logprobs)


def main(start: str, task=SUMS, adam=ADAM, *, num_steps=150, prompts=64, group_size=8, max_length=12, max_new_tokens=4):
    """Train the policy in `start`: a run directory, or a folder or hub name in Hugging Face format."""
    trainer = start_devices()
    policy, tokenizer = load_policy(start, trainer)
    sampling = SamplingConfig(max_new_tokens=max_new_tokens, max_seqs=prompts * group_size)
    sampler = GroupSampler(
        policy, config=sampling, stop_token_ids=tokenizer.stop_token_ids, max_context=max_length, trainer=trainer
    )
    environment = task.build()
    runner = RolloutRunner(environment, tokenizer, sampler, Limits(max_length, max_new_tokens))
    layout = row_layout(policy.config, trainer, max_length, prompts * group_size, group_size, max_new_tokens)
    learner = Learner(trainer, adam, num_updates=num_steps, capacity=layout.microbatches(prompts * group_size))
    state, stream, position = learner.start(policy), environment.stream(SEED), {}

    for step in range(1, num_steps + 1):
        tasks, position = stream.draw(position, prompts)
        groups = run_tasks(runner, tasks, group_size=group_size, seed_parts=(SEED, "train", step))
        rollouts, rewards, advantages = [], [], []
        for group in groups:
            graded = [rollout for rollout in group.rollouts if rollout.rewards]  # The others have failed.
            returns = [rollout.total_reward for rollout in graded]
            rollouts += graded
            rewards += returns
            advantages += rloo_advantages(returns).tolist()
        batch = batch_rollouts(rollouts).with_advantages(advantages)
        packed = pack_batch(batch, SequenceSumConfig(), layout, pad_token_id=tokenizer.pad_token_id)
        state, loss, _ = learner.forward_backward(state, packed.microbatches, RlLoss(policy_gradient))
        if any(advantages):  # Otherwise Adam would repeat its former steps.
            state, _ = learner.step(state)
        sampler.update_weights(state.model, step)
        print(f"step {step}: loss {float(loss)}, reward {sum(rewards) / len(rewards)}")
        if step % 50 == 0 or step == num_steps:
            print(evaluate(runner, seed=SEED)[0])


if __name__ == "__main__":
    main(sys.argv[1])
