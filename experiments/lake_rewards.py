# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Reward functions for FrozenLake in the compact view, for experiments/gigpo_rewards.yaml and gigpo_rewards.py."""

from marin_rl.rewards import EvaluateResult, StepOutput, reward_function


@reward_function(stateless=True)
def wasted_moves(messages, ground_truth, penalty=0.2, num_prompt_messages=0, **kwargs):
    """Reward each move that does not change the map, such as a move into the border, with `-penalty`.

    The move that ends the game has no map after it and is never penalized.
    """
    steps = []
    for index, message in enumerate(messages):
        if index < num_prompt_messages or message["role"] != "assistant":
            continue
        before = messages[index - 1]["content"]
        after = messages[index + 1]["content"] if index + 1 < len(messages) else None
        wasted = after == before
        steps.append(
            StepOutput(
                step_index=index,
                base_reward=-penalty if wasted else 0.0,
                metrics={"wasted": wasted},
                reason="the map did not change" if wasted else None,
            )
        )
    return EvaluateResult(step_outputs=steps)
