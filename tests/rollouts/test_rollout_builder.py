# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The rollout builder: limits, recorded turns, and final status."""

import dataclasses
import math
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marin_rl.environments.base import AgentResult, Step
from marin_rl.rollouts.attempt import Attempt, Limits, state_hash
from marin_rl.rollouts.rollout_builder import RolloutBuilder
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import byte_tokenizer
from marin_rl.types import (
    Generation,
    Message,
    Observation,
    RewardResult,
    Rollout,
    RolloutStatus,
    StopReason,
    Task,
    Turn,
    TurnReward,
)

END = 257
TOKENIZER = ChatTokenizer(byte_tokenizer())
TASK = Task("t", "sums", (Message(role="user", content="2+3"),), "5")
PROMPT = TOKENIZER.prompt_tokens(TASK.messages)
"""Six tokens."""
ANCHOR = state_hash(TASK.messages, TASK.anchor_state)
LIMITS = Limits(max_length=100, max_new_tokens=10, max_turns=5)
MORE = Message(role="user", content="on")
"""The message after each reply: five tokens with those of the template."""


def new_builder(limits: Limits = LIMITS) -> RolloutBuilder:
    attempt = Attempt(TASK, PROMPT, "", group_id="g", id="r", seed=3, start_seed=4, temperature=1.0, anchor=ANCHOR)
    return RolloutBuilder(attempt, TOKENIZER, limits)


def reply_of(text: str, stops: bool = True) -> Generation:
    """A reply of the policy: as many tokens as characters, and the end token."""
    tokens = (*text.encode(), *([END] if stops else []))
    stop = StopReason.STOP if stops else StopReason.LENGTH
    return Generation(tokens, (-0.5,) * len(tokens), stop, 0, 0)


def continues(**rewards: float) -> Step:
    return Step(rewards, (MORE,), done=False)


def built(*steps: Step, limits: Limits = LIMITS, reply: str = "abc") -> RolloutBuilder:
    """A builder with the same reply in every turn."""
    builder = new_builder(limits)
    for step in steps:
        builder.add_generation(reply_of(reply))
        builder.add_observation(step)
    return builder


OPENINGS = ["", "<think>", "<think>\n", "<think>\n\n", "<think> ", "<think>\n\n</think>\n\n", "<reasoning>\n", "Sure: "]


@pytest.mark.parametrize("opening", OPENINGS)
@pytest.mark.parametrize("reply", ["ab", "a</think>b", "<think>a</think>b"])
def test_rewards_see_the_turn_from_its_start(opening: str, reply: str):
    prompt = (*PROMPT, *opening.encode())
    start = TOKENIZER.reply_start(prompt)
    attempt = Attempt(TASK, prompt, start, group_id="g", id="r", seed=3, start_seed=4, temperature=1.0, anchor=ANCHOR)
    builder = RolloutBuilder(attempt, TOKENIZER, LIMITS)
    assert builder.add_generation(reply_of(reply)) == opening + reply
    builder.add_observation(Step({"won": 1.0}))
    assert builder.reward_request().messages == (*TASK.messages, Message(role="assistant", content=opening + reply))
    # The record holds what was sampled.
    assert builder.finish().messages[-1]["content"] == reply
    agent = RolloutBuilder(attempt, TOKENIZER, LIMITS)
    turn = Turn(prompt, reply_of(reply), (*TASK.messages, Message(role="assistant", content=reply)))
    agent.add_agent_turns([turn], AgentResult(), {}, hit_limit=False)
    assert agent.reward_request().last_reply == opening + reply


# --- limits ---


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
def test_limits_are_never_exceeded_and_end_no_rollout_early(replies: list[tuple[int, bool]], limits: Limits):
    """The policy uses all its tokens or stops earlier; the environment never ends the episode."""
    builder = new_builder(limits)
    sequence = generated = turns = 0
    for length, stops in replies:
        request = builder.request()
        assert request.max_new_tokens >= 1
        assert len(request.prompt_tokens) + request.max_new_tokens <= limits.max_length
        reply = (
            reply_of("a" * min(length, request.max_new_tokens - 1))
            if stops
            else reply_of("a" * request.max_new_tokens, False)
        )
        builder.add_generation(reply)
        builder.add_observation(continues(moves=0.5))
        turns, generated = turns + 1, generated + len(reply.token_ids)
        sequence = len(request.prompt_tokens) + len(reply.token_ids) + (5 if stops else 6)
        spent = limits.max_tokens is not None and generated >= limits.max_tokens
        assert builder.over == (sequence >= limits.max_length or turns >= limits.max_turns or spent)
        assert limits.max_tokens is None or generated <= limits.max_tokens
        if builder.over:
            assert builder.finish().status is RolloutStatus.TRUNCATED
            break
    rollout = builder.finish()
    assert len(rollout.turns) == turns <= limits.max_turns
    assert rollout.rewards == {"moves": 0.5 * turns}


# --- the last observation ---

SHOWN = (259, 111, 110, END, 260)
"""`MORE` as tokens, with those of the template."""


@pytest.mark.parametrize(
    "limits",
    [
        dataclasses.replace(LIMITS, max_turns=1),
        # With 6 tokens of the prompt and 4 of the reply, the observation does not fit into the row.
        dataclasses.replace(LIMITS, max_length=12),
        dataclasses.replace(LIMITS, max_tokens=4),
    ],
    ids=["max_turns", "max_length", "max_tokens"],
)
def test_a_limit_keeps_the_last_observation(limits: Limits):
    builder = built(continues(moves=1.0), limits=limits)
    reply = Message(role="assistant", content="abc")
    assert builder.reward_request().messages == (*TASK.messages, reply, MORE)
    assert builder.reward_request().last_reply == "abc"
    rollout = builder.finish()
    assert rollout.status is RolloutStatus.TRUNCATED
    assert rollout.last_observation == Observation((MORE,), SHOWN)
    assert rollout.messages == (*TASK.messages, reply, MORE)
    assert [turn.messages for turn in rollout.turns] == [(*TASK.messages, reply)]


def test_a_final_message_of_the_environment_is_kept_without_tokens():
    builder = built(continues(moves=1.0), Step({"moves": 1.0}, (MORE,), done=True))
    assert builder.reward_request().messages[-1] == MORE
    rollout = builder.finish()
    assert (rollout.status, rollout.last_observation) == (RolloutStatus.COMPLETED, Observation((MORE,)))
    # A limit that a finished episode has reached does not truncate it.
    limits = Limits(max_length=15, max_new_tokens=10, max_turns=1, max_tokens=4)
    assert built(Step({"won": 1.0}), limits=limits).finish().status is RolloutStatus.COMPLETED
    assert built(continues(moves=1.0), Step({"moves": 1.0})).finish().last_observation is None


# --- sample requests ---


def test_every_request_has_its_own_seed_and_the_whole_context():
    builder = new_builder()
    requests = []
    for _ in range(3):
        requests.append(builder.request())
        assert builder.request() == requests[-1]
        builder.add_generation(reply_of("abc"))
        builder.add_observation(continues())
    assert len({request.seed for request in requests}) == 3
    first, second, third = (request.prompt_tokens for request in requests)
    assert first == PROMPT
    reply, shown = (97, 98, 99, END), (259, 111, 110, END, 260)
    assert second == (*first, *reply, *shown)
    assert third == (*second, *reply, *shown)


# --- steps of the environment ---


def test_rewards_of_the_same_name_are_added_and_a_missing_reward_is_not_zero():
    rollout = built(continues(hit=1.0), continues(), Step({"hit": 2.0, "end": -3.0}), Step({"end": 0.0})).finish()
    assert rollout.rewards == {"hit": 3.0, "end": -3.0}
    assert [turn.reward for turn in rollout.turns] == [1.0, None, -1.0, 0.0]


@given(
    st.lists(
        st.fixed_dictionaries({"hit": st.floats(-1e3, 1e3), "style": st.floats(-1e3, 1e3)}), min_size=2, max_size=5
    ),
    st.randoms(),
)
@settings(max_examples=30)
def test_turn_rewards_in_another_order_give_the_same_bits(rewards: list[dict[str, float]], random: Random):
    moved = random.sample(rewards, len(rewards))

    def returns(order: list[dict[str, float]]) -> list[Rollout]:
        played = built(*(continues(**one) for one in order[:-1]), Step(order[-1])).finish()
        agent = new_builder()
        turns = [dataclasses.replace(turn, rewards=one) for turn, one in zip(played.turns, order, strict=True)]
        agent.add_agent_turns(turns[:-1], AgentResult(rewards=order[-1]), {"hit": 0.1}, hit_limit=False)
        return [played, agent.finish()]

    for one, other in zip(returns(rewards), returns(moved), strict=True):
        assert (one.rewards, one.total_reward) == (other.rewards, other.total_reward)


def test_turns_with_equal_states_have_equal_anchors():
    def anchors(*steps: Step) -> list[str]:
        return [turn.anchor_state for turn in built(*steps, Step({"a": 1.0})).finish().turns]

    # The messages identify the state if the environment gives none.
    first, second, third = anchors(continues(), Step({}, TASK.messages, done=False))
    assert first == third != second != ""
    by_state = [Step({}, (Message(role="user", content=str(at)),), False, anchor_state=[0, 1]) for at in range(3)]
    prompt, *later = anchors(*by_state)
    assert len(set(later)) == 1
    assert prompt != later[0]


def test_metadata_of_turns_and_of_the_rollout_is_kept():
    first = Step(
        {"a": 1.0},
        (MORE,),
        False,
        action="left",
        metrics={"x": 1.0, "y": 2.0},
        info={"cell": [1, 2]},
        rollout_info={"map": "4x4", "falls": 0},
    )
    rollout = built(first, Step({"a": 1.0}, metrics={"x": 3.0}, rollout_info={"falls": 1})).finish()
    assert [turn.action for turn in rollout.turns] == ["left", None]
    assert rollout.metrics == {"x": 3.0, "y": 2.0}
    assert [turn.info for turn in rollout.turns] == [{"cell": [1, 2]}, {}]
    assert rollout.info == {"map": "4x4", "falls": 1}


# --- reward functions ---


def scored(
    *evaluations: RewardResult, steps: tuple[Step, ...] = (continues(moves=0.5), Step({"moves": 0.5}))
) -> Rollout:
    builder = built(*steps)
    builder.add_rewards(evaluations)
    return builder.finish()


def test_scores_are_weighted_and_added_to_environment_rewards():
    style = RewardResult("style", 2.0, 0.25, steps=(TurnReward(1, 3.0),))
    rollout = scored(style, RewardResult("short", -1.0, 1.0))
    assert rollout.rewards == {"moves": 1.0, "style": 0.5, "short": -1.0}
    assert [turn.rewards for turn in rollout.turns] == [{"moves": 0.5}, {"moves": 0.5, "style": 6.0}]
    assert [turn.reward for turn in rollout.turns] == [0.5, 6.5]
    assert rollout.evaluations == (style, RewardResult("short", -1.0, 1.0))


def test_a_missing_score_removes_the_reward_and_keeps_the_turns():
    lost = RewardResult("judge", 1.0, None, error="TimeoutError: 3 s", failure="timeout")
    rollout = scored(RewardResult("style", 1.0, 1.0), lost)
    assert (rollout.status, rollout.rewards, rollout.total_reward) == (RolloutStatus.FAILED, {}, None)
    assert rollout.error == "reward 'judge': TimeoutError: 3 s"
    assert len(rollout.turns) == len(rollout.evaluations) == 2


def test_a_function_with_the_name_of_an_environment_reward_is_refused():
    rollout = scored(RewardResult("moves", 1.0, 1.0))
    assert rollout.status is RolloutStatus.FAILED
    assert rollout.error == "reward 'moves' has the name of a reward of the environment; set another `name`"


def test_functions_receive_the_conversation_and_the_prompt_length():
    request = built(continues(), Step({})).reward_request()
    assert [(message["role"], message["content"]) for message in request.messages] == [
        ("user", "2+3"),
        ("assistant", "abc"),
        ("user", "on"),
        ("assistant", "abc"),
    ]
    assert (request.num_prompt_messages, request.ground_truth, request.status) == (1, "5", "completed")


# --- final status ---


def test_an_aborted_generation_aborts_the_rollout_and_names_the_stop_reason():
    builder = built(continues(moves=0.5))
    builder.add_generation(Generation((97,), (-0.5,), StopReason.ABORT, 0, 0))
    assert (builder.over, builder.has_failed) == (True, True)
    rollout = builder.finish()
    assert (rollout.status, rollout.rewards, rollout.total_reward) == (RolloutStatus.ABORTED, {}, None)
    assert rollout.error == "the engine aborted the generation of turn 1 after 1 tokens (stop reason abort)"
    assert [turn.generation.token_ids for turn in rollout.turns] == [(97, 98, 99, END), (97,)]
    assert not rollout.status.is_graded


def test_a_rollout_cut_off_before_any_reward_has_reward_zero():
    limits = dataclasses.replace(LIMITS, max_turns=2)
    cut = built(continues(), continues(), limits=limits).finish()
    assert (cut.status, cut.rewards, cut.total_reward) == (RolloutStatus.TRUNCATED, {"truncated": 0.0}, 0.0)
    assert [turn.reward for turn in cut.turns] == [None, None]
    # Earlier rewards, and those of reward functions, replace the zero.
    assert built(continues(moves=1.0), continues(), limits=limits).finish().rewards == {"moves": 1.0}
    builder = built(continues(), continues(), limits=limits)
    builder.add_rewards([RewardResult("style", weight=2.0, score=0.5)])
    assert builder.finish().rewards == {"style": 1.0}


def test_a_rollout_without_rewards_is_an_error():
    with pytest.raises(ValueError, match="Rollout r: status is completed but it has no reward"):
        built(Step({})).finish()
    with pytest.raises(ValueError, match="Rollout r: reward 'won' is nan"):
        built(continues(won=math.inf), Step({"won": -math.inf})).finish()


# --- chosen experts ---


def reporting(text: str, context: int, stops: bool = True) -> Generation:
    """A reply with the experts `t` of token `t` of its sequence, whose first `context` tokens are the prompt."""
    reply = reply_of(text, stops)
    rows = np.arange(context + len(reply.token_ids) - 1, dtype=np.uint16)
    return dataclasses.replace(reply, experts=rows[:, None, None])


def test_a_turn_keeps_the_experts_that_no_earlier_turn_has():
    builder = new_builder()
    builder.add_generation(reporting("abc", len(PROMPT)))
    builder.add_observation(continues())
    second = reporting("de", len(PROMPT) + 4 + 5)
    builder.add_generation(second)
    builder.add_observation(Step({"won": 1.0}))
    rollout = builder.finish()
    found = [turn.generation.experts for turn in rollout.turns]
    assert [one is not None and one.ravel().tolist() for one in found] == [[*range(9)], [*range(9, 17)]]
    # The rows of earlier turns do not stay in memory.
    assert all(one is not None and one.base is None for one in found)


@pytest.mark.parametrize("more", [-1, 1, -9])
def test_experts_of_another_number_of_tokens_are_refused_by_name(more: int):
    builder = new_builder()
    message = f"rollout r: the sampler reported the experts of {9 + more} tokens for a prompt of 6 and 4 sampled tokens"
    with pytest.raises(ValueError, match=f"{message}; expected those of 9, all but the last"):
        builder.add_generation(dataclasses.replace(reply_of("abc"), experts=np.zeros((9 + more, 2, 2), np.uint8)))


def test_an_aborted_reply_without_tokens_has_the_experts_of_its_prompt():
    builder = new_builder()
    aborted = Generation((), (), StopReason.ABORT, 0, 0, np.zeros((5, 2, 2), np.uint8))
    builder.add_generation(aborted)
    [turn] = builder.finish().turns
    assert turn.generation.experts is not None
    assert turn.generation.experts.shape == (5, 2, 2)
