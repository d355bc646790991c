# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The parts of a run that every command that trains has: tokenizer, model, layout of rows, and learner."""

import abc
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Self, cast

import jax
from jax.typing import DTypeLike
from levanter.models.lm_model import LmConfig, LmHeadModel
from levanter.trainer_state import TrainerState

from marin_rl.batching.attention_kernel import AttentionKernel, attention_kernel
from marin_rl.batching.packing import Prompt, RowLayout
from marin_rl.batching.rollout_batch import RolloutBatch
from marin_rl.batching.rows import GroupSizes, Rows
from marin_rl.config.run_config import AbstractRunConfig
from marin_rl.learner.base_weights import check_base, fingerprint
from marin_rl.learner.critic import assemble
from marin_rl.learner.logprobs import LOGPROB_BLOCK_SIZE
from marin_rl.learner.policy_spec import PolicySpec, TrainedPolicy
from marin_rl.learner.scoring import Scorer, Scores
from marin_rl.learner.starting_weights import first_policy
from marin_rl.learner.train_step import Learner
from marin_rl.models.lora import Adapter
from marin_rl.models.mixture import mixture_shape
from marin_rl.models.peft_format import load_peft_adapter
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.utils.devices.setup import microbatch_rows, platform_of, start_devices
from marin_rl.utils.devices.trainer_config import TrainerConfig
from marin_rl.utils.seeds import derive_seed

Report = Callable[[str], None]
"""Receives progress messages of one line each."""


class Lengths(NamedTuple):
    """Tokens of every sequence of a step whose sequences are equally long."""

    prompt: int
    """Tokens without loss, such as those of a prompt."""
    answer: int
    """Tokens with loss, such as sampled ones."""


class EqualStep(NamedTuple):
    """A step whose sequences are equally long."""

    description: str
    """The step in words."""
    lengths: Lengths
    """Tokens of each sequence."""
    groups: int
    """Prompts or rows of data of the step."""
    sequences: int
    """Sequences of the step."""
    updates: int
    """Updates of the step."""
    of_update: Sequence[Sequence[int]]
    """Lengths of the sequences of each rollout or row of data in an update."""
    prompts: Sequence[Sequence[Prompt]] | None = None
    """Prompt of each of them, which rollouts may share; None if they share none."""


@dataclasses.dataclass(frozen=True)
class AbstractModelParts(abc.ABC):
    """The parts of a run. A command makes those that it uses: each is made once, when it is first read.

    A part whose construction raises is made again when it is read again.
    """

    measures_accuracy: ClassVar[bool] = False
    """Whether the scorer also tells whether a token is the most likely one."""

    config: AbstractRunConfig
    """Config of the run."""
    trainer: TrainerConfig
    """Mesh, precision and sharding in this process, as returned by `start_devices`. A command without devices, which
    reads no part that needs them, has the section of the config."""
    resources: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    """Closes the opened parts, such as the event loop and the reward functions."""
    report: Report = lambda message: None
    """Called if a part takes long to prepare."""

    @classmethod
    def start(
        cls,
        config: AbstractRunConfig,
        section: TrainerConfig | None = None,
        *,
        alone: bool = False,
        of_other_machine: bool = False,
        resources: contextlib.ExitStack | None = None,
        report: Report = lambda message: None,
    ) -> Self:
        """Start the devices of this process.

        Args:
            config: config of the run.
            section: trainer section of this process; None for that of the config.
            alone: as for `start_devices`.
            of_other_machine: as for `start_devices`.
            resources: closes the opened parts; None if the command opens none.
            report: called if a part takes long to prepare.

        Raises:
            DeviceError: if the mesh does not fit the devices, or a required accelerator is missing.
        """
        trainer = start_devices(
            section or config.trainer,
            rows_per_device=config.rows.sizes.rows_per_device,
            alone=alone,
            of_other_machine=of_other_machine,
        )
        return cls(config, trainer, contextlib.ExitStack() if resources is None else resources, report)

    @functools.cached_property
    def tokenizer(self) -> ChatTokenizer:
        """Chat tokenizer of the policy."""
        return self.config.tokenizer.build()

    @functools.cached_property
    def learner(self) -> Learner:
        """The learner, for batches in the layout of the run."""
        return self.make_learner(self.layout, self.base)

    @abc.abstractmethod
    def make_learner(self, layout: RowLayout, base: LmHeadModel | None, teacher: LmHeadModel | None = None) -> Learner:
        """Make a learner for batches in a layout.

        `base` and `teacher` are models or their shapes. `base` is None if whole models are trained, `teacher` if the
        loss has no exact divergence.
        """

    @functools.cached_property
    def scorer(self) -> Scorer:
        """The scorer of sequences."""
        return self.make_scorer(self.layout, self.tokenizer.pad_token_id)

    def make_scorer(self, layout: RowLayout, pad_token_id: int) -> Scorer:
        """Make a scorer for batches in a layout."""
        return Scorer(
            self.trainer,
            layout,
            pad_token_id=pad_token_id,
            temperature=self.config.temperature,
            block_size=self.logprob_block,
            capacity=layout.microbatches(self.config.rows.sequences_per_step),
            accuracy=self.measures_accuracy,
            experts=self.scores_experts,
        )

    @property
    def scores_experts(self) -> bool:
        """Whether the updates of a step use the experts that the scorer chooses."""
        return False

    @property
    def has_router(self) -> bool:
        """Whether the model is a mixture of experts."""
        return mixture_shape(self.model) is not None

    @property
    @abc.abstractmethod
    def optional_arrays(self) -> frozenset[str]:
        """Names of the arrays of a batch that not every loss reads."""

    @abc.abstractmethod
    def equal_step(self, lengths: Lengths | None = None) -> EqualStep:
        """Return a step with sequences of these lengths; None for the longest."""

    @property
    @abc.abstractmethod
    def whole_rollouts(self) -> bool:
        """Whether all sequences of a rollout must be in one microbatch."""

    @property
    def own_scorings(self) -> float:
        """How often a step scores its batch with the trained weights, on average."""
        return 0.0

    @property
    def scores_data(self) -> bool:
        """Whether rows of data are scored, outside of updates."""
        return False

    @property
    def passes_per_step(self) -> int:
        """How often a step trains on its batch."""
        return 1

    @functools.cached_property
    def kernel(self) -> AttentionKernel:
        """Attention kernel of the learner."""
        return attention_kernel(self.config.model, platform_of(self.trainer), self.config.context_shards)

    @functools.cached_property
    def model(self) -> LmConfig:
        """Model config with the attention kernel, and a block size of it that divides the rows.

        Raises:
            ValueError: if the attention kernel does not support the length of a row.
        """
        assert self.config.model is not None
        return self.kernel.configure(self.config.model, self.config.rows.sizes.positions(self.kernel))

    @functools.cached_property
    def layout(self) -> RowLayout:
        """Shape of the microbatches of all batches, with its alternatives.

        Raises:
            ValueError: if the attention kernel does not support the length of a row.
        """
        return Rows.of(self.config.model, self.trainer, self.config.context_shards).of_run(
            self.config.rows.sizes,
            self.trainer.rows_per_microbatch,
            microbatch_rows(self.config.trainer, 0),
            self.groups,
            whole_rollouts=self.whole_rollouts,
        )

    @property
    def groups(self) -> GroupSizes | None:
        """Sizes of groups of sequences that may share a prompt; None if they may not."""
        return None

    @property
    def logprob_block(self) -> int:
        """Tokens per device whose logits are in memory at once."""
        return self.config.logprob_block_size or LOGPROB_BLOCK_SIZE[platform_of(self.trainer)]

    def score(self, trained: Any, batch: RolloutBatch) -> Scores:
        """Score rollouts with trained weights: those of the policy, or of its adapter, with or without critic."""
        return self.scorer.score(self.assemble(trained), batch)

    # Weights.

    @functools.cached_property
    def base(self) -> LmHeadModel | None:
        """The weights that the run's adapter changes, in the compute type of the trainer; None without an adapter.

        Raises:
            PolicyModelError: if `initialize_from` cannot be loaded.
        """
        return None if self.config.lora is None else self.load_base(self.model)

    def load_base(self, model: LmConfig) -> LmHeadModel:
        """Load the weights that the run's adapter changes. `model` is the architecture, with the attention kernel.

        Raises:
            PolicyModelError: if `initialize_from` cannot be loaded.
        """
        # The type of the run's trainer also in workers with another precision, so that all have the same base.
        return self._load_policy(model, self.config.trainer.mp.compute_dtype)

    @functools.cached_property
    def base_fingerprint(self) -> str:
        """Fingerprint of the base, which checkpoints hold; empty without an adapter."""
        return "" if self.base is None else fingerprint(self.base, self.trainer)

    def check_base(self, saved: str) -> None:
        """Check that the base is the one of a checkpoint, from its `Progress.base`.

        Raises:
            OtherBaseError: if it is not.
        """
        check_base(saved, self.base_fingerprint, str(self.config.initialize_from))

    def assemble(self, trained: Any) -> Any:
        """Return the model of trained weights: they themselves, or an adapter with its base."""
        return assemble(trained, self.base)

    def first_policy(self) -> TrainedPolicy:
        """Load or initialize the trained part of the policy.

        Raises:
            PolicyModelError: if `initialize_from` cannot be loaded, or does not fit `model` or the tokenizer.
            AdapterFormatError: if `lora.adapter` cannot be loaded, or does not fit `initialize_from` and `lora`.
            LoraTargetError: if a module that `lora.targets` names cannot be adapted.
        """
        if self.base is None:
            return self._load_policy(self.model, None)
        spec, lora = self.policy_spec(self.base.vocab_size), self.config.lora
        if lora is not None and lora.adapter is not None:
            return load_peft_adapter(lora.adapter, spec.policy, cast(Adapter, spec.trained_policy), self.trainer)
        return spec.new_adapter(jax.random.PRNGKey(derive_seed(self.config.seed, "adapter") % 2**32))

    def _load_policy(self, model: LmConfig, dtype: DTypeLike | None) -> LmHeadModel:
        config = self.config
        return first_policy(config.initialize_from, model, self.tokenizer, self.trainer, config.seed, dtype)

    def policy_spec(self, vocab_size: int) -> PolicySpec:
        """Return the shapes of the run's weights, for a vocabulary size of the model."""
        return PolicySpec(self.model, vocab_size, self.trainer, self.config.trained_critic, self.config.lora)

    def first_state(self, policy: TrainedPolicy) -> TrainerState:
        """Return the training state before the first update.

        `policy` is the trained part of the first policy; its arrays become part of the state.
        """
        key = jax.random.PRNGKey(derive_seed(self.config.seed, "training") % 2**32)
        spec = self.policy_spec(self.assemble(policy).vocab_size)
        return self.learner.initial_state(spec.attach_critic(policy), key)
