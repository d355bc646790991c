# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The policy as a model: from scratch, from and to the Hugging Face format."""

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import equinox as eqx
import haliax as hax
import jax
from haliax import Axis
from levanter.compat.hf_checkpoints import HFCheckpointConverter, HFCompatConfig, ModelWithHfSerializationMixin
from levanter.models.lm_model import LmConfig, LmHeadModel
from levanter.trainer import TrainerConfig
from safetensors import SafetensorError
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from marin_rl.tokenization.chat import ChatTokenizer

logger = logging.getLogger(__name__)

LEVANTER_MODELS = {
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gpt2": "gpt2",
    "llama": "llama",
    "mistral": "mistral",
    "mixtral": "mixtral",
    "olmo2": "olmo2",
    "qwen2": "qwen",
    "qwen3": "qwen3",
}
"""Levanter's name of each architecture, by the `model_type` in a Hugging Face `config.json`."""


class PolicyModelError(ValueError):
    """A model that cannot be made, loaded or saved as asked; says why and what to do."""


def initialize_policy(
    config: LmConfig, tokenizer: ChatTokenizer, trainer: TrainerConfig, *, key: jax.Array
) -> LmHeadModel:
    """A policy with random weights, sharded as the trainer wants its parameters.

    Args:
        config: levanter's model configuration.
        tokenizer: its vocabulary becomes the model's.
        trainer: mesh, axis mapping and parameter precision.
        key: random key of the initial weights.
    """
    Vocab = Axis("vocab", tokenizer.vocab_size)

    def build(key: jax.Array) -> LmHeadModel:
        return trainer.mp.cast_to_param(config.build(Vocab, key=key))

    with trainer.use_device_mesh():
        return hax.named_jit(build, axis_resources=trainer.parameter_axis_mapping)(key)


def model_shape(config: LmConfig, Vocab: Axis, trainer: TrainerConfig) -> LmHeadModel:
    """The shapes and dtypes of a policy's parameters, without making any."""

    def build() -> LmHeadModel:
        return trainer.mp.cast_to_param(config.build(Vocab, key=jax.random.PRNGKey(0)))

    return eqx.filter_eval_shape(build)


def load_hf_policy(
    checkpoint: str, tokenizer: ChatTokenizer, trainer: TrainerConfig, config: LmConfig | None
) -> LmHeadModel:
    """A policy from a folder, or a hub name, in Hugging Face format.

    Args:
        checkpoint: folder with `config.json` and safetensors, or a hub name.
        tokenizer: must not know more tokens than the checkpoint.
        trainer: mesh, axis mapping and parameter precision.
        config: overrides the architecture in the checkpoint's own `config.json`; None takes that.

    Raises:
        PolicyModelError: if the checkpoint is missing, damaged or of an unknown architecture, or does not fit
            `config` or the tokenizer.
    """
    checkpoint = _absolute_folder(checkpoint)
    converter = _converter_for(checkpoint, tokenizer)
    vocab_size = _read_hf_config(checkpoint).vocab_size
    if tokenizer.vocab_size > vocab_size:
        raise PolicyModelError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but the model in {checkpoint!r} has a vocabulary of "
            f"{vocab_size}: token ids would fall outside it. Use the tokenizer that belongs to the checkpoint "
            f"(tokenizer.path: {checkpoint})"
        )
    try:
        with trainer.use_device_mesh():
            model = converter.load_pretrained(
                converter.LevConfigClass if config is None else config.model_type,
                ref=checkpoint,
                config=cast(HFCompatConfig | None, config),
                axis_mapping=trainer.parameter_axis_mapping,
                resize_vocab_to_match_tokenizer=False,
                dtype=trainer.mp.param_dtype,
            )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise PolicyModelError(
            f"the weights in {checkpoint!r} are missing, damaged, or of another shape than the configured model "
            f"({str(error).splitlines()[0]}); leave model out to take the architecture from the checkpoint itself"
        ) from error
    return cast(LmHeadModel, model)


def save_hf_policy(model: LmHeadModel, tokenizer: ChatTokenizer, folder: Path, trainer: TrainerConfig) -> None:
    """Write a policy in Hugging Face format: safetensors, `config.json`, tokenizer and chat template.

    Raises:
        PolicyModelError: if levanter cannot export this architecture.
        OSError: if the folder cannot be written.
    """
    config = model.config
    if not isinstance(config, HFCompatConfig):
        raise PolicyModelError(f"{type(config).__name__} has no Hugging Face form; it cannot be exported to {folder}")
    hf_config = config.to_hf_config(model.vocab_size)
    hf_config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[hf_config.model_type]]
    with _system_errors(folder):
        _export(model, hf_config, tokenizer, folder, trainer)


def _export(
    model: LmHeadModel, hf_config: PretrainedConfig, tokenizer: ChatTokenizer, folder: Path, trainer: TrainerConfig
) -> None:
    # The converter copies some keys from a reference; this checkpoint's own config is that reference.
    hf_config.save_pretrained(folder)
    converter = HFCheckpointConverter(
        type(cast(HFCompatConfig, model.config)),
        reference_checkpoint=str(folder),
        HfConfigClass=type(hf_config),
        tokenizer=cast(PreTrainedTokenizerFast, tokenizer.tokenizer),
        # It would forbid generation to begin with the end token, which is an answer like any other.
        config_overrides={"begin_suppress_tokens": None},
    )
    with trainer.use_device_mesh(), hax.axis_mapping(trainer.parameter_axis_mapping):
        converter.save_pretrained(cast(ModelWithHfSerializationMixin, model), str(folder), save_reference_code=False)


@contextlib.contextmanager
def _system_errors(folder: Path) -> Iterator[None]:
    """Give the system's refusals one type: safetensors and tokenizers, which are Rust, have errors of their own."""
    try:
        yield
    except Exception as error:
        if number := re.search(r"\(os error (\d+)\)", str(error)):
            code = int(number[1])
            raise OSError(code, os.strerror(code), str(folder)) from error
        raise


def read_hf_architecture(checkpoint: str) -> LmConfig:
    """Levanter's configuration of a checkpoint in Hugging Face format.

    Raises:
        PolicyModelError: if it is missing or of an unknown architecture.
    """
    hf_config = _read_hf_config(checkpoint)
    return cast(LmConfig, _architecture(checkpoint, hf_config).from_hf_config(hf_config))


def _absolute_folder(checkpoint: str) -> str:
    # Levanter asks the hub for any file that it does not see; a relative folder would pass for a hub name there.
    return str(Path(checkpoint).absolute()) if Path(checkpoint).is_dir() else checkpoint


def _read_hf_config(checkpoint: str) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(checkpoint)
    except (OSError, ValueError) as error:
        raise PolicyModelError(
            f"no model in Hugging Face format at {checkpoint!r}: it is neither a folder with a config.json nor a hub "
            f"name that could be reached ({str(error).splitlines()[0]})"
        ) from error


def _architecture(checkpoint: str, hf_config: PretrainedConfig) -> type[HFCompatConfig]:
    choice = LEVANTER_MODELS.get(hf_config.model_type)
    if choice is None:
        raise PolicyModelError(
            f"{checkpoint!r} holds a {hf_config.model_type!r} model, which levanter does not know; "
            f"it knows {', '.join(LEVANTER_MODELS)}"
        )
    return LmConfig.get_choice_class(choice)


def _converter_for(checkpoint: str, tokenizer: ChatTokenizer) -> HFCheckpointConverter:
    hf_config = _read_hf_config(checkpoint)
    return HFCheckpointConverter(
        _architecture(checkpoint, hf_config),
        reference_checkpoint=checkpoint,
        HfConfigClass=type(hf_config),
        tokenizer=cast(PreTrainedTokenizerFast, tokenizer.tokenizer),
    )
