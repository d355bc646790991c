# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""RL on verified sums, with every line of the algorithm in one file: copy it, and change the copy.

    python -m marin_rl.train --config experiments/rloo.yaml --num_steps 0 --run_dir runs/start
    python -m experiments.loop runs/start

The first command trains a small model on worked sums until it solves a quarter of them: without right answers there is
nothing to reinforce. Losses and rewards are those of experiments/rloo.yaml from these weights, bit for bit.
"""

import sys

import haliax as hax
import jax
from levanter.optim.config import AdamConfig

from marin_rl.batching.rl_example import RlExample, pack_batch
from marin_rl.batching.rollout_batch import batch_rollouts
from marin_rl.batching.rows import row_layout
from marin_rl.config.sections import EvaluationConfig
from marin_rl.environments import ReasoningGymConfig
from marin_rl.learner.logprobs import learner_logprobs
from marin_rl.learner.starting_weights import load_policy
from marin_rl.learner.train_step import Learner
from marin_rl.objectives import SequenceSumConfig, rloo_advantages
from marin_rl.rollouts.attempt import Limits
from marin_rl.rollouts.run_rollouts import RolloutRunner, run_tasks
from marin_rl.sampling.config import SamplingConfig
from marin_rl.sampling.group_sampler import GroupSampler
from marin_rl.training.evaluation import evaluate
from marin_rl.utils.devices.setup import start_devices
from marin_rl.utils.devices.trainer_config import TrainerConfig

SEED = 0
PROMPTS, GROUP_SIZE = 64, 8
MAX_LENGTH, MAX_NEW_TOKENS = 12, 4
SUMS = ReasoningGymConfig(
    task="basic_arithmetic",
    options={
        **{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
        **{"operators": ["+"], "allow_parentheses": False, "allow_negation": False},
    },
    size=20_000,
    prompt_regex=r"Calculate (.*)\.",
    remove_whitespace=True,
    reverse_answer=True,
    exact_answer=True,
)


def policy_gradient(model, batch: RlExample) -> tuple[jax.Array, dict]:
    """Return the sum of -w · A · log π over the sampled tokens; w holds the denominators of the whole batch."""
    terms = -batch.advantages * learner_logprobs(model, batch)
    return hax.sum(batch.loss_weights * terms).array, {}


def main(start: str, num_steps: int = 150) -> None:
    trainer = start_devices(TrainerConfig())
    environment = SUMS.build()
    policy, tokenizer = load_policy(start, trainer)
    sampler = GroupSampler(
        policy,
        config=SamplingConfig(max_new_tokens=MAX_NEW_TOKENS, max_seqs=PROMPTS * GROUP_SIZE),
        stop_token_ids=tokenizer.stop_token_ids,
        max_context=MAX_LENGTH,
        trainer=trainer,
    )
    runner = RolloutRunner(environment, tokenizer, sampler, Limits(MAX_LENGTH, MAX_NEW_TOKENS))
    layout = row_layout(
        policy.config,
        trainer,
        max_length=MAX_LENGTH,
        sequences=PROMPTS * GROUP_SIZE,
        group_size=GROUP_SIZE,
        max_new_tokens=MAX_NEW_TOKENS,
    )
    optimizer = AdamConfig(learning_rate=3e-4, lr_schedule="constant", warmup=0, weight_decay=0.0, max_grad_norm=1.0)
    learner = Learner(trainer, optimizer, num_updates=num_steps)
    state, stream, position = learner.start(policy), environment.stream(SEED), {}
    for step in range(1, num_steps + 1):
        tasks, position = stream.draw(position, PROMPTS)
        groups = run_tasks(runner, tasks, group_size=GROUP_SIZE, seed_parts=(SEED, "train", step))
        rollouts, rewards, advantages = [], [], []
        for group in groups:
            graded = [rollout for rollout in group.rollouts if rollout.rewards]
            rollouts += graded
            rewards += [rollout.total_reward for rollout in graded]
            advantages += rloo_advantages([rollout.total_reward for rollout in graded]).tolist()
        batch = batch_rollouts(rollouts).with_advantages(advantages)
        packed = pack_batch(batch, SequenceSumConfig(), layout, pad_token_id=tokenizer.pad_token_id)
        loss = 0.0
        for rows in packed.microbatches:
            state, part, _ = learner.forward_backward(state, rows, policy_gradient)
            loss += part
        state, metrics = learner.step(state)
        sampler.update_weights(state.model, step)
        print(step, float(loss), sum(rewards) / len(rewards), float(metrics["grad_norm"]))
        if step % 50 == 0:
            print(evaluate(runner, EvaluationConfig(tasks=512), seed=SEED)[0])


if __name__ == "__main__":
    main(sys.argv[1])
