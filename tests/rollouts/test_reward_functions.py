# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Reward functions: order of the calls, and their effect on rollouts."""

import asyncio
import dataclasses
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from marin_rl.environments import ArithmeticConfig, TextGameConfig, ToolUseConfig
from marin_rl.environments.base import Split, Step
from marin_rl.rewards.component import FunctionRewardConfig, RewardComponentConfig, RewardScope
from marin_rl.rewards.functions import EvaluateResult, RewardRequest
from marin_rl.rewards.sandbox.config import SandboxConfig
from marin_rl.rewards.sandbox.isolation import Isolation
from marin_rl.rewards.sandbox.pool import Sandbox
from marin_rl.rollouts.attempt import Limits
from marin_rl.rollouts.event_loop import BackgroundLoop
from marin_rl.rollouts.group_codec import decode_group, encode_group
from marin_rl.rollouts.reward_functions import RewardFunctions
from marin_rl.rollouts.rollout_builder import RolloutBuilder
from marin_rl.rollouts.store import read_file
from marin_rl.types import Message, RewardResult, Rollout, RolloutGroup, RolloutStatus, TurnReward
from tests.rollouts.rollout_cases import write
from tests.rollouts.test_run_rollouts import Countdown, Game, run, runner, says, task


class Scripted(RewardFunctions):
    """Records the rollouts of each call, and gives them fixed results per scope."""

    def __init__(self, **results: list[RewardResult]) -> None:
        super().__init__()
        self.results = results
        self.calls: dict[str, list[list[str]]] = {"one": [], "group": [], "batch": []}

    @property
    def has_batch_scope(self) -> bool:
        return True

    async def score_rollout(self, builder: RolloutBuilder) -> None:
        self._add("one", [builder])

    async def score_group(self, builders: Sequence[RolloutBuilder]) -> None:
        self._add("group", builders)

    async def score_batch(self, builders: Sequence[RolloutBuilder]) -> None:
        self._add("batch", builders)

    def _add(self, scope: str, builders: Sequence[RolloutBuilder]) -> None:
        self.calls[scope].append([builder.reward_request().rollout_id for builder in builders])
        for builder in builders:
            if not builder.has_failed:
                builder.add_rewards(self.results.get(scope, []))


def scored(*turns: int, group_size: int = 1, **results: list[RewardResult]) -> tuple[Scripted, list[list[Rollout]]]:
    reward_functions = Scripted(**results)
    rollout_runner = dataclasses.replace(runner(says(*"abcdefgh")), reward_functions=reward_functions)
    groups = run(rollout_runner, [task(count) for count in turns], group_size, all_may_fail=True)
    return reward_functions, [list(group.rollouts) for group in groups]


def test_each_rollout_each_group_and_the_batch_are_scored_once():
    reward_functions, _ = scored(1, 2, group_size=2)
    ids = [["train-9-0-0", "train-9-0-1"], ["train-9-1-0", "train-9-1-1"]]
    assert sorted(reward_functions.calls["one"]) == [[id] for group in ids for id in group]
    assert sorted(reward_functions.calls["group"]) == ids
    assert reward_functions.calls["batch"] == [[*ids[0], *ids[1]]]


def test_scores_are_weighted_and_added_to_environment_rewards():
    results = {
        "one": [RewardResult("style", 0.5, 1.0)],
        "group": [RewardResult("short", 2.0, 0.25)],
        "batch": [RewardResult("rare", -1.0, 1.0)],
    }
    _, [[rollout]] = scored(1, **results)
    assert rollout.rewards == {"won": 1.0, "moves": 0.5, "style": 0.5, "short": 0.5, "rare": -1.0}
    assert rollout.total_reward == 1.5
    assert [result.component for result in rollout.evaluations] == ["style", "short", "rare"]


def test_step_rewards_are_added_to_environment_rewards():
    steps = (TurnReward(0, 3.0), TurnReward(2, -1.0))
    _, [[rollout]] = scored(3, one=[RewardResult("steps", 0.5, 0.0, steps)])
    # The environment gives 0.5 per move and 1 for the last.
    assert [turn.reward for turn in rollout.turns] == [0.5 + 1.5, 0.5, 1.5 - 0.5]


def test_a_rollout_without_a_score_has_no_reward():
    lost = RewardResult("judge", 1.0, None, error="timeout: no answer", failure="timeout")
    reward_functions, [[rollout]] = scored(1, one=[lost], group=[RewardResult("short", 1.0, 1.0)])
    assert (rollout.status, rollout.rewards) == (RolloutStatus.FAILED, {})
    assert rollout.error == "reward 'judge': timeout: no answer"
    assert rollout.evaluations == (lost,)
    assert reward_functions.calls["group"] == [["train-9-0-0"]]


def test_a_component_with_the_name_of_an_environment_reward_is_refused():
    _, [[rollout]] = scored(1, one=[RewardResult("won", 1.0, 1.0)])
    assert rollout.status is RolloutStatus.FAILED
    assert rollout.error == "reward 'won' has the name of a reward of the environment; set another `name`"


def test_functions_receive_the_conversation_and_the_prompt_length():
    requests = []

    class Reading(Scripted):
        async def score_rollout(self, builder: RolloutBuilder) -> None:
            requests.append(builder.reward_request())

    rollout_runner = dataclasses.replace(runner(says("a", "b")), reward_functions=Reading())
    run(rollout_runner, [task(2)])
    [request] = requests
    assert [message["content"] for message in request.messages] == ["go", "a", "n1", "b"]
    assert (request.num_prompt_messages, request.ground_truth, request.status) == (1, "2", "completed")


def test_an_environment_without_rewards_needs_a_reward_function():
    class Silent(Countdown):
        async def step(self, reply: str) -> Step:
            return Step({})

    silent = runner(says("a"), Game(Silent))
    with pytest.raises(
        ValueError, match=r"train-9-0-0: .* has no reward; neither its environment nor a reward function"
    ):
        run(silent, [task()])
    reward_functions = Scripted(batch=[RewardResult("late", 1.0, 0.75)])
    [group] = run(dataclasses.replace(silent, reward_functions=reward_functions), [task()])
    assert group.rollouts[0].rewards == {"late": 0.75}
    assert Message(role="user", content="go") in group.rollouts[0].turns[0].messages


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
    assert blocked.wait(30)
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

    component: Component

    def build(self, sandbox: Sandbox) -> Component:
        return self.component


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


LAST_MESSAGE = """
from marin_rl.rewards import EvaluateResult, reward_function


@reward_function
def last(messages, ground_truth, **kwargs):
    return EvaluateResult(score=float(len(messages)), reason=messages[-1]["role"] + ": " + messages[-1]["content"])
"""
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'


def test_functions_in_the_sandbox_receive_the_last_observation(tmp_path: Path):
    (tmp_path / "my_rewards.py").write_text(LAST_MESSAGE)
    settings = {"rewards": (FunctionRewardConfig(path=str(tmp_path / "my_rewards.py"), function="last"),)}
    # The turn limit is reached after one reply; the environment's response to it is the last message.
    cases = {
        "tool_use": (ToolUseConfig(questions=ArithmeticConfig(size=50), **settings), CALL, "tool: 42"),
        "text_game": (TextGameConfig(id="FrozenLake-v1", num_tasks=20, **settings), "left", "user: "),
        # An environment that grades its only turn sends no last observation.
        "single_turn": (ArithmeticConfig(size=50, **settings), "46", "assistant: 46"),
    }
    loop = BackgroundLoop()
    environments = {name: config.build() for name, (config, _, _) in cases.items()}
    components = {}
    for name, (config, _, _) in cases.items():
        [own] = config.reward_components(environments[name]).values()
        components[environments[name].name] = own
    reward_functions = RewardFunctions(components, Sandbox(SandboxConfig(require=Isolation.NONE, workers=1)), loop)
    try:
        for name, (_, reply, expected) in cases.items():
            environment, limits = environments[name], Limits(4000, 200, max_turns=1)
            rollout_runner = runner(says(reply), environment, limits)
            rollout_runner = dataclasses.replace(rollout_runner, reward_functions=reward_functions, loop=loop)
            [group] = run(rollout_runner, environment.tasks(Split.TRAIN)[:1])
            # Encoded as by the workers of an asynchronous run.
            [rollout] = decode_group(encode_group(group)).rollouts
            [evaluation] = rollout.evaluations
            assert evaluation.score == len(rollout.messages)
            assert (evaluation.reason or "").startswith(expected)
            assert (rollout.last_observation is None) == (name == "single_turn")
            if rollout.last_observation is not None:
                write(tmp_path, 1, [RolloutGroup(group.id, [rollout])])
                [row] = read_file(tmp_path / "step-00000001.parquet").to_pylist()
                [message] = row["last_observation"]["messages"]
                assert evaluation.reason == f"{message['role']}: {message['content']}"
                assert tuple(row["last_observation"]["observation_tokens"]) == rollout.last_observation.tokens
    finally:
        reward_functions.close()
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
