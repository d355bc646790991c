# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The settings that all commands that train share.

Levanter takes seconds to import, so the types of its sections are deferred: a command checks all other settings first.
"""

import abc
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge

from marin_rl.config.sections import AbstractRowConfig
from marin_rl.learner.config import CriticConfig, ExportConfig, LoraConfig
from marin_rl.runs.run_directory import CheckpointConfig
from marin_rl.tokenization.config import TokenizerConfig
from marin_rl.utils.devices.sharding import POSITION
from marin_rl.utils.devices.trainer_config import TrainerConfig
from marin_rl.utils.logs import LogLevel, module_levels
from marin_rl.utils.settings.checks import ConfigSection, check_fields
from marin_rl.utils.settings.fields import LOCAL_PATH, STORAGE_PATH, check_paths, may_change, may_change_by_name
from marin_rl.utils.settings.section_types import NOT_READ, ConfigError, Deferred
from marin_rl.utils.storage import storage_path


def _model() -> Any:
    # Registers the decoders and encoders of levanter's types.
    import levanter.config  # noqa: F401
    from levanter.models.lm_model import LmConfig

    return LmConfig | None


def _optimizer() -> Any:
    import levanter.config  # noqa: F401
    from levanter.optim.config import OptimizerConfig

    return OptimizerConfig


def _default_optimizer() -> "OptimizerConfig":
    from levanter.optim.config import AdamConfig

    return AdamConfig()


if TYPE_CHECKING:
    from levanter.models.lm_model import LmConfig
    from levanter.optim.config import OptimizerConfig

    Model, Optimizer = LmConfig | None, OptimizerConfig
else:
    Model, Optimizer = Annotated[Any, Deferred(_model)], Annotated[Any, Deferred(_optimizer)]

Check = Callable[[Any], Iterable[str]]
"""A check of a config, which yields its problems or raises a `ValueError`; a message names the keys and the remedy."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbstractRunConfig(ConfigSection, abc.ABC):
    """Settings that all commands that train share."""

    is_whole_config = True
    command: ClassVar[str]
    """Name of the command after `python -m marin_rl.`."""
    source_key: ClassVar[str]
    """Key of the source of its data, which only configs of this command have."""
    common_keys: ClassVar[tuple[str, ...]]
    """Most important keys, for the overview of `--help`."""
    samples: ClassVar[bool] = False
    """Whether a run samples rollouts, so that it has an environment, a sampler and stored rollouts."""

    run_dir: str = dataclasses.field(metadata=STORAGE_PATH | may_change())
    """Run directory, a path or an address such as `gs://bucket/run` or `s3://bucket/run`. A run resumes if its
    directory contains a checkpoint."""
    imports: tuple[str, ...] = dataclasses.field(default=(), metadata=LOCAL_PATH)
    """Python files, such as `[my_objectives.py]`, or modules of installed packages, such as `[lab.objectives]`, that
    register further types. Every command that reads the config imports them first, without isolation."""
    # Levanter's lines have other defaults for this key, which nothing here reads.
    model: Model = dataclasses.field(default=None, metadata=may_change("reference_checkpoint"))
    """Model architecture (levanter's section), required to train from scratch; null: read from `initialize_from`. Its
    type is `gemma`, `gemma2`, `gpt2`, `llama`, `mistral`, `mixtral`, `olmo2`, `olmo3`, `qwen2`, `qwen3` or, with
    marin-levanter, `qwen3_moe`."""
    initialize_from: str | None = dataclasses.field(default=None, metadata=STORAGE_PATH)
    """Initial weights: a folder or hub name in Hugging Face format, or a run directory of marin_rl; null: random
    weights. A folder in an object store is copied into the cache folder of the user."""
    lora: LoraConfig | None = None
    """Low-rank adapter that is trained instead of the weights of `initialize_from`; null: all weights are trained."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """Tokenizer and chat template."""
    seed: int = 0
    """Random seed of initial weights, of the order of tasks or rows, and of sampling."""
    num_steps: Annotated[int, Ge(0)] = dataclasses.field(default=200, metadata=may_change_by_name())
    """Number of steps. A step of RL samples a batch of rollouts and trains on it."""
    optimizer: Optimizer = dataclasses.field(default_factory=_default_optimizer, metadata=may_change_by_name())
    """Optimizer and learning-rate schedule (levanter's section)."""
    trainer: TrainerConfig = dataclasses.field(
        default_factory=TrainerConfig,
        metadata=may_change(
            *("tracker", "jax_compilation_cache_dir", "distributed"),
            *("profiler", "profiler_start_step", "profiler_num_steps"),
        ),
    )
    """Mesh, precision, microbatches and trackers. Batch size and number of steps are not set here."""
    logprob_block_size: Annotated[int, Ge(1)] | None = None
    """Tokens on each device whose logits are in memory at once; null: 256 on a CPU, 1,024 on an accelerator."""
    log_level: LogLevel = dataclasses.field(default=LogLevel.INFO, metadata=may_change())
    """Minimum level of messages in `log.txt`, `processes/*.txt` and `workers/*.txt`: `debug`, `info`, `warning` or
    `error`. `debug` logs every turn of every episode."""
    logging: dict[str, str] = dataclasses.field(default_factory=dict, metadata=may_change())
    """Log levels of modules or packages that override `log_level`, such as `{marin_rl.rollouts: debug}`."""
    checkpoint: CheckpointConfig = dataclasses.field(default=CheckpointConfig(), metadata=may_change())
    """Checkpoint schedule."""
    export: ExportConfig = dataclasses.field(default=ExportConfig(), metadata=may_change())
    """Export of the final weights to `hf/` in the run directory."""

    def __post_init__(self) -> None:
        check_fields(self)
        checks = self.checks
        if NOT_READ not in (self.optimizer, self.model, self.trainer.tracker):
            # Imported here because levanter takes seconds to import.
            from marin_rl.learner import levanter_checks

            if problems := levanter_checks.section_problems(self):
                raise ConfigError(*problems)
            checks += levanter_checks.CHECKS
        problems: list[str] = []
        for check in checks:
            try:
                problems += check(self)
            except ValueError as error:
                problems += str(error).splitlines()
        if problems:
            raise ConfigError(*problems)

    @property
    def checks(self) -> tuple[Check, ...]:
        """Checks of the settings without levanter's sections."""
        return RUN_CHECKS

    @property
    @abc.abstractmethod
    def rows(self) -> AbstractRowConfig:
        """Layout of batch rows."""

    @property
    def num_updates(self) -> int:
        """Number of updates of the run, the length of the learning-rate schedule; 0 if it is not yet known."""
        return self.num_steps

    @property
    def temperature(self) -> float:
        """Temperature of the policy's log-probabilities."""
        return 1.0

    @property
    def teacher_context_tokens(self) -> int:
        """Maximum number of tokens that the context of a teacher adds to a rollout."""
        return 0

    @property
    def is_async(self) -> bool:
        """Whether rollout workers sample during training."""
        return False

    @property
    def replays_experts(self) -> bool:
        """Whether the updates use given experts, which only a mixture of experts has."""
        return False

    @property
    def trained_critic(self) -> CriticConfig | None:
        """Critic that is trained with the policy; None if there is none."""
        return None

    @property
    def needs_reference(self) -> bool:
        """Whether a reference scores the rollouts."""
        return False

    @property
    def needs_teacher(self) -> bool:
        """Whether a model teaches in the updates."""
        return False

    @property
    def needs_initial_policy(self) -> bool:
        """Whether a run needs the weights in its checkpoint of step 0."""
        return False

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """Texts that end a reply, for exports."""
        return ()

    @property
    def run_name(self) -> str:
        """Name of the run in trackers."""
        return self.trainer.id or storage_path(self.run_dir).name

    @property
    def context_shards(self) -> int:
        """Number of devices over which the positions of a row are split."""
        return self.trainer.model_axis_size if POSITION in (self.trainer.tensor_parallel_axes or ()) else 1


def _check_values(config: AbstractRunConfig) -> Iterable[str]:
    check_paths(config)
    module_levels(config.logging)
    return ()


def _check_start(config: AbstractRunConfig) -> Iterator[str]:
    if config.model is None and config.initialize_from is None:
        yield (
            "neither model nor initialize_from is set: name an architecture to start from scratch "
            "(model: {type: llama, ...}) or weights to start from (initialize_from: FOLDER)"
        )


def _check_lora(config: AbstractRunConfig) -> Iterator[str]:
    if config.lora is not None and config.initialize_from is None:
        yield (
            "lora is set, but initialize_from is not: an adapter changes weights that exist; set initialize_from to "
            "them, or lora: null to train all weights"
        )


def _check_context(config: AbstractRunConfig) -> Iterator[str]:
    axes = config.trainer.tensor_parallel_axes or ()
    if POSITION in config.trainer.axis_resources or (POSITION in axes and len(axes) > 1):
        yield (
            f"trainer.tensor_parallel_axes is {list(axes)} and trainer.axis_resources is "
            f"{dict(config.trainer.axis_resources)}, but {POSITION!r} can be split over devices only alone: set "
            f"trainer.tensor_parallel_axes: [{POSITION}]"
        )


RUN_CHECKS: tuple[Check, ...] = (_check_values, _check_start, _check_lora, _check_context)
"""Checks of settings that all training commands share."""
