# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Tables from raw steps to GiGPO advantages, for one group of three rollouts on a lake of two by two.

    python -m experiments.gigpo_rewards

Every stage calls the same function as training; no model is loaded. experiments/gigpo_rewards.yaml trains with the
same reward function and the same estimator.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments.lake_rewards import wasted_moves
from marin_rl.objectives.advantage_inputs import AdvantageInputs, TokenAdvantages
from marin_rl.objectives.gigpo import GigpoConfig
from marin_rl.rewards.pipeline import align_steps, turn_rewards, weighted_rewards
from marin_rl.rewards.sandbox.functions import EvaluateResult, RewardRequest, evaluate
from marin_rl.rollouts.attempt import anchor_of
from marin_rl.types import Message, RewardResult

WEIGHT = 0.5
"""Weight of the reward function `wasted_moves`."""
GIGPO = GigpoConfig(gamma=0.5, omega=1.0)
"""The estimator; a small γ gives short numbers."""

START, RIGHT, BELOW = "A.\n.G", ".A\n.G", "..\nAG"
"""The three nonterminal maps: A is the player, G the goal."""
NAMES = {START: "start", RIGHT: "right", BELOW: "below"}
"""Names of the maps in the tables."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A raw turn."""

    observation: str
    """Map shown to the policy."""
    move: str
    """Reply of the policy: l, r, u or d."""
    reward: float
    """The environment's reward: 1 on the goal."""


class Example(NamedTuple):
    """All stages of the example, with one entry per rollout."""

    steps: list[list[Step]]
    """Raw turns."""
    results: list[EvaluateResult]
    """Results of the reward function."""
    evaluations: list[RewardResult]
    """Results with step rewards aligned to turns, in the format of stored rollouts."""
    rewards: list[dict[str, float]]
    """Reward by component, weights included."""
    turn_rewards: list[list[float]]
    """Reward of each turn: the environment's, and weight times base reward."""
    token_advantages_list: list[TokenAdvantages]
    """A_E, A_S and the advantages of the action tokens; here each turn has one token."""


ROLLOUTS = {
    # One move into the border, then two to the goal.
    "T0": [Step(START, "l", 0.0), Step(START, "r", 0.0), Step(RIGHT, "d", 1.0)],
    # Down, into the border, and back up; then the turn limit is reached.
    "T1": [Step(START, "d", 0.0), Step(BELOW, "l", 0.0), Step(BELOW, "u", 0.0)],
    # The shortest way.
    "T2": [Step(START, "d", 0.0), Step(BELOW, "r", 1.0)],
}
"""Steps of the group by rollout."""


def conversation(steps: Sequence[Step]) -> tuple[Message, ...]:
    """Return the conversation for reward functions: alternating maps and moves."""
    messages: list[Message] = []
    for step in steps:
        messages.append({"role": "user", "content": step.observation})
        messages.append({"role": "assistant", "content": step.move})
    return tuple(messages)


def compute_stages(rollouts: dict[str, list[Step]]) -> Example:
    """Compute all stages for a group.

    Args:
        rollouts: the raw turns of each rollout, by its id.
    """
    requests = [
        RewardRequest(name, conversation(steps), "", "lake", "FrozenLake-v1", "completed", num_prompt_messages=1)
        for name, steps in rollouts.items()
    ]
    results = evaluate(wasted_moves, requests, {"penalty": 0.2})
    evaluations = [
        RewardResult(
            component="wasted_moves",
            weight=WEIGHT,
            score=result.total_score,
            steps=tuple(
                align_steps(
                    request.rollout_id, request.messages, result.step_outputs or (), request.num_prompt_messages
                ).values()
            ),
        )
        for request, result in zip(requests, results, strict=True)
    ]
    rewards, rewards_by_turn, inputs = [], [], []
    for (name, steps), evaluation in zip(rollouts.items(), evaluations, strict=True):
        rewards.append({"correct": sum(step.reward for step in steps), **weighted_rewards([evaluation])})
        by_component = turn_rewards([evaluation], len(steps))
        rewards_by_turn.append(
            [step.reward + sum(by_name.values()) for step, by_name in zip(steps, by_component, strict=True)]
        )
        inputs.append(
            AdvantageInputs(
                id=name,
                score=sum(rewards[-1].values()),
                turn_rewards=np.array(rewards_by_turn[-1]),
                anchors=tuple(anchor_of(step.observation) for step in steps),
                turn_ids=np.arange(len(steps), dtype=np.int32),
                penalties=np.zeros(len(steps)),
                values=np.zeros(len(steps)),
            )
        )
    [token_advantages_list] = GIGPO.compute([inputs])
    return Example(list(rollouts.values()), results, evaluations, rewards, rewards_by_turn, token_advantages_list)


def report(rollouts: dict[str, list[Step]]) -> str:
    """Format the stages as tables.

    Args:
        rollouts: the raw turns of each rollout, by its id.
    """
    example = compute_stages(rollouts)
    raw, aligned, advantages = [], [], []
    for row, name in enumerate(rollouts):
        by_turn = {step.turn: step for step in example.evaluations[row].steps}
        token_advantages = example.token_advantages_list[row]
        assert token_advantages.turn_advantages is not None
        for index, step in enumerate(example.steps[row]):
            raw.append([name, index, NAMES[step.observation], step.move, step.reward])
            base = by_turn[index].base_reward
            aligned.append([name, 2 * index + 1, index, base, WEIGHT * base, example.turn_rewards[row][index]])
            episode, returns, steps = token_advantages.turn_advantages
            total = token_advantages.advantages[index]
            advantages.append([name, index, NAMES[step.observation], returns[index], episode, steps[index], total])
    scores = [
        [name, example.results[row].total_score, *example.rewards[row].values(), sum(example.rewards[row].values())]
        for row, name in enumerate(rollouts)
    ]
    return "\n\n".join(
        [
            _table("1. Raw turns", ["rollout", "turn", "observation", "move", "environment"], raw),
            _table(
                "2. EvaluateResult: step outputs, aligned to turns (weight 0.5)",
                ["rollout", "step_index", "turn", "base_reward", "weighted", "turn reward"],
                aligned,
            ),
            _table(
                "3. Rewards of the rollouts (score: the sum of the base rewards)",
                ["rollout", "score", "correct", "wasted_moves", "return R"],
                scores,
            ),
            _table(
                "4. GiGPO (gamma 0.5, omega 1): A = A_E + A_S",
                ["rollout", "turn", "anchor", "G", "A_E", "A_S", "A"],
                advantages,
            ),
        ]
    )


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    cells = [list(heads), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(heads))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    return "\n".join([title, *(line.rstrip() for line in lines)])


def _cell(value: object) -> str:
    # Adding 0.0 turns -0.0 into 0.0.
    return f"{round(float(value), 6) + 0.0:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    print(report(ROLLOUTS))
