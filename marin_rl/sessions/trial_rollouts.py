# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Rollouts with given replies instead of sampled ones, which show how environments and reward functions score them.

They run like those of a training run, except that no weights are needed: the replies are garbage, and the task's worked
answer, demonstration or answer.
"""

import collections
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from marin_rl.environments.base import CORRECT, AbstractEnvironment, EnvironmentConfig
from marin_rl.environments.random_reward import RandomRewardConfig
from marin_rl.environments.single_turn import FULL_REWARD, GARBAGE, garbage_reply, is_answer
from marin_rl.environments.streams import MixtureConfig, MixtureEnvironment
from marin_rl.rewards.judge import NOT_ASKED
from marin_rl.rollouts.run_rollouts import GroupInput, RolloutRunner, require_one_success, run_groups
from marin_rl.sampling.sampler import SampledTokens, Sampler, SampleRequest
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.types import (
    Generation,
    Message,
    RewardFailure,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    StopReason,
    Task,
)
from marin_rl.utils.output import escape_line
from marin_rl.utils.settings.fields import nested_sections

TRIAL_TASKS = 4
"""Tasks per environment with single replies; environments with several turns get one task and one garbage reply."""
WORKED = "the worked answer"
DEMONSTRATION = "the demonstration"
ANSWER = "the task's answer"
_SHOWN = 100
"""Maximum characters of a reason, an answer or an error in a table."""


class FixedReplies(Sampler):
    """Answers each request with the next reply of its conversation; the last reply is repeated."""

    batch_size = 1_000_000
    is_idle = True

    def __init__(self) -> None:
        """Start without replies."""
        self.replies: dict[str, Sequence[tuple[int, ...]]] = {}
        """Tokens of the replies by conversation, each with its stop token."""
        self._turns: collections.Counter[str | None] = collections.Counter()
        self._answered: list[tuple[int, Generation]] = []
        self._count = 0

    def start(self, requests: Sequence[SampleRequest]) -> list[int]:
        """Answer requests; `advance` returns the answers."""
        numbers = list(range(self._count, self._count + len(requests)))
        self._count += len(requests)
        self._answered += [(number, self._answer(request)) for number, request in zip(numbers, requests, strict=True)]
        self.is_idle = False
        return numbers

    def _answer(self, request: SampleRequest) -> Generation:
        assert request.conversation is not None
        replies = self.replies[request.conversation]
        tokens = replies[min(self._turns[request.conversation], len(replies) - 1)]
        self._turns[request.conversation] += 1
        return Generation(tokens, (0.0,) * len(tokens), StopReason.STOP, first_version=0, last_version=0)

    def advance(self) -> list[tuple[int, Generation]]:
        """Return all answers."""
        answered, self._answered = self._answered, []
        self.is_idle = True
        return answered

    def progress(self, seen: Mapping[int, int]) -> dict[int, SampledTokens]:
        """Return nothing: replies are complete."""
        return {}

    def prepare(self) -> None:
        """Do nothing; there are no weights."""

    def end_conversation(self, conversation: str) -> None:
        """Do nothing."""

    def reset(self) -> None:
        """Drop all answers."""
        self._answered, self.is_idle = [], True

    def update_weights(self, model: object, version: int) -> None:
        """Do nothing; there are no weights."""


class Reply(NamedTuple):
    """A reply to try."""

    name: str
    """`WORKED`, `DEMONSTRATION`, `ANSWER` or one of `GARBAGE`."""
    texts: tuple[str, ...]
    """The text of each turn; the last one is repeated."""


class Trial(NamedTuple):
    """The outcome of a reply."""

    reply: Reply
    """The reply."""
    tokens: int
    """Tokens of its longest turn."""
    rollout: Rollout
    """The rollout, scored."""

    @property
    def is_garbage(self) -> bool:
        """Whether a scorer should not reward it."""
        return self.reply.name in GARBAGE and not is_answer(self.reply.texts[0], self.rollout.task.answer)


def agent_environments(config: EnvironmentConfig, environment: AbstractEnvironment) -> set[str]:
    """Return the names of the environments whose episodes are agents, which this module does not start."""
    if isinstance(config, MixtureConfig) and isinstance(environment, MixtureEnvironment):
        parts = zip(config.parts, environment.parts.values(), strict=True)
        return {name for part, built in parts for name in agent_environments(part.environment, built)}
    runs_agents = any(getattr(section, "runs_agents", False) for _, section in nested_sections(config))
    return {environment.name} if runs_agents else set()


def try_replies(runner: RolloutRunner, sampler: FixedReplies, tasks: Sequence[Task], seed: int) -> list[list[Trial]]:
    """Run and score rollouts with garbage and right replies.

    `sampler` is that of `runner`; the prompts of the tasks fit.

    Returns:
        The trials of each task.

    Raises:
        AllRolloutsFailedError: if no rollout of an environment was graded.
        ValueError: if a reward is NaN or infinite, or a rollout has none.
    """
    trials: list[list[Trial]] = []
    for environment in dict.fromkeys(task.environment for task in tasks):
        groups = []
        for task in (task for task in tasks if task.environment == environment):
            trials.append(_try(runner, sampler, task, len(trials), seed))
            rollouts = [trial.rollout for trial in trials[-1]]
            groups.append(RolloutGroup(rollouts[0].group_id, rollouts))
            if all(map(_timed_out, rollouts)):
                # Further tasks would take as long.
                break
        require_one_success(groups)
    return trials


def _timed_out(rollout: Rollout) -> bool:
    causes = [result.failure for result in rollout.evaluations]
    return rollout.status is RolloutStatus.TIMED_OUT or RewardFailure.TIMEOUT in causes


def _try(runner: RolloutRunner, sampler: FixedReplies, task: Task, number: int, seed: int) -> list[Trial]:
    replies, group_id = list(_replies(runner, task)), f"dry-run-{number}"
    tokens = [[_tokens(runner.tokenizer, task, text) for text in reply.texts] for reply in replies]
    sampler.replies |= {f"{group_id}-{member}": of_reply for member, of_reply in enumerate(tokens)}
    request = GroupInput(group_id, task, (seed, "dry run", number))
    [group] = run_groups(runner, [request], group_size=len(replies), temperature=1.0)
    lengths = [max(map(len, of_reply)) for of_reply in tokens]
    return [Trial(*of_reply) for of_reply in zip(replies, lengths, group.rollouts, strict=True)]


def _replies(runner: RolloutRunner, task: Task) -> Iterator[Reply]:
    names = GARBAGE if runner.limits.max_turns == 1 else GARBAGE[:1]
    yield from (Reply(name, (garbage_reply(name, task),)) for name in names)
    environment, shown = runner.environment, ()
    # Only a warm start needs demonstrations; the dry run has reported the error if there is one.
    with contextlib.suppress(Exception):
        if environment.can_demonstrate(task):
            shown = environment.demonstrate(task)[len(task.messages) :]
    texts = tuple(message["content"] for message in shown if message["role"] == "assistant")
    if texts:
        yield Reply(DEMONSTRATION if task.worked_answer is None else WORKED, texts)
    elif task.answer.strip():
        yield Reply(ANSWER, (task.answer,))


def _tokens(tokenizer: ChatTokenizer, task: Task, text: str) -> tuple[int, ...]:
    """Tokenize a reply, with its stop token; thoughts that the prompt opens are closed first."""
    if tokenizer.opens_thoughts(tokenizer.prompt_tokens(task.messages)):
        text = f"\n</think>\n\n{text}"
    reply = Message(role="assistant", content=text)
    ids, mask = tokenizer.encode_replies((*task.messages, reply), len(task.messages))[0]
    return tuple(token for token, is_reply in zip(ids, mask, strict=True) if is_reply)


def describe_trials(trials: Sequence[Trial]) -> str:
    """Format the trials of a task as a table: reply, reward, rewards of the components, reasons."""
    task = trials[0].rollout.task
    rows = [(_name(trial), _reward(trial.rollout), _details(trial.rollout)) for trial in trials]
    width = max(len(name) for name, _, _ in rows)
    title = f"rewards of environment {task.environment!r} for task {task.id!r}"
    if task.answer.strip():
        title += f" with the answer {_shown(task.answer)!r}"
    return "\n".join([title, *(f"  {name:<{width}}  {reward:>6}  {details}" for name, reward, details in rows)])


def _name(trial: Trial) -> str:
    by_chance = trial.reply.name in GARBAGE and not trial.is_garbage
    return f"{trial.reply.name}, the answer" if by_chance else trial.reply.name


def _reward(rollout: Rollout) -> str:
    return "none" if rollout.total_reward is None else f"{rollout.total_reward:g}"


def _details(rollout: Rollout) -> str:
    if rollout.error is not None:
        # It names the exception; the warning has all lines.
        first, *_ = rollout.error.split("\n")
        return f"{rollout.status.value}: {escape_line(first)}"
    reasons = {result.component: f" ({_shown(result.reason)})" for result in rollout.evaluations if result.reason}
    return ", ".join(f"{name} {value:g}{reasons.get(name, '')}" for name, value in rollout.rewards.items())


def _shown(text: str) -> str:
    line = escape_line(text.strip())
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}…"


def trial_problems(trials: Sequence[Sequence[Trial]]) -> list[str]:
    """Return a sentence for each reward function that gives no score to replies which are only wrong.

    One result that is no number suffices. Errors count if most garbage raises them: some replies cannot be scored.
    """
    every = [trial for of_task in trials for trial in of_task]
    failed = [(result, trial) for trial in every for result in trial.rollout.evaluations if result.failure is not None]
    problems = []
    for name in dict.fromkeys(result.component for result, _ in failed):
        causes = [(result.failure, trial) for result, trial in failed if result.component == name]
        invalid = [trial for cause, trial in causes if cause == RewardFailure.INVALID_ANSWER]
        raised = [trial for cause, trial in causes if cause == RewardFailure.RAISED]
        if invalid or 2 * sum(trial.is_garbage for trial in raised) > sum(trial.is_garbage for trial in every):
            first = (invalid or raised)[0]
            problems.append(
                f"reward function {name!r} gives {len(invalid + raised)} of {len(every)} trial replies no score, and "
                "rollouts without a score are not trained on: return 0.0 for a wrong reply. The first is "
                f"{first.reply.name}: {first.rollout.error}"
            )
    return problems


def trial_warnings(section: EnvironmentConfig, max_new_tokens: int, trials: Sequence[Sequence[Trial]]) -> list[str]:
    """Return a sentence for each sign of a wrong reward in the trials of one environment.

    A sign counts if it appears for more than half of the tasks, because garbage can be right by chance. `trials` are
    those of each task.
    """
    every = [trial for of_task in trials for trial in of_task]
    environment = every[0].rollout.task.environment
    allowed = any(getattr(one, "allow_garbage_rewards", False) for _, one in nested_sections(section))
    warnings = []
    # Rewards of the control are random on purpose.
    if not isinstance(section, RandomRewardConfig):
        warnings = [*_rewarded_garbage(trials, allowed=allowed), *_unrewarded_answers(trials)]
    failed = [trial for trial in every if not trial.rollout.status.is_graded]
    if failed and not trial_problems(trials):
        warnings.append(
            f"environment {environment!r}: {len(failed)} of {len(every)} trial rollouts failed, and failed rollouts "
            f"are not trained on; the first, {failed[0].reply.name}: {failed[0].rollout.error}"
        )
    long = [trial for trial in every if trial.reply.name == WORKED and trial.tokens > max_new_tokens]
    if 2 * len(long) > len(trials):
        warnings.append(
            f"environment {environment!r}: the worked answer of task {long[0].rollout.task.id!r} has {long[0].tokens} "
            f"tokens, but sampling.max_new_tokens allows {max_new_tokens}, so the policy cannot give it; raise "
            "sampling.max_new_tokens"
        )
    return warnings


def _rewarded_garbage(trials: Sequence[Sequence[Trial]], *, allowed: bool) -> Iterator[str]:
    """Yield a sentence for each reward function, and for the environment, that gives garbage the full reward.

    For a function that is the score of the right reply. Environments have `FULL_REWARD`, because a reward for the
    format alone may be intended.
    """
    rewarded: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for of_task in trials:
        right = {
            subject: score for trial in of_task if trial.reply.name not in GARBAGE for subject, score in _of(trial)
        }
        for trial in filter(lambda trial: trial.is_garbage, of_task):
            for subject, score in _of(trial):
                best = right.get(subject, 0.0)
                if score >= (best if best > 0 else FULL_REWARD):
                    rewarded[subject][trial.reply.name] += 1
            if not allowed and _environment_reward(trial.rollout) >= FULL_REWARD:
                rewarded[f"environment {trial.rollout.task.environment!r}"][trial.reply.name] += 1
    for subject, counts in rewarded.items():
        names = [name for name in GARBAGE if 2 * counts[name] > len(trials)]
        if names:
            verb = "scores" if len(names) == 1 else "score"
            yield (
                f"{subject} rewards garbage: {', '.join(names)} {verb} as much as a right reply; a policy may learn to "
                "give such replies, unless another component has a higher weight"
            )


def _of(trial: Trial) -> Iterator[tuple[str, float]]:
    """Yield reward functions and their scores."""
    for result in trial.rollout.evaluations:
        if result.score is not None:
            yield f"reward function {result.component!r}", result.score


def _environment_reward(rollout: Rollout) -> float:
    functions = {result.component for result in rollout.evaluations}
    return sum(value for name, value in rollout.rewards.items() if name not in functions)


def _unrewarded_answers(trials: Sequence[Sequence[Trial]]) -> Iterator[str]:
    worked = [trial.rollout for of_task in trials for trial in of_task if trial.reply.name == WORKED]
    unknown = {rollout.id for rollout in worked if NOT_ASKED in [result.reason for result in rollout.evaluations]}
    graded = [one for one in worked if one.status.is_graded and (one.id not in unknown or CORRECT in one.rewards)]
    wrong = [one for one in graded if one.rewards.get(CORRECT, one.total_reward or 0.0) <= 0]
    if 2 * len(wrong) > len(trials):
        task = wrong[0].task
        yield (
            f"environment {task.environment!r}: the worked answer of task {task.id!r} earns no reward "
            f"({_details(wrong[0])}); correct the worked answers, or the grader, reply_regex or reward function"
        )
