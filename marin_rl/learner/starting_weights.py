# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Starting weights of a run: random, in Hugging Face format, or from a checkpoint of it or of an earlier run."""

import logging
from pathlib import Path

import jax
from jax.typing import DTypeLike
from levanter.models.lm_model import LmConfig, LmHeadModel

from marin_rl.batching.attention_kernel import FLASH_BLOCK, attention_kernel
from marin_rl.learner.policy_model import check_hf_policy, initialize_policy, load_hf_policy, read_hf_architecture
from marin_rl.models.hf_config import PolicyModelError, read_hf_config
from marin_rl.models.hf_tensors import read_tensor_shapes
from marin_rl.runs.checkpoint import CheckpointConfig, Checkpoints
from marin_rl.runs.run_directory import RunDirectory, exported_step
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.config import TokenizerConfig
from marin_rl.tokenization.load import (
    BYTES,
    TOKENIZER_FILES,
    TokenizerLoadError,
    is_byte_tokenizer,
    load_tokenizer,
    other_tokens,
)
from marin_rl.utils.devices.setup import platform_of
from marin_rl.utils.devices.trainer_config import TrainerConfig
from marin_rl.utils.remote_path import RemotePath
from marin_rl.utils.seeds import derive_seed
from marin_rl.utils.storage import local_copy, storage_path, user_cache

logger = logging.getLogger(__name__)


def check_weight_files(initialize_from: str | None, run_dir: str, tokenizer_path: str | None) -> None:
    """Check the files of a local `initialize_from` and the vocabulary of the tokenizer, without using a device.

    The weight files must exist and have valid headers. A run with a checkpoint does not read them again. The arguments
    are keys of the config, with `tokenizer.path` as from `resolve_model`.

    Raises:
        PolicyModelError: if a file is missing or damaged, or does not hold floating-point weights, or the tokenizer has
            another vocabulary than that of the weights.
    """
    if initialize_from is None:
        return
    # A hub name needs no access to the run directory, which a machine without credentials may not have in a dry run.
    if not is_hub_name(initialize_from):
        if any((storage_path(run_dir) / "checkpoints").glob("step-*")):
            return
        folder = Path(hf_folder(initialize_from)).absolute()
        # A folder without it is no checkpoint, which `resolve_model` reports.
        if (folder / "config.json").exists():
            read_tensor_shapes(str(folder))
    if tokenizer_path is not None:
        _check_vocabulary(tokenizer_path, initialize_from)


def _check_vocabulary(path: str, source: str) -> None:
    """Check that a tokenizer that differs from that of the weights has the same vocabulary, except for added tokens."""
    try:
        of_weights = tokenizer_of(source)
        if path == of_weights:
            return
        loaded = load_tokenizer(of_weights)
    except TokenizerLoadError as error:
        logger.info("the vocabulary of tokenizer.path is not compared with that of the weights: %s", error)
        return
    if other := other_tokens(load_tokenizer(path), loaded):
        index, (token, of_weights_token) = next(iter(other.items()))
        raise PolicyModelError(
            f"tokenizer.path is {path!r}, which has another vocabulary than the weights in {source!r}: {len(other):,} "
            f"tokens differ, the first is id {index}, {token!r} instead of {of_weights_token!r}; leave out "
            "tokenizer.path to use the tokenizer of the weights"
        )


def tokenizer_of(source: str, key: str = "initialize_from") -> str:
    """Return the `tokenizer.path` of weights.

    `source` is a run directory, or a folder or hub name in Hugging Face format. Error messages name the setting `key`.

    Raises:
        TokenizerLoadError: if they have no tokenizer.
    """
    location = hf_location(source, key)
    if is_hub_name(location, key):
        return location
    folder = storage_path(location, key)
    if not any((folder / name).exists() for name in (*TOKENIZER_FILES, "tokenizer.model", "vocab.json")):
        raise TokenizerLoadError(
            f"{key} is {source!r}, which has no tokenizer (no {' or '.join(TOKENIZER_FILES)}); set "
            "tokenizer.path to the folder or hub name of the tokenizer that belongs to the weights, or to "
            f"{BYTES} for the built-in byte-level one"
        )
    return BYTES if is_byte_tokenizer(folder) else location


def is_hub_name(source: str, key: str = "initialize_from") -> bool:
    """Return whether weights are a name on the hub and neither a folder nor an address."""
    folder = storage_path(source, key)
    return isinstance(folder, Path) and not folder.is_dir()


def hf_folder(source: str, key: str = "initialize_from") -> str:
    """Return the location of weights in Hugging Face format: `hf/` of a run directory, or `source` itself.

    Error messages name the setting `key`.

    Returns:
        A local folder or hub name. A folder in an object store is copied into the cache folder of the user.

    Raises:
        ValueError: if `source` is the directory of an unfinished run.
        OSError: if a folder in an object store does not exist or cannot be copied.
    """
    location = hf_location(source, key)
    folder = storage_path(location, key)
    if not isinstance(folder, RemotePath):
        return location if is_hub_name(location, key) else str(folder)
    copy = local_copy(folder, user_cache("weights"))
    logger.info("%s is copied to %s", folder, copy)
    return str(copy)


def stored_vocab_size(source: str) -> int:
    """Return the number of tokens of weights in `initialize_from`, which may be padded; raises like `hf_folder`."""
    return read_hf_config(hf_folder(source)).vocab_size


def hf_location(source: str, key: str = "initialize_from") -> str:
    """Return the location of weights as `hf_folder`, without a copy of a folder in an object store."""
    folder = storage_path(source, key)
    # Some checkpoints in Hugging Face format have a training config.yaml next to config.json.
    if not (folder / "config.yaml").exists() or (folder / "config.json").exists():
        return source
    if not (folder / "hf" / "config.json").exists():
        raise ValueError(
            f"{key}: the run in {source!r} has not finished: it has no hf/ folder yet. "
            "run its command again to finish it"
        )
    location = f"{source.rstrip('/')}/hf"
    steps = Checkpoints(folder / "checkpoints", CheckpointConfig()).steps()
    exported = exported_step(RunDirectory(folder))
    if exported is not None and steps and steps[-1] > exported:
        raise ValueError(
            f"{key}: the run in {source!r} was made longer and has not finished: hf/ is of step "
            f"{exported}, its newest checkpoint of step {steps[-1]}. Run its command again to finish it, or give "
            f"the folder of the former weights: {location!r}"
        )
    return location


def load_policy(source: str | LmConfig, trainer: TrainerConfig, *, seed: int = 0) -> tuple[LmHeadModel, ChatTokenizer]:
    """Load or initialize a policy, and load its tokenizer.

    Args:
        source: run directory, or a folder or hub name in Hugging Face format; or an architecture, for random weights
            with the byte-level tokenizer.
        trainer: as returned by `start_devices`; mesh, axis mapping and parameter precision.
        seed: seed of random weights, as of a run.

    Raises:
        PolicyModelError: if `source` cannot be loaded.
        TokenizerLoadError: if it has no tokenizer.
    """
    path = source if isinstance(source, str) else None
    tokenizer = TokenizerConfig(BYTES if path is None else tokenizer_of(path)).build()
    model = read_hf_architecture(hf_folder(source)) if isinstance(source, str) else source
    # A block size that is set restricts the rows that `row_layout` chooses to those that it divides.
    model = attention_kernel(model, platform_of(trainer)).configure(model, FLASH_BLOCK)
    return first_policy(path, model, tokenizer, trainer, seed), tokenizer


def first_policy(
    initialize_from: str | None,
    model: LmConfig,
    tokenizer: ChatTokenizer,
    trainer: TrainerConfig,
    seed: int,
    dtype: DTypeLike | None = None,
) -> LmHeadModel:
    """Create the initial policy of a run: random weights, or those of `initialize_from`.

    Args:
        initialize_from: starting weights; None for random ones.
        model: architecture, with the attention kernel of the learner.
        tokenizer: determines the vocabulary size of a randomly initialized model.
        trainer: as returned by `start_devices`; mesh, axis mapping and parameter precision.
        seed: seed of the run.
        dtype: precision of loaded weights; None for that of parameters.

    Raises:
        PolicyModelError: if `initialize_from` cannot be loaded, or does not fit `model` or the tokenizer.
    """
    if initialize_from is not None:
        return load_hf_policy(hf_folder(initialize_from), tokenizer, trainer, model, dtype)
    return initialize_policy(model, tokenizer, trainer, key=jax.random.PRNGKey(derive_seed(seed, "weights") % 2**32))


def check_first_policy(
    initialize_from: str | None, model: LmConfig | None, tokenizer: ChatTokenizer, trainer: TrainerConfig
) -> int:
    """Check that `first_policy` can create the policy, without a device or a download; return its vocabulary size.

    `initialize_from` is None for random weights, `model` is None for the architecture of the starting weights.

    Raises:
        PolicyModelError: if `initialize_from` cannot be loaded, or does not fit `model` or the tokenizer.
    """
    if initialize_from is None:
        return tokenizer.vocab_size
    folder = hf_folder(initialize_from)
    checkpoint = str(Path(folder).absolute()) if Path(folder).is_dir() else folder
    return check_hf_policy(checkpoint, tokenizer, trainer, model, download=False)[0].vocab_size
