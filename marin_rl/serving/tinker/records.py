# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""What the parts of the Tinker server exchange: data, requests, results, and the trainer that they reach."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Float32, Int32

from marin_rl.serving.bodies import ApiError

MAX_TOPK = 128
"""Maximum number of tokens of a position: of `topk_prompt_logprobs`, and of targets."""


class RequestError(ApiError):
    """A request that cannot be served, by the fault of the client; the message names the value and the remedy."""


TARGETS = "target_tokens"
"""Name of the input with the tokens to score."""


@dataclasses.dataclass(frozen=True)
class Loss:
    """Inputs and settings of a loss."""

    factor: str
    """Name of the input that multiplies each term; a token whose factor is 0 has the term 0, except in `dro`."""
    inputs: frozenset[str]
    """Names of all inputs."""
    takes_top_k: bool
    """Whether a position may have several targets."""
    settings: Mapping[str, float | None]
    """Names of settings and their defaults; None without one."""


CLIP = ("clip_low_threshold", "clip_high_threshold")
"""Settings of losses with a clipped ratio."""
_POLICY = "advantages", frozenset({TARGETS, "advantages", "logprobs"})
LOSSES = {
    "cross_entropy": Loss("weights", frozenset({TARGETS, "weights"}), takes_top_k=True, settings={}),
    "importance_sampling": Loss(*_POLICY, takes_top_k=True, settings={}),
    "ppo": Loss(*_POLICY, takes_top_k=False, settings=dict(zip(CLIP, (0.8, 1.2), strict=True))),
    "cispo": Loss(*_POLICY, takes_top_k=False, settings=dict(zip(CLIP, (0.0, 4.0), strict=True))),
    "dro": Loss(*_POLICY, takes_top_k=False, settings={"beta": None}),
}


class Datum(NamedTuple):
    """One sequence of a `forward_backward` call."""

    tokens: Int32[np.ndarray, " length"]
    """Token ids that the model reads."""
    inputs: Mapping[str, np.ndarray]
    """Inputs of the loss by name: `target_tokens` int64, all others float32; `[length]`, or `[length, k]` for top-k
    targets and their weights. Position `t` is the model's prediction after reading tokens `0..t`."""


@dataclasses.dataclass(frozen=True)
class ForwardBackward:
    """One chunk of a call of `forward_backward` or `forward`."""

    model_id: str
    seq_id: int
    """Place in the order of the model's operations, from 1 on."""
    data: tuple[Datum, ...]
    loss_fn: str
    """Name of the loss."""
    config: Mapping[str, float]
    """Settings of the loss, such as `clip_low_threshold`."""
    forward_only: bool
    """Whether no gradient is added."""
    size: int = 0
    """Bytes in memory, about, of a request that was parsed."""


class LossOutputs(NamedTuple):
    """Result of a chunk."""

    logprobs: list[np.ndarray]
    """Per datum float32 log-probs of its `target_tokens`, in their shape."""
    metrics: dict[str, float]
    """By `name:reduction`, among them `loss:sum`."""


class AdamParams(NamedTuple):
    """Settings of one step of AdamW."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    """Decoupled: the weights lose `learning_rate · weight_decay` of themselves."""
    grad_clip_norm: float = 0.0
    """Bound of the gradient's global L2 norm; at most 0 for none."""

    def in_float32(self) -> "AdamParams":
        """Return the settings as the program computes with them: in float32, 1 - 1e-9 is 1, and 1e-60 is 0.

        Raises:
            RequestError: if a setting is out of range.
        """
        with np.errstate(over="ignore"):
            params = AdamParams._make(map(np.float32, self))
        smallest = float(np.finfo(np.float32).tiny)
        clip = smallest if self.grad_clip_norm > 0 else -math.inf
        bounds = {"learning_rate": (0, math.inf), "beta1": (0, 1), "beta2": (0, 1), "eps": (smallest, math.inf)}
        bounds |= {"grad_clip_norm": (clip, math.inf)}
        for name, value in params._asdict().items():
            low, high = bounds.get(name, (-math.inf, math.inf))
            if not (math.isfinite(value) and low <= value < high):
                raise RequestError(
                    f"adam_params.{name} is {value} in float32; it must be finite, at least {low}, below {high}"
                )
        return params


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """What a training client asked for."""

    lora_rank: int
    """Rank of the adapter; 0 trains all weights."""
    seed: int
    """Seed of the adapter's matrices A."""
    train_unembed: bool
    train_mlp: bool
    train_attn: bool


@dataclasses.dataclass(frozen=True)
class SampleParams:
    """One prompt to continue, or to score."""

    prompt: tuple[int, ...]
    num_samples: int
    max_tokens: int | None
    """Maximum number of new tokens; None for all that fit."""
    seed: int
    temperature: float
    top_k: int
    """-1 for all."""
    top_p: float
    stop: tuple[str, ...] | tuple[int, ...] | None
    """Texts or token ids that end a sample, and remain in it; None for the tokenizer's end tokens."""
    prompt_logprobs: bool
    topk_prompt_logprobs: int
    """Number of likeliest tokens to return at every position of the prompt."""


class Sample(NamedTuple):
    """One continuation."""

    tokens: tuple[int, ...]
    """With the one that ended it; none after a scored prompt that fills the context."""
    logprobs: tuple[float, ...]
    stopped: bool
    """Whether it ended by itself, and not by its length."""


TopK = tuple[Int32[np.ndarray, "length k"], Float32[np.ndarray, "length k"]]
"""Ids and log-probs of the likeliest tokens at every position of a prompt; the first row is undefined."""


class SampleOutputs(NamedTuple):
    """Result of a `SampleParams`."""

    samples: list[Sample]
    prompt_logprobs: Float32[np.ndarray, " length"] | None
    """NaN for the first token; None if not asked for."""
    topk: TopK | None
    """The likeliest first; None if not asked for."""


class SampleJob(NamedTuple):
    """A sampling request that waits for the trainer."""

    key: str
    """Names it in the results."""
    params: SampleParams


class SampleSource(Protocol):
    """The requests that wait for one version of the weights, as the trainer sees them while it samples."""

    def take(self) -> Sequence[SampleJob]:
        """Return the requests that arrived since the last call; never waits."""
        ...

    def finish(self, key: str, result: SampleOutputs | RequestError) -> None:
        """Answer a request."""
        ...


class Trainer(Protocol):
    """The weights of one training client, and the samplers made from them. Used by one thread.

    A folder is complete when the call that writes it returns. Any method may raise `RequestError`, which changes
    nothing, except that `optim_step` drops a sum of the gradients that is not finite.
    """

    @property
    def num_programs(self) -> int:
        """Number of compiled programs of `forward_backward` and of the log-probs of prompts."""
        ...

    def create(self, spec: ModelSpec) -> None:
        """Begin training: a new adapter, or the base weights, without gradient and moments. Replaces a former model."""
        ...

    def unload(self) -> None:
        """Drop the trained weights."""
        ...

    def forward_backward(self, request: ForwardBackward) -> LossOutputs:
        """Compute log-probs and loss; unless `forward_only`, add the gradient of the loss to the sum."""
        ...

    def optim_step(self, params: AdamParams) -> dict[str, float]:
        """Apply the sum of the gradients and zero it; return metrics."""
        ...

    def save(self, folder: Path) -> None:
        """Write weights, moments and the sum of the gradients, which must be finite."""
        ...

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """Read a folder of `save`; without `optimizer` with zero moments. `create` came before, with the same spec."""
        ...

    def save_sampler(self, folder: Path) -> None:
        """Write the weights alone, for `sample`."""
        ...

    def sample(self, folder: Path | None, source: SampleSource) -> None:
        """Answer requests to the weights in a folder of `save_sampler` or `save` (None: the base) until none waits."""
        ...
