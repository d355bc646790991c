# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The configuration of a training run.

Each section is defined next to the code that it configures. `TrainConfig` combines the sections and validates
settings that depend on one another. `model`, `optimizer` and `trainer` are levanter's sections.
"""

import dataclasses
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from levanter.models.lm_model import LmConfig
from levanter.optim import AdamConfig, OptimizerConfig
from levanter.trainer import TrainerConfig

import marin_rl.objectives.gae
import marin_rl.objectives.gigpo
import marin_rl.rewards.components  # noqa: F401
from marin_rl.batching.packing import RowLayout
from marin_rl.enum_fields import convert_enum_fields
from marin_rl.environments.base import EnvironmentConfig
from marin_rl.learner.attention_kernel import PLATFORMS, AttentionKernel, attention_kernel, round_up
from marin_rl.learner.checkpoint import CheckpointConfig
from marin_rl.learner.critic import CriticConfig
from marin_rl.models.support import check_model
from marin_rl.objectives.advantage_inputs import AdvantageConfig
from marin_rl.objectives.advantages import RlooConfig
from marin_rl.objectives.aggregation import AggregationConfig, SequenceSumConfig
from marin_rl.objectives.importance import NoCorrectionConfig, OffPolicyCorrectionConfig
from marin_rl.objectives.kl import KlConfig, NoKlConfig
from marin_rl.objectives.policy_loss import PolicyLossConfig, ReinforceLossConfig
from marin_rl.objectives.shaping import KeepTruncatedConfig, OverlongConfig, TruncationConfig
from marin_rl.rewards.sandbox.config import SandboxConfig
from marin_rl.rollouts.filters import FilterConfig, KeepGroupsConfig
from marin_rl.rollouts.rollout_builder import LongPrompts
from marin_rl.rollouts.state_hashing import StateHashingConfig
from marin_rl.rollouts.store import RolloutStoreConfig
from marin_rl.runtime.config_decoding import decode
from marin_rl.runtime.evaluation import EvaluationConfig
from marin_rl.runtime.log_levels import LogLevel, module_levels
from marin_rl.runtime.run_directory import local_path
from marin_rl.runtime.warm_start import WarmStartConfig
from marin_rl.runtime.workers_config import Mode, Refresh, ReplayConfig, WorkersConfig
from marin_rl.sampling.config import LevanterSamplerConfig, OpenAiSamplerConfig, SamplerConfig, SamplingConfig
from marin_rl.tokenization.load import TokenizerConfig
from marin_rl.weights.config import ArrowFlightConfig, WeightTransferConfig, is_loopback


def compilation_cache() -> str:
    """Folder of compiled programs that are reused between runs, in the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return str(Path(home) / "marin_rl" / "jax")


def levanter_defaults() -> dict[str, Any]:
    """Defaults of this project that differ from levanter's, as nested plain values.

    By default, levanter's trainer requires an accelerator, logs to wandb, writes compiler dumps and starts Ray.
    A run of this project starts on a laptop without any of these.
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
    "train_batch_size": "set rollouts.prompts_per_step and rollouts.group_size, whose product is the batch",
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
"""Fields of levanter's trainer section that would be ignored, with the setting to use instead."""


_PATH_FIELDS = {"run_dir", "initialize_from", "path", "held_out_path", "folder", "chat_template"}
"""Names of this project's settings that are paths."""
_ADDRESS_FIELDS = {"weights.folder"}
"""Path settings that also accept addresses; their sections validate them."""


def _check_paths(section: object, prefix: str = "") -> None:
    """Validate that the paths of a config are local, not addresses such as `gs://bucket`."""
    if isinstance(section, Mapping):
        parts = [(str(name), value) for name, value in section.items()]
    elif isinstance(section, Sequence) and not isinstance(section, str):
        parts = [(str(index), value) for index, value in enumerate(section)]
    elif dataclasses.is_dataclass(section) and type(section).__module__.startswith("marin_rl."):
        parts = [(field.name, getattr(section, field.name)) for field in dataclasses.fields(section)]
        for name, value in parts:
            if isinstance(value, str) and name in _PATH_FIELDS and f"{prefix}{name}" not in _ADDRESS_FIELDS:
                local_path(value, f"{prefix}{name}")
    else:
        return
    for name, value in parts:
        _check_paths(value, f"{prefix}{name}.")


def _field_default(section: type, name: str) -> Any:
    field = next(field for field in dataclasses.fields(section) if field.name == name)
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


ROW_MULTIPLE = 128
"""The default length of a packed row is rounded up to a multiple of this."""
TOKENS_PER_MICROBATCH = 1024
"""Positions of a microbatch on each device if the config does not set the number of rows."""


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """Number of rollouts per step, their limits, and the layout of batch rows."""

    prompts_per_step: int = 64
    """Tasks sampled per step. At least 1."""
    group_size: int = 8
    """Rollouts per task; advantages compare the rollouts of one task. At least 1."""
    max_length: int = 512
    """Maximum tokens in a sequence, prompt and answers together. At least 1."""
    max_prompt_length: int | None = None
    """Maximum tokens in a task's prompt, from 1 to `max_length - 1`; null: `max_length - 1`."""
    long_prompts: LongPrompts = LongPrompts.ERROR
    """Handling of tasks with a longer prompt, in training and evaluation: `error` ends the run and names the task,
    `skip` uses the next task instead, `truncate_left` keeps the last `max_prompt_length` tokens of the prompt, which
    include the template's generation prompt."""
    max_turns: int = 1
    """Maximum answers in a rollout. At least 1."""
    max_tokens: int | None = None
    """Maximum tokens in all answers of a rollout together, at least 1; null: not limited."""
    max_seconds: float = 120.0
    """Time limit in seconds of the environment's work for one rollout, above 0; time spent waiting for the sampler
    does not count. Only the rollout that exceeds it fails. Reward functions have the limits of `sandbox`."""
    state_hashing: StateHashingConfig | None = None
    """A user function that maps turns to states, for `advantage: {type: gigpo}`; null: a hash of the environment's
    anchor state or, without one, of the messages shown."""
    packing: bool = True
    """Whether a batch row holds several sequences, in segments that do not attend to one another; false: one sequence
    per row."""
    row_length: int | None = None
    """Positions of a batch row, at least `max_length`; null: `max_length`, with packing rounded up to a multiple of
    128, and further if the attention kernel requires it. `trainer.per_device_parallelism` sets the rows per
    microbatch."""

    def __post_init__(self) -> None:
        convert_enum_fields(self)
        for name in ("prompts_per_step", "group_size", "max_length", "max_turns"):
            if getattr(self, name) < 1:
                raise ValueError(f"rollouts.{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_prompt_length is not None and not 1 <= self.max_prompt_length < self.max_length:
            raise ValueError(
                f"rollouts.max_prompt_length is {self.max_prompt_length}; it must be at least 1 and below "
                f"rollouts.max_length, which is {self.max_length}, to leave room for an answer"
            )
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"rollouts.max_tokens is {self.max_tokens}; it must be at least 1, or null for no limit")
        if not 0 < self.max_seconds <= 1e9:
            raise ValueError(
                f"rollouts.max_seconds is {self.max_seconds}; it must be a number of seconds above 0 and at most 1e9"
            )
        if self.row_length is not None and self.row_length < self.max_length:
            raise ValueError(
                f"rollouts.row_length is {self.row_length}, but a sequence may have rollouts.max_length = "
                f"{self.max_length} tokens, and must fit into a row; raise row_length or lower max_length"
            )

    @property
    def rollouts_per_step(self) -> int:
        """Number of rollouts per step."""
        return self.prompts_per_step * self.group_size

    def positions(self, kernel: AttentionKernel) -> int:
        """Positions of a batch row.

        Args:
            kernel: attention kernel that processes the rows.

        Raises:
            ValueError: if the kernel does not support the configured `row_length`.

        >>> from levanter.layers.attention import AttentionBackend
        >>> flash, splash = AttentionKernel(AttentionBackend.JAX_FLASH), AttentionKernel(AttentionBackend.SPLASH)
        >>> [RolloutConfig(max_length=200, packing=packing).positions(flash) for packing in (True, False)]
        [256, 200]
        >>> [RolloutConfig(max_length=1100).positions(kernel) for kernel in (flash, splash)]
        [1280, 1536]
        """
        if self.row_length is None:
            return kernel.fit(self._shortest_row)
        if not kernel.takes(self.row_length):
            raise ValueError(
                f"rollouts.row_length is {self.row_length}, but {kernel.backend.value} attention (model.attn_backend) "
                f"does not support rows of that length; set rollouts.row_length: {kernel.fit(self.row_length)}, or null"
            )
        return self.row_length

    @property
    def rows_per_device(self) -> int:
        """Default rows per microbatch on each device, about `TOKENS_PER_MICROBATCH` tokens."""
        return max(TOKENS_PER_MICROBATCH // self._shortest_row, 1)

    @property
    def _shortest_row(self) -> int:
        if self.row_length is not None:
            return self.row_length
        return round_up(self.max_length, ROW_MULTIPLE) if self.packing else self.max_length


@dataclasses.dataclass(frozen=True)
class UpdateConfig:
    """Number of optimizer updates per step."""

    epochs: int = 1
    """Epochs over the rollouts of a step. At least 1."""
    minibatches: int = 1
    """Updates per epoch, at least 1. Each rollout is in exactly one minibatch; they are shuffled in each epoch."""

    def __post_init__(self) -> None:
        for name in ("epochs", "minibatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"updates.{name} is {getattr(self, name)}; it must be at least 1")

    @property
    def per_step(self) -> int:
        """Number of updates per step."""
        return self.epochs * self.minibatches


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Configuration of a training run."""

    environment: EnvironmentConfig
    """Source of the tasks and their rewards."""
    run_dir: str
    """Run directory, a path. A run resumes if its directory contains a checkpoint."""
    model: LmConfig | None = None
    """Model architecture (levanter's section), required to train from scratch; null: read from `initialize_from`. The
    built-in sampler supports `llama`, `qwen2` and `qwen3`. With `sampler: {type: openai}`, `gemma`, `gemma2`, `gpt2`,
    `mistral`, `mixtral` and `olmo2` can also be trained."""
    initialize_from: str | None = None
    """Initial weights: a folder or hub name in Hugging Face format, or a run directory of marin_rl; null: random
    weights."""
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
    sampler: SamplerConfig = LevanterSamplerConfig()
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
    """`sync` alternates sampling and training in one process; `async` samples in rollout workers during training."""
    workers: WorkersConfig = WorkersConfig()
    """Rollout workers, for `mode: async`."""
    ray_address: str | None = None
    """Ray cluster of the rollout workers: `auto` for the cluster of this machine, or `host:port` of the head node;
    null: a local cluster is started and stopped with the run."""
    replay: ReplayConfig = ReplayConfig()
    """Replay buffer and staleness limits, for `mode: async`."""
    weights: WeightTransferConfig = ArrowFlightConfig()
    """Weight transfer from the trainer to the workers, for `mode: async`."""
    logprob_block_size: int = 128
    """Positions of a row whose logits are in memory at once. At least 1."""
    warm_start: WarmStartConfig = WarmStartConfig()
    """Supervised training before RL."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Evaluation on held-out tasks."""
    log_level: LogLevel = LogLevel.INFO
    """Minimum level of messages in `log.txt`, `processes/*.txt` and `workers/*.txt`: `debug`, `info`, `warning` or
    `error`. `debug` logs every turn of every episode."""
    logging: dict[str, str] = dataclasses.field(default_factory=dict)
    """Log levels of modules or packages that override `log_level`, such as `{marin_rl.rollouts: debug}`."""
    rollout_store: RolloutStoreConfig = RolloutStoreConfig()
    """Storage of rollouts in the run directory."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoint schedule."""
    optimizer: OptimizerConfig = dataclasses.field(default_factory=AdamConfig)
    """Optimizer and learning-rate schedule of RL (levanter's section)."""
    trainer: TrainerConfig = dataclasses.field(default_factory=default_trainer)
    """Mesh, precision, microbatches and trackers (levanter's section). Batch size and number of steps follow from
    `rollouts` and `num_steps`."""

    def __post_init__(self) -> None:
        convert_enum_fields(self)
        _check_paths(self)
        cache = self.trainer.jax_compilation_cache_dir
        if cache is not None and not cache.startswith("gs://"):
            local_path(cache, "trainer.jax_compilation_cache_dir")
        module_levels(self.logging)
        if self.num_steps < 0:
            raise ValueError(f"num_steps is {self.num_steps}; it must be at least 0")
        if not 0 <= self.optimizer.learning_rate < math.inf:
            raise ValueError(
                f"optimizer.learning_rate is {self.optimizer.learning_rate}; it must be a finite number of at least 0"
            )
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
                raise ValueError(f"trainer.{name} is {given!r}, but this setting has no effect: {remedy}")
        if self.model is not None and self.rollouts.max_length > self.model.Pos.size:
            raise ValueError(
                f"rollouts.max_length is {self.rollouts.max_length}, but the model's context has {self.model.Pos.size} "
                "tokens (model.seq_len); lower rollouts.max_length or raise model.seq_len"
            )
        self._check_row_length()
        if self.rollouts.long_prompts is LongPrompts.TRUNCATE_LEFT and self.rollouts.max_prompt_length is None:
            keep = max(self.rollouts.max_length - self.sampling.max_new_tokens, 1)
            raise ValueError(
                "rollouts.long_prompts is truncate_left, but rollouts.max_prompt_length is null; set it to the number "
                f"of tokens to keep, such as rollouts.max_length - sampling.max_new_tokens = {keep}"
            )
        if self.model is not None:
            check_model(
                self.model,
                built_in_sampler=isinstance(self.sampler, LevanterSamplerConfig),
                max_length=self.rollouts.max_length,
            )
        if getattr(self.model, "scan_layers", True) is False:
            raise ValueError(
                "model.scan_layers is false, but levanter's inference engine supports scanned layers only; "
                "set it to true"
            )
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
        if self.ray_address is not None and not re.fullmatch(r"auto|[^/]+:\d{1,5}", self.ray_address):
            raise ValueError(
                f"ray_address is {self.ray_address!r}; it is `auto`, or `host:port` of a cluster's head, such as "
                "10.0.0.1:6379. Over Ray's client protocol (ray://) runs cannot be started: start them on a machine of "
                "the cluster"
            )
        if self.mode is Mode.ASYNC and isinstance(self.sampler, OpenAiSamplerConfig):
            self._check_worker_of(self.sampler)
        if self.mode is Mode.ASYNC and self.ray_address is not None and isinstance(self.weights, ArrowFlightConfig):
            self._check_weights_reach(self.ray_address, self.weights)
        self._check_objective()

    def _check_weights_reach(self, ray_address: str, weights: ArrowFlightConfig) -> None:
        if is_loopback(weights.host) and not is_loopback(ray_address.rpartition(":")[0]):
            raise ValueError(
                f"weights.host is {weights.host}, which only this machine can reach, but the workers run on the Ray "
                f"cluster at ray_address {ray_address!r}; set weights.host to an address of this machine in a trusted "
                "network, or to 0.0.0.0. If the cluster consists of this machine only, set ray_address: 127.0.0.1:PORT"
            )

    def _check_row_length(self) -> None:
        """Validate that a platform supports the row length; the run's platform is checked after jax has started."""
        errors = []
        for platform in PLATFORMS:
            try:
                self.rollouts.positions(attention_kernel(self.model, platform))
            except ValueError as error:
                errors.append(error)
        if len(errors) == len(PLATFORMS):
            raise errors[0]

    def _check_worker_of(self, server: OpenAiSamplerConfig) -> None:
        if self.workers.num_workers != 1:
            raise ValueError(
                f"workers.num_workers is {self.workers.num_workers}, but several workers would overwrite each other's "
                f"weights on the server {server.base_url}; set workers.num_workers: 1, raise sampling.max_seqs, and "
                "put further engines behind that address"
            )
        if self.workers.refresh is Refresh.IN_FLIGHT:
            raise ValueError(
                f"workers.refresh is in_flight, but if {server.base_url} loads weights during an answer, the version "
                "that sampled each token is unknown; set workers.refresh: between_groups"
            )

    def _check_objective(self) -> None:
        if self.rollouts.group_size < self.advantage.minimum_group_size:
            raise ValueError(
                f"rollouts.group_size is {self.rollouts.group_size}, but advantage {self.advantage_name!r} compares "
                f"the rollouts of a prompt and needs at least {self.advantage.minimum_group_size}; "
                "raise it, or use advantage: {type: reinforce}"
            )
        if self.filter.drops and self.rollouts.group_size < 2:
            raise ValueError(
                f"filter {FilterConfig.get_choice_name(type(self.filter))!r} drops groups with equal rewards, "
                "which is every group if rollouts.group_size is 1; raise it, or use filter: {type: keep}"
            )
        if self.advantage.needs_critic and self.critic is None:
            raise ValueError(
                f"advantage {self.advantage_name!r} needs a critic; add critic: {{shared_trunk: true}}, or use an "
                "advantage that compares the rollouts of a prompt, such as advantage: {type: rloo}"
            )
        if self.critic is not None and not self.advantage.needs_critic:
            raise ValueError(
                f"critic is set, but advantage {self.advantage_name!r} does not use it; set advantage: {{type: gae}}, "
                "or critic: null"
            )
        if self.advantage.needs_turns and self.rollouts.max_turns < 2:
            raise ValueError(
                f"advantage {self.advantage_name!r} compares the turns of a rollout, but rollouts.max_turns is "
                f"{self.rollouts.max_turns}; raise it and use an environment with several turns, or use "
                "advantage: {type: rloo}"
            )
        loss_name = PolicyLossConfig.get_choice_name(type(self.policy_loss))
        if self.updates.per_step > 1 and not self.policy_loss.uses_ratio:
            raise ValueError(
                f"updates sets {self.updates.per_step} updates per step, but policy_loss {loss_name!r} does not "
                "correct for changes of the policy since sampling; use policy_loss: {type: ppo_clip}, or one update"
            )
        if self.off_policy_correction.is_token_level and self.policy_loss.is_sequence_level:
            name = OffPolicyCorrectionConfig.get_choice_name(type(self.off_policy_correction))
            raise ValueError(
                f"off_policy_correction {name!r} weights single tokens, but policy_loss {loss_name!r} has one ratio "
                "per rollout; use off_policy_correction: {type: mask}, which drops whole rollouts"
            )
        if self.advantage.is_token_level and self.policy_loss.is_sequence_level:
            raise ValueError(
                f"advantage {self.advantage_name!r} differs between the tokens of a rollout, but policy_loss "
                f"{loss_name!r} has one ratio per rollout and would average it; set policy_loss: {{type: ppo_clip}}"
            )
        if self.updates.minibatches > self.rollouts.rollouts_per_step:
            raise ValueError(
                f"updates.minibatches is {self.updates.minibatches}, but a step has only "
                f"{self.rollouts.rollouts_per_step} rollouts; lower it or raise rollouts.prompts_per_step"
            )
        if self.overlong.buffer > self.sampling.max_new_tokens:
            raise ValueError(
                f"overlong.buffer is {self.overlong.buffer}, but an answer has at most sampling.max_new_tokens = "
                f"{self.sampling.max_new_tokens} tokens; lower overlong.buffer or raise sampling.max_new_tokens"
            )

    @property
    def advantage_name(self) -> str:
        """Name of the advantage estimator in YAML."""
        return AdvantageConfig.get_choice_name(type(self.advantage))

    def trainer_config(self) -> TrainerConfig:
        """Levanter's trainer section with the number of steps, the seed and the run's name."""
        return dataclasses.replace(
            self.trainer,
            num_train_steps=self.num_steps,
            seed=self.seed,
            id=self.trainer.id or Path(self.run_dir).name,
        )

    def row_layout(self, trainer: TrainerConfig) -> RowLayout:
        """Shape of the microbatches.

        Args:
            trainer: trainer section completed by `start_devices`.

        Raises:
            ValueError: if the attention kernel of the trainer's platform does not support `rollouts.row_length`.
        """
        return RowLayout(
            self.rollouts.positions(self._kernel(trainer)),
            cast(int, trainer.train_batch_size),
            self.rollouts.packing,
            whole_rollouts=self.policy_loss.is_sequence_level,
        )

    def trained_model(self, trainer: TrainerConfig) -> LmConfig:
        """Model config with the attention kernel of the trainer's platform and a block size that divides the rows.

        Args:
            trainer: trainer section completed by `start_devices`.

        Raises:
            ValueError: if the attention kernel of the trainer's platform does not support `rollouts.row_length`.
        """
        assert self.model is not None
        kernel = self._kernel(trainer)
        return kernel.configure(self.model, self.rollouts.positions(kernel))

    def _kernel(self, trainer: TrainerConfig) -> AttentionKernel:
        return attention_kernel(self.model, trainer.device_mesh.devices.flat[0].platform)
