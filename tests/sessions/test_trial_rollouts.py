# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The rewards that a dry run shows, and its warnings."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_run import PROBLEMS, TinyRun
from tests.training.fault_cases import written

SANDBOX = {"workers": 1, "require": "none"}
NO_TRAINING = {"warm_start__max_steps": 0, "evaluation__every": 0, "evaluation__tasks": 0}


@pytest.fixture
def dry_run(
    new_run: Callable[..., TinyRun], capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, list[str], str]]:
    """Runs a dry run with config changes; returns status, lines and errors."""

    def run(**changes: Any) -> tuple[int, list[str], str]:
        status = new_run(**{"sandbox": SANDBOX, **changes}).train("--dry_run")
        printed = capfd.readouterr()
        return status, printed.out.splitlines(), printed.err

    return run


def rewards(path: Path, body: str) -> list[dict[str, Any]]:
    code = f"""
        from marin_rl.rewards import EvaluateResult, reward_function


        @reward_function
        def own(messages, ground_truth, **kwargs):
            reply = messages[-1]["content"]
            {body}
        """
    return [{"type": "function", "path": str(written(path / "own.py", code)), "function": "own"}]


def with_worked(folder: Path, answer: str) -> None:
    problems = [{**problem, "worked_answer": answer} for problem in PROBLEMS]
    (folder / "worked.jsonl").write_text("".join(f"{json.dumps(problem)}\n" for problem in problems))


def row(lines: list[str], reply: str) -> str:
    [line] = [line.strip() for line in lines if line.startswith(f"  {reply} ")]
    return " ".join(line.removeprefix(reply).split())


def warnings(lines: list[str]) -> list[str]:
    """The warnings of rewards; the splits of the tiny run are small."""
    texts = [line.removeprefix("warning: ") for line in lines if line.startswith("warning: ")]
    return [text for text in texts if not text.startswith("only ")]


def test_rewards_and_reasons_are_shown(dry_run: Callable[..., Any], tmp_path: Path):
    body = 'return EvaluateResult(score=float(reply.isdigit()) / 2, reason=f"got {reply}")'
    status, lines, _ = dry_run(environment__rewards=rewards(tmp_path, body))
    assert status == 0
    assert row(lines, "an empty reply") == "0 correct 0, format 0, own 0 (got)"
    # The sum of a format reward of 0.25 and the function's 0.5.
    assert row(lines, "the reply '0'") == "0.75 correct 0, format 0.25, own 0.5 (got 0)"


@pytest.mark.medium
def test_functions_that_reward_garbage_are_named(dry_run: Callable[..., Any], tmp_path: Path):
    def found(body: str) -> list[str]:
        lines = dry_run(environment__rewards=rewards(tmp_path, body))[1]
        return [text for text in warnings(lines) if text.startswith("reward function")]

    assert found("return float(bool(reply.strip()))") == [
        "reward function 'own' rewards garbage: the reply 'nan', the reply '0', a reply of 1,000 random characters, "
        "the question as the reply score as much as a right reply; a policy may learn to give such replies, unless "
        "another component has a higher weight"
    ]
    # Less than a right reply, and a penalty that garbage avoids.
    assert found("return 1.0 if reply.isdigit() and int(reply) > 1 else 0.25") == []
    assert found("return -float(reply.isdigit())") == []


def test_unrewarded_worked_answers_are_named(dry_run: Callable[..., Any], tmp_path: Path):
    status, lines, _ = dry_run(environment__reply_regex="never(1)")
    assert status == 0
    [warning] = warnings(lines)
    assert "the worked answer of task" in warning
    assert "earns no reward (correct 0, format 0.25); correct the worked answers" in warning


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {},
            ["only 4 validation tasks decide", "up to 0.25", "only 16 held-out tasks x 2 samples decide", "up to 0.12"],
        ),
        ({"warm_start__check_tasks": 1, "evaluation__tasks": 0}, ["only 1 validation tasks decide", "up to 0.50"]),
        ({"environment__validation": 0.5, "warm_start__check_tasks": 25, "evaluation__tasks": 0}, []),
        ({"warm_start__max_steps": 0, "environment__held_out": 0.6, "evaluation__tasks": 25}, []),
    ],
)
def test_splits_too_small_to_measure_are_named(
    dry_run: Callable[..., Any], changes: dict[str, Any], expected: list[str]
):
    status, lines, _ = dry_run(**changes)
    assert status == 0
    found = [line for line in lines if line.startswith("warning: only ")]
    assert len(found) == len(expected) // 2
    assert all(text in "\n".join(found) for text in expected)


def batch(path: Path, body: str) -> list[dict[str, Any]]:
    code = f"""
        from marin_rl.rewards import EvaluateResult, reward_function


        @reward_function(mode="batch")
        def own(messages, ground_truth, **kwargs):
            replies = [one[-1]["content"] for one in messages]
            {body}
        """
    return [{"type": "function", "path": str(written(path / "own.py", code)), "function": "own"}]


@pytest.mark.medium
@pytest.mark.parametrize(
    "body",
    [
        "return 1.0 if len(reply) > 3 else None",
        'return 1.0 if len(reply) > 3 else float("nan")',
        'return 1.0 if len(reply) > 3 else float("-inf")',
        'return 1.0 if len(reply) > 3 else "0.0"',
        "return 1.0 if len(reply) > 3 else [0.0]",
        "return 1.0 if len(reply) > 3 else {}",
        "return 1.0 if len(reply) > 3 else (0.0, reply)",
        "return 1.0 if len(reply) > 3 else (0.0 for _ in reply)",
        "return 1.0 if len(reply) > 3 else EvaluateResult.model_construct(score=None)",
        # An error for most wrong replies.
        "return float(int(reply) % 2)",
        "raise ValueError(reply)",
    ],
)
def test_a_function_without_a_score_for_wrong_replies_is_an_error(
    dry_run: Callable[..., Any], tmp_path: Path, body: str
):
    status, lines, errors = dry_run(environment__rewards=rewards(tmp_path, body))
    assert status == 1
    assert "reward function 'own' gives" in errors or "all 28 rollouts failed" in errors
    assert "0.0 for a wrong reply" in errors or "return 0 for them" in errors
    assert not any("no problems found" in line or "trial rollouts failed" in line for line in lines)


@pytest.mark.medium
@pytest.mark.parametrize(
    "body",
    [
        "return [0.0] * (len(replies) - 1)",
        "return [1.0 if one.isdigit() else None for one in replies]",
        "return None",
        "return 1.0",
        "return {index: 1.0 for index in range(len(replies))}",
        "return (1.0 for one in replies)",
    ],
)
def test_a_batch_of_other_results_is_an_error(dry_run: Callable[..., Any], tmp_path: Path, body: str):
    status, _, errors = dry_run(environment__rewards=batch(tmp_path, body))
    assert status == 1
    assert "'own'" in errors


@pytest.mark.medium
def test_numbers_of_every_kind_are_rewards(dry_run: Callable[..., Any], tmp_path: Path):
    values = [
        "reply.isdigit()",
        "np.float32(reply.isdigit())",
        "np.bool_(reply.isdigit())",
        "np.array(float(reply.isdigit()))",
        "int(reply.isdigit())",
        "Fraction(int(reply.isdigit()))",
    ]
    functions = [
        f"""
        @reward_function
        def own{index}(messages, ground_truth, **kwargs):
            reply = messages[-1]["content"]
            return {value}
        """
        for index, value in enumerate(values)
    ]
    head = """
        from fractions import Fraction

        import numpy as np

        from marin_rl.rewards import reward_function
        """
    path = written(tmp_path / "own.py", "".join([head, *functions]))
    names = [f"own{index}" for index in range(len(values))]
    asked = [{"type": "function", "path": str(path), "function": name} for name in names]
    status, lines, _ = dry_run(environment__rewards=asked)
    assert status == 0
    assert row(lines, "the reply '0'").endswith(", ".join(f"{name} 1" for name in names))
    assert row(lines, "an empty reply").endswith(", ".join(f"{name} 0" for name in names))


def test_rollouts_that_a_function_declares_invalid_stay_a_warning(dry_run: Callable[..., Any], tmp_path: Path):
    body = "return EvaluateResult(score=1.0) if reply.isdigit() else EvaluateResult(is_score_valid=False)"
    status, lines, _ = dry_run(environment__rewards=rewards(tmp_path, body))
    assert status == 0
    assert any("trial rollouts failed" in text for text in warnings(lines))


def test_some_failed_rollouts_are_a_warning(dry_run: Callable[..., Any], tmp_path: Path):
    status, lines, _ = dry_run(environment__rewards=rewards(tmp_path, "return 1 / len(reply)"))
    assert status == 0
    [warning] = [text for text in warnings(lines) if "trial rollouts failed" in text]
    assert "4 of 28 trial rollouts failed" in warning
    # In full, with the line of the function.
    assert "division by zero" in warning
    assert "return 1 / len(reply)" in "\n".join(lines)
    assert "the first, an empty reply: " in warning
    assert "ZeroDivisionError" in warning
    assert row(lines, "an empty reply").startswith("none failed: reward 'own': ")
    assert "division by zero" in row(lines, "an empty reply")


THINKING = (
    "{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<think>\n' }}{% endif %}"
)


def test_thoughts_that_the_prompt_opens_are_closed(dry_run: Callable[..., Any], tmp_path: Path):
    (tmp_path / "thinking.jinja").write_text(THINKING)
    with_worked(tmp_path, "1")
    lengths = {"rollouts__max_length": 64, "model.seq_len": 64, "sampling__max_new_tokens": 32}
    template = {"tokenizer__chat_template": str(tmp_path / "thinking.jinja")}
    status, lines, _ = dry_run(environment__path=str(tmp_path / "worked.jsonl"), **NO_TRAINING, **lengths, **template)
    assert status == 0
    # An unfinished thought would not be graded.
    assert row(lines, "the worked answer") == "1 correct 1, format 0"
    assert row(lines, "the reply '0'") == "0 correct 0, format 0"


def test_judges_are_not_asked(dry_run: Callable[..., Any], tmp_path: Path):
    judge = {"type": "llm_judge", "base_url": "http://127.0.0.1:9/v1", "model": "m", "prompt": "{conversation}"}
    status, lines, _ = dry_run(environment__rewards=[judge], **NO_TRAINING)
    assert status == 0
    assert "llm_judge 0 (the judge was not asked)" in row(lines, "an empty reply")
    [unchecked] = [line for line in lines if line.startswith("not checked")]
    assert unchecked.endswith("environment.rewards.0, the judge at http://127.0.0.1:9/v1")
    status, _, error = dry_run(environment__rewards=[{**judge, "api_key_env": "NO_SUCH_KEY"}], **NO_TRAINING)
    assert status == 1
    assert "NO_SUCH_KEY" in error


def test_agents_are_not_started(dry_run: Callable[..., Any], tmp_path: Path):
    pytest.importorskip("starlette")
    agent = written(tmp_path / "agent.py", "def play(**keywords):\n    raise SystemExit('started')")
    tasks = {"type": "arithmetic"}
    environment = {"type": "agent", "tasks": tasks, "path": str(agent), "function": "play"}
    status, lines, error = dry_run(environment=environment, **NO_TRAINING)
    assert (status, error) == (0, "")
    assert any(line.endswith("environment, whose episodes are agents") for line in lines)
    assert not any(line.startswith("rewards of environment") for line in lines)


GAME = """
from marin_rl.environments.base import AbstractEnvironment, Step
from marin_rl.types import Message, Task


class Game(AbstractEnvironment):
    name = "game"

    def tasks(self, split):
        return [Task(f"{split}{n}", "game", (Message(role="user", content="go"),), "") for n in range(4)]

    async def start(self, task, seed):
        return Episode()

    def can_demonstrate(self, task):
        return True

    def demonstrate(self, task):
        replies = [Message(role="assistant", content=text) for text in "ab"]
        return (*task.messages, replies[0], Message(role="user", content="on"), replies[1])


class Episode:
    def __init__(self):
        self.replies = ""

    async def step(self, reply):
        self.replies += reply or "-"
        if len(self.replies) == 2:
            return Step({"correct": float(self.replies == "ab")}, info={"replies": self.replies})
        return Step({}, (Message(role="user", content="on"),), done=False)

    async def close(self):
        pass
"""


def test_games_are_played_with_garbage_and_a_demonstration(dry_run: Callable[..., Any], tmp_path: Path):
    (tmp_path / "game.py").write_text(GAME)
    environment = {"type": "file", "path": str(tmp_path / "game.py"), "name": "Game"}
    sizes = {"rollouts__max_turns": 3, "rollouts__max_length": 16}
    status, lines, _ = dry_run(environment=environment, **sizes)
    assert status == 0
    assert row(lines, "an empty reply") == "0 correct 0"
    assert row(lines, "the demonstration") == "1 correct 1"


def test_own_environments_that_reward_garbage_are_named(dry_run: Callable[..., Any], tmp_path: Path):
    (tmp_path / "game.py").write_text(GAME.replace('float(self.replies == "ab")', "1.0"))
    environment = {"type": "file", "path": str(tmp_path / "game.py"), "name": "Game"}
    sizes = {"rollouts__max_turns": 3, "rollouts__max_length": 16}
    assert warnings(dry_run(environment=environment, **sizes)[1])[0].startswith(
        "environment 'game' rewards garbage: an empty reply scores as much as a right reply"
    )
    allowed = {**environment, "allow_garbage_rewards": True}
    assert warnings(dry_run(environment=allowed, **sizes)[1]) == []
    # The grader is right to reward "1", but the regular expression finds it in noise.
    [warning] = [text for text in warnings(dry_run()[1]) if "garbage" in text]
    assert warning.startswith("environment 'ones' rewards garbage: a reply of 1,000 random characters scores")


def test_worked_answers_that_are_too_long_to_sample_are_named(dry_run: Callable[..., Any], tmp_path: Path):
    with_worked(tmp_path, "11111")
    status, lines, _ = dry_run(environment__path=str(tmp_path / "worked.jsonl"), rollouts__max_length=16)
    assert status == 0
    # The stop token counts.
    assert "has 6 tokens, but sampling.max_new_tokens allows 3" in warnings(lines)[-1]


@pytest.mark.medium
def test_random_rewards_of_a_control_are_no_sign_of_a_mistake(dry_run: Callable[..., Any]):
    for probability in (0.0, 1.0):
        control = {"type": "random_control", "probability": probability, "environment": {"type": "arithmetic"}}
        status, lines, error = dry_run(environment=control, **NO_TRAINING)
        assert (status, error, warnings(lines)) == (0, "", [])
