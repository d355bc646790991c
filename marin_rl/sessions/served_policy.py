# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A policy to be served, of a run or of a folder in Hugging Face format, with a sampler."""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from marin_rl.config.input_files import digest_inputs
from marin_rl.config.run_config import AbstractRunConfig
from marin_rl.learner.policy_model import load_hf_policy
from marin_rl.learner.scoring import prompt_scorer
from marin_rl.parts.model import AbstractModelParts
from marin_rl.sampling.config import SamplingConfig
from marin_rl.sampling.group_sampler import GroupSampler
from marin_rl.sampling.stops import stop_text_bytes
from marin_rl.serving.options import choose_context
from marin_rl.sessions.earlier_run import load_run, restore_checkpoint
from marin_rl.sessions.recipes import as_rl, recipe_of
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.config import TokenizerConfig
from marin_rl.training.open_run import restore_policy
from marin_rl.utils.devices.setup import start_devices
from marin_rl.utils.devices.trainer_config import TrainerConfig
from marin_rl.utils.errors import UserError
from marin_rl.utils.levanter_line import max_positions
from marin_rl.utils.storage import read_small


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


def load_served_policy(
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
            functools.partial(restore_policy, parts),
        )
        rl = as_rl(config)
        context = choose_context(max_context, max_positions(model.config), rl.rollouts.max_length if rl else None)
        sampling = rl.sampling if rl else SamplingConfig(max_new_tokens=context - 1)
        max_turns = rl.rollouts.max_turns if rl else None
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


def open_parts(config: AbstractRunConfig) -> AbstractModelParts:
    """Start the devices of this process alone for the parts of an earlier run, maybe of another machine."""
    return recipe_of(config).parts.start(config, alone=True, of_other_machine=True)


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
