# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""One attempt, played against a desk whose answers a test gives; nothing here waits for a clock that matters."""

import asyncio
import dataclasses
import logging
from collections.abc import Callable

import pytest

from marin_rl.environments.base import Episode, Step
from marin_rl.rollouts import episode as module
from marin_rl.rollouts.episode import play
from marin_rl.rollouts.request_batcher import RequestBatcher
from marin_rl.rollouts.rollout_builder import Attempt, Limits, RolloutBuilder
from marin_rl.sampling.sampler import SampleRequest
from marin_rl.tokenization.byte_tokenizer import byte_tokenizer
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.types import Generation, Message, RolloutStatus, StopReason, Task

TOKENIZER = ChatTokenizer(byte_tokenizer())
TASK = Task("t", "sums", (Message(role="user", content="2+3"),), "5")
ATTEMPT = Attempt(TASK, TOKENIZER.prompt_tokens(TASK.messages), "g", "r", seed=1, start_seed=2, temperature=1.0)
LIMITS = Limits(max_length=100, max_new_tokens=10, max_turns=5)
DONE = Step({"won": 1.0})
GOES_ON = Step({"won": 0.0}, (Message(role="user", content="on"),), done=False)


class Desk(RequestBatcher):
    """Answers `5` at once, or does what a test says; counts who left."""

    def __init__(self, sample: Callable[[], object] = lambda: None):
        super().__init__(batch_size=1, episodes=1)
        self.left = 0
        self.requests: list[SampleRequest] = []
        self._do = sample

    async def sample(self, request: SampleRequest) -> Generation:
        self.requests.append(request)
        self._do()
        return Generation((53, 257), (-0.5, -0.5), StopReason.STOP, 0, 0)

    def leave(self) -> None:
        self.left += 1


async def forever() -> None:
    await asyncio.Event().wait()


@dataclasses.dataclass
class Scripted:
    """Environment and episode in one: what it does at each step, and what became of it."""

    steps: list[Step | Exception | None]
    """What a step answers, raises, or (None) that it never answers."""
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


def run(environment: Scripted, desk: Desk, limits: Limits = LIMITS) -> RolloutBuilder:
    return asyncio.run(play(ATTEMPT, environment, TOKENIZER, desk, limits))


def test_an_episode_is_played_to_its_end_closed_and_left_once():
    environment, desk = Scripted([GOES_ON, GOES_ON, DONE]), Desk()
    rollout = run(environment, desk).finish()
    assert (rollout.status, len(rollout.turns), rollout.rewards) == (RolloutStatus.COMPLETED, 3, {"won": 1.0})
    assert environment.replies == ["5", "5", "5"]
    assert environment.seeds == [ATTEMPT.start_seed]
    assert (environment.closed, desk.left, len(desk.requests)) == (1, 1, 3)


FAULTS: dict[str, tuple[Scripted, RolloutStatus, str, int]] = {
    "never starts": (Scripted([DONE], starts=False), RolloutStatus.TIMED_OUT, "took longer than 0.01 s", 0),
    "never answers": (Scripted([GOES_ON, None]), RolloutStatus.TIMED_OUT, "took longer than 0.01 s", 2),
    "raises": (Scripted([GOES_ON, KeyError("lost")]), RolloutStatus.FAILED, "KeyError: 'lost'", 2),
    "raises a timeout": (Scripted([TimeoutError("its own")]), RolloutStatus.FAILED, "TimeoutError: its own", 1),
}


@pytest.mark.parametrize("name", FAULTS)
def test_whatever_the_environment_does_is_the_end_of_this_rollout_alone(name: str):
    template, status, error, turns = FAULTS[name]
    environment, desk = dataclasses.replace(template, seeds=[], replies=[]), Desk()
    # What hangs hangs for good, so the limit decides nothing else.
    limits = dataclasses.replace(LIMITS, max_seconds=0.01 if status is RolloutStatus.TIMED_OUT else 60.0)
    builder = run(environment, desk, limits)
    rollout = builder.finish()
    assert builder.has_failed
    assert (rollout.status, rollout.rewards, len(rollout.turns)) == (status, {}, turns)
    assert error in (rollout.error or "")
    # One that never began has nothing to close.
    assert (environment.closed, desk.left) == (int(environment.starts), 1)


def test_the_time_for_the_environment_is_that_of_the_whole_rollout(monkeypatch: pytest.MonkeyPatch):
    """Each step takes the same time on a clock that the test turns; together they take too long."""
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

    monkeypatch.setattr(module.time, "perf_counter", lambda: now)
    monkeypatch.setattr(module.asyncio, "timeout", recorded)
    environment, desk = Turning([GOES_ON, GOES_ON, GOES_ON, None]), Desk()
    rollout = run(environment, desk, dataclasses.replace(LIMITS, max_seconds=1.0)).finish()
    start, *steps, closing = allowed
    assert [start, *steps] == pytest.approx([1.0, 1.0, 0.6, 0.2, 0.0])
    assert closing == module._CLOSING_SECONDS
    assert rollout.status is RolloutStatus.TIMED_OUT
    assert (len(rollout.turns), environment.closed) == (4, 1)
    assert rollout.seconds["environment"] == pytest.approx(1.6)
    assert rollout.seconds["sample"] == 0.0


def test_an_error_of_the_sampler_is_passed_on_and_the_episode_closed():
    def broken() -> None:
        raise MemoryError("the sampler is out of pages")

    environment, desk = Scripted([DONE]), Desk(broken)
    with pytest.raises(MemoryError, match="out of pages"):
        run(environment, desk)
    assert (environment.closed, desk.left, environment.replies) == (1, 1, [])


def test_one_that_is_cancelled_leaves_the_desk_and_closes_its_episode():
    environment, desk = Scripted([None]), Desk()

    async def cancelled() -> None:
        playing = asyncio.ensure_future(play(ATTEMPT, environment, TOKENIZER, desk, LIMITS))
        while not environment.replies:
            await asyncio.sleep(0)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    asyncio.run(cancelled())
    assert (environment.closed, desk.left) == (1, 1)


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        (Scripted([DONE], closing=OSError("already gone")), "OSError: already gone"),
        (Scripted([DONE], hangs_at_close=True), "TimeoutError"),
    ],
)
def test_how_closing_goes_changes_nothing_but_the_log(
    environment: Scripted, told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(module, "_CLOSING_SECONDS", 0.01)
    desk = Desk()
    with caplog.at_level(logging.WARNING):
        rollout = run(environment, desk).finish()
    assert (rollout.status, rollout.rewards) == (RolloutStatus.COMPLETED, {"won": 1.0})
    assert f"rollout r: its episode did not close: {told}" in caplog.text
    assert desk.left == 1
