# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Levanter's sections of `TrainConfig`, `optimizer` and `trainer`: defaults, and settings that a run cannot use."""

import math

import jax.numpy as jnp
from levanter.distributed import DistributedConfig, RayConfig
from levanter.optim import MarsConfig, OptimizerConfig
from levanter.trainer import TrainerConfig

from marin_rl.config.decode import default_of
from marin_rl.remote_path import RemotePath
from marin_rl.storage import storage_path, user_cache

UNUSABLE_OPTIMIZERS = ("adamH", "kron", "muonH", "rmsprop", "scion", "sophia-h")
"""Levanter's optimizers whose update cannot be compiled: sophia-h needs the loss function, the others call functions
that the installed jax has removed or does not support in a compiled program."""
TRAINER_KEYS_WITHOUT_EFFECT = {
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
    "batch_axis": "the axis of rows is always named batch",
    "profiler_perfetto_link": "open profile/ in the run directory with TensorBoard or Perfetto",
    "watch": "not supported; leave it out",
    "crash_on_nan": "a run always ends at an update that is not finite",
    "crash_on_inf": "a run always ends at an update that is not finite",
    "log_dir": "the log is in the run directory",
    "log_jaxprs": "the environment variable XLA_FLAGS=--xla_dump_to=FOLDER writes compiled programs",
    "log_xla_hlo": "the environment variable XLA_FLAGS=--xla_dump_to=FOLDER writes compiled programs",
    "shutdown_at_exit": "python -m marin_rl.launch tpu has the option --autodelete",
    "per_device_eval_parallelism": "set sampling.max_seqs",
    "allow_partial_checkpoint": "a checkpoint must be complete",
    "allow_nondivisible_batch_size": "rows that fill up a batch need no setting",
    "ray": "set ray_address at the top level",
}
"""Keys of the trainer section that would be ignored, each with the setting to use instead."""


def default_trainer() -> TrainerConfig:
    """Levanter's trainer section with defaults for any machine.

    Levanter's own defaults require an accelerator, log to wandb, write compiler dumps and start Ray.
    """
    return TrainerConfig(
        tracker=(),
        require_accelerator=False,
        log_jaxprs=False,
        log_xla_hlo=False,
        jax_compilation_cache_dir=str(user_cache("jax")),
        distributed=DistributedConfig(initialize_jax_distributed=False),
        ray=RayConfig(auto_start_cluster=False),
    )


def check_optimizer(optimizer: OptimizerConfig) -> None:
    """Raise a `ValueError` if the update of an optimizer cannot be compiled, or its learning rate is not finite."""
    if not 0 <= optimizer.learning_rate < math.inf:
        raise ValueError(
            f"optimizer.learning_rate is {optimizer.learning_rate}; it must be a finite number of at least 0"
        )
    refused = {OptimizerConfig.get_choice_class(name): name for name in UNUSABLE_OPTIMIZERS}
    if name := refused.get(type(optimizer)):
        usable = sorted(OptimizerConfig.get_known_choices().keys() - refused.values())
        raise ValueError(
            f"optimizer.type is {name!r}, whose update in levanter cannot be compiled; use one of {', '.join(usable)}"
        )
    if isinstance(optimizer, MarsConfig) and optimizer.max_grad_norm:
        raise ValueError(
            f"optimizer.max_grad_norm is {optimizer.max_grad_norm}, but levanter's clipping in mars cannot be "
            "compiled; set optimizer.max_grad_norm: null, or use optimizer: {type: adam}"
        )


def check_trainer(trainer: TrainerConfig) -> None:
    """Raise a `ValueError` for a setting that a run ignores or does not support."""
    cache = trainer.jax_compilation_cache_dir
    if cache is not None and "://" in cache:
        path = storage_path(cache, "trainer.jax_compilation_cache_dir")
        if not isinstance(path, RemotePath) or path.protocol not in ("gs", "s3"):
            raise ValueError(
                f"trainer.jax_compilation_cache_dir is {cache!r}, but jax supports only gs:// and s3:// addresses "
                "besides paths on a mounted file system"
            )
    defaults = default_trainer()
    for name, remedy in TRAINER_KEYS_WITHOUT_EFFECT.items():
        given = getattr(trainer, name)
        if given not in (default_of(TrainerConfig, name), getattr(defaults, name)):
            raise ValueError(f"trainer.{name} is {given!r}, but this setting has no effect: {remedy}")
    for name in ("profiler_start_step", "profiler_num_steps"):
        if getattr(trainer, name) < 1:
            raise ValueError(f"trainer.{name} is {getattr(trainer, name)}; it must be at least 1")
    precision = trainer.mp
    if jnp.float16 in (precision.param_dtype, precision.compute_dtype, precision.output_dtype):
        raise ValueError(
            f"trainer.mp is '{precision}', but gradients of many tokens underflow in float16, because the loss is "
            "not scaled; use bfloat16, such as p=f32,c=bf16"
        )
