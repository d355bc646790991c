# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Calls that share a process give the results of calls in separate processes, also if one of them misbehaves."""

import asyncio
import dataclasses
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest

from marin_rl.rewards.functions import EvaluateResult, RewardCallError, RewardFailure, RewardRequest
from marin_rl.rewards.sandbox import pool
from marin_rl.rewards.sandbox.isolation import Isolation
from marin_rl.rewards.sandbox.pool import UserFunction
from tests.rewards.sandbox.conftest import LENIENT, LEVELS, REQUEST, TIGHT, Attack, Attacks

FILE = str(Path(__file__).with_name("shared_rewards.py"))


@pytest.fixture(autouse=True)
def _slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "SHARED_SECONDS", 600.0)


def request_of(reply: str) -> RewardRequest:
    return dataclasses.replace(REQUEST, messages=({"role": "assistant", "content": reply},))


def outcomes(attack: Attack, name: str, replies: Sequence[str]) -> list[EvaluateResult | RewardCallError]:
    requests = [request_of(reply) for reply in replies]
    return attack.wait(attack.sandbox.call_each(UserFunction(FILE, name), requests, {}))


def scores(found: Sequence[EvaluateResult | RewardCallError]) -> list[Any]:
    """Return the score of each call, or its failure without addresses in memory and process ids."""
    varying = re.compile(r'0x[0-9a-f]+|(?<="reason":")[0-9]+')
    return [varying.sub("", str(one)) if isinstance(one, RewardCallError) else one.score for one in found]


def processes(found: Sequence[EvaluateResult | RewardCallError]) -> list[int]:
    """Number the processes of the calls in the order of their first call; -1 for failed calls."""
    numbers: dict[str | None, int] = {}
    return [-1 if isinstance(one, RewardCallError) else numbers.setdefault(one.reason, len(numbers)) for one in found]


def shared(attacks: Attacks, level: Isolation) -> Attack:
    attack = attacks.at(level, **TIGHT)
    attack.sandbox.failures.clear()
    return attack


def alone(attacks: Attacks, level: Isolation) -> Attack:
    attack = attacks.at(level, **TIGHT, calls_per_process=1)
    attack.sandbox.failures.clear()
    return attack


@pytest.mark.parametrize("level", LEVELS)
def test_calls_share_a_process(level: Isolation, attacks: Attacks):
    replies = [str(number) for number in range(10)]
    together = outcomes(shared(attacks, level), "numbers", replies)
    assert scores(together) == scores(outcomes(alone(attacks, level), "numbers", replies)) == list(range(10))
    assert processes(together) == [0] * 10


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 7, 8])
def test_the_order_determines_the_processes(count: int, attacks: Attacks):
    attack = attacks.at(Isolation.NONE, **TIGHT, calls_per_process=3)
    found = outcomes(attack, "numbers", [str(number) for number in range(count)])
    assert scores(found) == list(range(count))
    sizes = {0: [], 1: [1], 2: [2], 3: [3], 4: [2, 2], 5: [2, 3], 7: [2, 2, 3], 8: [2, 3, 3]}[count]
    assert processes(found) == [process for process, size in enumerate(sizes) for _ in range(size)]


FAILING = {
    "raises": (RewardFailure.RAISED, "ValueError: cannot score it"),
    "crashes": (RewardFailure.SIGNAL, "SIGSEGV"),
    "allocates": (RewardFailure.MEMORY, "sandbox.memory_mb"),
    "exits": (RewardFailure.EXITED, "without an answer"),
    "prints": (RewardFailure.OUTPUT, "sandbox.output_kb"),
    "answers_much": (RewardFailure.OUTPUT, "sandbox.output_kb"),
    "answers_twice": (RewardFailure.INVALID_ANSWER, "not a valid answer"),
    "answers_in_pieces": (RewardFailure.INVALID_ANSWER, "not a valid answer"),
    "answers_an_object": (RewardFailure.RAISED, "acts returned object"),
    "closes_descriptors": (RewardFailure.EXITED, "status 1"),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", FAILING)
def test_a_failure_is_that_of_its_own_call(name: str, level: Isolation, attacks: Attacks):
    replies = ["0", "1", f"{name} it", "3", f"{name} it", "5"]
    attack = shared(attacks, level)
    found = outcomes(attack, f"acts_{name}", replies)
    assert scores(found) == scores(outcomes(alone(attacks, level), f"acts_{name}", replies))
    assert [scores(found)[index] for index in (0, 1, 3, 5)] == [0, 1, 3, 5]
    cause, detail = FAILING[name]
    for failed in (found[2], found[4]):
        assert isinstance(failed, RewardCallError)
        assert failed.cause is cause
        assert detail in failed.detail
    assert attack.sandbox.failures == {cause: 2}
    assert attack.sandbox.shares_processes(UserFunction(FILE, f"acts_{name}"))


LAST = ["leaves_a_file", "with_exec score=1.0", "takes_long", "3"]


@pytest.mark.parametrize("last", LAST)
def test_a_line_that_a_call_writes_does_not_shift_the_scores(last: str, attacks: Attacks):
    attack = shared(attacks, Isolation.FULL)
    found = outcomes(attack, f"acts_writes_then_{LAST.index(last)}", ["0", "answers_twice", "2", last, "4"])
    assert [one if isinstance(one, float) else one[:14] for one in scores(found)] == [
        0.0,
        "invalid_answer",
        2.0,
        3.0 if last == "3" else 1.0,
        4.0,
    ]


def test_a_killed_process(attacks: Attacks):
    attack = shared(attacks, Isolation.NONE)
    found = outcomes(attack, "acts_is_killed", ["0", "is_killed", "2"])
    assert scores(found) == [0.0, "signal: terminated by SIGKILL", 2.0]


@pytest.mark.medium
@pytest.mark.parametrize("level", LEVELS)
def test_a_call_that_hangs_delays_the_others_by_the_limit_of_a_shared_process(
    level: Isolation, attacks: Attacks, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pool, "SHARED_SECONDS", 0.5)
    attack = attacks.at(level, wall_seconds=4.0, cpu_seconds=60.0)
    found = outcomes(attack, "acts_sleeps", ["0", "sleeps 1e6", "2", "3"])
    assert scores(found) == [0.0, "timeout: no answer within sandbox.wall_seconds", 2.0, 3.0]
    # A call alone has its own time limit.
    assert scores(outcomes(attack, "acts_sleeps", ["sleeps 0.6", "1"])) == [1.0, 1.0]
    assert attack.sandbox.shares_processes(UserFunction(FILE, "acts_sleeps"))


def test_a_killed_worker_loses_no_shared_call(attacks: Attacks, tmp_path: Path):
    attack = shared(attacks, Isolation.NONE)
    marker = tmp_path / "marker"
    marker.touch()

    async def kill() -> None:
        while marker.exists():
            await asyncio.sleep(0.01)
        for worker in attack.sandbox.worker_pids:
            os.kill(worker, signal.SIGKILL)

    async def run() -> list[EvaluateResult | RewardCallError]:
        calls = [request_of(reply) for reply in ("0", f"hangs_once {marker}", "2")]
        called = attack.sandbox.call_each(UserFunction(FILE, "acts_hangs_once"), calls, {})
        found, _ = await asyncio.gather(called, kill())
        return found

    assert scores(attack.wait(run())) == [0.0, 1.0, 2.0]
    assert not attack.sandbox.failures
    # The calls were not the cause.
    assert attack.sandbox.shares_processes(UserFunction(FILE, "acts_hangs_once"))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("name", "reason"),
    [("fails_together", "raised: OSError: too many open files"), ("prints_much", "output: more output")],
)
def test_calls_that_fail_only_together_stop_to_share(
    name: str, reason: str, level: Isolation, attacks: Attacks, caplog: pytest.LogCaptureFixture
):
    attack = shared(attacks, level)
    with caplog.at_level("INFO", logger="marin_rl.rewards.sandbox.pool"):
        found = outcomes(attack, f"acts_{name}", ["0", name, name, name, "4"])
    assert scores(found) == [0.0, 1.0, 1.0, 1.0, 4.0]
    assert f"because calls failed that succeed in separate processes ({reason}" in caplog.text
    assert not attack.sandbox.failures
    assert not attack.sandbox.shares_processes(UserFunction(FILE, f"acts_{name}"))


@pytest.mark.parametrize(("name", "shares"), [("uses_much", False), ("takes_long", True)])
def test_slow_calls(name: str, shares: bool, attacks: Attacks, caplog: pytest.LogCaptureFixture):
    attack = shared(attacks, Isolation.NONE)
    function = UserFunction(FILE, f"acts_{name}")
    with caplog.at_level("INFO", logger="marin_rl.rewards.sandbox.pool"):
        found = outcomes(attack, function.name, ["0", "1", name, "3", "4"])
    assert scores(found) == [0.0, 1.0, 1.0, 3.0, 4.0]
    assert processes(found) == [0, 0, 0, 1, 2]
    # A process can be late because the machine is busy.
    assert ("each call has its own process from now on, because its calls are slow" in caplog.text) is not shares
    assert attack.sandbox.shares_processes(function) is shares
    assert processes(outcomes(attack, function.name, ["0", "1"])) == ([0, 0] if shares else [0, 1])


LEAVING = {
    "leaves_a_thread": "left threads",
    "starts_a_low_level_thread": "left threads",
    "leaves_a_file": "left files",
    "leaves_a_file_open": "left files open",
    "leaves_a_timer": "left a timer",
    "leaves_a_virtual_timer": "left a timer",
    "changes_its_folder": "changed the working directory",
    "removes_its_folder": "removed the working directory",
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", LEAVING)
def test_later_calls_do_not_meet_what_a_call_left(
    name: str, level: Isolation, attacks: Attacks, caplog: pytest.LogCaptureFixture
):
    if name == "removes_its_folder" and level is not Isolation.NONE:
        pytest.skip("Landlock does not let a call remove its folder")
    attack = shared(attacks, level)
    with caplog.at_level("INFO", logger="marin_rl.rewards.sandbox.pool"):
        found = outcomes(attack, f"acts_{name}", ["0", "1", name, "3", "4"])
    assert scores(found) == [0.0, 1.0, 1.0, 3.0, 4.0]
    assert processes(found) == [0, 0, 0, 1, 2]
    assert f"acts_{name}: each call has its own process from now on, because a call {LEAVING[name]}" in caplog.text
    assert processes(outcomes(attack, f"acts_{name}", ["0", "1"])) == [0, 1]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["ends_a_thread", "removes_its_file", "imports"])
def test_calls_that_leave_nothing_share_a_process(name: str, level: Isolation, attacks: Attacks):
    found = outcomes(shared(attacks, level), f"acts_{name}", ["0", name, name, "3"])
    assert processes(found) == [0] * 4, scores(found)


RUNNING = [
    "with_exec",
    "with_eval",
    "with_a_code_object",
    "with_a_function",
    "with_an_interpreter",
    "in_a_thread",
    "from_a_file",
    "as_a_module",
    "on_the_path",
    "through_a_loader",
    "through_a_source_loader",
    "in_a_thread_without_frames",
    "from_a_pickle",
]
HACK = """
import builtins, json
import marin_rl.rewards.functions as functions
score = 0.25
builtins.float = lambda text: 1e6
json.dumps = lambda *arguments: '{"results": [{"score": 1e6}]}'
functions.evaluate = lambda *arguments: [functions.EvaluateResult(score=1e6)]
"""


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", RUNNING)
def test_model_written_code_cannot_change_the_scores_of_others(name: str, level: Isolation, attacks: Attacks):
    attack = shared(attacks, level)
    # The first call proves that the code would change the scores of its process.
    hacked = attack.call("scores_after", file=FILE, action=name, text=HACK)
    assert hacked.score == 1e6
    found = outcomes(attack, f"acts_{name}", ["0", "1", f"{name} {HACK}", "3", "4"])
    assert [scores(found)[index] for index in (0, 1, 3, 4)] == [0.0, 1.0, 3.0, 4.0]
    assert processes(found)[:2] == [0, 0]
    assert not attack.sandbox.shares_processes(UserFunction(FILE, f"acts_{name}"))


@pytest.mark.parametrize("name", ["from_a_library", "in_a_fork", "in_a_program"])
def test_calls_with_native_code_or_further_processes_have_their_own(name: str, attacks: Attacks):
    attack = attacks.at(Isolation.FULL, **LENIENT)
    found = outcomes(attack, f"acts_{name}", ["0.5", name, "0.5"])
    assert processes(found) == [0, 1, 2]
    assert not attack.sandbox.shares_processes(UserFunction(FILE, f"acts_{name}"))


@pytest.mark.parametrize("level", LEVELS)
def test_functions_declared_with_their_own_process(level: Isolation, attacks: Attacks):
    attack = shared(attacks, level)
    # Also if the function was not described before.
    assert processes(outcomes(attack, "numbers_alone", ["0", "1", "2"])) == [0, 1, 2]
    assert attack.wait(attack.sandbox.functions(FILE))["numbers_alone"].own_process
    assert not attack.sandbox.shares_processes(UserFunction(FILE, "numbers_alone"))


@pytest.mark.parametrize("level", LEVELS)
def test_globals_keep_the_changes_of_earlier_calls_in_the_process(level: Isolation, attacks: Attacks):
    for _ in range(2):
        assert scores(outcomes(shared(attacks, level), "counts", ["a"] * 5)) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert scores(outcomes(alone(attacks, level), "counts", ["a"] * 5)) == [1.0] * 5


def test_every_call_starts_with_the_same_state_of_numpys_generator(attacks: Attacks, tmp_path: Path):
    file = tmp_path / "draws.py"
    file.write_text(
        "import numpy\nfrom marin_rl.rewards import reward_function\nnumpy.random.seed(7)\n"
        "@reward_function\ndef draws(messages, ground_truth, **kwargs): return numpy.random.random()"
    )
    function = UserFunction(str(file), "draws")
    for attack in (shared(attacks, Isolation.NONE), alone(attacks, Isolation.NONE)):
        found = attack.wait(attack.sandbox.call_each(function, [REQUEST] * 3, {}))
        assert scores(found) == [numpy.random.RandomState(7).random()] * 3


def test_every_call_has_its_own_options(attacks: Attacks):
    function = UserFunction(FILE, "changes_its_options")
    for attack in (shared(attacks, Isolation.NONE), alone(attacks, Isolation.NONE)):
        found = attack.wait(attack.sandbox.call_each(function, [REQUEST] * 3, {"bonus": {"score": 1.0}}))
        assert scores(found) == [2.0] * 3


def test_the_limit_on_metric_names_is_that_of_a_call(attacks: Attacks):
    assert scores(outcomes(shared(attacks, Isolation.NONE), "names_metrics", ["a", "b", "c"])) == [1.0] * 3


def test_a_file_that_cannot_be_loaded_fails_every_call(tmp_path: Path, attacks: Attacks):
    attack = shared(attacks, Isolation.NONE)
    function = UserFunction(str(tmp_path / "rewards.py"), "f")
    Path(function.file).write_text("1 +")
    found = attack.wait(attack.sandbox.call_each(function, [REQUEST] * 2, {}))
    for failed in found:
        assert isinstance(failed, RewardCallError)
        assert "cannot be loaded: SyntaxError" in failed.detail
    assert attack.sandbox.failures == {RewardFailure.WORKER: 2}
