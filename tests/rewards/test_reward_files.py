# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Mistakes in reward files: what a user reads when a file is loaded, and in the error of a rollout."""

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from marin_rl.rewards.component import FunctionRewardConfig, RewardConfigError, RewardScope
from marin_rl.rewards.pipeline import build_components, check_components, score_rollouts
from marin_rl.rewards.sandbox.config import SandboxConfig
from marin_rl.rewards.sandbox.functions import RewardRequest
from marin_rl.rewards.sandbox.isolation import Isolation
from marin_rl.rewards.sandbox.pool import Sandbox
from marin_rl.types import RewardResult

IMPORT = "from marin_rl.rewards import EvaluateResult, StepOutput, reward_function\n"
GOOD = "@reward_function\ndef {}(messages, ground_truth, **kwargs): return 1.0\n"
BATCH = "@reward_function(mode='batch')\ndef correct(messages, ground_truth, **kwargs): "
SANDBOX = SandboxConfig(require=Isolation.NONE, workers=1, wall_seconds=600.0, start_seconds=600.0, output_kb=64)


def components_of(file: Path, *names: str) -> list[FunctionRewardConfig]:
    return [FunctionRewardConfig(path=str(file), function=name) for name in names]


async def problem(sandbox: Sandbox, configs: Sequence[FunctionRewardConfig]) -> str:
    with pytest.raises(RewardConfigError) as raised:
        await check_components(build_components(configs, sandbox))
    return str(raised.value)


@dataclasses.dataclass(frozen=True)
class Explained:
    """Parts of an error: of its sentence, and of the frames, one a line."""

    code: str
    sentence: str
    frames: tuple[str, ...] = ()
    cause: str = ""

    def check(self, text: str, file: Path) -> None:
        first, *frames = text.split("\n")
        assert self.sentence in first
        assert len(frames) == len(self.frames), text
        for frame, part in zip(frames, self.frames, strict=True):
            assert frame.startswith((f"  {file.parent}", "caused by "))
            assert part in frame
        # The file is named, and no code but the user's.
        assert file.name in first
        assert "marin_rl/" not in text.replace(str(file.parent), "")


UNLOADABLE = {
    "syntax": Explained("x = 1\ndef correct(m:\n", "SyntaxError: '(' was never closed", (":2: def correct",)),
    "no_text": Explained("x = 1\0", "source code string cannot contain null bytes"),
    "package": Explained("import nope", "No module named 'nope' (packages must be installed;", (":1: import nope",)),
    "misspelled": Explained("from json import lods", "cannot import name 'lods'", (":1: from json import lods",)),
    "needs_helper": Explained("import helper", "ZeroDivisionError", (":1: import helper", "helper.py:1: x = 1 / 0")),
    "exit": Explained("raise SystemExit", "cannot be loaded: SystemExit", (":1: raise SystemExit",)),
    "exit_of_process": Explained("import os; os._exit(3)", "the process that imported it ended, as after os._exit()"),
    "own_error": Explained("class Bad(Exception): ...\nraise Bad('no key')", "Bad: no key", (":2: raise Bad('no",)),
    "file": Explained("open('/nowhere/words')", "'/nowhere/words'", (":1: open('/nowhere/words')",)),
    "argument": Explained(IMPORT + "reward_function('batch')", "applied to 'batch' (str), which", (":2: reward_f",)),
    "no_function": Explained(
        IMPORT + GOOD.format("corect"), "write @reward_function above its `def`. Did you mean 'corect'"
    ),
    "plain": Explained(
        "def correct(messages, ground_truth, **kwargs): ...", "write @reward_function above its `def`. It has n"
    ),
    "class": Explained("class correct: ...", "is not a reward function of the file; correct the name, or write"),
    "no_kwargs": Explained(IMPORT + GOOD.format("correct").replace(", **kwargs", ""), "lacks **kwargs; it is called"),
    "async": Explained(IMPORT + GOOD.format("correct").replace("def", "async def"), "is async; use a plain def"),
    "yields": Explained(IMPORT + GOOD.format("correct").replace("return", "yield"), "contains `yield`; return"),
    "mode": Explained(IMPORT + BATCH.replace("batch", "group") + "...", "has mode 'group'; it must be"),
    "decorator": Explained(
        IMPORT + BATCH.replace("mode", "mod") + "...", "unknown arguments of @reward_function, mod;"
    ),
    "option": Explained(
        IMPORT + GOOD.format("correct").replace("m", "limit, m", 1), "requires limit; set it under opt"
    ),
}


@pytest.mark.medium
def test_mistakes_in_files_are_a_sentence_and_the_frames_of_the_user(tmp_path: Path):
    (tmp_path / "helper.py").write_text("x = 1 / 0")

    async def run() -> None:
        async with Sandbox(SANDBOX) as sandbox:
            for name, expected in UNLOADABLE.items():
                file = tmp_path / f"{name}.py"
                file.write_text(expected.code)
                text = await problem(sandbox, components_of(file, "correct"))
                expected.check(text.removeprefix("reward 'correct': "), file)

    asyncio.run(run())


def function(body: str) -> str:
    return f"{IMPORT}import json, math, os\n@reward_function\ndef correct(messages, ground_truth, **kwargs):\n {body}\n"


CHAINED = """try: return float(messages[-1]["content"] + "?")
 except ValueError as error: raise RuntimeError("cannot parse") from error"""

CALLS = {
    "raises": Explained(
        function("raise KeyError('k')"), "raised KeyError: 'k'", (":5, in correct: raise Ke",), "raised"
    ),
    "library": Explained(
        function("json.loads('{')"), "raised JSONDecodeError: Exp", (":5, in correct: json.l",), "raised"
    ),
    "chained": Explained(
        function(CHAINED),
        "raised RuntimeError: cannot parse",
        (":6, in correct: except ValueError", "caused by ValueError: could not", ":5, in correct: try"),
        "raised",
    ),
    "unprintable": Explained(
        "class Bad(Exception):\n def __str__(self): raise SystemExit\n" + function("raise Bad"),
        "raised Bad: <its message cannot be read: SystemExit>",
        (":7, in correct: raise Bad",),
        "raised",
    ),
    "stops": Explained(function("raise SystemExit"), "raised SystemExit", (":5, in correct: raise Sys",), "raised"),
    "exits": Explained(function("os._exit(7)"), "failed: its process exited with status 7", (), "exited"),
    "prints": Explained(
        function("print('x' * 10**6)"), "over 64 KiB; print less, or raise sandbox.output", (), "output"
    ),
    "text": Explained(function("return 'yes'"), "returned 'yes' (str); it must return", (), "invalid_answer"),
    "nothing": Explained(function("pass"), "returned None; it must return an EvaluateResult", (), "invalid_answer"),
    "pair": Explained(function("return 1.0, 'good'"), "returned (1.0, 'good') (tuple)", (), "invalid_answer"),
    "nan": Explained(function("return math.nan"), "returned nan; a reward must be finite", (), "invalid_answer"),
    "field": Explained(
        function("return EvaluateResult(score=math.nan)"),
        "created an invalid EvaluateResult with score nan: Input should be a finite number",
        (":5, in correct: return EvaluateResult",),
        "invalid_answer",
    ),
    "step": Explained(
        function("return StepOutput(step_index=-1, base_reward=1)"),
        "created an invalid StepOutput with step_index -1: Input should be greater than or equal to 0",
        (":5, in correct: return StepOutput",),
        "invalid_answer",
    ),
    "other": Explained(
        function("return other(messages=messages, ground_truth='')") + GOOD.format("other").replace("1.0", "math.nan"),
        "raised RewardFunctionError: other returned nan; a reward must be finite",
        (":5, in correct: return other(",),
        "raised",
    ),
    "short_batch": Explained(IMPORT + BATCH + "return [1]", "returned 1 results for 2 rollouts", (), "invalid_answer"),
    "bad_batch": Explained(
        IMPORT + BATCH + "return [1, '2']", "returned '2' (str) for rollout 1", (), "invalid_answer"
    ),
}


async def results_of(sandbox: Sandbox, file: Path, names: Sequence[str], requests: Sequence[RewardRequest]):
    """Results of the functions of a file for the first rollout, by name."""
    components = build_components(components_of(file, *names), sandbox)
    await check_components(components)
    found: dict[str, RewardResult] = {}
    for scope in RewardScope:
        for result in (await score_rollouts(components, scope, requests))[0]:
            found[result.component] = result
    return found


@pytest.mark.medium
def test_failed_calls_are_a_sentence_and_the_frames_of_the_user(tmp_path: Path, request_of):
    async def run() -> None:
        async with Sandbox(SANDBOX) as sandbox:
            for name, expected in CALLS.items():
                file = tmp_path / f"{name}.py"
                file.write_text(expected.code)
                result = (await results_of(sandbox, file, ["correct"], [request_of(), request_of()]))["correct"]
                assert result.failure == expected.cause
                assert str(result.error).startswith("'correct' of ")
                expected.check(str(result.error), file)

    asyncio.run(run())


def test_all_problems_of_all_files_are_reported_at_once(tmp_path: Path):
    mixed, broken = tmp_path / "mixed.py", tmp_path / "broken.py"
    mixed.write_text(IMPORT + GOOD.format("good") + GOOD.format("short").replace(", **kwargs", ""))
    broken.write_text("1 / 0")
    configs = [
        *components_of(mixed, "good", "short", "god"),
        *components_of(broken, "first", "second"),
        *components_of(tmp_path / "mixd.py", "third"),
    ]

    async def run() -> str:
        async with Sandbox(SANDBOX) as sandbox:
            return await problem(sandbox, configs)

    short, missing, unloadable, frame, nowhere = asyncio.run(run()).split("\n")
    assert short.startswith(f"reward 'short': 'short' of {mixed} takes (messages, ground_truth), which lacks **kwargs")
    assert missing.startswith(f"reward 'god': 'god' of {mixed} is not a reward function of the file; correct")
    assert unloadable == f"reward 'first', 'second': {broken} cannot be loaded: ZeroDivisionError: division by zero"
    assert frame == f"  {broken}:1: 1 / 0"
    assert "mixd.py does not exist; correct `path`: did you mean 'mixed.py'?" in nowhere


def test_errors_quote_the_version_of_the_file_that_was_loaded(tmp_path: Path, request_of):
    file = tmp_path / "rewards.py"
    file.write_text(function("raise KeyError('first version')"))

    async def run() -> RewardResult:
        async with Sandbox(SANDBOX) as sandbox:
            await sandbox.load(str(file))
            file.write_text(function("raise KeyError('second version')"))
            return (await results_of(sandbox, file, ["correct"], [request_of()]))["correct"]

    assert "in correct: raise KeyError('first version')" in str(asyncio.run(run()).error)
