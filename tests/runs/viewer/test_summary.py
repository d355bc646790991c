# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses

import pytest

from marin_rl.runs.stored_rollout import StoredAdvantages, as_table
from marin_rl.runs.viewer.summary import MAX_TEXT, Summary, info_text, shorten_prompts, summarize
from marin_rl.types import Generation, RewardResult, Rollout, RolloutStatus, StopReason, Task, Turn, TurnReward
from tests.rollouts.rollout_cases import piece, rollout_of, turn_of


def summary_of(rollout: Rollout, stored: dict[str, StoredAdvantages] | None = None) -> Summary:
    [row] = as_table([rollout], 1, "training", stored or {}, piece).to_pylist()
    return summarize(row)


def reason_of(**fields: object) -> str:
    return summary_of(rollout_of("r", **fields)).reason


def cut(turn: Turn) -> Turn:
    old = turn.generation
    return dataclasses.replace(
        turn, generation=Generation(old.token_ids, old.logprobs, StopReason.LENGTH, old.first_version, old.last_version)
    )


def test_texts_of_a_rollout():
    first = dataclasses.replace(
        turn_of("", "6"),
        messages=(
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "an example"},
            {"role": "user", "content": "2+3"},
            {"role": "assistant", "content": "6"},
        ),
    )
    shown = summary_of(rollout_of("r", turns=(first, turn_of("wrong", "5"))))
    assert shown == Summary("2+3", "5", "5", "")
    late = rollout_of("r", reward=None, status=RolloutStatus.TIMED_OUT, error="longer than 3 s\n  own.py:2, in f: f()")
    assert summary_of(late) == Summary("", "5", "", "timed out: longer than 3 s")
    for tests in ('{"calls": [{"call": "f(1)", "returns": 2}]}', '{ "cases": [{"stdin": "", "stdout": ""}]}', ""):
        task = Task("t", "code", ({"role": "user", "content": "f"},), tests)
        assert summary_of(dataclasses.replace(rollout_of("r"), task=task)).answer == ""
    long = summary_of(rollout_of("r", reply="a" * 10_000, info={"reason": "b" * 10_000}))
    assert (len(long.reply), len(long.reason)) == (MAX_TEXT, MAX_TEXT)
    cut_off = rollout_of("r", status=RolloutStatus.TRUNCATED, turns=(cut(turn_of("2+3", "abc")),))
    assert summary_of(cut_off, {"r": StoredAdvantages(None)}).reason == "cut off at 4 tokens, not trained"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"info": {"reason": "expected 5, found 6"}}, "expected 5, found 6"),
        ({"info": {"reason": ["no text"], "map": "a"}}, ""),
        ({"status": RolloutStatus.TRUNCATED, "turns": (cut(turn_of("2+3", "abc")),)}, "cut off at 4 tokens"),
        (
            {
                "status": RolloutStatus.TRUNCATED,
                "turns": (cut(turn_of("2+3", "abc")),),
                "info": {"reason": "expected 5, found abc"},
            },
            "expected 5, found abc; cut off at 4 tokens",
        ),
        ({"status": RolloutStatus.TRUNCATED, "turns": (turn_of("", "a"), turn_of("", "b"))}, "stopped at 2 turns"),
        # The component with the lowest weighted reward decides.
        (
            {
                "evaluations": (
                    RewardResult("good", 1.0, 0.5, reason="half right"),
                    RewardResult("bad", -2.0, 1.0, reason="rude"),
                    RewardResult("silent", 1.0, -9.0),
                )
            },
            "rude",
        ),
        (
            {"evaluations": (RewardResult("a", 1.0, 0.0, (TurnReward(0, 1.0, "x"), TurnReward(1, -1.0, "y"))),)},
            "turn 1: y",
        ),
        ({"turns": (turn_of("", "a", rewards={"format": -0.5}), turn_of("", "b"))}, "turn 0: format -0.5"),
        (
            {"turns": (turn_of("", "a"), turn_of("", "b")), "metrics": {"invalid_actions": 2.0}},
            "2 replies without a valid action",
        ),
        ({"turns": (turn_of("", "a"), turn_of("", "b"))}, ""),
    ],
)
def test_reason(fields: dict[str, object], reason: str):
    assert reason_of(**fields) == reason


@pytest.mark.parametrize(
    ("info", "shown", "reason"),
    [
        (None, "", ""),
        ('{"reason": "wrong"}', "", "wrong"),
        ('{"map": "a", "reason": "wrong"}', '{"map": "a"}', "wrong"),
        ('{"map": "\\u00fc"}', '{"map": "\\u00fc"}', ""),
        ("[1]", "[1]", ""),
        ("edited", "edited", ""),
    ],
)
def test_metadata_is_shown_without_the_reason(info: str | None, shown: str, reason: str):
    [row] = as_table([rollout_of("r")], 1, "training", {}, piece).to_pylist()
    row["info"] = info
    assert (info_text(row), summarize(row).reason) == (shown, reason)


@pytest.mark.parametrize(
    ("prompts", "shown"),
    [
        (["2+3=", "2+4="], ["2+3=", "2+4="]),
        (["a" * 50], ["a" * 50]),
        (["a" * 50, "a" * 50], ["a" * 50, "a" * 50]),
        ([f"Compute {sum} and reply with nothing but a number." for sum in ("12", "123")], ["…12…", "…123…"]),
        (["one two three " * 5, "one two three " * 5 + "x"], ["…", "…x"]),
        (["x " * 200 + "a", "x " * 200 + "b"], ["…a", "…b"]),
        (["计" * 400 + "三", "计" * 400 + "四"], ["计" * 100 + "…" + "计" * 98 + end for end in "三四"]),
    ],
)
def test_long_prompts_are_shown_without_their_template(prompts: list[str], shown: list[str]):
    assert shorten_prompts(prompts, ["e"] * len(prompts)) == shown


def test_templates_of_environments_differ():
    sums = [f"Add these two numbers, and reply with the sum: {a}" for a in "12"]
    words = [f"Sort these words, and reply with the sorted ones: {a}" for a in "xy"]
    assert shorten_prompts([*sums, *words], ["sums", "sums", "words", "words"]) == ["…1", "…2", "…x", "…y"]
