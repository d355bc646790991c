# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Runs that have started: their config and checkpoints, their policy with a sampler to be served, and exports.

A policy to be served may also be in a folder in Hugging Face format.
"""

import dataclasses
import functools
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from levanter.models.lm_model import LmHeadModel

from marin_rl.config.input_files import Inputs, digest_inputs
from marin_rl.config.run_config import AbstractRunConfig
from marin_rl.config.run_kind import RunKind
from marin_rl.config.sections import LOGPROB_BLOCK_SIZE, TOKENS_PER_MICROBATCH
from marin_rl.config.train_config import TrainConfig
from marin_rl.learner.hf_export import WeightParts
from marin_rl.learner.policy_model import load_hf_policy, read_hf_architecture, save_hf_folder
from marin_rl.learner.scoring import sequence_scorer
from marin_rl.learner.starting_weights import hf_folder, is_hub_name, tokenizer_of
from marin_rl.model_parts import AbstractModelParts
from marin_rl.models.lora import merge_adapter
from marin_rl.models.peft_format import CONFIG as PEFT_CONFIG
from marin_rl.run_parts import RunParts
from marin_rl.runs.checkpoint import Checkpoints
from marin_rl.runs.run_directory import EXPORTED_STEP, RunDirectory, open_with_checkpoint, read_config_text
from marin_rl.runs.saved_checkpoint import Checkpoint
from marin_rl.sampling.config import SamplingConfig
from marin_rl.sampling.group_sampler import GroupSampler
from marin_rl.sampling.stops import stop_text_bytes
from marin_rl.serving.options import choose_context
from marin_rl.supervised_parts import SupervisedParts
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.config import TokenizerConfig
from marin_rl.training.run_state import warn_of_changed_inputs
from marin_rl.utils import multihost
from marin_rl.utils.devices.setup import platform_of, start_devices
from marin_rl.utils.devices.trainer_config import TrainerConfig
from marin_rl.utils.errors import USER_ERRORS, RunDirectoryError, UserError
from marin_rl.utils.levanter_line import max_positions
from marin_rl.utils.settings.section_types import ConfigError
from marin_rl.utils.settings.yaml_text import from_yaml, parse_yaml
from marin_rl.utils.storage import StoragePath, read_small, replace_folder, storage_path, upload_folder

T = TypeVar("T")
ConfigT = TypeVar("ConfigT", bound=AbstractRunConfig)

MARKERS = ("config.json", PEFT_CONFIG)
"""Files that are written last, so that an export in an object store is complete if it has one."""


def read_config(directory: RunDirectory) -> AbstractRunConfig:
    """Read the config of an earlier run, whose keys determine the class.

    Raises:
        ConfigError: if it is invalid; the message names the file.
    """
    text, name = read_config_text(directory), str(directory.config)
    try:
        return from_yaml(RunKind.of(parse_yaml(text, name)).config, text, name)
    except ConfigError as error:
        if not any("unknown key" in problem or "is not one of its types" in problem for problem in error.problems):
            raise
        remedy = (
            "these keys or types are of another version of marin_rl or levanter; use the version that wrote the run, "
            "which checkpoints/*/run_files.json names, or start another run with --run_dir NEW"
        )
        raise ConfigError(*error.problems, remedy) from error


def require_rl(config: AbstractRunConfig, run: str, purpose: str) -> TrainConfig:
    """Return the config of an earlier run if it is one of RL.

    Args:
        config: config of the run.
        run: run directory, for the message.
        purpose: what is not possible with another run, for the message.

    Raises:
        RunDirectoryError: if the run is one of supervised training.
    """
    if isinstance(config, TrainConfig):
        return config
    raise RunDirectoryError(
        f"{run!r} is a run of marin_rl.{RunKind.of_config(config).value}, which has no environment and no rollouts, so "
        f"{purpose}; serve it with python -m marin_rl.serve --run, or start RL from it with initialize_from"
    )


def resolve_model(config: ConfigT) -> ConfigT:
    """Read `model` and `tokenizer.path` from the starting weights if they are not set; check a `model` that is.

    A run that was started with `model` set resumes from its checkpoints and does not read `initialize_from` again. One
    that was started without reads architecture and tokenizer in its directory if the starting weights are gone.

    Args:
        config: training config; `model` may be None.

    Returns:
        The config with `model` set, unless both `model` and `initialize_from` are None, and with the path of the
        tokenizer if there is an `initialize_from`.

    Raises:
        HubError: if `initialize_from` is neither a folder nor the name of a repository that can be loaded.
        PolicyModelError: if `initialize_from` cannot be loaded, or differs from `model`.
        TokenizerLoadError: if `initialize_from` has no tokenizer and `tokenizer.path` is not set.
        ValueError: if `initialize_from` is the directory of an unfinished run, or does not fit the config.
    """
    if config.initialize_from is None:
        return config
    directory, recorded, model = RunDirectory(storage_path(config.run_dir)), None, config.model
    if model is None or not directory.config.exists():
        try:
            model = read_hf_architecture(hf_folder(config.initialize_from), model)
        except USER_ERRORS:
            # They may be deleted when the run has a checkpoint.
            if not _has_checkpoint(directory):
                raise
            recorded = read_config(directory)
            model = recorded.model
    path = config.tokenizer.path
    if path is None:
        # A hub name needs no access to the run directory; see `check_weight_files`.
        if recorded is None and (config.model is not None or not is_hub_name(config.initialize_from)):
            recorded = read_config(directory) if _has_checkpoint(directory) else None
        path = tokenizer_of(config.initialize_from) if recorded is None else recorded.tokenizer.path
    tokenizer = dataclasses.replace(config.tokenizer, path=path)
    return dataclasses.replace(config, model=config.model or model, tokenizer=tokenizer)


def _has_checkpoint(directory: RunDirectory) -> bool:
    return directory.config.exists() and any(directory.checkpoints.glob("step-*"))


def load_run(run: str, step: int | None) -> tuple[AbstractRunConfig, Checkpoints]:
    """Return the config and the checkpoints of an earlier run, whose directory is not changed.

    Args:
        run: run directory, a path or an address.
        step: step of a checkpoint that must exist; None for any.

    Raises:
        RunDirectoryError: if the run does not exist.
        CheckpointError: if it has no such checkpoint.
    """
    directory = open_with_checkpoint(run, step)
    config = read_config(directory)
    return config, Checkpoints(directory.checkpoints, config.checkpoint)


def open_parts(config: AbstractRunConfig) -> AbstractModelParts:
    """Start the devices of this process alone for the parts of an earlier run, maybe of another machine."""
    kind = RunParts if isinstance(config, TrainConfig) else SupervisedParts
    return kind.start(config, alone=True, of_other_machine=True)


def restore_checkpoint(
    checkpoints: Checkpoints, step: int | None, inputs: Inputs, restore: Callable[[Checkpoint], T]
) -> tuple[int, T]:
    """Load a part of a checkpoint, and warn of changed inputs; see `open_with_checkpoint`.

    Args:
        checkpoints: checkpoints of the run.
        step: step of the checkpoint; None for the newest one that is not damaged.
        inputs: checksums of the inputs that the command reads.
        restore: loads the part.

    Returns:
        The step, and the part.
    """

    def load(checkpoint: Checkpoint) -> tuple[int, T]:
        warn_of_changed_inputs(checkpoint, inputs)
        return checkpoint.step, restore(checkpoint)

    restored = checkpoints.restore_newest(load) if step is None else load(checkpoints.open(step))
    assert restored is not None
    return restored


def export_folder(
    weights: WeightParts, tokenizer: ChatTokenizer, output: StoragePath, step: int, stop: Sequence[str] = ()
) -> None:
    """Write a policy in Hugging Face format, in place of a former export; collective over all processes.

    Args:
        weights: weights of the policy.
        tokenizer: its tokenizer.
        output: the folder. One in an object store is written to a temporary folder of the main host and uploaded.
        step: step of the weights, stored in `training_step.json`.
        stop: texts that end a generation.

    Raises:
        OSError: if it cannot be written.
    """
    replace_export(output, step, lambda folder: save_hf_folder(weights, tokenizer, folder, stop))


def replace_export(output: StoragePath, step: int, save: Callable[[Path], None]) -> None:
    """Replace an export by what `save` writes to a folder; arguments and errors are those of `export_folder`."""
    with tempfile.TemporaryDirectory() as temporary:
        partial = output.with_name(f".{output.name}.partial") if isinstance(output, Path) else Path(temporary)
        if multihost.is_main():
            shutil.rmtree(partial, ignore_errors=True)
        save(partial)
        multihost.on_main(lambda: _publish(output, partial, step))


def _publish(output: StoragePath, partial: Path, step: int) -> None:
    (partial / EXPORTED_STEP).write_text(json.dumps({"step": step}) + "\n", encoding="utf-8")
    if isinstance(output, Path):
        replace_folder(output, partial)
    else:
        upload_folder(output, partial, next(name for name in MARKERS if (partial / name).exists()))


class Policy(NamedTuple):
    """A policy that can be served."""

    sampler: GroupSampler
    """Samples from it."""
    tokenizer: ChatTokenizer
    """Its tokenizer."""
    vocab_size: int
    """Vocabulary size of the model."""
    max_context: int
    """Maximum number of prompt and new tokens of a sequence."""
    sampling: SamplingConfig
    """Limits and stop texts."""
    score: Callable[[Sequence[tuple[int, ...]]], list[list[float]]] | None
    """Returns the log-probs of the tokens of each prompt after the first, at temperature 1; None if not asked for."""
    max_turns: int | None
    """Maximum number of replies of an episode of its run; None if RL did not train it."""


def load_policy(
    *,
    run: str | None = None,
    step: int | None = None,
    folder: str | None = None,
    max_seqs: int | None = None,
    max_new_tokens: int | None = None,
    max_context: int | None = None,
    call_seconds: float = math.inf,
    score_prompts: bool = False,
) -> Policy:
    """Load the weights of a run or of a folder and create the sampler.

    Args:
        run: run directory, with the run's tokenizer and sampling limits; None: the policy is in `folder`.
        step: step of the run's checkpoint; None for the newest valid one.
        folder: folder in Hugging Face format.
        max_seqs: number of sequences that are decoded together; None for that of the run, or 64.
        max_new_tokens: maximum number of new tokens; None for that of the run, or all that fit.
        max_context: maximum number of tokens of a sequence; None for that of the run, or the model's up to 4,096.
        call_seconds: aimed duration of a call of the sampler.
        score_prompts: whether the policy also scores prompts.

    Raises:
        CheckpointError: if the run has no checkpoint of this step, or no valid checkpoint.
        PolicyModelError: if the model cannot be loaded.
        UserError: if `max_context` exceeds the number of the model's positions.
    """
    if run is None:
        tokenizer = TokenizerConfig(path=str(folder)).build()
        stop = _stop_texts(Path(str(folder)))
        trainer, version = start_devices(TrainerConfig(), rows_per_device=1, alone=True), 0
        model = load_hf_policy(str(folder), tokenizer, trainer, None)
        context = choose_context(max_context, max_positions(model.config))
        sampling, max_turns = SamplingConfig(max_new_tokens=context - 1, stop=stop), None
    else:
        config, checkpoints = load_run(run, step)
        parts = open_parts(config)
        tokenizer, trainer = parts.tokenizer, parts.trainer
        version, model = restore_checkpoint(
            checkpoints,
            step,
            digest_inputs(config, ("tokenizer",)),
            parts.restore_policy,
        )
        is_rl = isinstance(config, TrainConfig)
        longest = config.rollouts.max_length if is_rl else None
        context = choose_context(max_context, max_positions(model.config), longest)
        sampling = config.sampling if is_rl else SamplingConfig(max_new_tokens=context - 1)
        max_turns = config.rollouts.max_turns if is_rl else None
    # The run's config is not changed: checks of training would refuse limits that are valid here.
    sampling = dataclasses.replace(
        sampling,
        max_seqs=max_seqs or sampling.max_seqs,
        max_new_tokens=max_new_tokens or sampling.max_new_tokens,
    )
    sampler = GroupSampler(
        model,
        config=sampling,
        stop_token_ids=tokenizer.stop_token_ids,
        max_context=context,
        token_bytes=stop_text_bytes(tokenizer, sampling.stop),
        version=version,
        trainer=trainer,
        call_seconds=call_seconds,
    )
    score = prompt_scorer(model, trainer, context, tokenizer.pad_token_id) if score_prompts else None
    return Policy(sampler, tokenizer, model.vocab_size, context, sampling, score, max_turns)


def prompt_scorer(
    model: LmHeadModel, trainer: TrainerConfig, max_context: int, pad_token_id: int
) -> Callable[[Sequence[tuple[int, ...]]], list[list[float]]]:
    """Return a function that computes the log-probs of the tokens of each prompt after the first, at temperature 1.

    Args:
        model: the weights.
        trainer: mesh, precision and sharding.
        max_context: maximum number of tokens of a prompt.
        pad_token_id: token id of padding.
    """
    platform = platform_of(trainer)
    score = sequence_scorer(
        model.config,
        trainer,
        max_context,
        pad_token_id=pad_token_id,
        temperature=1.0,
        block_size=LOGPROB_BLOCK_SIZE[platform],
        tokens=TOKENS_PER_MICROBATCH[platform],
    )
    return functools.partial(score, merge_adapter(model))


def _stop_texts(folder: Path) -> tuple[str, ...]:
    """Read the stop texts of an exported policy.

    Raises:
        UserError: if they are not usable texts.
    """
    file = folder / "generation_config.json"
    value = json.loads(read_small(file)).get("stop_strings") if file.exists() else None
    texts = [value] if isinstance(value, str) else value or []
    if not (isinstance(texts, list) and all(isinstance(text, str) for text in texts)):
        raise UserError(f"stop_strings in {file} is {value!r}; it must be a list of texts")
    try:
        return SamplingConfig(max_new_tokens=1, stop=tuple(texts)).stop
    except ValueError as error:
        raise UserError(f"stop_strings in {file} is {value!r}: {error}") from error
