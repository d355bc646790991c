# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import pytest

from marin_rl.training.advice import WINDOW, Advice, count_silent
from marin_rl.types import Generation, Rollout, RolloutGroup, RolloutStatus, StopReason, Task, Turn


def groups(count: int, tasks: int, size: int = 8) -> list[RolloutGroup]:
    made = []
    for index in range(count):
        task = Task(f"t{index % tasks}", "ones", ({"role": "user", "content": "2x3"},), "1")
        turn = Turn((1,), Generation((2,), (-0.5,), StopReason.STOP, 0, 0), task.messages, {}, starts_sequence=True)
        rollouts = [
            Rollout(f"g{index}-{member}", f"g{index}", task, (turn,), RolloutStatus.COMPLETED, {"correct": 1.0})
            for member in range(size)
        ]
        made.append(RolloutGroup(f"g{index}", rollouts))
    return made


def silent(count: int, *, good: float = 0.0, bad: float = 0.0, dropped: int = 0, total: int = 64) -> dict[str, float]:
    return {
        "groups/no_signal": count - dropped,
        "filter/kept_groups": total - dropped,
        "filter/dropped_zero_spread": dropped,
        "filter/dropped_ungraded": 0,
        "groups/all_good_share": good,
        "groups/all_bad_share": bad,
        "seconds/reward": 0.1,
        "seconds/total": 1.0,
    }


def advise(steps: list[dict[str, float]], tasks: int = 64, functions: tuple[str, ...] = ()) -> list[str]:
    messages: list[str] = []
    advice = Advice(messages.append, functions)
    for step, metrics in enumerate(steps, start=1):
        advice.add(step, groups(64, tasks), metrics)
    return messages


@pytest.mark.parametrize(
    ("metrics", "tasks", "named", "not_named"),
    [
        (silent(62, good=0.97), 64, ["310 of 320 groups", "97%", "too easy"], ["too hard", "different tasks"]),
        (silent(64, bad=1.0), 64, ["320 of 320 groups", "100%", "too hard"], ["too easy", "different tasks"]),
        (silent(64, good=0.5, bad=0.5), 64, ["too hard", "too easy"], ["different tasks"]),
        (silent(64, good=1.0), 1, ["too easy", "only 1 different tasks"], ["too hard"]),
        # The filter drops them.
        (silent(60, bad=0.9, dropped=60), 64, ["300 of 320 groups", "too hard"], ["too easy"]),
    ],
)
def test_causes_are_named_once(metrics: dict[str, float], tasks: int, named: list[str], not_named: list[str]):
    [message] = advise([metrics] * 20, tasks)
    assert message.startswith("steps 1 to 5: ")
    assert all(text in message for text in named)
    assert not any(text in message for text in not_named)


def test_steps_with_signal_are_no_cause():
    few, most = silent(40), silent(64)
    assert advise([few] * 20) == []
    # The steps must follow each other.
    assert advise([*[most] * (WINDOW - 1), few] * 3) == []
    # Without a group, as in a step of groups that finished before, nothing is known.
    assert advise([silent(0, total=0)] * 20) == []


def test_groups_of_a_step_are_counted_with_the_dropped_ones():
    assert count_silent(silent(58, dropped=8)) == (58, 64)
    assert count_silent({"loss/ce_avg": 1.0}) == (0, 0)


def slow(reward: float, total: float = 10.0) -> dict[str, float]:
    return {**silent(0), "seconds/reward": reward, "seconds/total": total}


@pytest.mark.medium
def test_separate_processes_of_quick_calls_are_named_once_with_numbers():
    [message] = advise([slow(1.0), *[slow(7.2)] * 20], functions=("own",))
    assert message.startswith("steps 2 to 6: ")
    for text in ("72%", "7.20 of 10.00 s", "512 calls", "'own'", "stateless=True"):
        assert text in message
    # Declared functions, fast rewards, and calls that take long by themselves.
    assert advise([slow(7.2)] * 20) == []
    assert advise([slow(4.9)] * 20, functions=("own",)) == []
    assert advise([slow(72.0, 100.0)] * 20, functions=("own",)) == []
