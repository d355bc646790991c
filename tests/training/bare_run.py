# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A run without a model, for the parts of the loop that are plain Python; no function is compiled."""

import dataclasses
from collections.abc import Callable
from typing import Any

import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
import numpy as np
from levanter.models.llama import LlamaConfig

from marin_rl.batching.rollout_batch import RolloutBatch
from marin_rl.config.sections import RolloutConfig
from marin_rl.config.train_config import TrainConfig
from marin_rl.distributed.rollout_source import LocalRollouts, RolloutSource
from marin_rl.environments.arithmetic import ArithmeticConfig
from marin_rl.environments.base import AbstractEnvironment
from marin_rl.learner.scoring import Scores
from marin_rl.parts.rl import RunParts
from marin_rl.rollouts.attempt import Limits
from marin_rl.rollouts.run_rollouts import RolloutRunner
from marin_rl.sampling.config import SamplingConfig
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import byte_tokenizer
from marin_rl.training.batch_builder import BatchBuilder
from marin_rl.training.collect import Collected, GroupCollector
from marin_rl.training.run_state import Progress, RunState
from marin_rl.types import Task
from marin_rl.utils.levanter_line import seq_len
from marin_rl.utils.timing import PhaseTimer
from tests.scripted_sampler import Script, ScriptedSampler

END, USER, ASSISTANT = 257, 259, 260
TOKENIZER = ChatTokenizer(byte_tokenizer())
MODEL = LlamaConfig(**seq_len(64), hidden_dim=16, intermediate_dim=32, num_layers=1, num_heads=2, num_kv_heads=2)


def make_config(**changes: Any) -> TrainConfig:
    """Build a config with four prompts of four attempts each in rows of 64 positions, and the given changes."""
    settings = {
        "environment": ArithmeticConfig(),
        "run_dir": "runs/test",
        "model": MODEL,
        "rollouts": RolloutConfig(prompts_per_step=4, group_size=4, max_length=64, row_length=64),
        "sampling": SamplingConfig(max_new_tokens=6),
    }
    return TrainConfig(**{**settings, **changes})


Score = Callable[[RolloutBatch], np.ndarray]
"""Computes scores of the tokens of rollouts."""

NEWEST = "newest"
"""Placeholder for the newest weights of the learner in `BatchBuilder.build`."""


def zeros(batch: RolloutBatch) -> np.ndarray:
    return np.zeros(batch.input_ids.shape)


def bare_builder(
    config: TrainConfig,
    *,
    reference: Score | None = None,
    learner: Score = zeros,
    values: Score = zeros,
    rows: int = 8,
    tokenizer: ChatTokenizer = TOKENIZER,
) -> BatchBuilder:
    """A batch builder that scores rollouts by formulas instead of a model.

    Args:
        config: training config.
        reference: log-probs of tokens under the reference; None without a reference.
        learner: log-probs of tokens under the newest weights.
        values: the critic's values of tokens under the newest weights.
        rows: rows of a microbatch.
        tokenizer: provides the padding token.
    """

    def score(model: Any, batch: RolloutBatch) -> Scores:
        logprobs, critic = (learner, values) if model == NEWEST else model
        return Scores(*(np.where(batch.loss_mask, of(batch), 0).astype(np.float32) for of in (logprobs, critic)))

    parts = RunParts(config, dataclasses.replace(config.trainer, per_device_parallelism=rows))
    vars(parts)["tokenizer"] = tokenizer
    return BatchBuilder(
        parts,
        score,
        None if reference is None else lambda step: score((reference, zeros), step.batch).logprobs,
    )


@dataclasses.dataclass
class BareRun:
    """Tasks, rollout source and host-side state of a run, without a model."""

    config: TrainConfig
    environment: AbstractEnvironment
    rollout_source: RolloutSource
    state: RunState

    @property
    def progress(self) -> Progress:
        return self.state.progress

    @property
    def collector(self) -> GroupCollector:
        config = self.config
        limits, shaping = RunParts(config, config.trainer).limits, (config.overlong, config.truncation)
        return GroupCollector(
            self.environment, TOKENIZER, self.rollout_source, limits, *shaping, config.filter, config.seed
        )

    def draw_tasks(self, count: int) -> list[Task]:
        return self.collector.draw_tasks(self.progress, count)

    def collect(self, step: int, stop_requested: Callable[[], bool] = lambda: False) -> Collected:
        return self.collector.collect(self.state, step, PhaseTimer(), stop_requested)


def bare_run(config: TrainConfig, environment: AbstractEnvironment, progress: Progress | None = None) -> BareRun:
    """A run that samples in this process.

    Args:
        config: training config.
        environment: provides the tasks.
        progress: saved progress; None for a new run.
    """
    progress = progress or Progress()
    rollout_source = local_rollouts(config, make_runner(config, lambda request: (END,), environment))
    return BareRun(config, environment, rollout_source, make_state(config, progress))


def make_state(config: TrainConfig, progress: Progress) -> RunState:
    """The state of a run with this progress, as `open_run` makes it."""
    return RunState.create(
        progress,
        config.effective_replay,
        groups_per_step=config.rollouts.prompts_per_step,
        max_batches=config.filter.max_batches,
        last_step=config.num_steps,
    )


def local_rollouts(config: TrainConfig, runner: RolloutRunner) -> LocalRollouts:
    """The rollout source of a run that samples in this process."""
    return LocalRollouts(
        runner, group_size=config.rollouts.group_size, temperature=config.sampling.temperature, seed=config.seed
    )


def make_runner(
    config: TrainConfig, script: Script, environment: AbstractEnvironment, *, tokenizer: ChatTokenizer = TOKENIZER
) -> RolloutRunner:
    """A runner with the limits of the config and scripted replies."""
    limits = Limits(config.rollouts.max_length, config.sampling.max_new_tokens, config.rollouts.max_turns)
    sampler = ScriptedSampler(script, stop_token_ids=[END], logprob=-0.25)
    return RolloutRunner(environment, tokenizer, sampler, limits)
