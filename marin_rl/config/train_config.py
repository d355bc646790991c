# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The configuration of a training run.

Each section is defined next to the code that it configures. `TrainConfig` combines the sections and validates
settings that depend on one another. `model`, `optimizer` and `trainer` are levanter's sections.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import cast

from levanter.models.gpt2 import Gpt2Config
from levanter.models.lm_model import LmConfig
from levanter.models.mixtral import MixtralConfig
from levanter.optim import AdamConfig, OptimizerConfig
from levanter.trainer import TrainerConfig

import marin_rl.objectives.gae
import marin_rl.objectives.gigpo
import marin_rl.rewards.pipeline  # noqa: F401
from marin_rl.batching.packing import GroupRow, RowLayout
from marin_rl.config.levanter_sections import (
    TRAINER_KEYS_WITHOUT_EFFECT,
    check_optimizer,
    check_trainer,
    default_trainer,
)
from marin_rl.config.objective_config import ObjectiveConfig, UpdateConfig
from marin_rl.config.sections import (
    TOKENS_PER_MICROBATCH,
    EvaluationConfig,
    LogLevel,
    Mode,
    ReplayConfig,
    RolloutConfig,
    WarmStartConfig,
    module_levels,
)
from marin_rl.config.workers_config import Refresh, WorkersConfig
from marin_rl.config_fields import (
    STORAGE_PATH,
    check_paths,
    convert_enum_fields,
    may_change,
    nested_sections,
    without_effect,
)
from marin_rl.environments.base import EnvironmentConfig
from marin_rl.kernel_sharding import POSITION
from marin_rl.learner.attention_kernel import PLATFORMS, AttentionKernel, attention_kernel
from marin_rl.learner.checkpoint import CheckpointConfig
from marin_rl.learner.critic import CriticConfig
from marin_rl.learner.devices import microbatch_rows, platform_of
from marin_rl.learner.hf_export import ExportConfig
from marin_rl.models.conversion import check_model
from marin_rl.objectives.advantage_inputs import AdvantageConfig
from marin_rl.objectives.advantages import RlooConfig
from marin_rl.objectives.aggregation import AggregationConfig, SequenceSumConfig
from marin_rl.objectives.importance import NoCorrectionConfig, OffPolicyCorrectionConfig
from marin_rl.objectives.kl import KlConfig, NoKlConfig
from marin_rl.objectives.policy_loss import PolicyLossConfig, ReinforceLossConfig
from marin_rl.objectives.shaping import KeepTruncatedConfig, OverlongConfig, TruncationConfig
from marin_rl.rewards.component import RewardScope
from marin_rl.rewards.sandbox.config import SandboxConfig
from marin_rl.rollouts.attempt import LongPrompts
from marin_rl.rollouts.filters import FilterConfig, KeepGroupsConfig
from marin_rl.rollouts.store import RolloutStoreConfig
from marin_rl.sampling.config import LevanterSamplerConfig, OpenAiSamplerConfig, SamplerConfig, SamplingConfig
from marin_rl.storage import storage_path
from marin_rl.tokenization.load import TokenizerConfig
from marin_rl.weights.config import ArrowFlightConfig, TransferDtype, WeightTransferConfig, is_loopback

LOGPROB_BLOCK_SIZE = {"cpu": 256, "gpu": 1024, "tpu": 1024}
"""Tokens on each device whose logits are in memory at once, by platform, if the config does not set their number."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Configuration of a training run."""

    environment: EnvironmentConfig
    """Source of the tasks and their rewards."""
    run_dir: str = dataclasses.field(metadata=STORAGE_PATH)
    """Run directory, a path or an address such as `gs://bucket/run` or `s3://bucket/run`. A run resumes if its
    directory contains a checkpoint."""
    model: LmConfig | None = None
    """Model architecture (levanter's section), required to train from scratch; null: read from `initialize_from`. Its
    type is `gemma`, `gemma2`, `gpt2`, `llama`, `mistral`, `mixtral`, `olmo2`, `qwen2` or `qwen3`."""
    initialize_from: str | None = dataclasses.field(default=None, metadata=STORAGE_PATH)
    """Initial weights: a folder or hub name in Hugging Face format, or a run directory of marin_rl; null: random
    weights. A folder in an object store is copied into the cache folder of the user."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """Tokenizer and chat template."""
    seed: int = 0
    """Random seed of initial weights, task order and sampling."""
    num_steps: int = 200
    """Number of RL steps, at least 0. A step samples a batch of rollouts and trains on it."""
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
    training."""
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
        default=ArrowFlightConfig(),
        metadata=may_change("host", "port", "streams", "keep", "call_seconds", "retry"),
    )
    """Weight transfer from the trainer to the workers, for `mode: async`."""
    logprob_block_size: int | None = None
    """Tokens on each device whose logits are in memory at once. At least 1; null: 256 on a CPU, 1,024 on an
    accelerator."""
    warm_start: WarmStartConfig = WarmStartConfig()
    """Supervised training before RL."""
    evaluation: EvaluationConfig = dataclasses.field(default=EvaluationConfig(), metadata=may_change("every"))
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
    optimizer: OptimizerConfig = dataclasses.field(default_factory=AdamConfig)
    """Optimizer and learning-rate schedule of RL (levanter's section)."""
    trainer: TrainerConfig = dataclasses.field(
        default_factory=default_trainer,
        metadata=may_change(
            *("tracker", "jax_compilation_cache_dir", "distributed"),
            *("profiler", "profiler_start_step", "profiler_num_steps"),
        )
        | without_effect(**TRAINER_KEYS_WITHOUT_EFFECT),
    )
    """Mesh, precision, microbatches and trackers (levanter's section). Batch size and number of steps follow from
    `rollouts` and `num_steps`."""

    def __post_init__(self) -> None:
        convert_enum_fields(self)
        check_paths(self)
        module_levels(self.logging)
        self._check_numbers()
        check_optimizer(self.optimizer)
        check_trainer(self.trainer)
        self._check_model()
        self._check_replay()
        self._check_workers()
        self._check_agents()
        ObjectiveConfig(**{field.name: getattr(self, field.name) for field in dataclasses.fields(ObjectiveConfig)})

    def _check_numbers(self) -> None:
        if self.num_steps < 0:
            raise ValueError(f"num_steps is {self.num_steps}; it must be at least 0")
        if self.logprob_block_size is not None and self.logprob_block_size < 1:
            raise ValueError(f"logprob_block_size is {self.logprob_block_size}; it must be at least 1 token, or null")

    def _check_model(self) -> None:
        if self.sampling.stop and isinstance(self.sampler, OpenAiSamplerConfig):
            raise ValueError(
                f"sampling.stop is {list(self.sampling.stop)}, which sampler openai does not support; remove it, or "
                "use sampler: {type: levanter}"
            )
        if self.model is None and self.initialize_from is None:
            raise ValueError(
                "neither model nor initialize_from is set: name an architecture to start from scratch "
                "(model: {type: llama, ...}) or weights to start from (initialize_from: FOLDER)"
            )
        if self.model is not None and self.rollouts.max_length > self.model.Pos.size:
            raise ValueError(
                f"rollouts.max_length is {self.rollouts.max_length}, but the model's context has {self.model.Pos.size} "
                "tokens (model.seq_len); lower rollouts.max_length or raise model.seq_len"
            )
        self._check_context()
        self._check_row_length()
        if self.rollouts.long_prompts is LongPrompts.TRUNCATE_LEFT and self.rollouts.max_prompt_length is None:
            keep = max(self.rollouts.max_length - self.sampling.max_new_tokens, 1)
            raise ValueError(
                "rollouts.long_prompts is truncate_left, but rollouts.max_prompt_length is null; set it to the number "
                f"of tokens to keep, such as rollouts.max_length - sampling.max_new_tokens = {keep}"
            )
        if self.model is not None:
            check_model(self.model, max_length=self.rollouts.max_length)
        if isinstance(self.model, MixtralConfig):
            self._check_mixtral()
        if getattr(self.model, "scan_layers", True) is False:
            raise ValueError("model.scan_layers is false, but the learner supports scanned layers only; set it to true")

    def _check_mixtral(self) -> None:
        for key in ("tensor_parallel_axes", "axis_resources"):
            if "experts" in (getattr(self.trainer, key) or ()):
                raise ValueError(
                    f"trainer.{key} has 'experts', but levanter cannot shard the experts of a mixtral model over "
                    "devices; shard their hidden layers with trainer.tensor_parallel_axes: [mlp] instead"
                )

    def _check_context(self) -> None:
        axes = self.trainer.tensor_parallel_axes or ()
        if POSITION in self.trainer.axis_resources or (POSITION in axes and len(axes) > 1):
            raise ValueError(
                f"trainer.tensor_parallel_axes is {list(axes)} and trainer.axis_resources is "
                f"{dict(self.trainer.axis_resources)}, but {POSITION!r} can be split over devices only alone: set "
                f"trainer.tensor_parallel_axes: [{POSITION}]"
            )
        if POSITION in axes and isinstance(self.model, Gpt2Config):
            raise ValueError(
                "trainer.tensor_parallel_axes is ['position'], but the positions of a gpt2 model cannot be split over "
                "devices, because it has an attention module of its own; use another axis, such as mlp"
            )

    def _check_row_length(self) -> None:
        """Validate that a platform supports the row length; the run's platform is checked after jax has started."""
        errors = []
        for platform in PLATFORMS:
            try:
                self.rollouts.positions(attention_kernel(self.model, platform, self._context_shards))
            except ValueError as error:
                errors.append(error)
        if len(errors) == len(PLATFORMS):
            raise errors[0]

    def _check_replay(self) -> None:
        if self.replay.capacity is not None and self.replay.capacity < self.rollouts.prompts_per_step:
            raise ValueError(
                f"replay.capacity is {self.replay.capacity}, but a step takes rollouts.prompts_per_step = "
                f"{self.rollouts.prompts_per_step} groups; raise it"
            )
        if self.replay.keep_sampling_weights and not self.off_policy_correction.needs_sampling_logprobs:
            raise ValueError(
                "replay.keep_sampling_weights is true, but off_policy_correction: {type: none} does not use them; "
                "set off_policy_correction: {type: tis}, or keep_sampling_weights: false"
            )
        if self.replay.keep_sampling_weights and self.workers.refresh is Refresh.IN_FLIGHT:
            raise ValueError(
                "replay.keep_sampling_weights is true and workers.refresh is in_flight, but an answer sampled with "
                "several versions of the weights cannot be scored with one; set workers.refresh: between_groups, or "
                "keep_sampling_weights: false"
            )

    def _check_workers(self) -> None:
        if self.ray_address is not None and not re.fullmatch(r"auto|[^/]+:\d{1,5}", self.ray_address):
            raise ValueError(
                f"ray_address is {self.ray_address!r}; it must be `auto`, or `host:port` of a cluster's head node, "
                "such as 10.0.0.1:6379. Ray's client protocol (ray://) is not supported: start the run on a machine of "
                "the cluster"
            )
        if self.mode is Mode.ASYNC:
            self._check_async()

    def _check_async(self) -> None:
        if batch_scoped := self.batch_scoped_rewards():
            raise ValueError(
                f"{batch_scoped[0]} has scope: batch, which needs all rollouts of a step together; with mode: async "
                "they run at different times in different workers, so use scope: group, or mode: sync"
            )
        if isinstance(self.sampler, OpenAiSamplerConfig):
            self._check_openai_sampler(self.sampler.base_url)
        casts = self.weights.dtype is not TransferDtype.PARAMETER
        self.workers.check_run(self.ray_address, self.trainer.mp.param_dtype, casts=casts)
        is_local = self.ray_address is None or is_loopback(self.ray_address.rpartition(":")[0])
        if isinstance(self.weights, ArrowFlightConfig) and is_loopback(self.weights.host) and not is_local:
            raise ValueError(
                f"weights.host is {self.weights.host}, which only this machine can reach, but the workers run on the "
                f"Ray cluster at ray_address {self.ray_address!r}; set weights.host to an address of this machine in a "
                "trusted network, or to 0.0.0.0. If the cluster consists of this machine only, set ray_address: "
                "127.0.0.1:PORT"
            )

    def _check_openai_sampler(self, base_url: str) -> None:
        if self.workers.num_workers != 1:
            raise ValueError(
                f"workers.num_workers is {self.workers.num_workers}, but several workers would overwrite each other's "
                f"weights on the server {base_url}; set workers.num_workers: 1, raise sampling.max_seqs, and "
                "put further engines behind that address"
            )
        if self.workers.refresh is Refresh.IN_FLIGHT:
            raise ValueError(
                f"workers.refresh is in_flight, but if {base_url} loads weights during an answer, the version "
                "that sampled each token is unknown; set workers.refresh: between_groups"
            )

    def _check_agents(self) -> None:
        if not self.advantage.is_token_level:
            return
        for key, section in nested_sections(self.environment, "environment"):
            if getattr(section, "runs_agents", False):
                name = AdvantageConfig.get_choice_name(type(self.advantage))
                raise ValueError(
                    f"advantage {name!r} credits the turns of a rollout in the order of time, but {key} runs agents, "
                    "whose conversations may overlap; use advantage: {type: rloo}, or another that compares rollouts "
                    "(reinforce without gamma)"
                )

    def batch_scoped_rewards(self) -> list[str]:
        """Keys of the reward functions that score all rollouts of a step together."""
        sections = nested_sections(self.environment, "environment")
        return [key for key, section in sections if getattr(section, "scope", None) is RewardScope.BATCH]

    def trainer_config(self) -> TrainerConfig:
        """Levanter's trainer section with the number of steps, the seed and the run's name."""
        return dataclasses.replace(
            self.trainer,
            num_train_steps=self.num_steps,
            seed=self.seed,
            id=self.trainer.id or storage_path(self.run_dir).name,
        )

    def row_layout(self, trainer: TrainerConfig) -> RowLayout:
        """Shape of the microbatches, for a trainer section completed by `start_devices`.

        A row of R positions and P computed pairs of a query and a key costs `R + P / (6 · hidden size)`: the second
        term is attention, relative to the flops of the linear layers of a transformer. With `per_device_parallelism`,
        rows with shared prompts have at most as many positions as that many other rows.

        Raises:
            ValueError: if the attention kernel of the trainer's platform does not support `rollouts.row_length`.
        """
        kernel, rollouts = self._kernel(trainer), self.rollouts
        packed = rollouts.packing is not False
        layout = self._layout(kernel, rollouts.positions(kernel), cast(int, trainer.train_batch_size), packed=packed)
        platform, devices = platform_of(trainer), trainer.data_axis_size
        alternatives = []
        separate = dataclasses.replace(rollouts, packing=False)
        if rollouts.packing is None and separate.positions(kernel) != layout.row_length:
            rows = microbatch_rows(self.trainer, separate.rows_per_device(platform, devices)) * devices
            alternatives.append(self._layout(kernel, separate.positions(kernel), rows, packed=False))
        if rollouts.share_prompts and packed and rollouts.row_length is None:
            alternatives += self._group_layouts(kernel, platform, devices, layout.row_length)
        return dataclasses.replace(layout, alternatives=tuple(alternatives))

    def _group_layouts(
        self, kernel: AttentionKernel, platform: str, devices: int, row_length: int
    ) -> Sequence[RowLayout]:
        """Return the layout of rows with shared prompts, if there is one, given the length of other rows."""
        if not kernel.supports_shared_prompts(self.model):
            return ()
        rollouts, own_rows = self.rollouts, microbatch_rows(self.trainer, 0)
        most_tokens = own_rows * row_length or TOKENS_PER_MICROBATCH[platform]
        group = rollouts.group_row(self.sampling.max_new_tokens, kernel, most_tokens)
        if group is None:
            return ()
        default = rollouts.group_rows_per_device(group, platform, devices)
        rows = most_tokens // group.row_length if own_rows else default
        return (self._layout(kernel, group.row_length, rows * devices, packed=True, group=group),)

    def _layout(
        self, kernel: AttentionKernel, row_length: int, rows: int, *, packed: bool, group: GroupRow | None = None
    ) -> RowLayout:
        hidden = 1024 if self.model is None else self.model.Embed.size
        return RowLayout(
            row_length,
            rows,
            packed,
            whole_rollouts=self.policy_loss.is_sequence_level,
            group=group,
            row_cost=row_length + kernel.attention_pairs(row_length, group) / (6 * hidden),
        )

    def logprob_block(self, trainer: TrainerConfig) -> int:
        """Tokens per device whose logits are in memory at once, for a trainer section of started devices."""
        return self.logprob_block_size or LOGPROB_BLOCK_SIZE[platform_of(trainer)]

    def trained_model(self, trainer: TrainerConfig) -> LmConfig:
        """Model config with the attention kernel of the trainer's platform and a block size that divides the rows.

        Raises:
            ValueError: if the attention kernel of the trainer's platform does not support `rollouts.row_length`.
        """
        assert self.model is not None
        kernel = self._kernel(trainer)
        return kernel.configure(self.model, self.rollouts.positions(kernel))

    def _kernel(self, trainer: TrainerConfig) -> AttentionKernel:
        return attention_kernel(self.model, platform_of(trainer), self._context_shards)

    @property
    def _context_shards(self) -> int:
        """Number of devices over which the positions of a row are split."""
        return self.trainer.model_axis_size if POSITION in (self.trainer.tensor_parallel_axes or ()) else 1
