# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Sections of the run's config for rollouts, updates, replay, evaluation and warm start."""

import abc
import dataclasses
import enum
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt, Le

from marin_rl.batching.row_sizes import RowSizes
from marin_rl.rollouts.config import LongPrompts
from marin_rl.utils.settings.checks import ConfigSection, check_fields


@dataclasses.dataclass(frozen=True)
class AbstractRowConfig(ConfigSection, abc.ABC):
    """Layout of batch rows; a subclass declares the fields, in its own order and with its documentation."""

    section: ClassVar[str]
    """Name of the section in the config."""
    sequences_per_item: ClassVar[int] = 1
    """Number of sequences of an item of the batch that must be in one microbatch."""

    @property
    @abc.abstractmethod
    def max_length(self) -> int:
        """Maximum tokens of a sequence."""

    @property
    @abc.abstractmethod
    def packing(self) -> bool | None:
        """Whether a row holds several sequences; None: chosen for each batch."""

    @property
    @abc.abstractmethod
    def row_length(self) -> int | None:
        """Positions of a row; None: from `max_length`."""

    @property
    @abc.abstractmethod
    def sequences_per_step(self) -> int:
        """Number of sequences that a step trains on, if each item of its batch is one."""

    def row_length_problem(self) -> str:
        """Describe why `row_length` is not valid; empty if it is."""
        if self.row_length is None or self.row_length >= self.max_length:
            return ""
        return (
            f"{self.section}.row_length is {self.row_length}, but a sequence may have {self.section}.max_length = "
            f"{self.max_length} tokens, and must fit into a row; raise row_length or lower max_length"
        )

    @property
    def sizes(self) -> RowSizes:
        """Sizes from which the rows of a batch are chosen."""
        sequences = self.sequences_per_step, self.packing, self.row_length, self.sequences_per_item
        return RowSizes(self.section, self.max_length, *sequences)


@dataclasses.dataclass(frozen=True)
class RolloutConfig(AbstractRowConfig):
    """Number of rollouts per step, their limits, and the layout of batch rows."""

    section: ClassVar[str] = "rollouts"

    prompts_per_step: Annotated[int, Ge(1)] = 64
    """Tasks sampled per step."""
    group_size: Annotated[int, Ge(1)] = 8
    """Rollouts per task; advantages compare the rollouts of one task."""
    max_length: Annotated[int, Ge(1)] = 512
    """Maximum tokens in a sequence, prompt and answers together."""
    max_prompt_length: Annotated[int, Ge(1)] | None = None
    """Maximum tokens in a task's prompt, from 1 to `max_length - 1`; null: `max_length - 1`."""
    long_prompts: LongPrompts = LongPrompts.ERROR
    """Handling of tasks with a longer prompt, in training and evaluation: `error` ends the run and names the task,
    `skip` uses the next task instead."""
    max_turns: Annotated[int, Ge(1)] = 1
    """Maximum answers in a rollout."""
    max_tokens: Annotated[int, Ge(1)] | None = None
    """Maximum tokens in all answers of a rollout together; null: not limited."""
    max_seconds: Annotated[float, Gt(0), Le(10**9)] = 120.0
    """Time limit in seconds of the environment's work for one rollout; time spent waiting for the sampler does not
    count. Only the rollout that exceeds it fails. Reward functions have the limits of `sandbox`."""
    packing: bool | None = None
    """Whether a batch row holds several sequences, in segments that do not attend to one another; false: one sequence
    per row; null: chosen for each batch from the lengths of its sequences, by cost."""
    share_prompts: bool = True
    """Whether rollouts with the same prompt may share one copy of it in a row, for batches of one-turn rollouts that
    cost less then: those whose answers are about as long as `sampling.max_new_tokens`. It has no effect with
    `packing: false`, or if `row_length` is set."""
    row_length: Annotated[int, Ge(1)] | None = None
    """Positions of a batch row, at least `max_length`; null: `max_length`, for packed rows rounded up to a multiple of
    128, and further if the attention kernel requires it. `trainer.per_device_parallelism` sets the rows per
    microbatch."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.max_prompt_length is not None and self.max_prompt_length >= self.max_length:
            raise ValueError(
                f"rollouts.max_prompt_length is {self.max_prompt_length}; it must be below rollouts.max_length, which "
                f"is {self.max_length}, to leave room for an answer"
            )
        if problem := self.row_length_problem():
            raise ValueError(problem)

    @property
    def rollouts_per_step(self) -> int:
        """Number of rollouts per step."""
        return self.prompts_per_step * self.group_size

    @property
    def sequences_per_step(self) -> int:
        """Number of sequences that a step trains on, if each rollout is one."""
        return self.rollouts_per_step


class Mode(enum.StrEnum):
    """Whether sampling alternates with training or runs at the same time."""

    SYNC = "sync"
    """Sample in the trainer process between updates. Does not use Ray, `workers`, `replay` or `weights`."""
    ASYNC = "async"
    """Sample in rollout workers while the trainer trains."""


class RoutingReplay(enum.StrEnum):
    """Whose choice of experts the updates of a mixture of experts use."""

    ROLLOUT = "rollout"
    """That of the sampler, for every token (R3, Ma et al. 2025, arXiv 2510.11370)."""
    RECOMPUTE = "recompute"
    """That of the learner's weights before the step, in all updates of the step (R2, Zheng et al. 2025, arXiv
    2507.18071)."""


@dataclasses.dataclass(frozen=True)
class ReplayConfig(ConfigSection):
    """Replay buffer between sampling and training."""

    max_staleness: Annotated[int, Ge(0)] = 1
    """Maximum age of a group in steps: the step that trains on it minus the version of the weights that
    sampled its oldest token. Older groups are dropped. 0 samples each step's groups with its weights, as `mode: sync`
    does."""
    max_uses: int = 1
    """Steps that train on each group, from 1 to `max_staleness + 1`."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not 1 <= self.max_uses <= self.max_staleness + 1:
            raise ValueError(
                f"replay.max_uses is {self.max_uses}; a group can be used once per step for "
                f"replay.max_staleness + 1 steps, so it must be from 1 to {self.max_staleness + 1}"
            )


@dataclasses.dataclass(frozen=True)
class UpdateConfig(ConfigSection):
    """Number of optimizer updates per step."""

    epochs: Annotated[int, Ge(1)] = 1
    """Epochs over the rollouts of a step."""
    minibatches: Annotated[int, Ge(1)] = 1
    """Updates per epoch. Each rollout is in exactly one minibatch; they are shuffled in each epoch."""

    @property
    def per_step(self) -> int:
        """Number of updates per step."""
        return self.epochs * self.minibatches


@dataclasses.dataclass(frozen=True)
class EvaluationConfig(ConfigSection):
    """Held-out evaluation."""

    every: Annotated[int, Ge(0)] = 50
    """Steps between two evaluations, in addition to those before and after RL; 0 evaluates only before and after."""
    tasks: Annotated[int, Ge(0)] = 512
    """Number of held-out tasks of each environment, always the first ones; 0 disables evaluation."""
    samples: Annotated[int, Ge(1)] = 1
    """Attempts at each task at the sampling temperature; pass@k needs at least k."""
    pass_at: tuple[int, ...] = (1,)
    """The k of pass@k."""
    greedy: bool = True
    """Also make one attempt at each task at temperature 0."""

    def __post_init__(self) -> None:
        check_fields(self)
        if wrong := [k for k in self.pass_at if not 1 <= k <= self.samples]:
            raise ValueError(
                f"evaluation.pass_at contains k = {', '.join(map(str, wrong))} with evaluation.samples = "
                f"{self.samples}; each k must be between 1 and the number of samples"
            )

    def is_due(self, step: int, num_steps: int) -> bool:
        """Return whether to evaluate after `step` of `num_steps`.

        >>> [step for step in range(1, 6) if EvaluationConfig(every=2).is_due(step, 5)]
        [2, 4, 5]
        """
        return self.tasks > 0 and (step == num_steps or (self.every > 0 and step % self.every == 0))


@dataclasses.dataclass(frozen=True)
class WarmStartConfig(ConfigSection):
    """Supervised training on the environment's worked answers or demonstrations, before RL.

    A randomly initialized model solves no task, so RL has nothing to reinforce. The warm start ends early, at an
    accuracy that leaves room for RL to improve.
    """

    max_steps: Annotated[int, Ge(0)] = 0
    """Maximum number of supervised updates; 0 disables the warm start."""
    batch_size: Annotated[int, Ge(1)] = 64
    """Worked answers, or demonstrations of whole episodes, per update."""
    learning_rate: Annotated[float, Gt(0)] = 1e-3
    """Constant learning rate of AdamW."""
    target_accuracy: Annotated[float, Gt(0), Le(1)] = 0.25
    """Stop when the accuracy on validation tasks, sampled at temperature 1, reaches this."""
    check_every: Annotated[int, Ge(1)] = 25
    """Updates between two accuracy measurements."""
    check_tasks: Annotated[int, Ge(1)] = 256
    """Validation tasks of each environment per measurement."""
