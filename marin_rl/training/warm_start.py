# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Supervised warm start: train on worked answers until RL has correct answers to reinforce."""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import numpy as np
from levanter.models.lm_model import LmHeadModel
from levanter.optim.config import AdamConfig

from marin_rl.batching.packing import RowLayout
from marin_rl.batching.rl_example import PackedBatch
from marin_rl.batching.rollout_batch import RolloutBatch, join_batches
from marin_rl.config.sections import WarmStartConfig
from marin_rl.data.conversations import batch_conversation
from marin_rl.environments.base import AbstractEnvironment, Split
from marin_rl.learner.critic import assemble
from marin_rl.learner.loss import cross_entropy_loss
from marin_rl.learner.policy_spec import TrainedPolicy
from marin_rl.models.mixture import mixture_shape
from marin_rl.parts.supervised import make_learner, pack_tokens
from marin_rl.rollouts.metrics import is_correct
from marin_rl.rollouts.run_rollouts import RolloutRunner, run_tasks
from marin_rl.training.evaluation import first_of_each
from marin_rl.training.supervised_updates import SupervisedUpdates
from marin_rl.types import Task
from marin_rl.utils import multihost
from marin_rl.utils.devices.setup import exempt_from_collection, own_rows
from marin_rl.utils.devices.trainer_config import TrainerConfig
from marin_rl.utils.host_status import raise_if
from marin_rl.utils.seeds import derive_seed

logger = logging.getLogger(__name__)


class WarmStartError(ValueError):
    """The environment does not support a warm start; the message names the missing data."""


@exempt_from_collection()
def warm_start(
    config: WarmStartConfig,
    model: TrainedPolicy,
    runner: RolloutRunner,
    trainer: TrainerConfig,
    layout: RowLayout,
    *,
    base: LmHeadModel | None = None,
    seed: int,
    block_size: int,
    temperature: float,
    report: Callable[[str], None],
    stop_requested: Callable[[], bool] = lambda: False,
) -> TrainedPolicy:
    """Train `model` on worked answers or demonstrations until it solves some tasks.

    The loss is the mean cross-entropy of the assistant tokens.

    Args:
        config: number of updates, learning rate and stopping criterion.
        model: initial weights, or an adapter; **donated**, use the returned model.
        runner: runs the validation tasks, with the trained weights as version 0; its environment provides all tasks
            and answers.
        trainer: mesh and precision.
        layout: shape of a microbatch.
        base: weights that an adapter changes; None if `model` is a whole model.
        seed: seed of the run.
        block_size: number of positions with logits in memory at a time.
        temperature: sampling temperature of the accuracy measurement.
        report: called with each progress message.
        stop_requested: returns whether this process was asked to stop; called before each update.

    Returns:
        The trained model.

    Raises:
        StopRequestedError: in all processes, if one was asked to stop.
        WarmStartError: if the environment lacks worked answers or validation tasks, or no answer of a batch fits.
    """
    environment = runner.environment
    tasks = worked_tasks(environment)
    validation = first_of_each(environment.tasks(Split.VALIDATION), config.check_tasks, runner)
    check_tasks = _require_validation(environment, validation)
    optimizer = AdamConfig(learning_rate=config.learning_rate, lr_schedule="constant", warmup=0, weight_decay=0.0)

    @functools.cache
    def example(index: int) -> RolloutBatch | None:
        return worked_example(tasks[index], runner)

    has_router = mixture_shape(cast(Any, base or model).config) is not None

    def pack(step: int) -> PackedBatch:
        rng = np.random.default_rng(derive_seed(seed, "warm start", step))
        drawn = [example(int(index)) for index in rng.integers(len(tasks), size=config.batch_size)]
        batch, pad = join_batches(require_fitting(drawn, runner)), runner.tokenizer.pad_token_id
        return pack_tokens(batch, layout, pad, own_rows(trainer), has_router=has_router)

    loss = cross_entropy_loss(block_size)
    learner = make_learner(trainer, optimizer, loss, layout, base, config.batch_size, config.max_steps)
    updates = SupervisedUpdates(learner, pack)
    state = learner.initial_state(model, jax.random.PRNGKey(derive_seed(seed, "warm start") % 2**32))
    for step in range(1, config.max_steps + 1):
        raise_if(lambda: multihost.any_process(stop_requested()))
        state, metrics = updates.update(state, step, updates.batch(step), config.max_steps)
        if step % config.check_every == 0 or step == config.max_steps:
            runner.sampler.update_weights(assemble(state.model, base), 0)
            accuracy = _accuracy(runner, check_tasks, temperature, seed)
            report(f"warm start {step}: loss {float(metrics['loss/total']):.3f}, validation accuracy {accuracy:.3f}")
            if accuracy >= config.target_accuracy:
                break
    return state.model


def require_tasks(environment: AbstractEnvironment) -> None:
    """Check that an environment has the tasks of a warm start.

    Raises:
        WarmStartError: if it has no worked answers and demonstrations, or no validation tasks.
    """
    worked_tasks(environment)
    _require_validation(environment, environment.tasks(Split.VALIDATION))


def worked_tasks(environment: AbstractEnvironment) -> Sequence[Task]:
    """Return the training tasks with a demonstration; raises WarmStartError if there are none."""
    tasks = [task for task in environment.tasks(Split.TRAIN) if environment.can_demonstrate(task)]
    if not tasks:
        raise WarmStartError(
            f"environment {environment.name!r} has no worked answers or demonstrations to train on; set "
            "warm_start.max_steps: 0 and start from weights that solve some tasks (initialize_from)"
        )
    return tasks


def _require_validation(environment: AbstractEnvironment, tasks: Sequence[Task]) -> Sequence[Task]:
    if not tasks:
        raise WarmStartError(
            f"environment {environment.name!r} has no validation tasks to measure the warm start on; "
            "set environment.validation, or warm_start.max_steps: 0"
        )
    return tasks


def worked_example(task: Task, runner: RolloutRunner) -> RolloutBatch | None:
    """Tokenize the demonstration of a task for training on it.

    Returns:
        The example; None if no reply fits into the maximum length.

    Raises:
        ChatTemplateError: if the chat template does not mark the assistant's text.
    """
    return batch_conversation(
        runner.environment.demonstrate(task),
        id=task.id,
        max_length=runner.limits.max_length,
        tokenizer=runner.tokenizer,
    )


def require_fitting(examples: Sequence[RolloutBatch | None], runner: RolloutRunner) -> list[RolloutBatch]:
    """Return the examples of a batch that fit into the maximum length; raises WarmStartError if none does."""
    fitting = [example for example in examples if example is not None]
    if not fitting:
        raise WarmStartError(
            f"environment {runner.environment.name!r}: none of {len(examples)} worked answers fits into "
            f"{runner.limits.max_length} tokens; raise rollouts.max_length, or set warm_start.max_steps: 0"
        )
    return fitting


def _accuracy(runner: RolloutRunner, tasks: Sequence[Task], temperature: float, seed: int) -> float:
    groups = run_tasks(runner, tasks, group_size=1, temperature=temperature, seed_parts=(seed, "warm-start-check"))
    return sum(is_correct(group.rollouts[0]) for group in groups) / len(groups)
