# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The section of the reference policy: a frozen policy, a teacher, a server, or the policy itself with more context."""

import dataclasses
import enum
from typing import Annotated, ClassVar

import draccus
from annotated_types import Ge, Lt

from marin_rl.sampling.config import AbstractServerConfig
from marin_rl.utils.settings.checks import ConfigSection, check_fields
from marin_rl.utils.settings.fields import STORAGE_INPUT


@dataclasses.dataclass(frozen=True)
class ReferenceConfig(ConfigSection, draccus.ChoiceRegistry):
    """Policy whose log-probabilities `kl` and `distillation` compare with those of the trained policy."""

    @property
    def parts(self) -> tuple["ReferenceConfig", ...]:
        """The references that it consists of."""
        return (self,)


@ReferenceConfig.register_subclass("initial")
@dataclasses.dataclass(frozen=True)
class InitialReferenceConfig(ReferenceConfig):
    """The policy at the start of RL, after a warm start."""


@ReferenceConfig.register_subclass("checkpoint")
@dataclasses.dataclass(frozen=True)
class CheckpointReferenceConfig(ReferenceConfig):
    """A model with the tokens of the policy, and an architecture of its own."""

    path: str = dataclasses.field(metadata=STORAGE_INPUT)
    """A folder or hub name in Hugging Face format, or the directory of a finished run of marin_rl."""


@ReferenceConfig.register_subclass("server")
@dataclasses.dataclass(frozen=True)
class ServerReferenceConfig(AbstractServerConfig, ReferenceConfig):
    """A server with OpenAI's completions protocol that returns log-probs of prompts: `marin_rl.serve` or vLLM."""

    section: ClassVar[str] = "reference"


@dataclasses.dataclass(frozen=True)
class ContextConfig(ConfigSection):
    """What the reference reads besides the prompt of a task."""

    demonstrations: Annotated[int, Ge(0)] = 0
    """Number of worked answers of other training tasks, as turns before the question; drawn once for each task."""
    answer: bool = False
    """Whether the question ends with the worked answer of the task, or else with its answer."""
    feedback: bool = False
    """Whether the question ends with the environment's feedback for the attempt that is scored: rewards, their reasons
    and the last observation."""
    max_tokens: Annotated[int, Ge(1)] = 512
    """Maximum tokens that the context adds to a prompt."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not (self.demonstrations or self.answer or self.feedback):
            raise ValueError(
                "reference.context is empty; set demonstrations, answer or feedback in it, or context: null"
            )


class PolicyWeights(enum.StrEnum):
    """Weights of a reference that is the policy itself."""

    LIVE = "live"
    """The newest ones."""
    INITIAL = "initial"
    """Those at the start of RL."""
    AVERAGE = "average"
    """Their exponential moving average over updates, which checkpoints contain."""


@ReferenceConfig.register_subclass("policy")
@dataclasses.dataclass(frozen=True)
class PolicyReferenceConfig(ReferenceConfig):
    """The policy itself, usually with more context (self-distillation)."""

    weights: PolicyWeights = PolicyWeights.LIVE
    """`live`, `initial`, or `average`."""
    decay: Annotated[float, Ge(0), Lt(1)] = 0.99
    """Weight of the former average at each update, for `weights: average`."""
    context: ContextConfig | None = None
    """What the reference reads besides the prompt; null: nothing."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.context is None and self.weights is not PolicyWeights.AVERAGE:
            raise ValueError(
                f"weights is {self.weights} and context is null, so the reference is the policy itself, or that of "
                "reference: {type: initial}; set context, or weights: average"
            )


@ReferenceConfig.register_subclass("by_environment")
@dataclasses.dataclass(frozen=True)
class ReferencesByEnvironmentConfig(ReferenceConfig):
    """A reference for each environment of a mixture."""

    references: dict[str, ReferenceConfig]
    """References by name of the environment."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.references:
            raise ValueError("reference.references is empty; give a reference for the name of each environment")
        if any(isinstance(nested, ReferencesByEnvironmentConfig) for nested in self.references.values()):
            raise ValueError("reference.references contains by_environment; write its references at the first level")
        if len(set(decays(self))) > 1:
            raise ValueError("reference.references has several values of decay, but there is one average; use one")

    @property
    def parts(self) -> tuple[ReferenceConfig, ...]:
        """The references of all environments."""
        return tuple(self.references.values())


def decays(reference: ReferenceConfig) -> list[float]:
    """Return the decay of each part that is an average of the policy's weights."""
    policies = [part for part in reference.parts if isinstance(part, PolicyReferenceConfig)]
    return [policy.decay for policy in policies if policy.weights is PolicyWeights.AVERAGE]


def uses_initial_policy(reference: ReferenceConfig) -> bool:
    """Return whether a part has the weights at the start of RL."""
    return any(
        isinstance(part, InitialReferenceConfig)
        or (isinstance(part, PolicyReferenceConfig) and part.weights is PolicyWeights.INITIAL)
        for part in reference.parts
    )
