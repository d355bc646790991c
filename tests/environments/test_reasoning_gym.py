# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import pytest

from marin_rl.environments import reasoning_gym
from marin_rl.environments.base import AbstractEnvironment, Split
from marin_rl.environments.reasoning_gym import ReasoningGymConfig
from marin_rl.rewards import grading_process
from marin_rl.rewards.reasoning_gym_worker import DatasetError
from tests.one_reply import answer

TWO_TERMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
COMPACT = {"prompt_regex": ": (.*=)$", "remove_whitespace": True}


def chain_sum(**fields) -> AbstractEnvironment:
    return ReasoningGymConfig(**{"task": "chain_sum", "options": TWO_TERMS, "size": 400, **fields}).build()


def reward(environment: AbstractEnvironment, task, reply: str) -> float:
    return answer(environment, task, reply).rewards["correct"]


def two_digit_task(environment: AbstractEnvironment):
    """Return a task with a two-digit answer; the digits differ and are not 0."""
    return next(
        task
        for task in environment.tasks(Split.TRAIN)
        if task.answer.isdigit() and len(set(task.answer)) == len(task.answer) == 2 and "0" not in task.answer
    )


@pytest.mark.medium
@pytest.mark.parametrize(
    "task",
    ["basic_arithmetic", "caesar_cipher", "countdown", "gcd", "number_sorting", "simple_equations", "spell_backward"],
)
def test_answers_of_tasks_earn_the_full_reward(task: str):
    environment = ReasoningGymConfig(task=task, size=60, seed=5).build()
    assert environment.name == task
    for split in Split:
        for drawn in environment.tasks(split):
            assert drawn.worked_answer == drawn.answer
            assert reward(environment, drawn, drawn.worked_answer) == 1.0
            assert reward(environment, drawn, "") == 0.0
            assert reward(environment, drawn, "certainly not this") == 0.0


@pytest.mark.medium
@pytest.mark.parametrize("reverse", [False, True])
def test_compact_prompts_and_worked_answers(reverse: bool):
    environment = chain_sum(**COMPACT, reverse_answer=reverse)
    for split in Split:
        for task in environment.tasks(split):
            text = task.messages[-1]["content"]
            result = str(eval(text.rstrip("=")))
            assert task.worked_answer == task.answer == (result[::-1] if reverse else result)
            assert reward(environment, task, task.worked_answer) == 1.0


def test_reversed_replies_are_reversed_before_scoring():
    for exact in (False, True):
        environment = chain_sum(reverse_answer=True, exact_answer=exact)
        task = two_digit_task(environment)
        right = answer(environment, task, task.answer)
        wrong = answer(environment, task, task.answer[::-1])
        assert (right.rewards, right.rollout_info) == ({"correct": 1.0}, {})
        assert wrong.rewards == {"correct": 0.0}
        assert wrong.rollout_info == {"reason": f"expected {task.answer}, found {task.answer[::-1]}"}


def test_padded_answers_earn_a_reward_only_with_partial_credit():
    plain, partial = chain_sum(), chain_sum(partial_credit=True)
    task = two_digit_task(plain)
    padded = f"the answer is {task.answer}"
    assert reward(plain, task, padded) == 0.0
    assert 0.0 < reward(partial, task, padded) < 1.0
    assert reward(partial, task, task.answer) == 1.0


def test_exact_answer_rejects_other_spellings_of_the_number(monkeypatch):
    full, exact = chain_sum(), chain_sum(exact_answer=True)
    task = two_digit_task(full)
    spellings = [spell.format(task.answer) for spell in ("0{}", "{}.0", "+{}", " {}", "{} ")]
    assert [reward(full, task, spelling) for spelling in spellings] == [1.0] * 5
    # Grading exact answers asks no process.
    monkeypatch.setattr(reasoning_gym, "ask", None)
    assert [reward(exact, task, spelling) for spelling in [*spellings, task.answer]] == [0.0] * 5 + [1.0]


def test_exact_answer_rejects_an_answer_that_the_scorer_rejects(monkeypatch):
    def reject_answers(grader: str, request: dict, cpu_seconds: float) -> dict:
        problems = grading_process.ask(grader, request, cpu_seconds)["problems"]
        return {"problems": [[question, answer, 0.5] for question, answer, _ in problems]}

    monkeypatch.setattr("marin_rl.environments.reasoning_gym.ask", reject_answers)
    exact = chain_sum(exact_answer=True)
    task = two_digit_task(exact)
    assert reward(exact, task, task.answer) == 0.0


def test_splits_are_disjoint_by_text_over_neighbouring_seeds():
    environments = [chain_sum(seed=seed, **COMPACT) for seed in (0, 7, 1000)]
    texts = {
        split: {task.messages[-1]["content"] for made in environments for task in made.tasks(split)} for split in Split
    }
    assert all(texts.values())
    assert len(set.union(*texts.values())) == sum(map(len, texts.values()))
    for split in Split:
        again = chain_sum(seed=7, **COMPACT).tasks(split)
        assert environments[1].tasks(split) == again
        assert len({task.id for task in again}) == len(again)


def test_tasks_without_one_right_answer_have_no_worked_answer():
    tagged = chain_sum(reply_regex="<a>(.*?)</a>", system_prompt="Answer within <a></a>.")
    task = two_digit_task(tagged)
    assert (task.messages[0]["role"], task.worked_answer) == ("system", None)
    assert [reward(tagged, task, form.format(task.answer)) for form in ("so <a>{}</a>", "{}")] == [1.0, 0.0]
    environment = ReasoningGymConfig(task="rubiks_cube", size=60, name="cube").build()
    task = environment.tasks(Split.TRAIN)[0]
    assert (task.environment, task.answer, task.worked_answer) == ("cube", "", None)
    assert reward(environment, task, "no moves") == 0.0


def test_a_scorer_that_fails_on_the_right_answer_propagates(monkeypatch):
    environment = chain_sum()
    task = environment.tasks(Split.TRAIN)[0]
    monkeypatch.setattr(reasoning_gym, "ask", lambda *arguments: {"error": "broken scorer"})
    with pytest.raises(DatasetError, match="broken scorer"):
        answer(environment, task, "1")


@pytest.mark.medium
@pytest.mark.parametrize(
    ("task", "reply"),
    [
        ("countdown", "9**9**9"),
        ("countdown", "__import__('os').abort()"),
        ("puzzle24", "lambdify([], '24')()"),
        ("simple_integration", "Integral(exp(exp(sin(x)**x)), (x, 0, 10**9)).doit()"),
        ("n_queens", "[[0] * 10**9] * 10**9"),
        ("n_queens", "exit()"),
        ("binary_matrix", "__import__('time').sleep(1000)"),
    ],
)
def test_a_reply_without_end_scores_0_beside_other_episodes(monkeypatch, task: str, reply: str):
    monkeypatch.setattr(reasoning_gym, "SCORE_SECONDS", 1.0)
    environment = ReasoningGymConfig(task=task, size=10, held_out=0.0, validation=0.0).build()
    [first, second, *_] = environment.tasks(Split.TRAIN)
    # The problems of some tasks take long to create, which counts towards their first reply.
    assert reward(environment, second, second.answer) == reward(environment, first, first.answer) == 1.0
    assert reward(environment, first, reply) == 0.0
    assert reward(environment, first, first.answer) == 1.0


def test_scores_are_finite_and_at_most_the_full_score(monkeypatch):
    environment = chain_sum(partial_credit=True)
    task = environment.tasks(Split.TRAIN)[0]
    for score, expected in ((0.25, 0.25), (7.0, 1.0), (float("nan"), 0.0), (float("inf"), 0.0)):
        monkeypatch.setattr(reasoning_gym, "ask", lambda *arguments, score=score: {"score": score})
        assert reward(environment, task, "1") == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"task": "chain_sums"}, "no task 'chain_sums'; did you mean 'chain_sum'"),
        ({"options": {"max_term": 2}}, "no option 'max_term'; did you mean 'max_terms'"),
        ({"options": {"min_terms": 9, "max_terms": 2}}, "rejects the options .* max_terms must be >= min_terms"),
        ({"options": {"min_terms": 2.5, "max_terms": 2.5}}, "cannot create item 0"),
        ({"options": {"seed": 3}}, "options has 'seed'; use the environment's `seed`"),
        ({"exact_answer": True, "partial_credit": True}, "exclude each other"),
        ({"prompt_regex": "no such text (.*)"}, "does not match the question 'State the final answer"),
        ({"prompt_regex": "(State)"}, "map two problems with the answers .* to the same prompt 'State'"),
        ({"prompt_regex": "State"}, "prompt_regex: 'State' has 0 groups"),
        ({"reply_regex": "("}, r"reply_regex: '\(' is not a regular expression"),
    ],
)
def test_bad_settings(fields, message):
    with pytest.raises(ValueError, match=message):
        chain_sum(**fields)
