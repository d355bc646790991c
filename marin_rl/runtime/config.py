# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The configuration of a training run.

Every section sits beside what it configures; this file only puts them together and checks what no
section can see alone. `model`, `optimizer` and `trainer` are levanter's own sections.
"""

import dataclasses
import os
from pathlib import Path
from typing import Any

from levanter.models.lm_model import LmConfig
from levanter.optim import AdamConfig, OptimizerConfig
from levanter.trainer import TrainerConfig

from marin_rl.environments.base import EnvironmentConfig
from marin_rl.learner.checkpoint import CheckpointConfig
from marin_rl.objectives.advantages import AdvantageConfig, RlooConfig
from marin_rl.objectives.aggregation import AggregationConfig, SequenceSumConfig
from marin_rl.objectives.kl import KlConfig, NoKlConfig
from marin_rl.objectives.policy_loss import PolicyLossConfig, ReinforceLossConfig
from marin_rl.runtime.config_decoding import decode
from marin_rl.runtime.evaluation import EvaluationConfig
from marin_rl.runtime.warm_start import WarmStartConfig
from marin_rl.sampling.levanter_sampler import SamplingConfig
from marin_rl.tokenization.load import TokenizerConfig


def compilation_cache() -> str:
    """Where compiled programs are kept between runs: the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return str(Path(home) / "marin_rl" / "jax")


def levanter_defaults() -> dict[str, Any]:
    """What this project sets differently in levanter's own sections.

    Levanter's trainer insists on an accelerator, logs to wandb, writes compiler dumps and starts Ray
    unless told otherwise; a run here starts on a laptop with none of these.
    """
    return {
        "trainer": {
            "tracker": [],
            "require_accelerator": False,
            "log_jaxprs": False,
            "log_xla_hlo": False,
            "jax_compilation_cache_dir": compilation_cache(),
            "distributed": {"initialize_jax_distributed": False},
            "ray": {"auto_start_cluster": False},
        }
    }


def default_trainer() -> TrainerConfig:
    """Levanter's trainer section with this project's defaults, for experiments written in code."""
    return decode(TrainerConfig, levanter_defaults()["trainer"])


_DECIDED_ELSEWHERE = {
    "seed": "set seed",
    "train_batch_size": "set rollouts.prompts_per_step and rollouts.group_size, whose product it is",
    "num_train_steps": "set num_steps",
    "steps_per_eval": "set evaluation.every",
    "max_eval_batches": "set evaluation.tasks",
    "load_checkpoint": "rerun in the same run_dir to resume",
    "load_checkpoint_path": "rerun in the same run_dir to resume",
    "initialize_from": "set initialize_from at the top level",
    "checkpointer": "set checkpoint",
    "quantization": "not supported; leave it out",
    "model_averaging": "not supported; leave it out",
}
"""Fields of levanter's trainer section that would be ignored, and what to set instead."""


def _field_default(section: type, name: str) -> Any:
    field = next(field for field in dataclasses.fields(section) if field.name == name)
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """How many rollouts an update is made of, and how far each may go."""

    prompts_per_step: int = 64
    """Tasks drawn for each update."""
    group_size: int = 8
    """Attempts at each task; they are one another's baseline."""
    max_length: int = 512
    """Most tokens in one sequence, prompt and answers together; also the positions of a batch row."""
    max_turns: int = 1
    """Most answers in one rollout."""

    def __post_init__(self) -> None:
        for name in ("prompts_per_step", "group_size", "max_length", "max_turns"):
            if getattr(self, name) < 1:
                raise ValueError(f"rollouts.{name} is {getattr(self, name)}; it must be at least 1")

    @property
    def rollouts_per_step(self) -> int:
        """Rollouts, and rows of a batch, in one update."""
        return self.prompts_per_step * self.group_size


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Everything a training run is made of."""

    environment: EnvironmentConfig
    """Where tasks come from and who judges the answers."""
    run_dir: str
    """The run directory; rerunning with the same one resumes."""
    model: LmConfig | None = None
    """Architecture, levanter's own section. Needed from scratch; with `initialize_from` it is read there."""
    initialize_from: str | None = None
    """Start from these weights: a folder or hub name in Hugging Face format, or a run directory of marin_rl."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """The tokenizer and its chat template."""
    seed: int = 0
    """Seed of everything random: weights, task order, sampling."""
    num_steps: int = 200
    """RL updates."""
    rollouts: RolloutConfig = RolloutConfig()
    """Size of a batch and limits of a rollout."""
    sampling: SamplingConfig = SamplingConfig()
    """How the policy samples."""
    advantage: AdvantageConfig = RlooConfig()
    """How rewards of a group become advantages."""
    policy_loss: PolicyLossConfig = ReinforceLossConfig()
    """The policy term of the loss."""
    kl: KlConfig = NoKlConfig()
    """The penalty for leaving the reference, which is the policy as it was when RL began."""
    aggregation: AggregationConfig = SequenceSumConfig()
    """How token terms become one loss."""
    logprob_block_size: int = 128
    """Positions of a row whose logits exist at the same time."""
    warm_start: WarmStartConfig = WarmStartConfig()
    """Supervised training before RL."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out accuracy."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When to save."""
    optimizer: OptimizerConfig = dataclasses.field(default_factory=AdamConfig)
    """Optimizer and schedule of RL, levanter's own section."""
    trainer: TrainerConfig = dataclasses.field(default_factory=default_trainer)
    """Mesh, precision, microbatches and trackers, levanter's own section. Batch size and number of
    steps follow from `rollouts` and `num_steps`."""

    def __post_init__(self) -> None:
        if self.num_steps < 0:
            raise ValueError(f"num_steps is {self.num_steps}; it counts updates and cannot be negative")
        if self.logprob_block_size < 1:
            raise ValueError(f"logprob_block_size is {self.logprob_block_size}; it must be at least 1 position")
        if self.model is None and self.initialize_from is None:
            raise ValueError(
                "neither model nor initialize_from is set: name an architecture to start from scratch "
                "(model: {type: llama, ...}) or weights to start from (initialize_from: FOLDER)"
            )
        for name, remedy in _DECIDED_ELSEWHERE.items():
            given, default = getattr(self.trainer, name), _field_default(TrainerConfig, name)
            if given != default:
                raise ValueError(f"trainer.{name} is {given!r}, but it does not decide anything here: {remedy}")
        if self.model is not None and self.rollouts.max_length > self.model.Pos.size:
            raise ValueError(
                f"rollouts.max_length is {self.rollouts.max_length}, but the model's context has {self.model.Pos.size} "
                "tokens (model.seq_len); lower the one or raise the other"
            )
        if getattr(self.model, "scan_layers", True) is False:
            raise ValueError(
                "model.scan_layers is false, but levanter's inference engine samples from scanned layers alone; "
                "leave it true"
            )
        if self.rollouts.group_size < self.advantage.minimum_group_size:
            raise ValueError(
                f"rollouts.group_size is {self.rollouts.group_size}, but advantage {self.advantage_name!r} compares "
                f"the attempts at a prompt with one another and needs at least {self.advantage.minimum_group_size}; "
                "raise it, or use advantage: {type: reinforce}"
            )

    @property
    def advantage_name(self) -> str:
        """The configured advantage's name in YAML."""
        return AdvantageConfig.get_choice_name(type(self.advantage))

    def trainer_config(self) -> TrainerConfig:
        """Levanter's trainer section with batch size, steps and seed filled in."""
        return dataclasses.replace(
            self.trainer,
            train_batch_size=self.rollouts.rollouts_per_step,
            num_train_steps=self.num_steps,
            seed=self.seed,
            id=self.trainer.id or Path(self.run_dir).name,
        )
