# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""One episode with a fake batcher; no test depends on the real time."""

import asyncio
import dataclasses
import logging
from collections.abc import Callable

import pytest

from marin_rl.environments.base import AbstractEnvironment, Episode, Step
from marin_rl.rollouts import episode as module
from marin_rl.rollouts.attempt import Attempt, Limits
from marin_rl.rollouts.episode import run_episode
from marin_rl.rollouts.request_batcher import RequestBatcher
from marin_rl.rollouts.rollout_builder import RolloutBuilder
from marin_rl.sampling.sampler import SampleRequest
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import byte_tokenizer
from marin_rl.types import Generation, Message, RolloutStatus, StopReason, Task

TOKENIZER = ChatTokenizer(byte_tokenizer())
TASK = Task("t", "sums", (Message(role="user", content="2+3"),), "5")
ATTEMPT = Attempt(
    TASK, TOKENIZER.prompt_tokens(TASK.messages), "", "g", "r", seed=1, start_seed=2, temperature=1.0, anchor=""
)
LIMITS = Limits(max_length=100, max_new_tokens=10, max_turns=5)
DONE = Step({"won": 1.0})
CONTINUES = Step({"won": 0.0}, (Message(role="user", content="on"),), done=False)


class FakeBatcher(RequestBatcher):
    """Returns `5` immediately, after calling `sample`; counts calls of `leave`."""

    def __init__(self, sample: Callable[[], object] = lambda: None):
        super().__init__(batch_size=1, episodes=1)
        self.left = 0
        self.requests: list[SampleRequest] = []
        self.last_turns: list[bool] = []
        self._do = sample

    async def submit(self, request: SampleRequest, *, is_last_turn: bool) -> Generation:
        self.requests.append(request)
        self.last_turns.append(is_last_turn)
        self._do()
        return Generation((53, 257), (-0.5, -0.5), StopReason.STOP, 0, 0)

    def leave(self, conversation: str) -> None:
        assert conversation == ATTEMPT.id
        self.left += 1


async def forever() -> None:
    await asyncio.Event().wait()


@dataclasses.dataclass
class Scripted(AbstractEnvironment):
    """Environment and episode with scripted steps; records the calls."""

    steps: list[Step | Exception | None]
    """Result or error of each step; None: the step never returns."""
    starts: bool = True
    closing: Exception | None = None
    hangs_at_close: bool = False
    name: str = "sums"
    seeds: list[int] = dataclasses.field(default_factory=list)
    replies: list[str] = dataclasses.field(default_factory=list)
    closed: int = 0

    def tasks(self, split: object) -> list[Task]:
        return [TASK]

    async def start(self, task: Task, seed: int) -> Episode:
        self.seeds.append(seed)
        if not self.starts:
            await forever()
        return self

    async def step(self, reply: str) -> Step:
        self.replies.append(reply)
        outcome = self.steps[len(self.replies) - 1]
        if isinstance(outcome, Exception):
            raise outcome
        if outcome is None:
            await forever()
        assert isinstance(outcome, Step)
        return outcome

    async def close(self) -> None:
        self.closed += 1
        if self.hangs_at_close:
            await forever()
        if self.closing is not None:
            raise self.closing


def run(environment: Scripted, batcher: FakeBatcher, limits: Limits = LIMITS) -> RolloutBuilder:
    return asyncio.run(run_episode(ATTEMPT, environment, TOKENIZER, batcher, limits))


def test_sampler_knows_the_last_turn_that_the_limits_allow():
    environment, batcher = Scripted([CONTINUES] * 5), FakeBatcher()
    rollout = run(environment, batcher).finish()
    assert environment.seeds == [ATTEMPT.start_seed]
    assert (environment.replies, environment.closed, batcher.left) == (["5"] * 5, 1, 1)
    assert (rollout.status, batcher.last_turns) == (RolloutStatus.TRUNCATED, [False] * 4 + [True])


FAULTS: dict[str, tuple[Scripted, RolloutStatus, str, int]] = {
    "never starts": (Scripted([DONE], starts=False), RolloutStatus.TIMED_OUT, "took longer than 0.01 s", 0),
    "never answers": (Scripted([CONTINUES, None]), RolloutStatus.TIMED_OUT, "took longer than 0.01 s", 2),
    "raises": (Scripted([CONTINUES, KeyError("lost")]), RolloutStatus.FAILED, "KeyError: 'lost'", 2),
    "raises a timeout": (Scripted([TimeoutError("its own")]), RolloutStatus.FAILED, "TimeoutError: its own", 1),
}


@pytest.mark.parametrize("name", FAULTS)
def test_an_environment_fault_ends_only_this_rollout(name: str):
    template, status, error, turns = FAULTS[name]
    environment, batcher = dataclasses.replace(template, seeds=[], replies=[]), FakeBatcher()
    # Only environments that hang reach the short limit.
    limits = dataclasses.replace(LIMITS, max_seconds=0.01 if status is RolloutStatus.TIMED_OUT else 60.0)
    builder = run(environment, batcher, limits)
    rollout = builder.finish()
    assert builder.has_failed
    assert (rollout.status, rollout.rewards, len(rollout.turns)) == (status, {}, turns)
    assert error in (rollout.error or "")
    # An episode that did not start is not closed.
    assert (environment.closed, batcher.left) == (int(environment.starts), 1)


def test_max_seconds_limits_the_environment_over_the_whole_rollout(monkeypatch: pytest.MonkeyPatch):
    """Each step takes the same time on a fake clock; together they exceed the limit."""
    now = 0.0
    allowed: list[float] = []
    timeout = asyncio.timeout

    class Turning(Scripted):
        async def step(self, reply: str) -> Step:
            nonlocal now
            now += 0.4
            return await super().step(reply)

    def recorded(delay: float) -> asyncio.Timeout:
        allowed.append(delay)
        return timeout(delay)

    monkeypatch.setattr("time.perf_counter", lambda: now)
    monkeypatch.setattr(module.asyncio, "timeout", recorded)
    environment, batcher = Turning([CONTINUES, CONTINUES, CONTINUES, None]), FakeBatcher()
    rollout = run(environment, batcher, dataclasses.replace(LIMITS, max_seconds=1.0)).finish()
    start, *steps, closing = allowed
    assert [start, *steps] == pytest.approx([1.0, 1.0, 0.6, 0.2, 0.0])
    assert closing == module.CLOSING_SECONDS
    assert rollout.status is RolloutStatus.TIMED_OUT
    assert (len(rollout.turns), environment.closed) == (4, 1)
    # Without time left, the last step is not called.
    assert rollout.seconds["environment"] == pytest.approx(1.2)
    assert rollout.seconds["sample"] == 0.0


def test_an_error_of_the_sampler_propagates_and_closes_the_episode():
    def broken() -> None:
        raise MemoryError("the sampler is out of pages")

    environment, batcher = Scripted([DONE]), FakeBatcher(broken)
    with pytest.raises(MemoryError, match="out of pages"):
        run(environment, batcher)
    assert (environment.closed, batcher.left, environment.replies) == (1, 1, [])


def test_a_cancelled_rollout_leaves_the_batcher_and_closes_its_episode():
    environment, batcher = Scripted([None]), FakeBatcher()

    async def cancelled() -> None:
        running = asyncio.ensure_future(run_episode(ATTEMPT, environment, TOKENIZER, batcher, LIMITS))
        while not environment.replies:
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(cancelled())
    assert (environment.closed, batcher.left) == (1, 1)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (Scripted([DONE], closing=OSError("already gone")), "OSError: already gone"),
        (Scripted([DONE], hangs_at_close=True), "TimeoutError"),
    ],
)
def test_an_error_of_close_is_only_logged(
    environment: Scripted, message: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(module, "CLOSING_SECONDS", 0.01)
    batcher = FakeBatcher()
    with caplog.at_level(logging.WARNING):
        rollout = run(environment, batcher).finish()
    assert (rollout.status, rollout.rewards) == (RolloutStatus.COMPLETED, {"won": 1.0})
    assert f"rollout r: closing its episode failed: {message}" in caplog.text
    assert batcher.left == 1
