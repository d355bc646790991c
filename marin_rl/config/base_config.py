# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The settings of a training run, without levanter's classes, which take seconds to import.

Each section is defined in a module that imports neither levanter nor transformers; `combinations` checks sections that
restrict one another. The subclasses add the types of levanter's sections `model`, `optimizer` and `trainer.tracker`.
"""

import dataclasses
from typing import Annotated, Any, ClassVar

from annotated_types import Ge

import marin_rl.objectives.gae
import marin_rl.objectives.gigpo
import marin_rl.rewards.pipeline  # noqa: F401
from marin_rl.config.combinations import CHECKS, Check, run_checks
from marin_rl.config.sections import (
    EvaluationConfig,
    Mode,
    ReplayConfig,
    RolloutConfig,
    UpdateConfig,
    WarmStartConfig,
)
from marin_rl.config.weights_config import WeightTransferConfig
from marin_rl.config.workers_config import WorkersConfig
from marin_rl.environments.base import EnvironmentConfig
from marin_rl.learner.config import CriticConfig, ExportConfig
from marin_rl.objectives.advantage_inputs import AdvantageConfig
from marin_rl.objectives.advantages import RlooConfig
from marin_rl.objectives.aggregation import AggregationConfig, SequenceSumConfig
from marin_rl.objectives.importance import NoCorrectionConfig, OffPolicyCorrectionConfig
from marin_rl.objectives.kl import KlConfig, NoKlConfig
from marin_rl.objectives.policy_loss import PolicyLossConfig, ReinforceLossConfig
from marin_rl.objectives.shaping import KeepTruncatedConfig, OverlongConfig, TruncationConfig
from marin_rl.rewards.component import RewardScope
from marin_rl.rewards.sandbox.config import SandboxConfig
from marin_rl.rollouts.config import FilterConfig, KeepGroupsConfig
from marin_rl.runs.rollout_store import RolloutStoreConfig
from marin_rl.runs.run_directory import CheckpointConfig
from marin_rl.sampling.config import LevanterSamplerConfig, SamplerConfig, SamplingConfig
from marin_rl.tokenization.config import TokenizerConfig
from marin_rl.utils.devices.sharding import POSITION
from marin_rl.utils.devices.trainer_config import AbstractTrainerConfig
from marin_rl.utils.logs import LogLevel
from marin_rl.utils.settings.checks import ConfigSection, check_fields
from marin_rl.utils.settings.fields import (
    LOCAL_PATH,
    STORAGE_PATH,
    may_change,
    may_change_by_name,
    nested_sections,
)
from marin_rl.utils.settings.section_types import CheckedConfig, ConfigError

TRAINER_METADATA = may_change(
    *("tracker", "jax_compilation_cache_dir", "distributed"),
    *("profiler", "profiler_start_step", "profiler_num_steps"),
)
"""Metadata of the field `trainer`."""
MODEL_METADATA = may_change("reference_checkpoint")
"""Metadata of the field `model`. Levanter's lines have other defaults for this key, which nothing here reads."""


@dataclasses.dataclass(frozen=True)
class AbstractTrainConfig(ConfigSection, CheckedConfig):
    """Configuration of a training run; subclasses set the types of `model`, `optimizer` and `trainer.tracker`."""

    checks: ClassVar[tuple[Check, ...]] = CHECKS
    """Checks of the settings."""

    environment: EnvironmentConfig
    """Source of the tasks and their rewards."""
    run_dir: str = dataclasses.field(metadata=STORAGE_PATH | may_change())
    """Run directory, a path or an address such as `gs://bucket/run` or `s3://bucket/run`. A run resumes if its
    directory contains a checkpoint."""
    imports: tuple[str, ...] = dataclasses.field(default=(), metadata=LOCAL_PATH)
    """Python files, such as `[my_objectives.py]`, or modules of installed packages, such as `[lab.objectives]`, that
    register further types. Every command that reads the config imports them first, without isolation."""
    model: Any = dataclasses.field(default=None, metadata=MODEL_METADATA)
    """Model architecture (levanter's section), required to train from scratch; null: read from `initialize_from`. Its
    type is `gemma`, `gemma2`, `gpt2`, `llama`, `mistral`, `mixtral`, `olmo2`, `olmo3`, `qwen2` or `qwen3`."""
    initialize_from: str | None = dataclasses.field(default=None, metadata=STORAGE_PATH)
    """Initial weights: a folder or hub name in Hugging Face format, or a run directory of marin_rl; null: random
    weights. A folder in an object store is copied into the cache folder of the user."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """Tokenizer and chat template."""
    seed: int = 0
    """Random seed of initial weights, task order and sampling."""
    num_steps: Annotated[int, Ge(0)] = dataclasses.field(default=200, metadata=may_change_by_name())
    """Number of RL steps. A step samples a batch of rollouts and trains on it."""
    rollouts: RolloutConfig = RolloutConfig()
    """Rollouts per step, their limits, and the layout of batch rows."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling parameters of the policy."""
    sampler: SamplerConfig = dataclasses.field(
        default=LevanterSamplerConfig(),
        metadata=may_change("base_url", "model", "reload", "api_key_env", "timeout", "retry"),
    )
    """Inference engine that samples answers."""
    sandbox: SandboxConfig = SandboxConfig()
    """Isolation and resource limits of reward functions and of programs written by a model."""
    advantage: AdvantageConfig = RlooConfig()
    """Advantage estimator."""
    policy_loss: PolicyLossConfig = ReinforceLossConfig()
    """Policy term of the loss."""
    kl: KlConfig = NoKlConfig()
    """KL penalty against the reference policy, which is the policy at the start of RL."""
    aggregation: AggregationConfig = SequenceSumConfig()
    """Aggregation of the token losses to a scalar."""
    critic: CriticConfig | None = None
    """Critic, required by `advantage: {type: gae}`; null: no critic."""
    updates: UpdateConfig = UpdateConfig()
    """Epochs and minibatches per step."""
    off_policy_correction: OffPolicyCorrectionConfig = NoCorrectionConfig()
    """Importance correction for differences between the probabilities of sampler and learner."""
    overlong: OverlongConfig = OverlongConfig()
    """Soft penalty on answers close to the length limit."""
    truncation: TruncationConfig = KeepTruncatedConfig()
    """Handling of rollouts that were cut off at a limit."""
    filter: FilterConfig = KeepGroupsConfig()
    """Handling of groups in which all rewards are equal."""
    mode: Mode = Mode.SYNC
    """`sync` alternates sampling and training in the same processes; `async` samples in rollout workers during
    training, and needs the extra `ray`."""
    workers: WorkersConfig = dataclasses.field(
        default=WorkersConfig(),
        metadata=may_change("num_workers", "resources", "tpu_slice", "heartbeat_timeout", "no_progress_timeout"),
    )
    """Rollout workers, for `mode: async`."""
    ray_address: str | None = dataclasses.field(default=None, metadata=may_change())
    """Ray cluster of the rollout workers: `auto` for the cluster of this machine, or `host:port` of the head node;
    null: a local cluster is started and stopped with the run."""
    replay: ReplayConfig = ReplayConfig()
    """Replay buffer and staleness limits, for `mode: async`."""
    weights: WeightTransferConfig = dataclasses.field(
        default=WeightTransferConfig(),
        metadata=may_change("host", "port", "streams", "retry"),
    )
    """Weight transfer from the trainer to the workers, for `mode: async`."""
    logprob_block_size: Annotated[int, Ge(1)] | None = None
    """Tokens on each device whose logits are in memory at once; null: 256 on a CPU, 1,024 on an accelerator."""
    warm_start: WarmStartConfig = WarmStartConfig()
    """Supervised training before RL."""
    evaluation: EvaluationConfig = dataclasses.field(
        default=EvaluationConfig(), metadata=may_change("every") | may_change_by_name()
    )
    """Evaluation on held-out tasks."""
    log_level: LogLevel = dataclasses.field(default=LogLevel.INFO, metadata=may_change())
    """Minimum level of messages in `log.txt`, `processes/*.txt` and `workers/*.txt`: `debug`, `info`, `warning` or
    `error`. `debug` logs every turn of every episode."""
    logging: dict[str, str] = dataclasses.field(default_factory=dict, metadata=may_change())
    """Log levels of modules or packages that override `log_level`, such as `{marin_rl.rollouts: debug}`."""
    rollout_store: RolloutStoreConfig = dataclasses.field(default=RolloutStoreConfig(), metadata=may_change())
    """Storage of rollouts in the run directory."""
    checkpoint: CheckpointConfig = dataclasses.field(default=CheckpointConfig(), metadata=may_change())
    """Checkpoint schedule."""
    export: ExportConfig = dataclasses.field(default=ExportConfig(), metadata=may_change())
    """Export of the final weights to `hf/` in the run directory."""
    optimizer: Any = dataclasses.field(default=None, metadata=may_change_by_name())
    """Optimizer and learning-rate schedule of RL (levanter's section)."""
    trainer: AbstractTrainerConfig = dataclasses.field(default_factory=AbstractTrainerConfig, metadata=TRAINER_METADATA)
    """Mesh, precision, microbatches and trackers. Batch size and number of steps follow from `rollouts` and
    `num_steps`."""

    def __post_init__(self) -> None:
        check_fields(self)
        if problems := self.find_problems(self):
            raise ConfigError(*problems)

    @classmethod
    def find_problems(cls, config: Any) -> list[str]:
        """Problems of single settings and of sections that restrict one another."""
        return run_checks(cls.checks, config)

    def batch_scoped_rewards(self) -> list[str]:
        """Keys of the reward functions that score all rollouts of a step together."""
        sections = nested_sections(self.environment, "environment")
        return [key for key, section in sections if getattr(section, "scope", None) is RewardScope.BATCH]

    @property
    def effective_replay(self) -> ReplayConfig:
        """`replay` in `mode: async`; in `mode: sync` groups are never sampled ahead."""
        return self.replay if self.mode is Mode.ASYNC else ReplayConfig(max_staleness=0)

    @property
    def context_shards(self) -> int:
        """Number of devices over which the positions of a row are split."""
        return self.trainer.model_axis_size if POSITION in (self.trainer.tensor_parallel_axes or ()) else 1
