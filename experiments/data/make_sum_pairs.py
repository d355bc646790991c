# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Write sum_pairs.jsonl, right answers against wrong ones that the policy of `sft.yaml` samples.

    python -m experiments.data.make_sum_pairs runs/sft

The sums are training tasks of `rloo.yaml` after those of sums.jsonl, so held-out tasks stay unseen. Of eight answers to
each sum, sampled at temperature 1, the first wrong one is rejected; a sum without a wrong answer is left out.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.data.make_sums import ROWS
from marin_rl.config.train_config import TrainConfig
from marin_rl.environments.base import Split
from marin_rl.sampling.sampler import SampleRequest
from marin_rl.sessions.served_policy import Policy, load_served_policy
from marin_rl.types import Task
from marin_rl.utils.settings.yaml_text import from_yaml

OUTPUT = Path(__file__).with_name("sum_pairs.jsonl")
SUMS, ANSWERS, NEW_TOKENS = 2000, 8, 4


def sampled_answers(policy: Policy, tasks: Sequence[Task]) -> list[list[str]]:
    """Return the answers to each task."""
    prompts = [policy.tokenizer.prompt_tokens(task.messages) for task in tasks]
    requests = [
        SampleRequest(tuple(prompt), index * ANSWERS + number, NEW_TOKENS)
        for index, prompt in enumerate(prompts)
        for number in range(ANSWERS)
    ]
    answers, waiting = [""] * len(requests), {}
    for first in range(0, len(requests), policy.sampler.batch_size):
        part = range(first, min(first + policy.sampler.batch_size, len(requests)))
        waiting |= zip(policy.sampler.start([requests[index] for index in part]), part, strict=True)
        while not policy.sampler.is_idle:
            for handle, generation in policy.sampler.advance():
                answers[waiting[handle]] = policy.tokenizer.decode_reply(generation.token_ids)
    return [answers[index : index + ANSWERS] for index in range(0, len(answers), ANSWERS)]


def pairs(run: str) -> Iterator[dict[str, str]]:
    """Yield the rows."""
    config = Path(__file__).parents[1] / "rloo.yaml"
    environment = from_yaml(TrainConfig, config.read_text(encoding="utf-8"), str(config)).environment.build()
    tasks = environment.tasks(Split.TRAIN)[ROWS : ROWS + SUMS]
    policy = load_served_policy(run=run, max_context=16, max_seqs=512)
    for task, answers in zip(tasks, sampled_answers(policy, tasks), strict=True):
        [message] = task.messages
        wrong = [answer for answer in answers if answer.strip() and answer != task.worked_answer]
        if wrong:
            yield {"prompt": message["content"], "chosen": str(task.worked_answer), "rejected": wrong[0]}


if __name__ == "__main__":
    [path] = sys.argv[1:]
    OUTPUT.write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs(path)), encoding="utf-8")
