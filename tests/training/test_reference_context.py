# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
from typing import Any

import haliax as hax
import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
import numpy as np
import pytest
from levanter.layers.attention import AttentionMask
from levanter.models.lm_model import LmHeadModel

from marin_rl.batching.rollout_batch import batch_rollouts
from marin_rl.config.reference_config import ContextConfig, PolicyReferenceConfig, PolicyWeights
from marin_rl.environments.arithmetic import ArithmeticConfig
from marin_rl.environments.base import Split
from marin_rl.objectives import DistillationConfig
from marin_rl.training.batch_builder import StepToScore
from marin_rl.training.reference_context import ContextPrompts, feedback, with_context
from marin_rl.types import (
    Generation,
    Observation,
    RewardResult,
    Rollout,
    RolloutStatus,
    StopReason,
    Task,
    Turn,
)
from marin_rl.utils.errors import UserError
from marin_rl.utils.levanter_line import seq_len
from tests.tiny_run import TinyRun
from tests.training.bare_run import TOKENIZER
from tests.training.reopened_run import config_of, reopen

ENVIRONMENT = ArithmeticConfig().build()
TASK = ENVIRONMENT.tasks(Split.TRAIN)[0]
SYSTEM = {"role": "system", "content": "Add."}


def prompts(**content: Any) -> ContextPrompts:
    return ContextPrompts(ContextConfig(**content), ENVIRONMENT, TOKENIZER, seed=0)


def rollout(task: Task = TASK, *replies: tuple[int, ...], name: str = "a", **more: Any) -> Rollout:
    """A rollout whose later turns continue the first one's sequence."""
    turns = []
    for index, reply in enumerate(replies or ((49, 50, 257),)):
        generation = Generation(reply, (-0.5,) * len(reply), StopReason.STOP, 0, 0)
        observed = (259, 63, 257, 260) if index else TOKENIZER.prompt_tokens(task.messages)
        turns.append(Turn(observed, generation, task.messages, starts_sequence=not index))
    return Rollout(name, "g", task, tuple(turns), RolloutStatus.COMPLETED, {"correct": 0.5}, **more)


def text(made: ContextPrompts, of_rollout: Rollout) -> str:
    return TOKENIZER.tokenizer.decode(list(made(of_rollout)))


def test_demonstrations_are_worked_answers_of_other_tasks_before_the_question():
    tasks = {task.messages[-1]["content"]: task for task in ENVIRONMENT.tasks(Split.TRAIN)}
    made = prompts(demonstrations=3)
    shown = text(made, rollout())
    *turns, question = shown.split("<|user|>")[1:]
    assert question == f"{TASK.messages[-1]['content']}<|end|><|assistant|>"
    assert len(set(turns)) == 3
    for turn in turns:
        asked, _, answered = turn.partition("<|end|><|assistant|>")
        assert tasks[asked].id != TASK.id
        assert answered == f"{tasks[asked].worked_answer}<|end|>"
    # They depend on the seed and the task only.
    other = ENVIRONMENT.tasks(Split.TRAIN)[1]
    assert text(dataclasses.replace(made), rollout()) == shown
    assert text(dataclasses.replace(made, seed=1), rollout()).split("<|user|>")[1:4] != turns
    assert text(made, rollout(other)).split("<|user|>")[1:4] != turns


def test_answer_and_feedback_follow_the_question_and_system_messages_stay_first():
    task = dataclasses.replace(TASK, messages=(SYSTEM, *TASK.messages))
    graded = rollout(
        task,
        evaluations=(RewardResult("judge", 1.0, 0.5, reason="too long"),),
        last_observation=Observation(({"role": "user", "content": "No."},)),
        info={"reason": "off by one", "other": "hidden"},
    )
    assert feedback(graded) == "correct: 0.5\ntoo long\noff by one\nNo."
    question, answer = TASK.messages[-1]["content"], TASK.worked_answer or TASK.answer
    shown = text(prompts(answer=True, feedback=True, demonstrations=1), graded)
    assert shown.startswith("<|system|>Add.<|end|><|user|>")
    assert shown.count("<|system|>") == 1
    assert shown.endswith(
        f"<|user|>{question}\n\nThe right answer is:\n{answer}\n\nFeedback on a reply:\n{feedback(graded)}"
        "<|end|><|assistant|>"
    )


def test_action_tokens_stay_exactly_as_they_were_sampled():
    """Against a list of tokens made turn by turn."""
    rollouts = [rollout(), rollout(ENVIRONMENT.tasks(Split.TRAIN)[1], (49, 257), (50, 51, 257), name="b")]
    batch, made = batch_rollouts(rollouts, max_length=64), prompts(answer=True)
    longer = with_context(batch, rollouts, made)
    expected, masks = [], []
    for one in rollouts:
        expected += [*made(one), *one.turns[0].generation.token_ids]
        masks += [False] * len(made(one)) + [True] * len(one.turns[0].generation.token_ids)
        for turn in one.turns[1:]:
            expected += [*turn.observation_tokens, *turn.generation.token_ids]
            masks += [False] * len(turn.observation_tokens) + [True] * len(turn.generation.token_ids)
    assert longer.input_ids.tolist() == expected
    assert longer.loss_mask.tolist() == masks
    assert longer.turn_ids[longer.loss_mask].tolist() == batch.turn_ids[batch.loss_mask].tolist()
    assert longer.input_ids[longer.loss_mask].tolist() == batch.input_ids[batch.loss_mask].tolist()


def test_a_long_context_is_an_error_that_names_the_task():
    with pytest.raises(
        UserError, match=rf"^task '{TASK.id}' of environment 'arithmetic': its context .* allows 5; raise"
    ):
        prompts(demonstrations=2, max_tokens=5)
    # The feedback is not known before the rollout.
    measured = prompts(feedback=True, max_tokens=40)
    assert len(measured(rollout())) <= len(TOKENIZER.prompt_tokens(TASK.messages)) + 40
    with pytest.raises(UserError, match=r"max_tokens allows 40; raise it$"):
        measured(rollout(info={"reason": "much longer than the rest of the context"}))


def test_a_sequence_that_does_not_begin_with_the_prompt_is_refused():
    turn = dataclasses.replace(rollout().turns[0], observation_tokens=(259, 49, 257, 260), starts_sequence=True)
    rewritten = dataclasses.replace(rollout(), turns=(*rollout().turns, turn))
    batch = batch_rollouts([rewritten], max_length=64)
    with pytest.raises(UserError, match=rf"task '{TASK.id}' .*rewrites the prompt in a later turn"):
        with_context(batch, [rewritten], prompts(answer=True))


def test_tasks_without_answers_are_refused():
    silent = rollout(dataclasses.replace(TASK, answer="", worked_answer=None))
    with pytest.raises(UserError, match=r"has no answer; set reference\.context\.answer: false"):
        prompts(answer=True)(silent)
    total = len(ENVIRONMENT.tasks(Split.TRAIN))
    with pytest.raises(UserError, match=rf"demonstrations is {total}, but only {total} training tasks .*'arithmetic'"):
        prompts(demonstrations=total)


def logprobs_of_last(model: LmHeadModel, tokens: tuple[int, ...], count: int) -> list[float]:
    """Log-probs of the last tokens by levanter's own forward pass and numpy, at temperature 1."""
    ids = hax.named(np.array(tokens, np.int32), "position")
    logits = np.asarray(model(ids, attn_mask=AttentionMask.causal()).array, np.float64)
    logits -= np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True)) + logits.max(
        -1, keepdims=True
    )
    return [logits[index - 1, tokens[index]] for index in range(len(tokens) - count, len(tokens))]


@pytest.mark.medium
@pytest.mark.parametrize("weights", [PolicyWeights.LIVE, PolicyWeights.INITIAL])
def test_scores_are_those_of_the_chosen_weights_behind_the_longer_prompt(finished_run: TinyRun, weights: PolicyWeights):
    config = config_of(finished_run)
    reference = PolicyReferenceConfig(weights, context=ContextConfig(answer=True, demonstrations=2, max_tokens=100))
    run = reopen(
        finished_run,
        reference=reference,
        distillation=DistillationConfig(),
        model=dataclasses.replace(config.model, **seq_len(128)),
    )
    score = run.batch_builder.score_reference
    assert score is not None
    task = run.runner.environment.tasks(Split.TRAIN)[0]
    rollouts = [rollout(task, (49, 257)), rollout(task, (50, 51, 52, 257), name="b")]
    batch = batch_rollouts(rollouts, max_length=12)
    live, first = run.trainer_state.model, _initial(run)
    made = ContextPrompts(reference.context, run.runner.environment, TOKENIZER, config.seed)
    scored = score(StepToScore(batch, rollouts, live))
    model = first if weights is PolicyWeights.INITIAL else live
    for one, found in zip(rollouts, batch.actions(scored), strict=True):
        reply = one.turns[0].generation.token_ids
        np.testing.assert_allclose(found, logprobs_of_last(model, (*made(one), *reply), len(reply)), atol=1e-5)
    assert not scored[~batch.loss_mask].any()


def _initial(run: Any) -> LmHeadModel:
    from marin_rl.parts.rl import RunParts

    checkpoint = run.checkpoints.open(0)
    return RunParts(run.config, run.learner.trainer).policy_spec(checkpoint.vocab_size).restore_policy(checkpoint)
