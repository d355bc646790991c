# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Templates that open the thoughts of a reply in its prompt."""

import pytest

from marin_rl.environments.single_turn import SingleTurnEnvironment
from marin_rl.environments.splits import Split
from marin_rl.rollouts.attempt import Limits
from marin_rl.rollouts.run_rollouts import RolloutRunner, run_tasks
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import byte_tokenizer
from marin_rl.types import Message, Task
from tests.scripted_sampler import ScriptedSampler

END = 257
TASK = Task("t", "sums", (Message(role="user", content="2+3"),), "5")


@pytest.mark.parametrize(
    ("opening", "reply", "reward"),
    [
        ("<think>\n", "5", 0.0),
        ("<think>\n", "3?</think>5", 1.0),
        ("<think>\n", '<tool_call>{"a": "</think>"}</tool_call>5', 0.0),
        ("<think>\n\n</think>\n\n", "5", 1.0),
        ("", "5", 1.0),
    ],
)
def test_a_reply_that_was_cut_off_in_its_thoughts_is_wrong(opening: str, reply: str, reward: float):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("'<|assistant|>'", repr(f"<|assistant|>{opening}"))
    environment = SingleTurnEnvironment(
        "sums",
        {split: [TASK] for split in Split},
        score=lambda task, text: float(text == task.answer),
    )
    sampler = ScriptedSampler(lambda request: (*reply.encode(), END), stop_token_ids=[END])
    limits = Limits(max_length=100, max_new_tokens=50, max_turns=1)
    runner = RolloutRunner(environment, ChatTokenizer(tokenizer), sampler, limits)
    [group] = run_tasks(runner, [TASK], group_size=1, temperature=1.0, seed_parts=(0, "training"))
    [rollout] = group.rollouts
    assert rollout.total_reward == reward
    # The record holds what was sampled.
    assert rollout.messages == (*TASK.messages, {"role": "assistant", "content": reply})
