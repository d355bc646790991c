# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Reward functions: order of the calls, and their effect on rollouts."""

import asyncio
import dataclasses
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from marin_rl.environments.base import Step
from marin_rl.rewards.component import RewardComponent, RewardComponentConfig, RewardScope
from marin_rl.rewards.sandbox.config import SandboxConfig
from marin_rl.rewards.sandbox.functions import EvaluateResult, RewardCallError, RewardRequest
from marin_rl.rewards.sandbox.isolation import Isolation
from marin_rl.rewards.sandbox.pool import Sandbox
from marin_rl.rollouts.reward_functions import RewardFunctions
from marin_rl.sampling.sampler import SampleRequest
from marin_rl.types import RewardFailure, RolloutStatus
from marin_rl.utils.event_loop import BackgroundLoop
from tests.rollouts.test_rollout_builder import built
from tests.rollouts.test_run_rollouts import Countdown, Game, run, runner, says, task


def empty_reward_functions(loop: BackgroundLoop) -> tuple[RewardFunctions, Sandbox]:
    """Reward functions without components, with a running sandbox."""
    sandbox = Sandbox(SandboxConfig(require=Isolation.NONE, workers=1))
    return RewardFunctions({}, sandbox, loop, runs_programs=True), sandbox


def test_close_does_not_wait_for_a_blocked_event_loop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("marin_rl.rollouts.reward_functions.STOP_TIMEOUT", 0.01)
    loop, release, blocked = BackgroundLoop(), threading.Event(), threading.Event()
    reward_functions, sandbox = empty_reward_functions(loop)
    assert loop.submit(sandbox.run_python("print(1)")).result().stdout == "1\n"

    async def block() -> None:
        blocked.set()
        release.wait()

    done = loop.submit(block())
    assert blocked.wait(600)
    reward_functions.close()
    assert "the event loop is blocked" in caplog.text
    release.set()
    done.result()
    monkeypatch.undo()
    reward_functions.close()
    loop.close()
    assert sandbox.worker_pids == []


@dataclasses.dataclass
class Component:
    """A reward component that calls a function of the test in `check`, and may fail to close."""

    on_check: Callable[[], Awaitable[None]] | None = None
    fails_to_close: bool = False
    name: str = "scripted"
    weight: float = 1.0
    scope: RewardScope = RewardScope.POINTWISE
    waits_for_group: bool = False
    is_closed: bool = False

    async def check(self) -> None:
        if self.on_check is not None:
            await self.on_check()

    async def score(self, requests: Sequence[RewardRequest]) -> list[EvaluateResult]:
        raise NotImplementedError

    async def close(self) -> None:
        self.is_closed = True
        if self.fails_to_close:
            raise OSError("the connection does not close")


@dataclasses.dataclass(frozen=True)
class Built(RewardComponentConfig):
    """Config of a component that exists already."""

    component: RewardComponent

    def build(self, sandbox: Sandbox) -> Component:
        return self.component


@dataclasses.dataclass
class Recorder:
    """A reward component that records its calls, and fails for some rollouts."""

    waits_for_group: bool
    name: str = "recorded"
    weight: float = 1.0
    scope: RewardScope = RewardScope.POINTWISE
    failing: Sequence[str] = ()
    on_score: Callable[[], Any] = lambda: None
    calls: list[list[str]] = dataclasses.field(default_factory=list)

    async def check(self) -> None:
        pass

    async def score(self, requests: Sequence[RewardRequest]) -> Sequence[EvaluateResult | RewardCallError]:
        self.calls.append([request.rollout_id for request in requests])
        self.on_score()
        failure = RewardCallError(RewardFailure.TIMEOUT, "no answer")
        return [failure if one.rollout_id in self.failing else EvaluateResult(score=1.0) for one in requests]

    async def close(self) -> None:
        pass


def recording(*components: Recorder, environment: str = "countdown") -> RewardFunctions:
    sandbox = Sandbox(SandboxConfig(require=Isolation.NONE), strongest=Isolation.NONE)
    return RewardFunctions({environment: [Built(component) for component in components]}, sandbox)


def ids(*groups: int, group_size: int = 2) -> list[str]:
    return [f"train-9-{group}-{member}" for group in groups for member in range(group_size)]


@pytest.mark.parametrize("waits_for_group", [False, True])
def test_rewards_of_a_group_start_while_other_groups_are_sampled(waits_for_group: bool):
    scored = threading.Event()

    def script(request: SampleRequest) -> Sequence[int]:
        is_second_turn = b"n1" in bytes(token for token in request.prompt_tokens if token < 256)
        return (*(b"late" if is_second_turn and not scored.wait(600) else b"ok"), 257)

    component = Recorder(waits_for_group, on_score=scored.set)
    rollout_runner = dataclasses.replace(runner(script), reward_functions=recording(component))
    groups = run(rollout_runner, [task(1), task(2)], 2, all_may_fail=True)
    assert {turn.messages[-1]["content"] for group in groups for one in group.rollouts for turn in one.turns} == {"ok"}
    assert all(one.rewards["recorded"] == 1.0 for group in groups for one in group.rollouts)
    if waits_for_group:
        assert component.calls == [ids(0), ids(1)]
    else:
        assert sorted(component.calls) == [[one] for one in ids(0, 1)]


@pytest.mark.parametrize(
    ("waits_for_group", "batch_calls", "expected"),
    [
        (True, 4, [ids(0, 1), ids(2, 3), ids(4)]),
        (True, 5, [ids(0, 1), ids(2, 3), ids(4)]),
        (True, 64, [ids(0, 1, 2, 3, 4)]),
        (True, 1, [ids(group) for group in range(5)]),
        (False, 64, [[one] for one in ids(0, 1, 2, 3, 4)]),
    ],
)
def test_small_groups_are_scored_together_if_all_are_needed_at_the_end(
    waits_for_group: bool, batch_calls: int, expected: list[list[str]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("marin_rl.rollouts.reward_functions.BATCH_CALLS", batch_calls)
    component = Recorder(waits_for_group)
    per_group = Recorder(False, name="per_group", scope=RewardScope.GROUP)
    reward_functions = recording(component, per_group)
    rollout_runner = dataclasses.replace(runner(says("a", "b", "c")), reward_functions=reward_functions)
    # Groups that end in another order.
    groups = run(rollout_runner, [task(count) for count in (3, 1, 2, 1, 3)], 2)
    assert sorted(component.calls) == expected
    assert sorted(per_group.calls) == [ids(group) for group in range(5)]
    assert [rollout.id for group in groups for rollout in group.rollouts] == ids(0, 1, 2, 3, 4)


def test_each_group_is_scored_by_itself_if_a_component_scores_the_batch():
    component, batch = Recorder(True), Recorder(False, name="batch", scope=RewardScope.BATCH)
    rollout_runner = dataclasses.replace(runner(says("a", "b")), reward_functions=recording(component, batch))
    run(rollout_runner, [task(2), task(1)], 2, all_may_fail=True)
    assert sorted(component.calls) == [ids(0), ids(1)]
    assert batch.calls == [ids(0, 1)]


def test_an_environment_without_rewards_needs_a_reward_function():
    class Silent(Countdown):
        async def step(self, reply: str) -> Step:
            return Step({})

    silent = runner(says("a"), Game(Silent))
    message = r"train-9-0-0: .* has no reward; neither its environment nor a reward function"
    with pytest.raises(ValueError, match=message):
        run(silent, [task()])
    late = recording(Recorder(False, name="late", scope=RewardScope.BATCH))
    [group] = run(dataclasses.replace(silent, reward_functions=late), [task()])
    assert group.rollouts[0].rewards == {"late": 1.0}


def test_results_have_the_order_of_the_config():
    late, early = Recorder(True, name="late"), Recorder(False, name="early")
    rollout_runner = dataclasses.replace(runner(says("a")), reward_functions=recording(late, early))
    [group] = run(rollout_runner, [task(1)], 2)
    assert (late.calls, sorted(early.calls)) == ([ids(0)], [[one] for one in ids(0)])
    for rollout in group.rollouts:
        assert [result.component for result in rollout.evaluations] == ["late", "early"]
        assert list(rollout.rewards) == ["won", "moves", "late", "early"]
        assert rollout.seconds["reward"] > 0


def test_a_failure_concerns_its_own_rollout():
    failed, *others = ids(0, group_size=4)
    pointwise = Recorder(True, failing=[failed])
    per_group = Recorder(False, name="per_group", scope=RewardScope.GROUP)
    rollout_runner = dataclasses.replace(runner(says("a")), reward_functions=recording(pointwise, per_group))
    [group] = run(rollout_runner, [task(1)], 4)
    assert [rollout.status for rollout in group.rollouts] == [RolloutStatus.FAILED] + [RolloutStatus.COMPLETED] * 3
    assert group.rollouts[0].error == "reward 'recorded': no answer"
    assert per_group.calls == [others]


def test_a_component_that_stops_to_wait_scores_each_rollout_once():
    component = Recorder(True)
    reward_functions = recording(component, environment="sums")
    builders = [built(Step({})) for _ in range(3)]

    async def score() -> None:
        await reward_functions.score_rollout(builders[0])
        component.waits_for_group = False
        await reward_functions.score_rollout(builders[1])
        component.waits_for_group = True
        builders[2].fail(RolloutStatus.FAILED, "the environment broke")
        await reward_functions.score_rollouts(builders)

    asyncio.run(score())
    assert component.calls == [["r"], ["r"]]
    assert [builder.finish().rewards for builder in builders] == [{"recorded": 1.0}, {"recorded": 1.0}, {}]


def test_an_interrupt_during_start_leaves_no_process():
    pids: list[int] = []
    cancelled = threading.Event()
    sandbox = Sandbox(SandboxConfig(require=Isolation.NONE, workers=1))

    async def check_for_ever() -> None:
        await sandbox.run_python("print(1)")
        pids.extend(sandbox.worker_pids)
        # Like Ctrl-C.
        signal.pthread_kill(main, signal.SIGINT)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    main = threading.get_ident()
    loop = BackgroundLoop()
    component = Component(check_for_ever)
    with pytest.raises(KeyboardInterrupt):
        RewardFunctions({"game": [Built(component)]}, sandbox, loop)
    assert cancelled.is_set()
    assert component.is_closed
    [pid] = pids
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    loop.close()


def test_the_sandbox_closes_if_a_component_fails_to_close():
    loop = BackgroundLoop()
    sandbox = Sandbox(SandboxConfig(require=Isolation.NONE, workers=1))
    components = [Component(name=name, fails_to_close=name == "bad") for name in ("good", "bad", "other")]
    first, second, other = map(Built, components)
    reward_functions = RewardFunctions({"one": [first, second], "two": [other]}, sandbox, loop)
    assert loop.submit(sandbox.run_python("print(1)")).result().stdout == "1\n"
    with pytest.raises(OSError, match="the connection does not close"):
        reward_functions.close()
    assert all(component.is_closed for component in components)
    assert sandbox.worker_pids == []
    loop.close()
