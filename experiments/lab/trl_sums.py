# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A run of TRL's `GRPOTrainer` on the problem of `against_peer`, in an environment with TRL and without marin_rl.

    python -m experiments.lab.trl_sums --problem FOLDER --output FILE --rows 64

Appends one JSON object per step to the output, with the names of marin_rl's metrics. Held-out problems are answered
with `model.generate`, sampled at temperature 1 and greedily, as often as marin_rl evaluates.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from experiments.lab.benchmarks.peer_arguments import parse_peer
from experiments.lab.benchmarks.trl_run import trainer_config

Problem = dict[str, Any]
"""See `against_peer.prepare`."""
Messages = list[dict[str, str]]


def as_messages(question: str) -> Messages:
    """Return a question as a conversation, which the tokenizer's template renders."""
    return [{"role": "user", "content": question}]


class Writer(TrainerCallback):
    """Writes the reward of each step, and the accuracy on held-out problems."""

    def __init__(self, problem: Problem, tokenizer: Any, output: Path) -> None:
        self._problem = problem
        self._tokenizer = tokenizer
        self._output = output

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluate the start."""
        self._write({"step": 0, **self._accuracies(kwargs["model"])})

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write a step; the summary at the end of training has no loss."""
        logs: dict[str, float] = kwargs["logs"]
        if "loss" not in logs:
            return
        record = {"step": state.global_step, "reward/correct/mean": logs["reward"], "gradient_norm": logs["grad_norm"]}
        if state.global_step % self._problem["every"] == 0:
            record |= self._accuracies(kwargs["model"])
        self._write(record)

    def _write(self, record: Problem) -> None:
        with self._output.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def _accuracies(self, model: Any) -> dict[str, float]:
        """Return the share of right answers, sampled and greedy."""
        questions, answers = zip(*self._problem["held_out"], strict=True)
        batch = self._tokenizer.apply_chat_template(
            [as_messages(question) for question in questions],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
            padding=True,
            tokenizer_kwargs={"padding_side": "left"},
        )
        shares = {}
        for name, sampled in (("sampled", True), ("greedy", False)):
            with torch.no_grad():
                ids = model.generate(
                    **batch, max_new_tokens=self._problem["new_tokens"], do_sample=sampled, temperature=None, top_k=0
                )
            replies = self._tokenizer.batch_decode(ids[:, batch.input_ids.shape[1] :], skip_special_tokens=True)
            right = sum(reply == answer for reply, answer in zip(replies, answers, strict=True))
            shares[f"eval/{self._problem['environment']}/accuracy_{name}"] = right / len(answers)
        return shares


def sums_config(problem: Problem, folder: Path, rows: int) -> GRPOConfig:
    """Return TRL's settings; `rows` are those of a forward and backward pass.

    With `scale_rewards="none"` the advantage is the reward minus the mean of its group, (G - 1)/G times that of RLOO.
    With `loss_type="dr_grpo"` the loss is the sum over tokens by N·L, where marin_rl divides by N. The bound on the
    norm of the gradient is scaled by both factors; Adam does not depend on them.
    """
    group, tokens = problem["group_size"], problem["new_tokens"]
    bound = problem["max_grad_norm"] * (group - 1) / group / tokens
    return trainer_config(problem, folder, problem["steps"], rows, loss_type="dr_grpo", top_k=0, max_grad_norm=bound)


def main() -> None:
    """Train, and write the metrics."""
    arguments = parse_peer("TRL's side of against_peer", steps=False)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    problem = json.loads((arguments.problem / "problem.json").read_text())
    prompts, answers = zip(*problem["train"], strict=True)

    def reward(completions: list[Messages], answer: list[str], **_: Any) -> list[float]:
        return [float(reply[0]["content"] == right) for reply, right in zip(completions, answer, strict=True)]

    tokenizer = AutoTokenizer.from_pretrained(arguments.problem / "model")
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(arguments.problem / "model", dtype=torch.float32),
        reward_funcs=reward,
        args=sums_config(problem, arguments.problem, arguments.rows),
        train_dataset=Dataset.from_dict({"prompt": [*map(as_messages, prompts)], "answer": answers}),
        processing_class=tokenizer,
        callbacks=[Writer(problem, tokenizer, arguments.output)],
    )
    trainer.train()


if __name__ == "__main__":
    main()
