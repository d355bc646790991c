# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0


from marin_rl.environments import Split, TextGameConfig
from marin_rl.environments.games import View
from marin_rl.rollouts.attempt import Limits, state_hash
from marin_rl.rollouts.run_rollouts import GroupInput, RolloutRunner, run_groups
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import byte_tokenizer
from marin_rl.types import Message, Rollout
from tests.scripted_sampler import ScriptedSampler

LAKE = {"is_slippery": False, "desc": ["SFF", "FFF", "FFG"]}
END = 257


def walk() -> Rollout:
    """Run a rollout that walks right, down, left and up on an empty lake."""
    game = TextGameConfig(
        id="FrozenLake-v1", options=LAKE, num_tasks=1, view=View.COMPACT, held_out=0.0, validation=0.0, max_steps=5
    )
    replies = iter("rdluu")
    sampler = ScriptedSampler(lambda request: (ord(next(replies)), END), stop_token_ids=[END])
    runner = RolloutRunner(game.build(), ChatTokenizer(byte_tokenizer()), sampler, Limits(200, 4, 5))
    [task] = runner.environment.tasks(Split.TRAIN)
    [group] = run_groups(runner, [GroupInput("t", task, (0, "t"))], group_size=1, temperature=1.0)
    return group.rollouts[0]


def test_default_hashes_are_equal_only_for_equal_states():
    anchors = [turn.anchor_state for turn in walk().turns]
    assert anchors[0] == anchors[4]
    assert len(set(anchors)) == 4
    message: Message = {"role": "user", "content": "a"}
    assert state_hash((message,), None) == state_hash((message,), None)
    assert state_hash((message,), None) != state_hash((message, message), None)
    assert state_hash((message,), {"x": 1}) == state_hash((), {"x": 1})
