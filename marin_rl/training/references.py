# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Opens the reference policy of a run: the frozen teacher, server or weights that score its rollouts."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from levanter.models.lm_model import LmHeadModel

from marin_rl.batching.packing import RowLayout
from marin_rl.config.reference_config import (
    CheckpointReferenceConfig,
    InitialReferenceConfig,
    PolicyReferenceConfig,
    PolicyWeights,
    ReferenceConfig,
    ReferencesByEnvironmentConfig,
    ServerReferenceConfig,
)
from marin_rl.environments.base import Split
from marin_rl.learner.critic import assemble, policy_of
from marin_rl.learner.policy_model import load_hf_policy
from marin_rl.learner.policy_spec import TrainedPolicy, with_config
from marin_rl.learner.train_step import Learner
from marin_rl.parts.rl import RunParts
from marin_rl.parts.teacher import PATH, find_teacher, teacher_spec
from marin_rl.sampling.client import CompletionsClient
from marin_rl.sampling.prompt_logprobs import PromptScorer
from marin_rl.training.batch_builder import ScoreReference, StepToScore
from marin_rl.training.reference_context import ContextPrompts, with_context
from marin_rl.utils import multihost
from marin_rl.utils.errors import UserError


class Teacher(NamedTuple):
    """A frozen model in this process."""

    parts: RunParts
    """Parts of the run with the architecture of the teacher: its attention kernel, layout and scorer."""
    model: LmHeadModel
    """The weights."""

    def score(self, step: StepToScore) -> np.ndarray:
        """Compute log-probs of rollouts; a `ScoreReference`."""
        if (largest := int(step.batch.input_ids.max())) >= self.model.vocab_size:
            raise UserError(
                f"the policy sampled token {largest}, but the teacher in {PATH} has a vocabulary of "
                f"{self.model.vocab_size}; use a teacher with the vocabulary of the policy"
            )
        return self.parts.scorer.score(self.model, step.batch).logprobs


class References:
    """The reference of a run, which scores rollouts or teaches in the updates. Each of its models is loaded once."""

    def __init__(self, parts: RunParts, initial: Callable[[], TrainedPolicy]) -> None:
        """Load nothing yet; `initial` loads the weights at the start of RL."""
        self._parts = parts
        self._initial = functools.cache(initial)
        self._teacher = functools.cache(functools.partial(load_teacher, parts))

    def open_scorer(self) -> ScoreReference | None:
        """Return the function that scores rollouts under the reference; None if nothing uses it.

        Raises:
            PolicyModelError: if a teacher cannot be loaded, or does not fit the tokenizer or the length of rollouts.
            SamplerError: if a server does not return log-probs of prompts, or has another tokenizer.
            UserError: if an environment has no reference, or too few worked answers for its context.
        """
        config = self._parts.config
        return self._open(config.reference) if config.needs_reference else None

    def open_learner(self, vocab_size: int) -> Learner:
        """Return the learner of the run, with the teacher of `kl: {type: exact}` if there is one.

        Raises:
            PolicyModelError: as for `load_teacher`.
            UserError: if rows share prompts, which the architecture of the teacher does not support, or the policy has
                tokens that the teacher has not.
        """
        parts, reference = self._parts, self._parts.config.reference
        if not parts.config.kl.needs_teacher:
            return parts.learner
        if isinstance(reference, CheckpointReferenceConfig):
            own, model = self._teacher(reference.path)
            _check_teacher(own, model, reference.path, parts.layout, vocab_size)
        else:
            model = parts.trainer.mp.cast_to_compute(parts.assemble(self._initial()))
        return parts.make_learner(parts.layout, parts.base, model)

    def _open(self, reference: ReferenceConfig, environment: str | None = None) -> ScoreReference:
        """Open a reference for the rollouts of an environment, or for all."""
        parts = self._parts
        match reference:
            case InitialReferenceConfig():
                return Teacher(parts, parts.assemble(self._initial())).score
            case CheckpointReferenceConfig():
                return self._teacher(reference.path).score
            case ServerReferenceConfig():
                return _open_server(parts, reference)
            case PolicyReferenceConfig():
                return self._open_policy(reference, environment)
            case ReferencesByEnvironmentConfig():
                check_environments(parts, reference)
                opened = {name: self._open(part, name) for name, part in reference.references.items()}
                return functools.partial(_score_by_environment, opened)
        raise TypeError(f"no reference {reference!r}")

    def _open_policy(self, reference: PolicyReferenceConfig, environment: str | None) -> ScoreReference:
        """Open the policy, in rows with room for its context."""
        parts, context, prompts = self._parts, reference.context, None
        own, config = parts, parts.config
        if context is not None:
            prompts = ContextPrompts(context, parts.environment, parts.tokenizer, config.seed, environment)
            longest = config.rollouts.max_length + context.max_tokens
            rollouts = dataclasses.replace(config.rollouts, max_length=longest, row_length=None)
            longer = dataclasses.replace(config, rollouts=rollouts, reference=InitialReferenceConfig())
            own = dataclasses.replace(parts, config=longer)
        scorer, first = own.scorer, self._initial() if reference.weights is PolicyWeights.INITIAL else None

        def in_own_rows(model: LmHeadModel) -> LmHeadModel:
            # Longer rows may have other attention blocks.
            return model if own.model == parts.model else with_config(model, own.model)

        base = None if parts.base is None else in_own_rows(parts.base)

        def score(step: StepToScore) -> np.ndarray:
            weights: Any = {
                PolicyWeights.LIVE: step.newest,
                PolicyWeights.INITIAL: first,
                PolicyWeights.AVERAGE: step.average,
            }
            policy = policy_of(weights[reference.weights])
            model = in_own_rows(policy) if base is None else assemble(policy, base)
            scored = step.batch if prompts is None else with_context(step.batch, step.rollouts, prompts)
            logprobs = np.zeros(step.batch.input_ids.shape, np.float32)
            logprobs[step.batch.loss_mask] = scorer.score(model, scored).logprobs[scored.loss_mask]
            return logprobs

        return score


def _check_teacher(own: RunParts, model: LmHeadModel, path: str, layout: RowLayout, vocab_size: int) -> None:
    """Check that a teacher can read the rows of the updates, in this layout, and every token of the policy."""
    if model.vocab_size < vocab_size:
        raise UserError(
            f"the policy has a vocabulary of {vocab_size} tokens, and may sample each of them, but the teacher in "
            f"{PATH}, {path!r}, one of {model.vocab_size}; use one with at least the policy's vocabulary"
        )
    for other in layout.alternatives:
        if other.group and not own.kernel.supports_shared_prompts(own.model, other.group):
            raise UserError(
                f"{PATH} is {path!r}, whose attention cannot read rows with shared prompts; set "
                "rollouts.share_prompts: false"
            )


def _open_server(parts: RunParts, server: ServerReferenceConfig) -> ScoreReference:
    """Connect to a server, which the main process asks."""
    scorer = PromptScorer(CompletionsClient(server), server.model)
    tokenizer, length = parts.tokenizer.tokenizer, parts.config.rollouts.max_length
    multihost.on_main(lambda: scorer.check_tokenizer(tokenizer, length))

    def score(step: StepToScore) -> np.ndarray:
        batch = step.batch
        bounds = itertools.pairwise(batch.sequence_offsets.tolist())
        sequences = [batch.input_ids[start:end].tolist() for start, end in bounds]
        data = multihost.on_main(lambda: np.array(scorer.score(sequences), np.float32).tobytes())
        return np.where(batch.loss_mask, np.frombuffer(data, np.float32), np.float32(0))

    return score


def _score_by_environment(opened: Mapping[str, ScoreReference], step: StepToScore) -> np.ndarray:
    """Score the rollouts of each environment with its reference."""
    logprobs = np.zeros(step.batch.input_ids.shape, np.float32)
    names = [rollout.task.environment for rollout in step.rollouts]
    for name in dict.fromkeys(names):
        own = np.flatnonzero([name == other for other in names])
        logprobs[step.batch.tokens_of(own)] = opened[name](step.take(own))
    return logprobs


def load_teacher(parts: RunParts, path: str) -> Teacher:
    """Load a teacher in the compute precision of the run; the arguments and errors are those of `find_teacher`."""
    own, folder = find_teacher(parts, path)
    return Teacher(own, load_hf_policy(folder, parts.tokenizer, own.trainer, own.model))


def check_reference(parts: RunParts) -> str:
    """Check the reference policy without devices and servers, and describe it with the memory that it takes.

    Raises:
        UserError: as `open_reference`.
        ValueError: if the environment variable with the key of a server is not set, or a teacher is an unfinished run.
    """
    config, found = parts.config, dict[str, None]()
    if not config.loads_reference:
        return "not loaded, the KL coefficient is 0"
    copied = ", a second copy" if config.lora is None else ", its adapter alone"
    by_name: dict[str | None, ReferenceConfig] = {None: config.reference}
    if isinstance(config.reference, ReferencesByEnvironmentConfig):
        check_environments(parts, config.reference)
        by_name = {**config.reference.references}
    for name, part in by_name.items():
        if isinstance(part, PolicyReferenceConfig) and part.context is not None:
            ContextPrompts(part.context, parts.environment, parts.tokenizer, config.seed, name)
        match part:
            case CheckpointReferenceConfig():
                size = teacher_spec(parts, part.path).num_parameters
                found[f"{part.path}, {size:,} parameters in {np.dtype(parts.trainer.mp.compute_dtype).name}"] = None
            case ServerReferenceConfig():
                part.read_key()
                found[f"{part.model} on the server {part.base_url}"] = None
            case PolicyReferenceConfig(weights=PolicyWeights.LIVE):
                found["the policy itself"] = None
            case PolicyReferenceConfig(weights=PolicyWeights.AVERAGE):
                found[f"an average of the weights{copied}"] = None
            case _:
                found[f"the policy at the start of RL{copied}"] = None
    return "; ".join(found)


def check_environments(parts: RunParts, reference: ReferencesByEnvironmentConfig) -> None:
    """Check that every environment has a reference, and every reference an environment.

    Raises:
        UserError: if one has none; names it.
    """
    names = dict.fromkeys(task.environment for task in parts.environment.tasks(Split.TRAIN))
    if missing := [name for name in names if name not in reference.references]:
        raise UserError(
            f"reference.references has no entry for the environment {missing[0]!r}, only for "
            f"{', '.join(map(repr, reference.references))}; add it"
        )
    if unknown := [name for name in reference.references if name not in names]:
        raise UserError(
            f"reference.references has an entry for {unknown[0]!r}, but the training tasks are those of the "
            f"environments {', '.join(map(repr, names))}; correct the name, or remove it"
        )
