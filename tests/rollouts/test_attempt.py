# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import math

import pytest

from marin_rl.environments import Split, TextGameConfig
from marin_rl.environments.games import View
from marin_rl.rollouts.attempt import Limits, anchor_of, state_hash
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


def test_anchor_does_not_depend_on_key_order():
    assert anchor_of({"a": 1, "b": {"c": [1, 2], "d": None}}) == anchor_of({"b": {"d": None, "c": [1, 2]}, "a": 1})
    assert anchor_of(({"role": "user", "content": "é"},)) == anchor_of([{"content": "é", "role": "user"}])


@pytest.mark.parametrize(
    ("one", "other"), [("a", "b"), (1, "1"), (["ab"], ["a", "b"]), ([1, 2], [2, 1]), ({}, []), (None, "null")]
)
def test_different_observations_have_different_anchors(one, other):
    assert anchor_of(one) != anchor_of(other)


def test_anchor_is_stable_across_processes():
    # printf '{"a":[1,2]}' | sha256sum
    expected = "01530d164d479cf08e26d3b1ad9bdba927120d97e2d057a6d792db778780d720"
    assert anchor_of({"a": [1, 2]}) == expected


@pytest.mark.parametrize("observation", [object(), {1, 2}, {"x": math.nan}, {1: "a", "b": 2}])
def test_non_json_observations_raise_an_error(observation):
    with pytest.raises(TypeError, match="has no canonical JSON"):
        anchor_of(observation)
