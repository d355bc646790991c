# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from marin_rl.batching.rollout_batch import RolloutBatch
from marin_rl.config.sections import EvaluationConfig
from marin_rl.environments.base import AbstractEnvironment, Episode, Split, Step
from marin_rl.learner.scoring import Scores
from marin_rl.rollouts.attempt import Limits
from marin_rl.rollouts.config import LongPrompts
from marin_rl.rollouts.run_rollouts import AllRolloutsFailedError, RolloutRunner
from marin_rl.sampling.sampler import PromptTooLongError, SampleRequest
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import byte_tokenizer
from marin_rl.training.evaluation import describe_accuracy, evaluate, first_of_each, reference_loss
from marin_rl.types import Message, Task
from tests.scripted_sampler import ScriptedSampler

END = 257
TOKENIZER = ChatTokenizer(byte_tokenizer())


@dataclasses.dataclass(frozen=True)
class Exam(AbstractEnvironment):
    """A reply is correct if it equals the answer; the reply `x` makes scoring fail."""

    sources: Sequence[str] = ("exam",)
    name: str = "exam"

    def tasks(self, split: Split) -> Sequence[Task]:
        if split is Split.TRAIN:
            return []
        return [
            Task(f"{split}{index}", self.sources[index % len(self.sources)], (message(f"{split[0]}{index}"),), "1")
            for index in range(4)
        ]

    async def start(self, task: Task, seed: int) -> Episode:
        return Sitting(task)


@dataclasses.dataclass(frozen=True)
class Sitting:
    task: Task

    async def step(self, reply: str) -> Step:
        if reply == "x":
            raise RuntimeError("illegible")
        return Step({"correct": float(reply == self.task.answer)})

    async def close(self) -> None:
        pass


def message(text: str) -> Message:
    return Message(role="user", content=text)


def prompt(request: SampleRequest) -> str:
    return TOKENIZER.decode_reply(request.prompt_tokens[1:-2])


def runner(script, environment: Exam | None = None) -> RolloutRunner:
    sampler = ScriptedSampler(lambda request: (*script(request).encode(), END), stop_token_ids=[END])
    return RolloutRunner(environment or Exam(), TOKENIZER, sampler, Limits(32, 4, 1))


def measure(made: RolloutRunner, split: Split = Split.HELD_OUT, seed: int = 0, **config) -> dict[str, float]:
    metrics, _ = evaluate(made, EvaluationConfig(**config), temperature=0.8, seed=seed, split=split)
    return metrics


def test_rewards_that_do_not_tell_right_from_wrong_give_no_accuracy(monkeypatch):
    async def praise(self: Sitting, reply: str) -> Step:
        return Step({"style": 0.75 if reply == "1" else 0.25})

    monkeypatch.setattr(Sitting, "step", praise)
    replies = iter("1111222211112222")
    measured = measure(runner(lambda request: next(replies)), tasks=4, samples=2)
    assert measured == {"eval/exam/tasks": 4.0, "eval/exam/reward_sampled": 0.5, "eval/exam/reward_greedy": 0.75}
    assert describe_accuracy(measured) == "held-out exam/reward_sampled 0.500, exam/reward_greedy 0.750"


def test_task_count_is_per_environment():
    measured = measure(runner(lambda request: "1"), tasks=1) | measure(
        runner(lambda request: "1", Exam(sources=("b", "a"))), tasks=1
    )
    assert {name: value for name, value in measured.items() if name.endswith("/tasks")} == {
        "eval/exam/tasks": 1.0,
        "eval/a/tasks": 1.0,
        "eval/b/tasks": 1.0,
    }
    tasks = Exam(sources=("b", "a")).tasks(Split.HELD_OUT)
    single = RolloutRunner(
        Exam(), TOKENIZER, ScriptedSampler(lambda request: (END,), stop_token_ids=[END]), Limits(16, 4, 1)
    )
    assert first_of_each(tasks, 1, single) == [tasks[0], tasks[1]]
    assert first_of_each(tasks, 9, single) == tasks


def test_long_prompts_are_replaced_by_next_tasks(caplog: pytest.LogCaptureFixture):
    # The template adds three tokens to each content.
    tasks = [Task(text, "exam", (message(text),), "1") for text in ("aaaaa", "b", "cccccc", "dd", "e")]
    limits = Limits(16, 4, 1, max_prompt_length=5, long_prompts=LongPrompts.SKIP)
    skipping = RolloutRunner(Exam(), TOKENIZER, ScriptedSampler(lambda request: (END,), stop_token_ids=[END]), limits)
    assert [task.id for task in first_of_each(tasks, 2, skipping)] == ["b", "dd"]
    assert "skipping task aaaaa of environment exam: its prompt has 8 tokens, more than 5" in caplog.text
    assert "task e " not in caplog.text


@pytest.mark.parametrize(("longest", "setting"), [(3, "max_prompt_length"), (None, "max_length")])
def test_an_evaluation_whose_prompts_are_all_too_long_names_the_limit(longest: int | None, setting: str):
    limits = Limits(4, 4, 1, max_prompt_length=longest, long_prompts=LongPrompts.SKIP)
    skipping = RolloutRunner(Exam(), TOKENIZER, ScriptedSampler(lambda request: (END,), stop_token_ids=[END]), limits)
    with pytest.raises(PromptTooLongError, match=rf"all 4 tasks .* more than 3 tokens.*raise rollouts\.{setting}$"):
        measure(skipping)
    assert first_of_each([], 1, skipping) == []


def test_sampled_and_greedy_accuracy():
    made = runner(lambda request: "1" if request.temperature == 0 or prompt(request) == "h2" else "0")
    assert measure(made) == {
        "eval/exam/tasks": 4.0,
        "eval/exam/accuracy_sampled": 0.25,
        "eval/exam/pass@1": 0.25,
        "eval/exam/accuracy_greedy": 1.0,
    }
    assert {request.temperature for request in made.sampler.requests} == {0.8, 0.0}


def test_all_groups_are_returned():
    _, groups = evaluate(runner(lambda request: "1"), EvaluationConfig(samples=2), temperature=0.8, seed=0)
    assert [len(group.rollouts) for group in groups] == [2] * 4 + [1] * 4
    assert len({rollout.id for group in groups for rollout in group.rollouts}) == 12


def test_pass_at_k_is_unbiased():
    # One of three attempts at the first task is correct; the other tasks are never solved.
    seen: list[str] = []

    def script(request: SampleRequest) -> str:
        seen.append(prompt(request))
        return "1" if seen.count("h0") == 1 and seen[-1] == "h0" else "0"

    found = measure(runner(script), samples=3, pass_at=(1, 2, 3), greedy=False)
    assert found["eval/exam/accuracy_sampled"] == pytest.approx(1 / 12)
    # 1 - C(2, k) / C(3, k) for one of four tasks.
    expected = {1: 1 / 3 / 4, 2: 2 / 3 / 4, 3: 1 / 4}
    assert {k: found[f"eval/exam/pass@{k}"] for k in expected} == pytest.approx(expected)
    assert "eval/exam/accuracy_greedy" not in found


def test_failed_rollout_counts_as_wrong():
    made = runner(lambda request: {"h0": "x", "h1": "1"}.get(prompt(request), "0"))
    assert measure(made, greedy=False)["eval/exam/accuracy_sampled"] == 0.25
    with pytest.raises(AllRolloutsFailedError, match="evaluate-held_out-sampled-0-0"):
        measure(runner(lambda request: "x"))


def test_metrics_are_per_environment():
    made = runner(lambda request: "1" if prompt(request) in ("h0", "h1", "h2") else "0", Exam(("sums", "words")))
    found = measure(made)
    assert found["eval/sums/accuracy_sampled"] == found["eval/sums/accuracy_greedy"] == 1.0
    assert found["eval/words/accuracy_sampled"] == found["eval/words/pass@1"] == 0.5
    assert found["eval/words/tasks"] == 2.0


def test_first_tasks_of_split_are_evaluated():
    for split, letter in ((Split.HELD_OUT, "h"), (Split.VALIDATION, "v")):
        made = runner(lambda request: "0")
        assert measure(made, split, tasks=3, greedy=False)["eval/exam/tasks"] == 3.0
        assert [prompt(request) for request in made.sampler.requests] == [f"{letter}{index}" for index in range(3)]


def test_evaluations_are_deterministic_in_seed():
    asked = []
    for seed in (0, 0, 1):
        made = runner(lambda request: "0")
        measure(made, seed=seed, samples=2)
        asked.append(made.sampler.requests)
    assert asked[0] == asked[1]
    seeds = [request.seed for request in asked[0]]
    assert len(set(seeds)) == len(seeds)
    assert not {request.seed for request in asked[2]} & set(seeds)


def test_evaluation_is_disabled_without_tasks():
    never = EvaluationConfig(every=1, tasks=0)
    assert not any(never.is_due(step, 3) for step in range(1, 4))
    with pytest.raises(ValueError, match=r"evaluation\.tasks is 0; set the number of tasks"):
        measure(runner(lambda request: "1"), tasks=0)


def scored_tokens(template: str, tasks: Sequence[Task]) -> tuple[dict[str, float], list[list[int]]]:
    """Run `reference_loss` with a log-prob of -1 per token; return its metrics and the scored tokens."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    asked: list[list[int]] = []

    def score(batch: RolloutBatch) -> Scores:
        asked.extend(tokens.tolist() for tokens in batch.actions(batch.input_ids))
        return Scores(-batch.loss_mask.astype(np.float32), np.zeros(batch.loss_mask.shape, np.float32))

    made = dataclasses.replace(runner(lambda request: "1"), tokenizer=ChatTokenizer(tokenizer))
    return reference_loss(made, tasks, score), asked


WITHOUT_BLOCKS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_reference_loss_without_generation_blocks():
    tasks = [Task("a", "exam", (message("2+3="),), "5", worked_answer="5")]
    found, asked = scored_tokens(WITHOUT_BLOCKS, tasks)
    assert asked == [[*b"5", END]]
    assert found == {"eval/exam/loss": 1.0, "eval/exam/loss_tokens": 2.0}


def test_examples_in_prompt_are_not_reference_answers():
    example = (message("1+1="), Message(role="assistant", content="2"), message("2+3="))
    _, asked = scored_tokens(TOKENIZER.tokenizer.chat_template, [Task("a", "exam", example, "5", worked_answer="5")])
    assert asked == [[*b"5", END]]
