# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Sections of the run's config for adapters, the critic and the export of weights."""

import dataclasses
import enum
from typing import Annotated

import jax.numpy as jnp
from annotated_types import Ge, Gt, Lt

from marin_rl.utils.settings.checks import ConfigSection, check_fields
from marin_rl.utils.settings.fields import STORAGE_PATH


@dataclasses.dataclass(frozen=True)
class LoraConfig(ConfigSection):
    """Low-rank adaptation (Hu et al. 2021): only matrices A and B are trained, `y = x W + (alpha / rank) (x A) B`.

    The weights `W` of `initialize_from` stay as they are, in the compute type. B starts at 0, so that training starts
    with the function of these weights.
    """

    rank: Annotated[int, Ge(1)] = 16
    """Rank of the product `A B`."""
    alpha: Annotated[float, Gt(0), Lt(10**6)] = 32.0
    """The product is multiplied by `alpha / rank`."""
    targets: tuple[str, ...] | str = (
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    )
    """Modules to adapt in every layer, by their names in Hugging Face's model: the last part (`q_proj`), or more parts
    (`self_attn.q_proj`). The head (`lm_head`) and the router of a mixture of experts (`gate`) are adapted only if they
    are named; embeddings and the experts of a mixture cannot be. `all-linear` names all linear layers but the head."""
    adapter: str | None = dataclasses.field(default=None, metadata=STORAGE_PATH)
    """Folder of an adapter in PEFT's format to start from; null: A is random and B is 0."""

    def __post_init__(self) -> None:
        if isinstance(self.targets, str):
            object.__setattr__(self, "targets", (self.targets,))
        check_fields(self)
        if not self.targets:
            raise ValueError("lora.targets is empty, so nothing is trained; name modules, such as [q_proj, v_proj]")

    @property
    def scale(self) -> float:
        """Factor of the product of A and B."""
        return self.alpha / self.rank


@dataclasses.dataclass(frozen=True)
class CriticConfig(ConfigSection):
    """Configuration of a critic, which estimates the return from each token on. `advantage: {type: gae}` needs one."""

    shared_trunk: bool = True
    """True: the value head shares the policy's trunk, at no extra cost, and the value loss also updates the trunk.
    False: the critic has a separate trunk, initialized as a copy of the policy's. It doubles time and memory, and the
    value loss does not affect the policy."""
    coefficient: Annotated[float, Gt(0)] = 0.5
    """Weight of the value loss relative to the policy term."""
    clip: Annotated[float, Gt(0)] | None = 0.2
    """ε_v: bound on the change of a value from its old value in the clipped value loss; null for no bound."""


@dataclasses.dataclass(frozen=True)
class ObservationLossConfig(ConfigSection):
    """Cross-entropy of the observations within a rollout, as an auxiliary target: a model of the environment.

    It is the mean over the tokens between the replies, with the markup of the chat template. Prompts have no loss.
    """

    coefficient: Annotated[float, Gt(0)] = 0.1
    """Weight of the cross-entropy relative to the policy term."""


class ExportDtype(enum.StrEnum):
    """Type of exported weights."""

    PARAMETER = "parameter"
    """The type of the trained parameters."""
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    """Rounded to nearest, half the size of float32."""


@dataclasses.dataclass(frozen=True)
class ExportConfig(ConfigSection):
    """Export of the final weights in Hugging Face format."""

    dtype: ExportDtype = ExportDtype.PARAMETER
    """Type of the exported weights: `parameter` (that of the trained parameters), `float32` or `bfloat16`."""

    @property
    def numeric_dtype(self) -> jnp.dtype | None:
        """The type; None for that of the parameters."""
        return None if self.dtype is ExportDtype.PARAMETER else jnp.dtype(self.dtype.value)
