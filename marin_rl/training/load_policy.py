# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The policy of a run, or of a folder in Hugging Face format, with a sampler, to be served."""

import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from marin_rl.sampling.config import SamplingConfig
from marin_rl.tokenization.config import TokenizerConfig
from marin_rl.utils.devices.trainer_config import AbstractTrainerConfig
from marin_rl.utils.errors import UserError
from marin_rl.utils.levanter_line import max_positions

if TYPE_CHECKING:
    from levanter.models.lm_model import LmHeadModel

    from marin_rl.sampling.group_sampler import GroupSampler
    from marin_rl.tokenization.chat import ChatTokenizer

_DEFAULT_CONTEXT = 4096


class Policy(NamedTuple):
    """A policy that can be served."""

    sampler: "GroupSampler"
    """Samples from it."""
    tokenizer: "ChatTokenizer"
    """Its tokenizer."""
    vocab_size: int
    """Vocabulary size of the model."""
    max_context: int
    """Maximum number of prompt and new tokens of a sequence."""
    sampling: SamplingConfig
    """Limits and stop texts."""


def load_policy(
    *,
    run: str | None = None,
    step: int | None = None,
    folder: str | None = None,
    max_seqs: int | None = None,
    max_new_tokens: int | None = None,
    max_context: int | None = None,
    call_seconds: float = math.inf,
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

    Raises:
        CheckpointError: if the run has no checkpoint of this step, or no valid checkpoint.
        PolicyModelError: if the model cannot be loaded.
        UserError: if `max_context` exceeds the number of the model's positions.
    """
    from marin_rl.sampling.group_sampler import GroupSampler
    from marin_rl.sampling.stops import stop_text_bytes

    loaded = _load_run(run, step, max_context) if run is not None else _load_folder(str(folder), max_context)
    # The run's config is not changed: checks of training would refuse limits that are valid here.
    sampling = dataclasses.replace(
        loaded.sampling,
        max_seqs=max_seqs or loaded.sampling.max_seqs,
        max_new_tokens=max_new_tokens or loaded.sampling.max_new_tokens,
    )
    sampler = GroupSampler(
        loaded.model,
        config=sampling,
        stop_token_ids=loaded.tokenizer.stop_token_ids,
        max_context=loaded.max_context,
        token_bytes=stop_text_bytes(loaded.tokenizer, sampling.stop),
        version=loaded.version,
        trainer=loaded.trainer,
        call_seconds=call_seconds,
    )
    return Policy(sampler, loaded.tokenizer, loaded.model.vocab_size, loaded.max_context, sampling)


class _Loaded(NamedTuple):
    """A policy without a sampler."""

    model: "LmHeadModel"
    tokenizer: "ChatTokenizer"
    trainer: AbstractTrainerConfig
    version: int
    """Number of training steps that produced the weights."""
    sampling: SamplingConfig
    """Limits and stop texts, without those of the command line."""
    max_context: int


def _load_run(run: str, step: int | None, max_context: int | None) -> _Loaded:
    # Imported here because levanter takes seconds to import, and most mistakes can be reported without it.
    from marin_rl.config.input_files import digest_inputs
    from marin_rl.run_parts import RunParts
    from marin_rl.training.starting_weights import load_run, restore_checkpoint

    train_config, checkpoints = load_run(run, step)
    parts = RunParts.start(train_config, alone=True, of_other_machine=True)
    inputs = digest_inputs(train_config, ("tokenizer",))
    restored, model = restore_checkpoint(
        checkpoints, step, inputs, lambda saved: parts.saved_spec(saved).restore_policy(saved)
    )
    limit = _max_context(max_context, model, train_config.rollouts.max_length)
    return _Loaded(model, parts.tokenizer, parts.trainer, restored, train_config.sampling, limit)


def _load_folder(folder: str, max_context: int | None) -> _Loaded:
    from marin_rl.config.train_config import TrainerConfig
    from marin_rl.learner.policy_model import load_hf_policy
    from marin_rl.utils.devices.setup import start_devices

    tokenizer = TokenizerConfig(path=folder).build()
    stop = _stop_texts(Path(folder))
    trainer = start_devices(TrainerConfig(), rows_per_device=1, alone=True)
    model = load_hf_policy(folder, tokenizer, trainer, None)
    limit = _max_context(max_context, model, min(max_positions(model.config), _DEFAULT_CONTEXT))
    sampling = SamplingConfig(max_new_tokens=limit - 1, stop=stop)
    return _Loaded(model, tokenizer, trainer, 0, sampling, limit)


def _stop_texts(folder: Path) -> tuple[str, ...]:
    """Read the stop texts of an exported policy.

    Raises:
        UserError: if they are not usable texts.
    """
    file = folder / "generation_config.json"
    value = json.loads(file.read_bytes()).get("stop_strings") if file.exists() else None
    texts = [value] if isinstance(value, str) else value or []
    if not (isinstance(texts, list) and all(isinstance(text, str) for text in texts)):
        raise UserError(f"stop_strings in {file} is {value!r}; it must be a list of texts")
    try:
        return SamplingConfig(max_new_tokens=1, stop=tuple(texts)).stop
    except ValueError as error:
        raise UserError(f"stop_strings in {file} is {value!r}: {error}") from error


def _max_context(max_context: int | None, model: "LmHeadModel", default: int) -> int:
    max_context = max_context or default
    if max_context > (positions := max_positions(model.config)):
        raise UserError(
            f"--max_context is {max_context}, but the model has {positions} positions; use at most that many"
        )
    return max_context
