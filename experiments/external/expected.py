# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Evaluates a run at temperature 0 as `marin_rl.evaluate` does, and writes every problem with its reply.

    python -m experiments.external.expected --run runs/external --output runs/external/problems.jsonl

The other programs in this folder read the problems from the same file, and `compare` compares their replies with these.
"""

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from marin_rl.config.sections import EvaluationConfig
from marin_rl.config.train_config import TrainConfig
from marin_rl.parts.rl import RunParts
from marin_rl.rollouts.metrics import is_correct
from marin_rl.runs.run_directory import check_output
from marin_rl.sessions.served_policy import load_served_policy
from marin_rl.training.evaluation import evaluate
from marin_rl.utils.settings.yaml_text import from_yaml

CONTEXT = 16
"""Maximum number of prompt and new tokens, with which the server is started, too."""


def greedy_replies(run: Path, tasks: int) -> list[dict[str, Any]]:
    """Evaluate a run.

    Args:
        run: run directory.
        tasks: number of held-out tasks.

    Returns:
        For each task: the user's message `prompt`, the right `answer`, the `reply` at temperature 0, whether it is
        `correct`, and the `token_ids` and `logprobs` of the reply.
    """
    policy = load_served_policy(run=str(run), max_context=CONTEXT)
    config = from_yaml(TrainConfig, (run / "config.yaml").read_text(encoding="utf-8"), "config.yaml")
    config = dataclasses.replace(config, rollouts=dataclasses.replace(config.rollouts, max_length=CONTEXT))
    settings = EvaluationConfig(tasks=tasks)
    with contextlib.ExitStack() as opened:
        runner = RunParts(config, config.trainer, opened).make_runner(policy.sampler, policy.vocab_size)
        _, groups = evaluate(runner, settings, temperature=config.sampling.temperature, seed=config.seed)
    replies = []
    # The sampled groups come before the greedy ones.
    for group in groups[len(groups) // 2 :]:
        [rollout] = group.rollouts
        [turn] = rollout.turns
        replies.append(
            {
                "prompt": rollout.task.messages[-1]["content"],
                "answer": rollout.task.worked_answer,
                "reply": policy.tokenizer.decode_reply(turn.generation.token_ids),
                "correct": is_correct(rollout),
                "token_ids": turn.generation.token_ids,
                "logprobs": turn.generation.logprobs,
            }
        )
    return replies


def main(argv: Sequence[str] | None = None) -> None:
    """Write the file and print the accuracy."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--run", type=Path, required=True, help="run directory")
    parser.add_argument("--output", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--tasks", type=int, default=200, help="number of held-out tasks")
    arguments = parser.parse_args(argv)
    check_output(arguments.output, "--output", b'"token_ids": [')
    replies = greedy_replies(arguments.run, arguments.tasks)
    arguments.output.write_text("".join(json.dumps(reply) + "\n" for reply in replies), encoding="utf-8")
    accuracy = sum(reply["correct"] for reply in replies) / len(replies)
    print(f"{len(replies)} problems, greedy accuracy {accuracy}")


if __name__ == "__main__":
    main()
