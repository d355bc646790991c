# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A run of Tunix's `GRPOLearner` on the problem of `against_peer`, in an environment with Tunix and without marin_rl.

    python -m experiments.lab.tunix_sums --problem FOLDER --output FILE --rows 512

Appends one JSON object per step to the output, with the names of marin_rl's metrics. Held-out problems are answered
with Tunix's sampler, at temperature 1 and greedily, as often as marin_rl evaluates.
"""

import dataclasses
import json
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from experiments.lab.benchmarks.peer_arguments import parse_peer
from experiments.lab.benchmarks.tunix_run import AfterStep, batches, make_learner


def main() -> None:
    """Train, and write the metrics."""
    arguments = parse_peer("Tunix's side of against_peer", steps=False)
    problem = json.loads((arguments.problem / "problem.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(arguments.problem / "model")

    def rendered(pairs: list[list[str]]) -> tuple[list[str], list[str]]:
        questions, answers = zip(*pairs, strict=True)
        messages = [[{"role": "user", "content": question}] for question in questions]
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False), list(answers)

    prompts, right = rendered(problem["train"])
    held_out, held_out_right = rendered(problem["held_out"])
    prompt_tokens = max(len(tokenizer.encode(prompt)) for prompt in [*prompts, *held_out])
    rewards: list[float] = []

    def reward(completions: list[str], right: list[str], **_: Any) -> list[float]:
        rewards[:] = [float(reply == answer) for reply, answer in zip(completions, right, strict=True)]
        return rewards

    model = arguments.problem / "model"
    learner, sampling = make_learner(problem, model, arguments.rows, prompt_tokens, reward)

    def write(record: dict[str, float]) -> None:
        if record["step"] % problem["every"] == 0:
            # Without top_p, Tunix's sampler is greedy.
            for name, top_p in (("sampled", 1.0), ("greedy", None)):
                output = learner.rl_cluster.rollout.generate(held_out, dataclasses.replace(sampling, top_p=top_p))
                share = np.mean([reply == answer for reply, answer in zip(output.text, held_out_right, strict=True)])
                record[f"eval/{problem['environment']}/accuracy_{name}"] = float(share)
        with arguments.output.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def after_step(step: int, _: float, grad_norm: float) -> None:
        write({"step": step, "reward/correct/mean": float(np.mean(rewards)), "gradient_norm": grad_norm})

    write({"step": 0})
    learner.rl_cluster.actor_trainer.with_training_hooks(AfterStep(after_step))
    learner.train(batches({"prompts": prompts, "right": right}, problem["prompts"], problem["steps"]))


if __name__ == "__main__":
    main()
