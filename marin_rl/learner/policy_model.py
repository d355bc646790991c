# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Policy models: random initialization, import from and export to the Hugging Face format."""

import contextlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import haliax as hax
import jax
from haliax import Axis
from jax.typing import DTypeLike
from levanter.compat.hf_checkpoints import HFCheckpointConverter, HFCompatConfig
from levanter.models.lm_model import LmConfig, LmHeadModel
from safetensors import SafetensorError
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.hub import cached_file

from marin_rl.learner.hf_export import DeviceWeights, WeightParts, write_weights
from marin_rl.learner.policy_spec import PolicySpec, only_arrays
from marin_rl.models.conversion import check_same_function, levanter_config, to_hf_config
from marin_rl.models.hf_config import PolicyModelError, read_hf_config, with_number_types, write_experts
from marin_rl.models.hf_rope import write_rope
from marin_rl.models.hf_tensors import BASE_PREFIX, check_tensors, split_experts
from marin_rl.models.lora import Adapter
from marin_rl.models.peft_format import save_peft_adapter
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.hf_folder import save_tokenizer
from marin_rl.utils import multihost
from marin_rl.utils.devices.setup import platform_of
from marin_rl.utils.devices.trainer_config import TrainerConfig
from marin_rl.utils.levanter_line import max_positions


def initialize_policy(
    config: LmConfig, tokenizer: ChatTokenizer, trainer: TrainerConfig, *, key: jax.Array
) -> LmHeadModel:
    """Initialize a policy with random weights and the tokenizer's vocabulary, sharded like the trainer's parameters.

    Args:
        config: levanter's model configuration.
        tokenizer: its vocabulary becomes the model's.
        trainer: mesh, axis mapping and parameter precision.
        key: random key of the initial weights.

    Raises:
        ShardingError: if the mesh does not divide an axis of the model.
    """
    Vocab = Axis("vocab", tokenizer.vocab_size)
    PolicySpec(config, Vocab.size, trainer).check_mesh()

    def build(key: jax.Array) -> LmHeadModel:
        return trainer.mp.cast_to_param(only_arrays(config.build(Vocab, key=key)))

    program = cast(Any, hax.named_jit)(
        build, axis_resources=trainer.parameter_axis_mapping, compiler_options=_options_of_one_run(trainer)
    )
    with trainer.use_device_mesh():
        return program(key)


def _options_of_one_run(trainer: TrainerConfig) -> dict[str, str] | None:
    """Return XLA's options for a program that runs once: on a CPU, LLVM optimizes three times as long by default."""
    return {"xla_backend_optimization_level": "1"} if platform_of(trainer) == "cpu" else None


def load_hf_policy(
    checkpoint: str,
    tokenizer: ChatTokenizer,
    trainer: TrainerConfig,
    config: LmConfig | None,
    dtype: DTypeLike | None = None,
) -> LmHeadModel:
    """Load a policy from a folder or hub name in Hugging Face format.

    Args:
        checkpoint: folder with `config.json` and safetensors, or a hub name.
        tokenizer: its vocabulary must not exceed the checkpoint's.
        trainer: mesh, axis mapping and parameter precision.
        config: overrides the architecture in the checkpoint's `config.json`; None uses the checkpoint's.
        dtype: precision of the weights; None for that of parameters.

    Raises:
        PolicyModelError: if the checkpoint is missing, damaged or of an unknown architecture, has settings or tensors
            that the model does not implement, or does not fit `config` or the tokenizer.
        ShardingError: if the mesh does not divide an axis of the model.
    """
    # Levanter queries the hub for any file that it does not find; it would take a relative folder for a hub name.
    checkpoint = str(Path(checkpoint).absolute()) if Path(checkpoint).is_dir() else checkpoint
    hf_config, config = check_hf_policy(checkpoint, tokenizer, trainer, config)
    PolicySpec(config, hf_config.vocab_size, trainer).check_mesh()
    # Files of a hub name are in the cache by now. Levanter's new line would download them again, also offline.
    folder = str(Path(cast(str, cached_file(checkpoint, "config.json"))).parent)
    converter = _Converter(
        cast(type[HFCompatConfig], type(config)),
        reference_checkpoint=folder,
        HfConfigClass=type(hf_config),
        tokenizer=cast(PreTrainedTokenizerFast, tokenizer.tokenizer),
        trust_remote_code=False,
        ignore_prefix=BASE_PREFIX,
    )
    try:
        with trainer.use_device_mesh():
            model = converter.load_pretrained(
                config.model_type,
                ref=folder,
                config=cast(HFCompatConfig, config),
                axis_mapping=trainer.parameter_axis_mapping,
                resize_vocab_to_match_tokenizer=False,
                dtype=cast(Any, trainer.mp.param_dtype if dtype is None else dtype),
            )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise PolicyModelError(
            f"the weights in {checkpoint!r} are missing or damaged: {str(error).splitlines()[0]}"
        ) from error
    return only_arrays(cast(LmHeadModel, model))


class _Converter(HFCheckpointConverter):
    """Levanter's converter, for files with fused experts and whole numbers such as 256.0, too."""

    def hf_config_from_hf_checkpoint(self, ref: Any = None) -> PretrainedConfig:
        return read_hf_config(str(self.reference_checkpoint if ref is None else ref))

    def load_state_dict(self, ref: Any = None, dtype: Any = None) -> dict[str, Any]:
        model_type = LmConfig.get_choice_name(cast(Any, self.LevConfigClass))
        return split_experts(HFCheckpointConverter.load_state_dict(self, ref, dtype), model_type)


def check_hf_policy(
    checkpoint: str,
    tokenizer: ChatTokenizer,
    trainer: TrainerConfig,
    config: LmConfig | None,
    *,
    download: bool = True,
) -> tuple[PretrainedConfig, LmConfig]:
    """Check that a policy can be loaded; reads only descriptions and the headers of weight files, and uses no device.

    Args:
        checkpoint: an absolute folder, or a hub name.
        tokenizer: its vocabulary must not exceed the checkpoint's.
        trainer: parameter precision.
        config: overrides the architecture in the checkpoint's `config.json`; None uses the checkpoint's.
        download: whether to check the weight files of a hub name, too, which downloads them.

    Returns:
        The Hugging Face config and the architecture.

    Raises:
        PolicyModelError: as `load_hf_policy`.
    """
    hf_config = read_hf_config(checkpoint)
    config = _architecture(hf_config, config, checkpoint)
    vocab_size = hf_config.vocab_size
    if tokenizer.vocab_size > vocab_size:
        raise PolicyModelError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but the model in {checkpoint!r} has a vocabulary of "
            f"{vocab_size}: token ids would fall outside it. Use the tokenizer that belongs to the checkpoint "
            f"(tokenizer.path: {checkpoint})"
        )
    if download or Path(checkpoint).is_dir():
        check_tensors(checkpoint, PolicySpec(config, vocab_size, trainer).policy)
    return hf_config, config


def save_hf_policy(
    model: LmHeadModel, tokenizer: ChatTokenizer, folder: Path, trainer: TrainerConfig, stop: Sequence[str] = ()
) -> None:
    """Write a policy that is on devices in Hugging Face format; see `save_hf_folder`."""
    save_hf_folder(DeviceWeights(model, trainer), tokenizer, folder, stop)


def save_hf_folder(weights: WeightParts, tokenizer: ChatTokenizer, folder: Path, stop: Sequence[str] = ()) -> None:
    """Write a policy in Hugging Face format: weights, model and generation configs, tokenizer, chat template.

    Collective over all processes; the main process writes. `generation_config.json` lists every stop token and stop
    text, so that transformers and inference servers end generations as training and evaluation did. It has no sampling
    settings. Its `max_length` is the model's context, because without one transformers stops after 20 tokens.

    Args:
        weights: weights of the policy.
        tokenizer: its tokenizer.
        folder: the folder; created if it does not exist.
        stop: texts that end a generation.

    Raises:
        PolicyModelError: if levanter cannot export this architecture.
        OSError: if the folder cannot be written.
    """
    model = weights.shape
    hf_config = to_hf_config(model.config, model.vocab_size)
    hf_config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[hf_config.model_type]]
    stop_tokens = list(tokenizer.stop_token_ids)
    special_tokens = {
        "bos_token_id": tokenizer.tokenizer.bos_token_id,
        "eos_token_id": stop_tokens[0] if len(stop_tokens) == 1 else stop_tokens,
        "pad_token_id": tokenizer.pad_token_id,
    }
    hf_config.update(special_tokens)
    dtype = (weights.dtype or jax.tree.leaves(model)[0].dtype).name
    # Transformers before 4.56 and many servers read the older name of the dtype.
    settings = write_experts(write_rope(with_number_types(hf_config.to_diff_dict(), type(hf_config))))
    settings |= {"dtype": dtype, "torch_dtype": dtype}
    with _system_errors(folder):
        if multihost.is_main():
            folder.mkdir(parents=True, exist_ok=True)
        write_weights(weights, folder)
        if multihost.is_main():
            save_tokenizer(tokenizer.tokenizer, folder)
            (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
            stop_texts = {"stop_strings": list(stop)} if stop else {}
            positions = max_positions(model.config)
            GenerationConfig(**special_tokens, **stop_texts, max_length=positions).save_pretrained(folder)


def save_adapter_folder(
    base: LmHeadModel, adapter: Adapter, base_name: str, dtype: DTypeLike | None, tokenizer: ChatTokenizer, folder: Path
) -> None:
    """Write an adapter in the format of PEFT, with its tokenizer and chat template; see `save_peft_adapter`."""
    with _system_errors(folder):
        save_tokenizer(tokenizer.tokenizer, folder)
        save_peft_adapter(base, adapter, folder, base_name, dtype)


@contextlib.contextmanager
def _system_errors(folder: Path) -> Iterator[None]:
    """Convert operating system errors of the Rust libraries (safetensors, tokenizers) to `OSError`."""
    try:
        yield
    except Exception as error:
        if number := re.search(r"\(os error (\d+)\)", str(error)):
            code = int(number[1])
            raise OSError(code, os.strerror(code), str(folder)) from error
        raise


def read_hf_architecture(checkpoint: str, override: LmConfig | None = None) -> LmConfig:
    """Read levanter's configuration of a checkpoint in Hugging Face format.

    Args:
        checkpoint: a folder or hub name.
        override: the `model` section of a run, returned if it is equivalent to the checkpoint's; or None.

    Raises:
        PolicyModelError: if the checkpoint is missing, of an unknown architecture, has settings that are not
            implemented, or differs from `override`.
    """
    return _architecture(read_hf_config(checkpoint), override, checkpoint)


def _architecture(hf_config: PretrainedConfig, override: LmConfig | None, checkpoint: str) -> LmConfig:
    config = levanter_config(hf_config, checkpoint)
    if override is None:
        return config
    check_same_function(
        hf_config,
        override,
        f"the model section describes another model than {checkpoint!r}; leave model out to take the architecture from "
        "the checkpoint. They differ in (config.json, then model)",
    )
    return override
