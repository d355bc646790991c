# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Where the weights of a run come from: chance, weights in Hugging Face format, or one of its checkpoints."""

import dataclasses
from pathlib import Path

import equinox as eqx
import jax
from haliax import Axis
from levanter.models.lm_model import LmHeadModel
from levanter.trainer import TrainerConfig
from levanter.trainer_state import TrainerState

from marin_rl.learner.checkpoint import Checkpoint
from marin_rl.learner.critic import with_critic
from marin_rl.learner.policy_model import initialize_policy, load_hf_policy, model_shape, read_hf_architecture
from marin_rl.learner.train_step import Learner
from marin_rl.runtime.config import TrainConfig
from marin_rl.seeds import derive_seed
from marin_rl.tokenization.chat import ChatTokenizer


def resolve_model(config: TrainConfig) -> TrainConfig:
    """Fill in `model` from the weights that the run starts from, if it is left out, and compare the two if it is not.

    A run that has begun with a `model` of its own takes its weights from its checkpoints; `initialize_from` is not read
    again.

    Raises:
        PolicyModelError: if `initialize_from` cannot be loaded, or differs from `model`.
        ValueError: if it is the directory of a run that has not finished, or does not suit the config.
    """
    if config.initialize_from is None or (config.model is not None and Path(config.run_dir, "config.yaml").exists()):
        return config
    model = read_hf_architecture(hf_folder(config.initialize_from), config.model)
    return config if config.model is not None else dataclasses.replace(config, model=model)


def hf_folder(source: str) -> str:
    """Where weights lie in Hugging Face format: in a run directory's `hf/`, or in what is named itself.

    Args:
        source: a run directory, or a folder or hub name in Hugging Face format.

    Raises:
        ValueError: if it is the directory of a run that has not finished.
    """
    folder = Path(source)
    # Some checkpoints in Hugging Face format have a config.yaml of their training beside config.json.
    if (folder / "config.yaml").exists() and not (folder / "config.json").exists():
        if not (folder / "hf" / "config.json").exists():
            raise ValueError(
                f"initialize_from: the run in {source!r} has not finished: it has no hf/ folder yet. "
                "run its command again to finish it"
            )
        return str(folder / "hf")
    return source


def first_policy(config: TrainConfig, tokenizer: ChatTokenizer, trainer: TrainerConfig) -> LmHeadModel:
    """The policy that a run begins with, before any training: random weights, or those of `initialize_from`.

    Args:
        config: the run's; its `model` filled in.
        tokenizer: its vocabulary becomes that of a model with random weights.
        trainer: as `start_devices` completed it; mesh, axis mapping and parameter precision.

    Raises:
        PolicyModelError: if `initialize_from` cannot be loaded, or does not fit the config or the tokenizer.
    """
    model = config.trained_model(trainer)
    if config.initialize_from is not None:
        return load_hf_policy(hf_folder(config.initialize_from), tokenizer, trainer, model)
    key = jax.random.PRNGKey(derive_seed(config.seed, "weights") % 2**32)
    return initialize_policy(model, tokenizer, trainer, key=key)


def restore_policy(checkpoint: Checkpoint, config: TrainConfig, trainer: TrainerConfig) -> LmHeadModel:
    """The policy's weights out of a checkpoint, without its critic, if any, and without the optimizer's state.

    Args:
        checkpoint: of a run.
        config: that run's config; its `model` filled in.
        trainer: as `start_devices` completed it; mesh and axis mapping.

    Raises:
        CheckpointError: if the checkpoint holds another model than the config says.
    """
    like = _policy_shape(checkpoint, config, trainer)
    where = "model" if config.critic is None else "model/policy"
    return checkpoint.restore_model(like, where, axis_mapping=trainer.parameter_axis_mapping, mesh=trainer.device_mesh)


def restore_state(checkpoint: Checkpoint, config: TrainConfig, learner: Learner) -> TrainerState:
    """Weights, optimizer moments and random key out of a checkpoint, as an update would have left them.

    Args:
        checkpoint: of a run.
        config: that run's config; its `model` filled in.
        learner: that run's; says what state there is, and where it lies.

    Raises:
        CheckpointError: if the checkpoint holds another model or optimizer than the config says.
    """
    policy = _policy_shape(checkpoint, config, learner.trainer.config)
    model = policy if config.critic is None else eqx.filter_eval_shape(with_critic, config.critic, policy)
    like = learner.state_shape(model)
    return learner.place(checkpoint.restore(like, axis_mapping=learner.parameter_mapping, mesh=learner.mesh))


def _policy_shape(checkpoint: Checkpoint, config: TrainConfig, trainer: TrainerConfig) -> LmHeadModel:
    return model_shape(config.trained_model(trainer), Axis("vocab", checkpoint.progress["vocab_size"]), trainer)
