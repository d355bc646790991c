# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A run without a model, for the parts of the loop that are plain Python; no function is compiled."""

import dataclasses
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
import numpy as np
from levanter.models.llama import LlamaConfig

from marin_rl.batching.processed_rollout import ProcessedRollout
from marin_rl.config.sections import RolloutConfig
from marin_rl.config.train_config import TrainConfig
from marin_rl.environments.arithmetic import ArithmeticConfig
from marin_rl.environments.base import AbstractEnvironment
from marin_rl.learner.scoring import Scores
from marin_rl.rollouts.replay_buffer import ReplayBuffer
from marin_rl.rollouts.rollout_builder import Limits
from marin_rl.rollouts.run_rollouts import RolloutRunner
from marin_rl.rollouts.scheduler import RolloutScheduler
from marin_rl.runtime.open_rollout_source import make_staleness_limits
from marin_rl.runtime.progress import Progress
from marin_rl.runtime.training_run import TrainingRun
from marin_rl.sampling.config import SamplingConfig
from marin_rl.tokenization.byte_tokenizer import byte_tokenizer
from marin_rl.tokenization.chat import ChatTokenizer
from tests.scripted_sampler import Script, ScriptedSampler

END, USER, ASSISTANT = 257, 259, 260
TOKENIZER = ChatTokenizer(byte_tokenizer())
MODEL = LlamaConfig(seq_len=64, hidden_dim=16, intermediate_dim=32, num_layers=1, num_heads=2, num_kv_heads=2)


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


Score = Callable[[ProcessedRollout], np.ndarray]
"""Computes per-token scores of a rollout: `[batch, position]`."""


@dataclasses.dataclass(frozen=True)
class FixedScorer:
    """Scores rollouts with a "model" that is a pair of formulas, for log-probs and values."""

    def score(self, model: tuple[Score, Score], rollouts: Sequence[ProcessedRollout]) -> list[Scores]:
        logprobs, values = model
        return [Scores(on_loss(logprobs(rollout), rollout), on_loss(values(rollout), rollout)) for rollout in rollouts]


def on_loss(array: np.ndarray, rollout: ProcessedRollout) -> np.ndarray:
    return np.where(rollout.loss_mask, array, 0).astype(np.float32)


def zeros(rollout: ProcessedRollout) -> np.ndarray:
    return np.zeros(rollout.input_ids.shape)


def bare_run(
    config: TrainConfig,
    environment: AbstractEnvironment | None = None,
    *,
    progress: Progress | None = None,
    reference: Score | None = None,
    learner: Score = zeros,
    values: Score = zeros,
    rows: int = 8,
    tokenizer: ChatTokenizer = TOKENIZER,
) -> TrainingRun:
    """A run of which there is config, environment, tokenizer, progress, and a scorer that knows formulas.

    Args:
        config: what was asked for.
        environment: gives tasks, where anybody draws them.
        progress: by default nothing is done yet.
        reference: log-probs of tokens under the reference; None where there is no reference.
        learner: log-probs of tokens under the weights of the learner.
        values: the critic's values of tokens.
        rows: in a pass.
        tokenizer: gives the padding token.
    """
    run = object.__new__(TrainingRun)
    run.config = config
    run.trainer = dataclasses.replace(config.trainer, train_batch_size=rows)
    run.tokenizer = tokenizer
    run.progress = progress or Progress()
    run.orders = RolloutScheduler(make_staleness_limits(config), run.progress.orders)
    run.replay = ReplayBuffer(max_staleness=0)
    run.history = None
    run.scorer = FixedScorer()
    run.reference = None if reference is None else (reference, zeros)
    run.state = SimpleNamespace(model=(learner, values))
    if environment is not None:
        run.environment = environment
    return run


def make_runner(
    run: TrainingRun, script: Script, environment: AbstractEnvironment, *, tokenizer: ChatTokenizer = TOKENIZER
) -> RolloutRunner:
    """What plays that run's episodes, with answers from a script."""
    limits = Limits(run.config.rollouts.max_length, run.config.sampling.max_new_tokens, run.config.rollouts.max_turns)
    sampler = ScriptedSampler(script, stop_token_ids=[END], logprob=-0.25)
    return RolloutRunner(environment, tokenizer, sampler, limits)
