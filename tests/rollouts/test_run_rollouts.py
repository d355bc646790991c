# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import asyncio
import dataclasses
import logging
import math
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, ClassVar

import pytest

from marin_rl.batching.processed_rollout import process_rollout
from marin_rl.environments.base import Environment, Episode, Split, Step
from marin_rl.rollouts.reward_functions import NoRewardScorer
from marin_rl.rollouts.rollout_builder import Limits, LongPrompts, RolloutBuilder
from marin_rl.rollouts.run_rollouts import (
    AllRolloutsFailedError,
    BlockedEventLoopError,
    GroupInput,
    RolloutRunner,
    run_groups,
    run_requests,
    stream_requests,
)
from marin_rl.rollouts.state_hashing import default_state_hash
from marin_rl.sampling.sampler import PromptTooLongError, SampleRequest
from marin_rl.sampling.scripted import ScriptedSampler
from marin_rl.seeds import derive_seed
from marin_rl.tokenization.byte_tokenizer import byte_tokenizer
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.types import Message, Rollout, RolloutGroup, RolloutStatus, StopReason, Task

END, USER, ASSISTANT = 257, 259, 260
TOKENIZER = ChatTokenizer(byte_tokenizer())
LIMITS = Limits(max_length=64, max_new_tokens=6, max_turns=8)


@dataclasses.dataclass
class Countdown:
    """A game whose task's answer says after how many replies it is over; the last one is rewarded."""

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
class Game:
    """Starts episodes, and remembers them."""

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
    """Replies in the order of turns: the number of assistant tokens in the prompt says which turn it is."""
    return lambda request: (*tokens(replies[request.prompt_tokens.count(ASSISTANT) - 1]), END)


def runner(
    script: Callable[[SampleRequest], Sequence[int]], environment: Environment | None = None, limits: Limits = LIMITS
) -> RolloutRunner:
    sampler = ScriptedSampler(script, stop_token_ids=[END], logprob=-0.25, version=4)
    return RolloutRunner(environment or Game(), TOKENIZER, sampler, limits)


def play(
    made: RolloutRunner, tasks: Sequence[Task], group_size: int = 1, step: int = 9, all_may_fail: bool = False
) -> list[RolloutGroup]:
    seeds = (11, "train", step)
    if all_may_fail:
        requests = [GroupInput(f"train-{step}-{index}", one, (*seeds, index)) for index, one in enumerate(tasks)]
        return run_requests(made, requests, group_size=group_size, temperature=0.7)
    return run_groups(made, tasks, group_size=group_size, temperature=0.7, seed_parts=seeds)


def only(groups: Sequence[RolloutGroup]) -> Rollout:
    [group] = groups
    [rollout] = group.rollouts
    return rollout


def flat(rollout: Rollout) -> tuple[int, ...]:
    """The one sequence of a rollout whose history was never rewritten."""
    return tuple(token for turn in rollout.turns for token in (*turn.observation_tokens, *turn.generation.token_ids))


def test_episodes_of_1_2_6_and_3_turns_are_played_together():
    made = runner(says(*"abcdefgh"))
    groups = play(made, [task(count) for count in (1, 2, 6, 3)])
    rollouts = [group.rollouts[0] for group in groups]
    assert [len(rollout.turns) for rollout in rollouts] == [1, 2, 6, 3]
    assert {rollout.status for rollout in rollouts} == {RolloutStatus.COMPLETED}
    assert [rollout.rewards for rollout in rollouts] == [{"moves": 0.5 * turns, "won": 1.0} for turns in (1, 2, 6, 3)]
    assert [turn.reward for turn in rollouts[3].turns] == [0.5, 0.5, 1.5]
    # Those that are still being played are asked, and no others.
    prompts = [request.prompt_tokens.count(ASSISTANT) for request in made.sampler.requests]
    assert sorted(prompts) == [1] * 4 + [2] * 3 + [3] * 2 + [4, 5, 6]


def test_every_turn_continues_exactly_the_tokens_before_it():
    made = runner(says("a", "b", "c"))
    rollout = only(play(made, [task(3)]))
    first = (USER, *tokens("go"), END, ASSISTANT)
    second, third = (USER, *tokens("n1"), END, ASSISTANT), (USER, *tokens("n2"), END, ASSISTANT)
    assert [turn.observation_tokens for turn in rollout.turns] == [first, second, third]
    assert [turn.generation.token_ids for turn in rollout.turns] == [(*tokens(reply), END) for reply in "abc"]
    assert [turn.starts_sequence for turn in rollout.turns] == [True, False, False]
    asked = [request.prompt_tokens for request in made.sampler.requests]
    assert asked == [first, (*first, *tokens("a"), END, *second), flat(rollout)[: len(asked[2])]]
    assert [turn.generation.logprobs for turn in rollout.turns] == [(-0.25, -0.25)] * 3
    assert {turn.generation.first_version for turn in rollout.turns} == {4}


def test_a_reply_cut_before_its_end_token_gets_the_end_token_as_observation():
    made = runner(lambda request: tokens("abcdef"))
    rollout = only(play(made, [task(2)]))
    assert rollout.turns[0].generation.stop_reason is StopReason.LENGTH
    assert rollout.turns[1].observation_tokens == (END, USER, *tokens("n1"), END, ASSISTANT)
    assert rollout.status is RolloutStatus.TRUNCATED
    assert rollout.total_reward == 2.0


def test_sampled_tokens_are_kept_where_their_text_would_be_tokenized_otherwise():
    # A lone continuation byte decodes to U+FFFD, which would encode to three other bytes.
    made = runner(lambda request: (0x80, END))
    rollout = only(play(made, [task(2)]))
    assert rollout.turns[0].messages[-1]["content"] == "\ufffd"
    assert made.sampler.requests[1].prompt_tokens[: len(flat(rollout)) - 2][5:7] == (0x80, END)


def test_messages_tell_the_turns_in_words():
    rollout = only(play(runner(says("a", "b")), [task(2)]))
    assert [[(message["role"], message["content"]) for message in turn.messages] for turn in rollout.turns] == [
        [("user", "go"), ("assistant", "a")],
        [("user", "n1"), ("assistant", "b")],
    ]


def test_a_history_that_the_template_rewrites_starts_a_sequence():
    tokenizer = byte_tokenizer()
    # Shows no reply but the last: what was sampled is not in the later context.
    tokenizer.chat_template = (
        "{%- for message in messages -%}"
        "{%- if message['role'] == 'user' or loop.last -%}"
        "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
        "{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
    )
    made = dataclasses.replace(runner(lambda request: (*tokens("a"), END)), tokenizer=ChatTokenizer(tokenizer))
    rollout = only(play(made, [task(2)]))
    assert [turn.starts_sequence for turn in rollout.turns] == [True, True]
    complete = (USER, *tokens("go"), END, USER, *tokens("n1"), END, ASSISTANT)
    assert rollout.turns[1].observation_tokens == made.sampler.requests[1].prompt_tokens == complete


def test_turns_run_out():
    rollout = only(play(runner(says(*"abc"), limits=Limits(64, 6, max_turns=3)), [task(4)]))
    assert len(rollout.turns) == 3
    assert rollout.status is RolloutStatus.TRUNCATED
    assert rollout.rewards == {"moves": 1.5}


def test_an_answer_never_exceeds_the_sequence():
    # The prompt has 5 tokens: of 6 new ones, 4 have room.
    made = runner(lambda request: tokens("abcdef"), limits=Limits(9, 6, 1))
    rollout = only(play(made, [task(1)]))
    assert made.sampler.requests[0].max_new_tokens == 4
    assert len(flat(rollout)) == 9
    assert rollout.status is RolloutStatus.TRUNCATED


def test_an_observation_that_leaves_no_room_ends_the_rollout():
    # 5 tokens of prompt, 2 of answer and 5 of observation are 12; a second answer needs one more.
    for length, turns in ((12, 1), (13, 2)):
        rollout = only(play(runner(says("a", "b"), limits=Limits(length, 6, 8)), [task(3)]))
        assert len(rollout.turns) == turns
        assert rollout.status is RolloutStatus.TRUNCATED
        assert len(flat(rollout)) <= length


def test_a_prompt_without_room_for_an_answer_is_named_and_nothing_is_sampled():
    made = runner(says("a"), limits=Limits(5, 6, 1))
    with pytest.raises(PromptTooLongError, match=r"task 'go1' of environment 'countdown'.* 5 tokens.*max_length"):
        play(made, [task(1)])
    assert made.sampler.requests == []
    short = Limits(16, 6, 1, max_prompt_length=4, long_prompts=LongPrompts.SKIP)
    with pytest.raises(
        PromptTooLongError, match=r"has 5 tokens, but rollouts.max_prompt_length allows 4; .*long_prompts"
    ):
        play(runner(says("a"), limits=short), [task(1)])
    assert only(play(runner(says("a"), limits=Limits(6, 6, 1)), [task(1)])).turns[0].generation.token_ids == tokens("a")


def test_a_prompt_that_is_cut_on_the_left_keeps_its_end_and_turns_continue_it():
    whole = only(play(runner(says("a", "b"), limits=Limits(64, 6, 2)), [task(3)]))
    limits = Limits(64, 6, 2, max_prompt_length=4, long_prompts=LongPrompts.TRUNCATE_LEFT)
    cut = only(play(runner(says("a", "b"), limits=limits), [task(3)]))
    assert len(whole.turns[0].observation_tokens) == 5
    assert cut.turns[0].observation_tokens == whole.turns[0].observation_tokens[-4:]
    # The rest is the same, token for token: the second turn continues the sequence.
    assert [turn.generation.token_ids for turn in cut.turns] == [turn.generation.token_ids for turn in whole.turns]
    assert cut.turns[1].observation_tokens == whole.turns[1].observation_tokens
    assert not cut.turns[1].starts_sequence
    assert cut.turns[0].messages == whole.turns[0].messages
    processed = process_rollout(cut, length=64, pad_token_id=256)
    assert processed.lengths == (len(flat(cut)),)
    assert processed.num_loss_tokens == sum(len(turn.generation.token_ids) for turn in cut.turns)


def test_attempts_at_one_task_start_equally_and_differ_by_their_sampling_seed():
    game = Game()
    made = runner(says("a", "b"), game)
    groups = play(made, [task(2), task(2, prompt="up")], group_size=3)
    starts = [seed for _, seed in game.started]
    assert starts[:3] == [starts[0]] * 3
    assert starts[3:] == [starts[3]] * 3
    assert starts[0] != starts[3]
    seeds = [request.seed for request in made.sampler.requests]
    assert len(set(seeds)) == len(seeds) == 12
    assert [[rollout.task.id for rollout in group.rollouts] for group in groups] == [["go2"] * 3, ["up2"] * 3]
    assert {request.temperature for request in made.sampler.requests} == {0.7}


def test_ids_and_seeds_follow_from_the_call_alone():
    first, again, other = (play(runner(says("a")), [task(), task(prompt="up")], 2, step) for step in (9, 9, 10))
    assert first == again
    names = [[rollout.id for rollout in group.rollouts] for group in first]
    assert names == [["train-9-0-0", "train-9-0-1"], ["train-9-1-0", "train-9-1-1"]]
    assert [group.id for group in other] == ["train-10-0", "train-10-1"]
    made = runner(says("a"))
    play(made, [task()])
    assert made.sampler.requests[0].seed == derive_seed(derive_seed(11, "train", 9, 0, 0), 0)


def test_a_seed_does_not_depend_on_what_else_is_played():
    alone, together = runner(says(*"abcdefgh")), runner(says(*"abcdefgh"))
    play(alone, [task(3)])
    play(together, [task(3), task(6, prompt="up"), task(1, prompt="hm")], group_size=2)
    seeds = {request.prompt_tokens: request.seed for request in reversed(together.sampler.requests)}
    assert all(seeds[request.prompt_tokens] == request.seed for request in alone.sampler.requests)


def test_an_episode_that_raises_fails_alone(caplog: pytest.LogCaptureFixture):
    def script(request: SampleRequest) -> Sequence[int]:
        broken = request.prompt_tokens.count(ASSISTANT) == 2 and request.prompt_tokens[1:3] == tokens("up")
        return (*tokens("boom" if broken else "a"), END)

    with caplog.at_level(logging.WARNING):
        groups = play(runner(script), [task(3), task(3, prompt="up"), task(1)])
    good, bad, short = (group.rollouts[0] for group in groups)
    assert (good.status, short.status) == (RolloutStatus.COMPLETED, RolloutStatus.COMPLETED)
    assert bad.status is RolloutStatus.FAILED
    assert bad.error == "RuntimeError: the game broke"
    assert (bad.rewards, bad.total_reward) == ({}, None)
    assert [turn.generation.token_ids for turn in bad.turns] == [(97, END), (*tokens("boom"), END)]
    assert "rollout train-9-1-0 failed: RuntimeError: the game broke" in caplog.text


def test_an_episode_that_cannot_start_fails_alone():
    def begin(task: Task, seed: int) -> Episode:
        if task.id == "up1":
            raise OSError("no board")
        return Countdown(task, seed)

    bad, good = (group.rollouts[0] for group in play(runner(says("a"), Game(begin)), [task(prompt="up"), task()]))
    assert (bad.status, bad.turns, bad.error) == (RolloutStatus.FAILED, (), "OSError: no board")
    assert good.status is RolloutStatus.COMPLETED


def test_when_all_fail_the_first_error_is_told():
    def begin(task: Task, seed: int) -> Episode:
        raise ConnectionError(f"judge of {task.id} is away")

    with pytest.raises(
        AllRolloutsFailedError,
        match=r"all 4 rollouts failed; the first, train-9-0-0 \(task 'go1' of environment 'countdown'\): "
        "ConnectionError: judge of go1 is away",
    ):
        play(runner(says("a"), Game(begin)), [task(), task(prompt="up")], group_size=2)


def test_playing_alone_asks_for_no_success():
    def begin(task: Task, seed: int) -> Episode:
        raise ConnectionError("away")

    [group] = play(runner(says("a"), Game(begin)), [task()], group_size=2, all_may_fail=True)
    assert [rollout.error for rollout in group.rollouts] == ["ConnectionError: away"] * 2


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_names_the_rollout(value: float):
    made = runner(says("a"), Game(lambda task, seed: Fixed(Step({"won": value}))))
    with pytest.raises(ValueError, match=f"Rollout train-9-0-0: reward 'won' is {value}"):
        play(made, [task()])


def test_a_step_that_goes_on_with_nothing_to_show_fails_its_rollout():
    def begin(task: Task, seed: int) -> Episode:
        return Fixed(Step({"won": 1.0}, done=False)) if task.id == "up1" else Countdown(task, seed)

    bad, good = (group.rollouts[0] for group in play(runner(says("a"), Game(begin)), [task(prompt="up"), task()]))
    assert bad.status is RolloutStatus.FAILED
    assert bad.error == "ValueError: the environment's step is not done, but has no messages to show the policy next"
    assert good.status is RolloutStatus.COMPLETED


def test_rewards_of_the_same_name_add_up_and_others_stand_alone():
    steps: Mapping[int, Step] = {
        0: Step({"hit": 1.0}, (Message(role="user", content="on"),), done=False),
        1: Step({"hit": 2.0, "end": -1.0}),
    }

    @dataclasses.dataclass
    class Two:
        played: int = 0

        async def step(self, reply: str) -> Step:
            self.played += 1
            return steps[self.played - 1]

        async def close(self) -> None:
            pass

    rollout = only(play(runner(says("a", "b"), Game(lambda task, seed: Two())), [task()]))
    assert rollout.rewards == {"hit": 3.0, "end": -1.0}


def test_a_step_without_a_reward_is_not_one_of_nought():
    steps = [Step({}, (Message(role="user", content="on"),), done=False), Step({"hit": 0.0})]

    @dataclasses.dataclass
    class Late:
        played: int = 0

        async def step(self, reply: str) -> Step:
            self.played += 1
            return steps[self.played - 1]

        async def close(self) -> None:
            pass

    rollout = only(play(runner(says("a", "b"), Game(lambda task, seed: Late())), [task()]))
    assert [turn.reward for turn in rollout.turns] == [None, 0.0]
    assert rollout.rewards == {"hit": 0.0}


def test_turns_that_saw_the_same_have_the_same_anchor_state():
    @dataclasses.dataclass
    class Circle:
        played: int = 0

        async def step(self, reply: str) -> Step:
            self.played += 1
            return Step({"on": 0.0}, (Message(role="user", content="n" if self.played == 1 else "go"),), done=False)

        async def close(self) -> None:
            pass

    made = runner(says("a", "b", "c"), Game(lambda task, seed: Circle()), Limits(64, 6, max_turns=3))
    first, second, third = [turn.anchor_state for turn in only(play(made, [task()])).turns]
    assert first == third != second
    assert second != ""


class Slow(Countdown):
    """One that never answers a reply of `stuck`, and remembers that it was closed."""

    closed: ClassVar[list[str]] = []

    async def step(self, reply: str) -> Step:
        if reply == "stuck":
            await asyncio.Event().wait()
        return await super().step(reply)

    async def close(self) -> None:
        self.closed.append(self.task.id)


def sticks(request: SampleRequest) -> Sequence[int]:
    return (*tokens("stuck" if request.prompt_tokens[1:3] == tokens("up") else "a"), END)


def test_an_episode_that_never_answers_times_out_alone(caplog: pytest.LogCaptureFixture):
    Slow.closed.clear()
    limits = dataclasses.replace(LIMITS, max_seconds=0.2)
    with caplog.at_level(logging.WARNING):
        groups = play(runner(sticks, Game(Slow), limits), [task(3), task(3, prompt="up"), task(1)])
    good, stuck, short = (group.rollouts[0] for group in groups)
    assert (good.status, short.status) == (RolloutStatus.COMPLETED, RolloutStatus.COMPLETED)
    assert (stuck.status, stuck.rewards, len(stuck.turns)) == (RolloutStatus.TIMED_OUT, {}, 1)
    assert stuck.error == "its environment took longer than 0.2 s (rollouts.max_seconds)"
    assert "rollout train-9-1-0 timed out: its environment took longer than 0.2 s" in caplog.text
    assert sorted(Slow.closed) == ["go1", "go3", "up3"]


def test_an_environment_that_raises_a_timeout_of_its_own_has_failed():
    class Asleep(Countdown):
        async def step(self, reply: str) -> Step:
            if self.task.id == "up1":
                raise TimeoutError("the judge is asleep")
            return await super().step(reply)

    bad, good = play(runner(says("a"), Game(Asleep)), [task(prompt="up"), task()])
    assert (bad.rollouts[0].status, bad.rollouts[0].error) == (
        RolloutStatus.FAILED,
        "TimeoutError: the judge is asleep",
    )
    assert good.rollouts[0].status is RolloutStatus.COMPLETED


async def wait_for_something_cancelled() -> None:
    waiting = asyncio.ensure_future(asyncio.Event().wait())
    waiting.cancel()
    await waiting


async def leave() -> None:
    sys.exit("the game is over")


@pytest.mark.parametrize(
    ("end", "error"),
    [(leave, "SystemExit: the game is over"), (wait_for_something_cancelled, "CancelledError: ")],
)
@pytest.mark.parametrize("where", ["start", "step", "close"])
def test_an_environment_that_ends_more_than_an_episode_may_loses_its_own_alone(
    end: Callable[[], Coroutine[Any, Any, None]], error: str, where: str, caplog: pytest.LogCaptureFixture
):
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
        groups = play(runner(says("a"), EndingGame(Ending)), [task(prompt="up"), task()])
    hit, other = (group.rollouts[0] for group in groups)
    assert other.status is RolloutStatus.COMPLETED
    if where == "close":
        assert hit.status is RolloutStatus.COMPLETED
        assert f"its episode did not close: {error}" in caplog.text
    else:
        assert (hit.status, hit.error, hit.rewards) == (RolloutStatus.FAILED, error, {})


def test_a_step_that_is_given_up_cancels_episodes_that_are_at_work(caplog: pytest.LogCaptureFixture):
    cancelled = threading.Event()

    class Waiting(Countdown):
        async def step(self, reply: str) -> Step:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise
            raise AssertionError("unreachable")

    class BrokenJudges(NoRewardScorer):
        async def score_rollout(self, builder: RolloutBuilder) -> None:
            raise ZeroDivisionError("in the judge")

    class Mixed(Game):
        async def start(self, task: Task, seed: int) -> Episode:
            return Waiting(task, seed) if task.id == "up1" else await super().start(task, seed)

    made = dataclasses.replace(runner(says("a"), Mixed()), reward_functions=BrokenJudges())
    with caplog.at_level(logging.WARNING), pytest.raises(ZeroDivisionError, match="in the judge"):
        play(made, [task(prompt="up"), task()])
    assert cancelled.wait(30)
    made.loop.close()
    # That is no failure of the environment.
    assert not caplog.records


def test_code_that_blocks_all_episodes_is_an_error_that_names_the_remedy():
    release = threading.Event()

    class Blocking(Countdown):
        async def step(self, reply: str) -> Step:
            release.wait(60)
            return await super().step(reply)

    limits = dataclasses.replace(LIMITS, max_seconds=0.1)
    made = runner(says("a"), Game(Blocking), limits)
    with pytest.raises(BlockedEventLoopError, match=r"'countdown' has kept .* over 0.1 s .*asyncio.to_thread"):
        play(made, [task()])
    release.set()
    made.loop.close()


def test_every_episode_is_closed_once_however_it_ended(caplog: pytest.LogCaptureFixture):
    class Careless(Slow):
        async def close(self) -> None:
            await super().close()
            raise OSError("already gone")

    Slow.closed.clear()
    script = says("boom")
    with caplog.at_level(logging.WARNING):
        groups = play(runner(script, Game(Careless)), [task(1), task(2)], all_may_fail=True)
    assert {group.rollouts[0].status for group in groups} == {RolloutStatus.FAILED}
    assert sorted(Slow.closed) == ["go1", "go2"]
    assert "rollout train-9-0-0: its episode did not close: OSError: already gone" in caplog.text


def test_all_answers_together_have_a_limit():
    made = runner(lambda request: tokens("abcdef"), limits=dataclasses.replace(LIMITS, max_tokens=8, max_length=640))
    rollout = only(play(made, [task(9)]))
    assert [len(turn.generation.token_ids) for turn in rollout.turns] == [6, 2]
    assert rollout.status is RolloutStatus.TRUNCATED


def test_actions_metrics_and_anchors_are_kept():
    @dataclasses.dataclass
    class Maze:
        played: int = 0

        async def step(self, reply: str) -> Step:
            self.played += 1
            shown = (Message(role="user", content=f"you are at {self.played}"),)
            return Step(
                {"won": 0.0}, shown, False, action="left", anchor_state=[0, 1], metrics={"n": float(self.played)}
            )

        async def close(self) -> None:
            pass

    start = dataclasses.replace(task(), anchor_state=[0, 1])
    made = runner(says("a", "b", "c"), Game(lambda task, seed: Maze()), dataclasses.replace(LIMITS, max_turns=3))
    rollout = only(play(made, [start]))
    assert [turn.action for turn in rollout.turns] == ["left"] * 3
    assert len({turn.anchor_state for turn in rollout.turns}) == 1
    assert rollout.metrics == {"n": 3.0}
    assert set(rollout.seconds) == {"sample", "environment", "reward"}


def test_an_anchor_state_that_json_cannot_hold_fails_its_rollout():
    step = Step({}, (Message(role="user", content="on"),), done=False, anchor_state={1, 2})
    made = runner(says("a"), Game(lambda task, seed: Fixed(step)))
    rollout = only(play(made, [task()], all_may_fail=True))
    assert rollout.status is RolloutStatus.FAILED
    assert "an observation of type set has no canonical JSON" in (rollout.error or "")


def test_every_step_is_told_at_debug_and_every_episode_at_info(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.DEBUG, logger="marin_rl.rollouts.rollout_builder"):
        play(runner(says("a", "b")), [task(2)])
    debug = [record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG]
    info = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    go = [{"role": "user", "content": "go"}]
    assert debug[:4] == [
        "rollout train-9-0-0 turn 0: observation [{'role': 'user', 'content': 'go'}]",
        "rollout train-9-0-0 turn 0: action 'a', stop reason stop, tokens [97, 257], log-probs [-0.25, -0.25]",
        f"rollout train-9-0-0 turn 0: anchor state {go}, hash {default_state_hash(tuple(go), None)}",
        "rollout train-9-0-0 turn 0: structured action 'a', rewards {'moves': 0.5}, done False, "
        "next [{'role': 'user', 'content': 'n1'}]",
    ]
    assert debug[7].endswith("structured action 'b', rewards {'won': 1.0, 'moves': 0.5}, done True, next []")
    assert len(debug) == 8
    assert info == ["rollout train-9-0-0 of task go2: completed, 2 turns, 4 tokens, reward 2"]


def test_time_is_counted_by_phase():
    made = runner(says("a"))
    play(made, [task()])
    assert set(made.timer.seconds) == {"sample", "reward"}


def test_no_tasks_make_no_groups():
    assert play(runner(says("a")), []) == []


@dataclasses.dataclass
class Held:
    """An episode that ends only when it is let go."""

    task: Task
    let_go: threading.Event

    async def step(self, reply: str) -> Step:
        if not await asyncio.to_thread(self.let_go.wait, 60):
            raise RuntimeError("nobody let it go")
        return Step({"won": 1.0})

    async def close(self) -> None:
        pass


def hold_the_first() -> tuple[Game, threading.Event]:
    """A game whose episodes of the task `first` wait for the event."""
    let_go = threading.Event()
    return Game(lambda task, seed: Held(task, let_go) if task.id == "first1" else Countdown(task, seed)), let_go


REQUESTS = [GroupInput(f"g-{name}", task(prompt=name), (1, name)) for name in ("first", "second", "third")]


def test_a_group_is_handed_in_while_others_are_still_played():
    game, let_go = hold_the_first()
    came: dict[str, RolloutGroup] = {}

    def on_group_done(group: RolloutGroup) -> tuple[GroupInput, ...]:
        came[group.id] = group
        if len(came) == 2:
            # Were groups handed in together, the first would wait for this for ever.
            assert "g-first" not in came
            let_go.set()
        return ()

    stream_requests(patient(game), REQUESTS, group_size=2, temperature=1.0, on_group_done=on_group_done)
    assert list(came)[2] == "g-first"
    assert [rollout.status for group in came.values() for rollout in group.rollouts] == [RolloutStatus.COMPLETED] * 6


def test_others_are_played_in_the_place_of_a_group_that_is_whole_while_a_long_one_goes_on():
    game, let_go = hold_the_first()
    further = [GroupInput(f"g-more{number}", task(prompt="more"), (1, "more", number)) for number in range(5)]
    came: dict[str, RolloutGroup] = {}

    def on_group_done(group: RolloutGroup) -> list[GroupInput]:
        came[group.id] = group
        if group.id == "g-more4":
            assert "g-first" not in came
            let_go.set()
        # Now one, now two, now none.
        return {"g-second": further[:1], "g-third": further[1:3], "g-more2": further[3:]}.get(group.id, [])

    stream_requests(patient(game), REQUESTS, group_size=2, temperature=1.0, on_group_done=on_group_done)
    assert sorted(came) == sorted(request.group_id for request in (*REQUESTS, *further))
    # What comes out does not depend on when it was begun, and with whom.
    game, let_go = hold_the_first()
    let_go.set()
    together = run_requests(patient(game), [*REQUESTS, *further], group_size=2, temperature=1.0)
    assert [untimed(came[group.id]) for group in together] == [untimed(group) for group in together]


def patient(game: Game) -> RolloutRunner:
    return dataclasses.replace(runner(says("a"), game), limits=dataclasses.replace(LIMITS, max_seconds=60.0))


def untimed(group: RolloutGroup) -> list[Rollout]:
    return [dataclasses.replace(rollout, seconds={}) for rollout in group.rollouts]


class JudgesOfAll(NoRewardScorer):
    """Judge the batch as a whole, late."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    @property
    def has_batch_scope(self) -> bool:
        return True

    async def score_batch(self, builders: Sequence[RolloutBuilder]) -> None:
        self._log.append(f"judged {len(builders)}")


def test_no_group_is_handed_in_before_the_batch_that_it_is_judged_with():
    log: list[str] = []
    made = dataclasses.replace(runner(says("a")), reward_functions=JudgesOfAll(log))

    def on_group_done(group: RolloutGroup) -> list[GroupInput]:
        log.append(group.id)
        return [GroupInput("g-more", task(prompt="more"), (1, "more"))] if group.id == "g-second" else []

    stream_requests(made, REQUESTS, group_size=2, temperature=1.0, on_group_done=on_group_done)
    assert log[0] == "judged 6"
    assert sorted(log[1:4]) == ["g-first", "g-second", "g-third"]
    # What came in its place is a batch of its own.
    assert log[4:] == ["judged 2", "g-more"]


def test_where_nobody_takes_a_group_the_others_are_given_up():
    game, let_go = hold_the_first()

    def refuse(group: RolloutGroup) -> list[GroupInput]:
        raise ConnectionError("nobody is there")

    try:
        with pytest.raises(ConnectionError, match="nobody is there"):
            stream_requests(runner(says("a"), game), REQUESTS, group_size=1, temperature=1.0, on_group_done=refuse)
    finally:
        let_go.set()
