# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import collections
from pathlib import Path

import pytest

from marin_rl.environments import Split, TextGameConfig
from marin_rl.environments.games import View
from marin_rl.rollouts.attempt import Limits, default_state_hash
from marin_rl.rollouts.config import StateHash, StateHashingConfig
from marin_rl.rollouts.run_rollouts import GroupInput, RolloutRunner, run_groups
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import byte_tokenizer
from marin_rl.types import Message, Rollout, RolloutGroup, RolloutStatus
from marin_rl.utils.user_code import UserFileError
from tests.scripted_sampler import ScriptedSampler

FUNCTIONS = """
def column(messages, anchor_state):
    return f"{messages[-1]['role']} {anchor_state['state'] % 3}"

def number(messages, anchor_state):
    return 3

def fails_later(messages, anchor_state):
    return "start" if anchor_state["state"] == 0 else 1 / 0

X = 1
"""
LAKE = {"is_slippery": False, "desc": ["SFF", "FFF", "FFG"]}
END = 257


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "hashing.py"
    file.write_text(FUNCTIONS)
    return str(file)


def walk(state_hash: StateHash) -> Rollout:
    """Run a rollout that walks right, down, left and up on an empty lake."""
    return walks(state_hash, group_size=1).rollouts[0]


def walks(state_hash: StateHash, group_size: int) -> RolloutGroup:
    game = TextGameConfig(
        id="FrozenLake-v1", options=LAKE, num_tasks=1, view=View.COMPACT, held_out=0.0, validation=0.0, max_steps=5
    )
    replies = collections.defaultdict(lambda: iter("rdluu"))
    sampler = ScriptedSampler(lambda request: (ord(next(replies[request.conversation])), END), stop_token_ids=[END])
    runner = RolloutRunner(
        game.build(), ChatTokenizer(byte_tokenizer()), sampler, Limits(200, 4, 5), state_hash=state_hash
    )
    [task] = runner.environment.tasks(Split.TRAIN)
    [group] = run_groups(runner, [GroupInput("t", task, (0, "t"))], group_size=group_size, temperature=1.0)
    return group


def test_default_hashes_are_equal_only_for_equal_states():
    anchors = [turn.anchor_state for turn in walk(default_state_hash).turns]
    assert anchors[0] == anchors[4]
    assert len(set(anchors)) == 4
    message: Message = {"role": "user", "content": "a"}
    assert default_state_hash((message,), None) == default_state_hash((message,), None)
    assert default_state_hash((message,), None) != default_state_hash((message, message), None)
    assert default_state_hash((message,), {"x": 1}) == default_state_hash((), {"x": 1})


def test_a_users_function_is_applied(path: str):
    rollout = walk(StateHashingConfig(path, "column").build())
    assert [turn.anchor_state for turn in rollout.turns] == ["user 0", "user 1", "user 1", "user 0", "user 0"]


def test_the_prompt_of_a_group_is_hashed_once():
    hashed: list[tuple[Message, ...]] = []

    def count(messages: tuple[Message, ...], anchor_state: object) -> str:
        hashed.append(messages)
        return str(len(hashed))

    group = walks(count, group_size=3)
    assert [rollout.turns[0].anchor_state for rollout in group.rollouts] == ["1"] * 3
    assert len(hashed) == 1 + sum(len(rollout.turns) - 1 for rollout in group.rollouts)


def test_an_invalid_hashing_function_fails_its_rollout_or_is_refused(path: str):
    rollout = walk(StateHashingConfig(path, "fails_later").build())
    assert rollout.status is RolloutStatus.FAILED
    assert "state_hashing: 'fails_later' of" in (rollout.error or "")
    assert "ZeroDivisionError" in (rollout.error or "")
    with pytest.raises(UserFileError, match=r"'number' of .* returned int; it must return a str"):
        walk(StateHashingConfig(path, "number").build())
    with pytest.raises(UserFileError, match=r"'X' of .* is int; it must be a function"):
        StateHashingConfig(path, "X").build()
