# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A draft fed by hand: what limits leave, what is written down, and how it ends."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marin_rl.environments.base import Step
from marin_rl.rollouts.rollout_builder import Attempt, EnvironmentFault, Limits, RolloutBuilder
from marin_rl.tokenization.byte_tokenizer import byte_tokenizer
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.types import (
    Generation,
    Message,
    Observation,
    RewardResult,
    Rollout,
    RolloutStatus,
    StopReason,
    Task,
    TurnReward,
)

END = 257
TOKENIZER = ChatTokenizer(byte_tokenizer())
TASK = Task("t", "sums", (Message(role="user", content="2+3"),), "5")
PROMPT = TOKENIZER.prompt_tokens(TASK.messages)
"""Six tokens."""
LIMITS = Limits(max_length=100, max_new_tokens=10, max_turns=5)
MORE = Message(role="user", content="on")
"""Shown after a reply: five tokens with those of the template."""


def builder() -> RolloutBuilder:
    return RolloutBuilder(Attempt(TASK, PROMPT, group_id="g", id="r", seed=3, start_seed=4, temperature=1.0))


def said(text: str, stops: bool = True) -> tuple[Generation, str]:
    """A reply of the policy: as many tokens as characters, and the end token."""
    tokens = (*text.encode(), *([END] if stops else []))
    stop = StopReason.STOP if stops else StopReason.LENGTH
    return Generation(tokens, (-0.5,) * len(tokens), stop, 0, 0), text


def goes_on(**rewards: float) -> Step:
    return Step(rewards, (MORE,), done=False)


def played(*steps: Step, limits: Limits = LIMITS, reply: str = "abc") -> RolloutBuilder:
    """A draft whose policy always says the same."""
    made = builder()
    for step in steps:
        made.hear(*said(reply))
        made.see(step, TOKENIZER, limits)
    return made


# --- limits ---


@pytest.mark.parametrize(("length", "room"), [(7, 1), (10, 4), (16, 10), (17, 10)])
def test_an_answer_has_the_room_that_the_sequence_leaves(length: int, room: int):
    limits = dataclasses.replace(LIMITS, max_length=length)
    assert builder().request(limits).max_new_tokens == room


@pytest.mark.parametrize(("length", "over"), [(15, True), (16, False)])
def test_a_sequence_without_room_for_one_more_token_is_over(length: int, over: bool):
    # 6 of the prompt, 4 of the reply, 5 of what follows: 15.
    limits = dataclasses.replace(LIMITS, max_length=length)
    made = played(goes_on(moves=1.0), limits=limits)
    assert made.over is over
    if over:
        assert made.finish().status is RolloutStatus.TRUNCATED
    else:
        assert made.request(limits).max_new_tokens == 1


@pytest.mark.parametrize(("tokens", "over"), [(4, True), (5, False)])
def test_all_answers_together_may_use_up_their_limit_and_no_more(tokens: int, over: bool):
    limits = dataclasses.replace(LIMITS, max_tokens=tokens)
    made = played(goes_on(moves=1.0), limits=limits)
    assert made.over is over
    if not over:
        assert made.request(limits).max_new_tokens == 1


@pytest.mark.parametrize(("turns", "over"), [(2, True), (3, False)])
def test_the_last_turn_that_is_allowed_is_played(turns: int, over: bool):
    made = played(*[goes_on(moves=1.0)] * 2, limits=dataclasses.replace(LIMITS, max_turns=turns))
    assert made.over is over


def test_a_limit_that_is_reached_by_an_episode_that_is_done_truncates_nothing():
    limits = Limits(max_length=15, max_new_tokens=10, max_turns=1, max_tokens=4)
    made = played(Step({"won": 1.0}), limits=limits)
    assert (made.over, made.finish().status) == (True, RolloutStatus.COMPLETED)


def test_a_reply_that_was_cut_is_truncated_though_the_episode_is_done():
    made = builder()
    made.hear(*said("abc", stops=False))
    made.see(Step({"won": 1.0}), TOKENIZER, LIMITS)
    assert made.finish().status is RolloutStatus.TRUNCATED


@given(
    replies=st.lists(st.tuples(st.integers(0, 12), st.booleans()), min_size=1, max_size=8),
    limits=st.builds(
        Limits,
        max_length=st.integers(7, 60),
        max_new_tokens=st.integers(1, 12),
        max_turns=st.integers(1, 6),
        max_tokens=st.none() | st.integers(1, 40),
    ),
)
@settings(deadline=None)
def test_no_limit_is_ever_exceeded_and_none_ends_a_rollout_early(replies: list[tuple[int, bool]], limits: Limits):
    """A policy that says as much as it is allowed to, or stops before; the environment never ends it."""
    made = builder()
    sequence = generated = turns = 0
    for length, stops in replies:
        request = made.request(limits)
        assert request.max_new_tokens >= 1
        assert len(request.prompt_tokens) + request.max_new_tokens <= limits.max_length
        reply = (
            said("a" * min(length, request.max_new_tokens - 1)) if stops else said("a" * request.max_new_tokens, False)
        )
        made.hear(*reply)
        made.see(goes_on(moves=0.5), TOKENIZER, limits)
        turns, generated = turns + 1, generated + len(reply[0].token_ids)
        sequence = len(request.prompt_tokens) + len(reply[0].token_ids) + (5 if stops else 6)
        spent = limits.max_tokens is not None and generated >= limits.max_tokens
        assert made.over == (sequence >= limits.max_length or turns >= limits.max_turns or spent)
        assert limits.max_tokens is None or generated <= limits.max_tokens
        if made.over:
            assert made.finish().status is RolloutStatus.TRUNCATED
            break
    rollout = made.finish()
    assert len(rollout.turns) == turns <= limits.max_turns
    assert rollout.rewards == {"moves": 0.5 * turns}


# --- the last observation ---

SHOWN = (259, 111, 110, END, 260)
"""`MORE` as tokens, between the template's own."""


@pytest.mark.parametrize(
    "limits",
    [
        dataclasses.replace(LIMITS, max_turns=1),
        # 6 tokens of the prompt and 4 of the reply: the observation does not fit into the row.
        dataclasses.replace(LIMITS, max_length=12),
        dataclasses.replace(LIMITS, max_tokens=4),
    ],
    ids=["max_turns", "max_length", "max_tokens"],
)
def test_a_limit_keeps_the_environments_last_answer(limits: Limits):
    made = played(goes_on(moves=1.0), limits=limits)
    reply = Message(role="assistant", content="abc")
    assert made.reward_request().messages == (*TASK.messages, reply, MORE)
    assert made.reward_request().last_reply == "abc"
    rollout = made.finish()
    assert rollout.status is RolloutStatus.TRUNCATED
    assert rollout.last_observation == Observation((MORE,), SHOWN)
    assert rollout.messages == (*TASK.messages, reply, MORE)
    assert [turn.messages for turn in rollout.turns] == [(*TASK.messages, reply)]


def test_a_reply_that_was_cut_by_its_length_is_answered_too():
    made = builder()
    made.hear(*said("abc", stops=False))
    made.see(goes_on(moves=1.0), TOKENIZER, dataclasses.replace(LIMITS, max_turns=1))
    # The end token that the policy did not sample belongs to the observation.
    assert made.finish().last_observation == Observation((MORE,), (END, *SHOWN))


def test_closing_words_of_the_environment_are_kept_without_tokens():
    made = played(goes_on(moves=1.0), Step({"moves": 1.0}, (MORE,), done=True))
    assert made.reward_request().messages[-1] == MORE
    rollout = made.finish()
    assert (rollout.status, rollout.last_observation) == (RolloutStatus.COMPLETED, Observation((MORE,)))


def test_an_observation_that_was_answered_is_not_the_last():
    assert played(goes_on(moves=1.0), Step({"moves": 1.0})).finish().last_observation is None


# --- what is asked ---


def test_every_turn_is_asked_with_a_seed_of_its_own_and_all_before_it():
    made = builder()
    requests = []
    for _ in range(3):
        requests.append(made.request(LIMITS))
        assert made.request(LIMITS) == requests[-1]
        made.hear(*said("abc"))
        made.see(goes_on(), TOKENIZER, LIMITS)
    assert len({request.seed for request in requests}) == 3
    first, second, third = (request.prompt_tokens for request in requests)
    assert first == PROMPT
    reply, shown = (97, 98, 99, END), (259, 111, 110, END, 260)
    assert second == (*first, *reply, *shown)
    assert third == (*second, *reply, *shown)


# --- what the environment says ---


class Odd(float):
    """WeightPoll like a number, and is none."""

    def __float__(self) -> float:
        raise TypeError("no number")


@pytest.mark.parametrize("step", [Step({"won": Odd(1.0)}), Step({"won": 1.0}, metrics={"x": Odd(1.0)})])
def test_a_value_that_is_no_number_is_the_environments_fault(step: Step):
    made = builder()
    made.hear(*said("abc"))
    with pytest.raises(EnvironmentFault, match=r"^TypeError: no number") as caught:
        made.see(step, TOKENIZER, LIMITS)
    assert caught.value.status is RolloutStatus.FAILED


class Huge(float):
    """A whole number of many digits, as far as converting it goes; tests let no other type pass."""

    def __float__(self) -> float:
        return float(10**400)


def test_a_number_too_large_for_a_float_is_the_environments_fault():
    made = builder()
    made.hear(*said("abc"))
    with pytest.raises(EnvironmentFault, match=r"^OverflowError: int too large") as caught:
        made.see(Step({"won": Huge(1.0)}), TOKENIZER, LIMITS)
    assert caught.value.status is RolloutStatus.FAILED


@pytest.mark.parametrize("done", [False, True])
def test_a_message_that_no_tokenizer_takes_is_the_environments_fault(done: bool):
    made = builder()
    made.hear(*said("abc"))
    step = Step({"game": 1.0}, (Message(role="user", content="half a \ud83d"),), done=done)
    with pytest.raises(EnvironmentFault, match=r"message 0 of the environment's step .* lone surrogates") as raised:
        made.see(step, TOKENIZER, LIMITS)
    assert raised.value.status is RolloutStatus.FAILED


def test_nobody_but_the_policy_speaks_as_the_assistant():
    made = played(goes_on(game=1.0))
    made.hear(*said("abc"))
    with pytest.raises(EnvironmentFault, match=r"role 'assistant'.* show it as 'user' or 'tool'") as raised:
        made.see(Step({}, (Message(role="assistant", content="hint"), MORE), done=False), TOKENIZER, LIMITS)
    assert raised.value.status is RolloutStatus.FAILED


def test_of_the_steps_the_last_to_name_a_metric_decides_it():
    steps = [Step({"a": 1.0}, (MORE,), False, metrics={"x": 1.0, "y": 2.0}), Step({"a": 1.0}, metrics={"x": 3.0})]
    assert played(*steps).finish().metrics == {"x": 3.0, "y": 2.0}


def test_metadata_of_turns_and_of_the_rollout_is_kept():
    first = Step({"a": 1.0}, (MORE,), False, info={"cell": [1, 2]}, rollout_info={"map": "4x4", "falls": 0})
    rollout = played(first, Step({"a": 1.0}, rollout_info={"falls": 1})).finish()
    assert [turn.info for turn in rollout.turns] == [{"cell": [1, 2]}, {}]
    assert rollout.info == {"map": "4x4", "falls": 1}


@pytest.mark.parametrize("name", ["info", "rollout_info"])
def test_metadata_that_is_no_json_is_the_environments_fault(name: str):
    made = builder()
    made.hear(*said("abc"))
    with pytest.raises(EnvironmentFault, match=r"^ValueError: info\['seen'\] is not a JSON value") as caught:
        made.see(Step({"a": 1.0}, **{name: {"seen": {1, 2}}}), TOKENIZER, LIMITS)
    assert caught.value.status is RolloutStatus.FAILED


# --- what reward functions say ---


def judged(*evaluations: RewardResult, steps: tuple[Step, ...] = (goes_on(moves=0.5), Step({"moves": 0.5}))) -> Rollout:
    made = played(*steps)
    made.judged(evaluations)
    return made.finish()


def test_what_functions_say_is_weighed_and_added_to_what_the_environment_gave():
    style = RewardResult("style", 2.0, 0.25, steps=(TurnReward(1, 3.0),))
    rollout = judged(style, RewardResult("short", -1.0, 1.0))
    assert rollout.rewards == {"moves": 1.0, "style": 0.5, "short": -1.0}
    assert [turn.rewards for turn in rollout.turns] == [{"moves": 0.5}, {"moves": 0.5, "style": 6.0}]
    assert [turn.reward for turn in rollout.turns] == [0.5, 6.5]
    assert rollout.evaluations == (style, RewardResult("short", -1.0, 1.0))


def test_a_turn_that_nobody_rewarded_stays_without_a_reward():
    rollout = judged(RewardResult("style", 1.0, 1.0, steps=(TurnReward(1, 0.0),)), steps=(goes_on(), Step({})))
    assert [turn.reward for turn in rollout.turns] == [None, 0.0]


def test_a_missing_score_costs_the_reward_and_keeps_what_was_said_and_sampled():
    lost = RewardResult("judge", 1.0, None, error="TimeoutError: 3 s", lost="timeout")
    rollout = judged(RewardResult("style", 1.0, 1.0), lost)
    assert (rollout.status, rollout.rewards, rollout.total_reward) == (RolloutStatus.FAILED, {}, None)
    assert rollout.error == "reward 'judge': TimeoutError: 3 s"
    assert len(rollout.turns) == len(rollout.evaluations) == 2


def test_a_function_with_the_name_of_the_environments_own_reward_is_refused():
    rollout = judged(RewardResult("moves", 1.0, 1.0))
    assert rollout.status is RolloutStatus.FAILED
    assert rollout.error == "reward 'moves' has the name of one that the environment gives; give it another `name`"


def test_functions_are_told_the_whole_conversation_and_where_the_policy_begins():
    request = played(goes_on(), Step({})).reward_request()
    assert [(one["role"], one["content"]) for one in request.messages] == [
        ("user", "2+3"),
        ("assistant", "abc"),
        ("user", "on"),
        ("assistant", "abc"),
    ]
    assert (request.num_prompt_messages, request.ground_truth, request.status) == (1, "5", "completed")


# --- how it ends ---


def test_a_failure_takes_the_rewards_and_leaves_the_turns():
    made = played(goes_on(moves=0.5))
    made.fail(RolloutStatus.TIMED_OUT, "too slow")
    rollout = made.finish()
    assert made.has_failed
    assert (rollout.status, rollout.error, rollout.rewards, len(rollout.turns)) == (
        RolloutStatus.TIMED_OUT,
        "too slow",
        {},
        1,
    )


def test_an_aborted_generation_aborts_the_rollout_and_names_the_stop_reason():
    made = played(goes_on(moves=0.5))
    made.hear(Generation((97,), (-0.5,), StopReason.ABORT, 0, 0), "a")
    assert (made.over, made.has_failed) == (True, True)
    rollout = made.finish()
    assert (rollout.status, rollout.rewards, rollout.total_reward) == (RolloutStatus.ABORTED, {}, None)
    assert rollout.error == "the engine aborted the generation of turn 1 after 1 tokens (stop reason abort)"
    assert [turn.generation.token_ids for turn in rollout.turns] == [(97, 98, 99, END), (97,)]
    assert not rollout.status.is_graded


def test_a_rollout_that_is_cut_off_before_any_reward_has_earned_nothing():
    limits = dataclasses.replace(LIMITS, max_turns=2)
    cut = played(goes_on(), goes_on(), limits=limits).finish()
    assert (cut.status, cut.rewards, cut.total_reward) == (RolloutStatus.TRUNCATED, {"truncated": 0.0}, 0.0)
    assert [turn.reward for turn in cut.turns] == [None, None]
    # What was given before, or by a reward function, is all there is.
    assert played(goes_on(moves=1.0), goes_on(), limits=limits).finish().rewards == {"moves": 1.0}
    made = played(goes_on(), goes_on(), limits=limits)
    made.judged([RewardResult("style", weight=2.0, score=0.5)])
    assert made.finish().rewards == {"style": 1.0}


def test_a_rollout_that_nobody_rewarded_is_an_error_that_names_it():
    with pytest.raises(ValueError, match="Rollout r: status is completed but it has no reward"):
        played(Step({})).finish()


def test_rewards_that_add_up_to_nothing_finite_name_the_rollout():
    with pytest.raises(ValueError, match="Rollout r: reward 'won' is nan"):
        played(goes_on(won=math.inf), Step({"won": -math.inf})).finish()
