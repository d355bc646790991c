# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import asyncio
import contextlib
import dataclasses
import logging
import re
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ClassVar

import pytest

from marin_rl.environments.base import AbstractEnvironment, Episode, Split, Step
from marin_rl.environments.single_turn import SingleTurnEnvironment
from marin_rl.rewards.grading import FormatConfig
from marin_rl.rollouts.attempt import Limits, state_hash
from marin_rl.rollouts.config import LongPrompts
from marin_rl.rollouts.reward_functions import RewardFunctions
from marin_rl.rollouts.rollout_builder import RolloutBuilder
from marin_rl.rollouts.run_rollouts import (
    AllRolloutsFailedError,
    BlockedEventLoopError,
    CancelledEpisodesError,
    GroupInput,
    RolloutRunner,
    run_groups,
    run_tasks,
    stream_groups,
)
from marin_rl.sampling.sampler import PromptTooLongError, SampleRequest
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import byte_tokenizer
from marin_rl.types import Message, Rollout, RolloutGroup, RolloutStatus, Task
from marin_rl.utils.event_loop import BackgroundLoop, call_in
from marin_rl.utils.seeds import derive_seed
from tests.hostile_errors import HOSTILE_ERRORS
from tests.scripted_sampler import ScriptedSampler

END, USER, ASSISTANT = 257, 259, 260
TOKENIZER = ChatTokenizer(byte_tokenizer())
LIMITS = Limits(max_length=64, max_new_tokens=6, max_turns=8)


@dataclasses.dataclass
class Countdown:
    """A game that ends after as many replies as its task's answer; the last reply is rewarded."""

    task: Task
    seed: int
    replies: list[str] = dataclasses.field(default_factory=list)

    async def step(self, reply: str) -> Step:
        self.replies.append(reply)
        if reply == "boom":
            raise RuntimeError("the game broke")
        if len(self.replies) == int(self.task.answer):
            return Step({"won": 1.0, "moves": 0.5})
        return Step({"moves": 0.5}, (Message(role="user", content=f"n{len(self.replies)}"),), done=False)

    async def close(self) -> None:
        pass


@dataclasses.dataclass
class Game(AbstractEnvironment):
    """Starts episodes and records them."""

    begin: Callable[[Task, int], Episode] = Countdown
    name: str = "countdown"
    started: list[tuple[Task, int]] = dataclasses.field(default_factory=list)

    def tasks(self, split: Split) -> Sequence[Task]:
        return []

    async def start(self, task: Task, seed: int) -> Episode:
        self.started.append((task, seed))
        return self.begin(task, seed)


@dataclasses.dataclass
class Fixed:
    """An episode of one step."""

    outcome: Step

    async def step(self, reply: str) -> Step:
        return self.outcome

    async def close(self) -> None:
        pass


def task(turns: int = 1, prompt: str = "go") -> Task:
    return Task(f"{prompt}{turns}", "countdown", (Message(role="user", content=prompt),), str(turns))


def tokens(text: str) -> tuple[int, ...]:
    return tuple(text.encode())


def says(*replies: str) -> Callable[[SampleRequest], Sequence[int]]:
    """Give replies in turn order; the number of assistant tokens in the prompt is the turn number."""
    return lambda request: (*tokens(replies[request.prompt_tokens.count(ASSISTANT) - 1]), END)


def runner(
    script: Callable[[SampleRequest], Sequence[int]],
    environment: AbstractEnvironment | None = None,
    limits: Limits = LIMITS,
) -> RolloutRunner:
    sampler = ScriptedSampler(script, stop_token_ids=[END], logprob=-0.25, version=4)
    return RolloutRunner(environment or Game(), TOKENIZER, sampler, limits)


def run(
    rollout_runner: RolloutRunner, tasks: Sequence[Task], group_size: int = 1, step: int = 9, all_may_fail: bool = False
) -> list[RolloutGroup]:
    seeds = (11, "train", step)
    if all_may_fail:
        requests = [GroupInput(f"train-{step}-{index}", item, (*seeds, index)) for index, item in enumerate(tasks)]
        return run_groups(rollout_runner, requests, group_size=group_size, temperature=0.7)
    return run_tasks(rollout_runner, tasks, group_size=group_size, temperature=0.7, seed_parts=seeds)


def only(groups: Sequence[RolloutGroup]) -> Rollout:
    [group] = groups
    [rollout] = group.rollouts
    return rollout


def flat(rollout: Rollout) -> tuple[int, ...]:
    """The tokens of a rollout with a single sequence."""
    return tuple(token for turn in rollout.turns for token in (*turn.observation_tokens, *turn.generation.token_ids))


def test_every_turn_continues_exactly_the_tokens_before_it():
    # A lone continuation byte decodes to U+FFFD, which would encode to three other bytes.
    lone = runner(lambda request: (0x80, END))
    assert only(run(lone, [task(2)])).turns[0].messages[-1]["content"] == "\ufffd"
    assert lone.sampler.requests[1].prompt_tokens[5:7] == (0x80, END)
    rollout_runner = runner(says("a", "b", "c"))
    rollout = only(run(rollout_runner, [task(3)]))
    first = (USER, *tokens("go"), END, ASSISTANT)
    second, third = (USER, *tokens("n1"), END, ASSISTANT), (USER, *tokens("n2"), END, ASSISTANT)
    assert [turn.observation_tokens for turn in rollout.turns] == [first, second, third]
    assert [turn.generation.token_ids for turn in rollout.turns] == [(*tokens(reply), END) for reply in "abc"]
    assert [turn.starts_sequence for turn in rollout.turns] == [True, False, False]
    prompts = [request.prompt_tokens for request in rollout_runner.sampler.requests]
    assert prompts == [first, (*first, *tokens("a"), END, *second), flat(rollout)[: len(prompts[2])]]
    assert [turn.generation.logprobs for turn in rollout.turns] == [(-0.25, -0.25)] * 3
    assert {turn.generation.first_version for turn in rollout.turns} == {4}
    assert [[(message["role"], message["content"]) for message in turn.messages] for turn in rollout.turns[:2]] == [
        [("user", "go"), ("assistant", "a")],
        [("user", "n1"), ("assistant", "b")],
    ]
    assert set(rollout_runner.timer.seconds) == {"sample", "reward"}


def test_a_too_long_prompt_is_named_and_nothing_is_sampled():
    rollout_runner = runner(says("a"), limits=Limits(5, 6, 1))
    with pytest.raises(PromptTooLongError, match=r"task 'go1' of environment 'countdown'.* 5 tokens.*max_length"):
        run(rollout_runner, [task(1)])
    assert rollout_runner.sampler.requests == []
    short = Limits(16, 6, 1, max_prompt_length=4, long_prompts=LongPrompts.SKIP)
    with pytest.raises(
        PromptTooLongError, match=r"has 5 tokens, but rollouts.max_prompt_length allows 4; .*long_prompts"
    ):
        run(runner(says("a"), limits=short), [task(1)])
    assert only(run(runner(says("a"), limits=Limits(6, 6, 1)), [task(1)])).turns[0].generation.token_ids == tokens("a")


def test_attempts_at_one_task_differ_only_in_their_sampling_seed():
    game = Game()
    rollout_runner = runner(says("a", "b"), game)
    groups = run(rollout_runner, [task(2), task(2, prompt="up")], group_size=3)
    starts = [seed for _, seed in game.started]
    assert starts[:3] == [starts[0]] * 3
    assert starts[3:] == [starts[3]] * 3
    assert starts[0] != starts[3]
    seeds = [request.seed for request in rollout_runner.sampler.requests]
    assert len(set(seeds)) == len(seeds) == 12
    assert [[rollout.task.id for rollout in group.rollouts] for group in groups] == [["go2"] * 3, ["up2"] * 3]
    assert {request.temperature for request in rollout_runner.sampler.requests} == {0.7}


def test_ids_and_seeds_depend_only_on_the_call():
    first, again, other = (run(runner(says("a")), [task(), task(prompt="up")], 2, step) for step in (9, 9, 10))
    assert first == again
    names = [[rollout.id for rollout in group.rollouts] for group in first]
    assert names == [["train-9-0-0", "train-9-0-1"], ["train-9-1-0", "train-9-1-1"]]
    assert [group.id for group in other] == ["train-10-0", "train-10-1"]
    rollout_runner = runner(says("a"))
    run(rollout_runner, [task()])
    assert rollout_runner.sampler.requests[0].seed == derive_seed(derive_seed(11, "train", 9, 0, 0), 0)


def test_an_episode_that_raises_fails_alone(caplog: pytest.LogCaptureFixture):
    def script(request: SampleRequest) -> Sequence[int]:
        broken = request.prompt_tokens.count(ASSISTANT) == 2 and request.prompt_tokens[1:3] == tokens("up")
        return (*tokens("boom" if broken else "a"), END)

    with caplog.at_level(logging.DEBUG):
        groups = run(runner(script), [task(3), task(3, prompt="up"), task(1)])
    good, bad, short = (group.rollouts[0] for group in groups)
    assert (good.status, short.status) == (RolloutStatus.COMPLETED, RolloutStatus.COMPLETED)
    assert bad.status is RolloutStatus.FAILED
    error, _, frame = str(bad.error).partition("\n")
    assert error == "RuntimeError: the game broke"
    assert re.fullmatch(rf"  {re.escape(__file__)}:\d+, in Countdown.step: raise RuntimeError.*", frame)
    assert (bad.rewards, bad.total_reward) == ({}, None)
    assert [turn.generation.token_ids for turn in bad.turns] == [(97, END), (*tokens("boom"), END)]
    assert "rollout train-9-1-0 failed: RuntimeError: the game broke" in caplog.text


def test_if_all_fail_the_first_error_is_raised():
    def begin(task: Task, seed: int) -> Episode:
        raise ConnectionError(f"no grader for {task.id}")

    with pytest.raises(
        AllRolloutsFailedError,
        match=r"all 4 rollouts failed; the first, train-9-0-0 \(task 'go1' of environment 'countdown'\): "
        "ConnectionError: no grader for go1",
    ):
        run(runner(says("a"), Game(begin)), [task(), task(prompt="up")], group_size=2)


async def wait_for_something_cancelled() -> None:
    waiting = asyncio.ensure_future(asyncio.Event().wait())
    waiting.cancel()
    await waiting


async def leave() -> None:
    sys.exit("the game is over")


async def cancel_itself() -> None:
    running = asyncio.current_task()
    assert running is not None
    running.cancel()
    await asyncio.sleep(0)


async def exit_in_a_task() -> None:
    await asyncio.create_task(leave())


async def stop_the_loop() -> None:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0)
    raise ValueError("stopped")


async def exit_in_a_callback() -> None:
    asyncio.get_running_loop().call_soon(sys.exit, 0)
    await asyncio.sleep(0)
    raise ValueError("exited")


def raise_at_once(*_: object) -> Any:
    raise KeyboardInterrupt("no coroutine")


def raising(error: BaseException) -> Callable[[], Coroutine[Any, Any, None]]:
    async def end() -> None:
        raise error

    return end


ENDS: dict[str, tuple[Callable[[], Any], str]] = {
    "exit": (leave, "SystemExit: the game is over"),
    "another task": (wait_for_something_cancelled, "CancelledError"),
    "itself": (cancel_itself, "CancelledError"),
    "task": (exit_in_a_task, "SystemExit: the game is over"),
    "callback": (exit_in_a_callback, "ValueError: exited"),
    "loop": (stop_the_loop, "ValueError: stopped"),
    "at once": (raise_at_once, "KeyboardInterrupt: no coroutine"),
    **{f"raises {name}": (raising(error), text) for name, (error, text) in HOSTILE_ERRORS.items()},
}


@pytest.mark.parametrize("name", HOSTILE_ERRORS)
def test_whatever_a_scorer_raises_fails_only_its_rollout(name: str):
    """Episodes that never wait run without a task of their own."""
    error, text = HOSTILE_ERRORS[name]

    def score(task: Task, reply: str) -> float:
        if task.id == "up1":
            raise error
        return 1.0

    tasks = [task(prompt="up"), task()]
    environment = SingleTurnEnvironment("countdown", {Split.TRAIN: tasks}, score)
    hit, other = (group.rollouts[0] for group in run(runner(says("a"), environment), tasks))
    assert (other.status, other.rewards) == (RolloutStatus.COMPLETED, {"correct": 1.0})
    assert (hit.status, hit.rewards) == (RolloutStatus.FAILED, {})
    assert text in str(hit.error)


def test_a_search_in_another_process_counts_as_time_of_the_environment():
    """Its thread is waited for, so the end of the time must reach the rollout as such."""
    environment = SingleTurnEnvironment(
        "countdown", {Split.TRAIN: [task()]}, lambda task, reply: 1.0, format=FormatConfig(regex=r"(a+)+b")
    )
    limits = dataclasses.replace(LIMITS, max_new_tokens=40, max_seconds=0.05)
    groups = run(runner(says("a" * 30), environment, limits), [task()], all_may_fail=True)
    assert only(groups).status is RolloutStatus.TIMED_OUT


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("where", ["start", "step", "close"])
def test_whatever_an_environment_raises_fails_only_its_rollout(name: str, where: str, caplog: pytest.LogCaptureFixture):
    end, error = ENDS[name]

    class Ending(Countdown):
        async def step(self, reply: str) -> Step:
            if self.task.id == "up1" and where == "step":
                await end()
            return await super().step(reply)

        async def close(self) -> None:
            if self.task.id == "up1" and where == "close":
                await end()

    class EndingGame(Game):
        async def start(self, task: Task, seed: int) -> Episode:
            if task.id == "up1" and where == "start":
                await end()
            return await super().start(task, seed)

    with caplog.at_level(logging.WARNING):
        groups = run(runner(says("a"), EndingGame(Ending)), [task(prompt="up"), task()])
    hit, other = (group.rollouts[0] for group in groups)
    assert other.status is RolloutStatus.COMPLETED
    if where == "close":
        assert hit.status is RolloutStatus.COMPLETED
        [message] = [one for one in caplog.messages if "closing its episode failed: " in one]
    else:
        assert (hit.status, hit.rewards) == (RolloutStatus.FAILED, {})
        message = str(hit.error)
    assert error in message
    assert len(message.encode()) < 10_000


class Stubborn(Countdown):
    """Ignores cancellations until it is released; records `close`."""

    release: ClassVar[asyncio.Event]
    closed: ClassVar[list[str]] = []

    async def step(self, reply: str) -> Step:
        while self.task.id == "up1" and not self.release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self.release.wait()
        return await super().step(reply)

    async def close(self) -> None:
        self.closed.append(self.task.id)


def test_an_environment_that_ignores_its_cancellation_is_abandoned(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    Stubborn.release, Stubborn.closed = asyncio.Event(), []
    responds = BackgroundLoop.responds
    monkeypatch.setattr(BackgroundLoop, "responds", lambda loop, seconds: responds(loop, 600.0))
    monkeypatch.setattr("marin_rl.rollouts.episode.CLOSING_SECONDS", 0.1)
    rollout_runner = runner(says("a"), Game(Stubborn), dataclasses.replace(LIMITS, max_seconds=0.1))
    stuck, good = run(rollout_runner, [task(prompt="up"), task()])
    assert stuck.rollouts[0].status is RolloutStatus.TIMED_OUT
    assert good.rollouts[0].status is RolloutStatus.COMPLETED
    assert sorted(Stubborn.closed) == ["go1", "up1"]
    assert "rollout train-9-0-0: its environment ignores its cancellation, and is abandoned" in caplog.text
    call_in(rollout_runner.loop.submit(running_loop()).result(600), Stubborn.release.set)
    rollout_runner.loop.close()


async def running_loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


class Odd:
    """Raises whatever is done with it."""

    def __getattr__(self, name: str) -> Any:
        raise KeyboardInterrupt(name)

    __iter__ = __float__ = __bool__ = __len__ = __str__ = __repr__ = raise_at_once  # type: ignore[assignment]


NEXT = Message(role="user", content="on")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: None, "step of its environment returned NoneType; it must return Step"),
        (lambda: Odd(), "step of its environment returned Odd"),
        (lambda: Step({"won": Odd()}), "TypeError|KeyboardInterrupt"),
        (lambda: Step(Odd()), "TypeError|KeyboardInterrupt"),
        (lambda: Step({3: 1.0}), "rewards of the environment have the name 3"),
        (lambda: Step({"won": 1.0}, metrics={None: 1.0}), "metrics of the environment have the name None"),
        (lambda: Step({"won": 1.0}, metrics={"m": "much"}), "could not convert"),
        (lambda: Step({"won": 1.0}, action=7), "has an action of type int"),
        (lambda: Step({"won": 1.0}, info={"x": {1}}), r"info\['x'\] is not a JSON value"),
        (lambda: Step({"won": 1.0}, info={"x": Odd()}), r"info\['x'\] is not a JSON value"),
        (lambda: Step({"won": 1.0}, (Message(role="user", content=Odd()),)), "message 0|KeyboardInterrupt"),
        (
            lambda: Step({"won": 1.0}, ({"role": "user", "content": "a", "more": Odd()},)),
            "not JSON serializable|KeyboardInt",
        ),
        (lambda: Step({"won": 1.0}, done=Odd()), "KeyboardInterrupt"),
        (lambda: Step({}, (NEXT,), done=False, anchor_state=Odd()), "not JSON serializable"),
        (lambda: Step({"won": 1.0}, done=False), "step is not done, but has no messages for the policy"),
        (lambda: Step({}, (Message(role="user", content="half a \ud83d"),)), "message 0 .* lone surrogates"),
        (lambda: Step({}, (Message(role="assistant", content="hint"), NEXT), False), "role 'assistant'"),
    ],
)
def test_any_value_of_a_step_costs_only_its_rollout(make: Callable[[], Any], message: str):
    class Mixed(Game):
        async def start(self, task: Task, seed: int) -> Episode:
            return Fixed(make()) if task.id == "up1" else await super().start(task, seed)

    bad, good = run(runner(says("a"), Mixed()), [task(prompt="up"), task()])
    assert bad.rollouts[0].status is RolloutStatus.FAILED
    assert re.search(message, str(bad.rollouts[0].error))
    assert good.rollouts[0].status is RolloutStatus.COMPLETED


def test_an_error_cancels_running_episodes(caplog: pytest.LogCaptureFixture):
    cancelled = threading.Event()

    class Waiting(Countdown):
        async def step(self, reply: str) -> Step:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise
            raise AssertionError("unreachable")

    class BrokenRewards(RewardFunctions):
        async def score_rollout(self, builder: RolloutBuilder) -> None:
            raise ZeroDivisionError("in a reward function")

    class Mixed(Game):
        async def start(self, task: Task, seed: int) -> Episode:
            return Waiting(task, seed) if task.id == "up1" else await super().start(task, seed)

    rollout_runner = dataclasses.replace(runner(says("a"), Mixed()), reward_functions=BrokenRewards())
    with caplog.at_level(logging.WARNING), pytest.raises(ZeroDivisionError, match="in a reward function"):
        run(rollout_runner, [task(prompt="up"), task()])
    assert cancelled.wait(600)
    rollout_runner.loop.close()
    # A cancellation is not a failure of the environment. A thread of an earlier test may still grade, and warn.
    assert not [record for record in caplog.records if record.name.startswith("marin_rl.rollouts")]


def test_code_that_cancels_other_episodes_is_an_error():
    class Cancelling(Countdown):
        async def step(self, reply: str) -> Step:
            for one in asyncio.all_tasks():
                one.cancel()
            return await super().step(reply)

    with pytest.raises(CancelledEpisodesError, match="code of environment 'countdown' has cancelled all tasks"):
        run(runner(says("a"), Game(Cancelling)), [task(), task()])


def test_code_that_blocks_the_event_loop_is_an_error():
    release = threading.Event()

    class Blocking(Countdown):
        async def step(self, reply: str) -> Step:
            release.wait(600)
            return await super().step(reply)

    limits = dataclasses.replace(LIMITS, max_seconds=0.1)
    rollout_runner = runner(says("a"), Game(Blocking), limits)
    with pytest.raises(BlockedEventLoopError, match=r"'countdown' has blocked .* over 0.1 s .*asyncio.to_thread"):
        run(rollout_runner, [task()])
    release.set()
    rollout_runner.loop.close()


def test_steps_and_episodes_are_logged_at_debug(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.DEBUG, logger="marin_rl.rollouts.rollout_builder"):
        run(runner(says("a", "b")), [task(2)])
    # A thread of an earlier test may still grade, and warn.
    records = [record for record in caplog.records if record.name == "marin_rl.rollouts.rollout_builder"]
    assert {record.levelno for record in records} == {logging.DEBUG}
    debug = [record.getMessage() for record in records]
    go = [{"role": "user", "content": "go"}]
    assert debug[:4] == [
        "rollout train-9-0-0 turn 0: observation [{'role': 'user', 'content': 'go'}]",
        "rollout train-9-0-0 turn 0: action 'a', stop reason stop, tokens [97, 257], log-probs [-0.25, -0.25]",
        f"rollout train-9-0-0 turn 0: anchor state {go}, hash {state_hash(tuple(go), None)}",
        "rollout train-9-0-0 turn 0: structured action 'a', rewards {'moves': 0.5}, done False, "
        "next [{'role': 'user', 'content': 'n1'}]",
    ]
    assert debug[7].endswith("structured action 'b', rewards {'won': 1.0, 'moves': 0.5}, done True, next []")
    assert debug[8:] == ["rollout train-9-0-0 of task go2: completed, 2 turns, 4 tokens, reward 2"]


@dataclasses.dataclass
class Held:
    """An episode that ends only when it is released."""

    task: Task
    release: threading.Event

    async def step(self, reply: str) -> Step:
        if not await asyncio.to_thread(self.release.wait, 600):
            raise RuntimeError("not released")
        return Step({"won": 1.0})

    async def close(self) -> None:
        pass


def game_with_blocked_first_task() -> tuple[Game, threading.Event]:
    """A game in which episodes of the task `first` wait for the event."""
    release = threading.Event()
    return Game(lambda task, seed: Held(task, release) if task.id == "first1" else Countdown(task, seed)), release


REQUESTS = [GroupInput(f"g-{name}", task(prompt=name), (1, name)) for name in ("first", "second", "third")]


def test_new_groups_replace_complete_groups_while_a_long_one_runs():
    game, release = game_with_blocked_first_task()
    further = [GroupInput(f"g-more{number}", task(prompt="more"), (1, "more", number)) for number in range(5)]
    finished: dict[str, RolloutGroup] = {}

    async def on_group_done(group: RolloutGroup) -> list[GroupInput]:
        finished[group.id] = group
        if group.id == "g-more4":
            assert "g-first" not in finished
            release.set()
        # One, two or no further groups.
        return {"g-second": further[:1], "g-third": further[1:3], "g-more2": further[3:]}.get(group.id, [])

    stream_groups(without_timeout(game), REQUESTS, group_size=2, temperature=1.0, on_group_done=on_group_done)
    assert sorted(finished) == sorted(request.group_id for request in (*REQUESTS, *further))
    # The results do not depend on the start time or the other groups.
    game, release = game_with_blocked_first_task()
    release.set()
    together = run_groups(without_timeout(game), [*REQUESTS, *further], group_size=2, temperature=1.0)
    assert [untimed(finished[group.id]) for group in together] == [untimed(group) for group in together]


def without_timeout(game: Game) -> RolloutRunner:
    return dataclasses.replace(runner(says("a"), game), limits=dataclasses.replace(LIMITS, max_seconds=600.0))


def untimed(group: RolloutGroup) -> list[Rollout]:
    return [dataclasses.replace(rollout, seconds={}) for rollout in group.rollouts]


class BatchRewards(RewardFunctions):
    """Scores whole batches."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self._log = log

    @property
    def has_batch_scope(self) -> bool:
        return True

    async def score_batch(self, builders: Sequence[RolloutBuilder]) -> None:
        self._log.append(f"scored {len(builders)}")


def test_no_group_is_passed_on_before_its_batch_is_scored():
    log: list[str] = []
    rollout_runner = dataclasses.replace(runner(says("a")), reward_functions=BatchRewards(log))

    async def on_group_done(group: RolloutGroup) -> list[GroupInput]:
        log.append(group.id)
        return [GroupInput("g-more", task(prompt="more"), (1, "more"))] if group.id == "g-second" else []

    stream_groups(rollout_runner, REQUESTS, group_size=2, temperature=1.0, on_group_done=on_group_done)
    assert log[0] == "scored 6"
    assert sorted(log[1:4]) == ["g-first", "g-second", "g-third"]
    # The next group is a separate batch.
    assert log[4:] == ["scored 2", "g-more"]
