# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""No call changes the result of another one, and calls that share a process fail like calls in separate processes."""

import asyncio
import dataclasses
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from marin_rl.rewards.sandbox import pool
from marin_rl.rewards.sandbox.functions import EvaluateResult, RewardCallError, RewardRequest
from marin_rl.rewards.sandbox.isolation import Isolation
from marin_rl.rewards.sandbox.pool import UserFunction
from marin_rl.types import RewardFailure
from tests.rewards.sandbox.conftest import CONFINED_LEVELS, LEVELS, REQUEST, TIGHT, Attack, Attacks
from tests.rewards.sandbox.stateful_rewards import ACTIONS

FILE = str(Path(__file__).with_name("stateful_rewards.py"))


def request_of(reply: str) -> RewardRequest:
    return dataclasses.replace(REQUEST, messages=({"role": "assistant", "content": reply},))


def started(attacks: Attacks, level: Isolation) -> Attack:
    attack = attacks.at(level, **TIGHT)
    attack.wait(attack.sandbox.load(FILE))
    attack.sandbox.failures.clear()
    return attack


def outcomes(
    attack: Attack, name: str, replies: Sequence[str], **options: Any
) -> list[EvaluateResult | RewardCallError]:
    requests = [request_of(reply) for reply in replies]
    return attack.wait(attack.sandbox.call_each(UserFunction(FILE, name), requests, options))


def scores(found: Sequence[EvaluateResult | RewardCallError]) -> list[Any]:
    """Return the score of each call, or its failure without addresses, process ids and the function's name."""
    varying = re.compile(r"""0x[0-9a-f]+|(?<="reason":")[0-9]+|'\w+'(?= of \S+\.py )""")
    return [varying.sub("", str(one)) if isinstance(one, RewardCallError) else one.score for one in found]


def processes(found: Sequence[EvaluateResult | RewardCallError]) -> list[int]:
    """Number the processes of the calls in the order of their first call; -1 for failed calls."""
    numbers: dict[str | None, int] = {}
    return [-1 if isinstance(one, RewardCallError) else numbers.setdefault(one.reason, len(numbers)) for one in found]


@pytest.mark.medium
@pytest.mark.parametrize("level", LEVELS)
def test_a_call_finds_the_state_after_the_import_whatever_other_calls_changed(level: Isolation, attacks: Attacks):
    # At the level `none`, calls can write to folders that all processes share.
    names = [name for name in ACTIONS if name != "files" or level is not Isolation.NONE]
    replies = [name for name in names for _ in range(2)]
    found = outcomes(started(attacks, level), "finds", replies)
    changed = {reply: score for reply, score in zip(replies, scores(found), strict=True) if score != 0.0}
    assert not changed


HACK = """
import builtins
import marin_rl.rewards.sandbox.functions as functions
score = 0.25
builtins.float = lambda text: 1e6
functions.evaluate = lambda *_, result=functions.EvaluateResult(score=1e6): [result]
"""


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "reply", [f"with_exec {HACK}", f"from_a_pickle {HACK}", "assigns builtins float 1000000"], ids=lambda one: one[:13]
)
def test_a_reply_that_is_run_cannot_change_the_scores_of_others(reply: str, level: Isolation, attacks: Attacks):
    attack = started(attacks, level)
    # In a shared process it would.
    assert scores(outcomes(attack, "stateless", ["0", reply, "2"]))[2] == 1e6
    assert scores(outcomes(attack, "separate", ["0", "1", reply, "3", "4"]))[3:] == [3.0, 4.0]
    assert processes(outcomes(attack, "separate", ["0", "1", "2"])) == [0, 1, 2]


@pytest.mark.parametrize("level", CONFINED_LEVELS)
@pytest.mark.parametrize(
    ("shared", "error"),
    [
        ("mmap.mmap(-1, 4096)", "PermissionError"),
        ("mmap.mmap(file.fileno(), 4096)", "maps shared memory when it is imported"),
    ],
)
def test_a_file_that_maps_shared_memory_is_not_loaded(
    shared: str, error: str, level: Isolation, attacks: Attacks, tmp_path: Path
):
    file = tmp_path / "rewards.py"
    file.write_text(
        "import mmap, tempfile\nfile = tempfile.TemporaryFile()\nfile.truncate(4096)\n"
        f"private = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE)\nshared = {shared}\n"
    )
    with pytest.raises(pool.UserFileError, match=error):
        attacks.at(level, **TIGHT).wait(attacks.at(level, **TIGHT).sandbox.load(str(file)))


@pytest.mark.parametrize("level", LEVELS)
def test_calls_of_a_stateless_function_share_a_process(level: Isolation, attacks: Attacks):
    replies = [str(number) for number in range(10)]
    attack = started(attacks, level)
    together = outcomes(attack, "stateless", replies)
    assert scores(together) == scores(outcomes(attack, "separate", replies)) == list(range(10))
    assert processes(together) == [0] * 10
    # Options and the limit on names of metrics are those of one call.
    assert scores(outcomes(attack, "changes_its_options", ["0", "1", "2"], bonus={"score": 1.0})) == [2.0] * 3
    assert scores(outcomes(attack, "names_metrics", ["a", "b", "c"])) == [1.0] * 3


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 7, 8])
def test_the_order_determines_the_processes(count: int, attacks: Attacks, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pool, "BATCH_CALLS", 3)
    found = outcomes(started(attacks, Isolation.NONE), "stateless", [str(number) for number in range(count)])
    assert scores(found) == list(range(count))
    sizes = {0: [], 1: [1], 2: [2], 3: [3], 4: [2, 2], 5: [2, 3], 7: [2, 2, 3], 8: [2, 3, 3]}[count]
    assert processes(found) == [process for process, size in enumerate(sizes) for _ in range(size)]


FAILING = {
    "raises": (RewardFailure.RAISED, "ValueError: cannot score it"),
    "crashes": (RewardFailure.SIGNAL, "SIGSEGV"),
    "is_killed": (RewardFailure.SIGNAL, "failed: terminated by SIGKILL"),
    "allocates": (RewardFailure.MEMORY, "sandbox.memory_mb"),
    "exits": (RewardFailure.EXITED, "without an answer"),
    "prints": (RewardFailure.OUTPUT, "sandbox.output_kb"),
    "answers_much": (RewardFailure.OUTPUT, "sandbox.output_kb"),
    "answers_twice": (RewardFailure.INVALID_ANSWER, "sent the answer"),
    "answers_an_object": (RewardFailure.INVALID_ANSWER, "returned a value of type object"),
    "closes_descriptors": (RewardFailure.EXITED, "status 1"),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", FAILING)
def test_a_failure_is_that_of_its_own_call(name: str, level: Isolation, attacks: Attacks):
    replies = ["0", "1", f"{name} it", "3", f"{name} it", "5"]
    attack = started(attacks, level)
    found = outcomes(attack, "stateless", replies)
    cause, detail = FAILING[name]
    if name == "is_killed" and level is not Isolation.NONE:
        cause, detail = RewardFailure.RAISED, "PermissionError"
    assert attack.sandbox.failures == {cause: 2}
    assert scores(found) == scores(outcomes(attack, "separate", replies))
    assert [scores(found)[index] for index in (0, 1, 3, 5)] == [0, 1, 3, 5]
    for failed in (found[2], found[4]):
        assert isinstance(failed, RewardCallError)
        assert failed.cause is cause
        assert detail in failed.detail


@pytest.mark.medium
def test_a_killed_worker(attacks: Attacks, tmp_path: Path):
    attack = started(attacks, Isolation.NONE)
    marker = tmp_path / "marker"
    marker.touch()

    async def kill() -> None:
        while marker.exists():
            await asyncio.sleep(0.01)
        for worker in attack.sandbox.worker_pids:
            os.kill(worker, signal.SIGKILL)

    async def run() -> list[EvaluateResult | RewardCallError]:
        calls = [request_of(reply) for reply in ("0", f"hangs_once {marker}", "2")]
        called = attack.sandbox.call_each(UserFunction(FILE, "stateless"), calls, {})
        found, _ = await asyncio.gather(called, kill())
        return found

    assert scores(attack.wait(run())) == [0.0, 1.0, 2.0]
    assert not attack.sandbox.failures
    # The calls were not the cause.
    assert attack.sandbox.batches_calls(UserFunction(FILE, "stateless"))


@pytest.mark.medium
@pytest.mark.parametrize(("function", "reply"), [("slow", "takes_long"), ("hanging", "hangs_together")])
def test_slow_calls_stop_to_share_a_process(function: str, reply: str, attacks: Attacks):
    attack = started(attacks, Isolation.NONE)
    assert scores(outcomes(attack, function, ["0", reply, reply, "3"])) == [0.0, 1.0, 1.0, 3.0]
    assert not attack.sandbox.failures
    assert not attack.sandbox.batches_calls(UserFunction(FILE, function))
    assert processes(outcomes(attack, function, ["0", "1"])) == [0, 1]


def test_a_file_that_cannot_be_loaded_fails_every_call(tmp_path: Path, attacks: Attacks):
    attack = started(attacks, Isolation.NONE)
    function = UserFunction(str(tmp_path / "rewards.py"), "f")
    Path(function.file).write_text("1 +")
    found = attack.wait(attack.sandbox.call_each(function, [REQUEST] * 2, {}))
    for failed in found:
        assert isinstance(failed, RewardCallError)
        assert "cannot be loaded: SyntaxError" in failed.detail
    assert attack.sandbox.failures == {RewardFailure.WORKER: 2}
