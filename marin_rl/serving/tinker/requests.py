# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""JSON bodies of the Tinker protocol, of SDK 0.25 to 0.38. Unknown fields are ignored."""

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from annotated_types import Ge, Gt, Le

from marin_rl.serving.bodies import validate
from marin_rl.serving.tinker.records import MAX_TOPK, AdamParams, ModelSpec, RequestError, SampleParams

MAX_SAMPLES = 1024
"""Maximum `num_samples` of a request."""
MIN_TTL, MAX_TTL = 3600, 10 * 366 * 24 * 3600
Number = Annotated[int, Ge(0), Le(2**63 - 1)]
Operation = Annotated[int, Ge(1), Le(2**31 - 1)]
Token = Annotated[int, Ge(0), Le(2**31 - 1)]
Ttl = Annotated[int, Ge(MIN_TTL), Le(MAX_TTL)]
Metadata = dict[str, Any]
_FIRST_ERROR = pydantic.Field(fail_fast=True)
"""Without it, each of the two million invalid items of a list becomes an error."""
_STOPS = pydantic.Field(fail_fast=True, max_length=1000)


class Body(pydantic.BaseModel):
    """A body."""

    model_config = pydantic.ConfigDict(protected_namespaces=(), allow_inf_nan=False)


class CreateSession(Body):
    """Body of `create_session`."""

    tags: Annotated[list[str], _FIRST_ERROR] = []
    user_metadata: Metadata | None = None
    display_name: str | None = None


class SessionBody(Body):
    """Body of `session_heartbeat`."""

    session_id: str


class Optimizer(Body):
    """Kind of optimizer."""

    type: str = "adamw"

    def check(self) -> None:
        """Raise `RequestError` unless this is AdamW."""
        if self.type != "adamw":
            raise RequestError(f"the optimizer {self.type!r:.100} is not supported; use adamw")


class LoraConfig(Body):
    """Settings of a new adapter; rank 0 trains all weights."""

    rank: Annotated[int, Ge(0), Le(4096)]
    seed: Number | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModel(Body):
    """Body of `create_model`."""

    session_id: str
    model_seq_id: Number
    base_model: str
    user_metadata: Metadata | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: Optimizer = Optimizer()

    def spec(self, seed: int) -> ModelSpec:
        """Return the model's specification, with `seed` if the client gave none."""
        self.optimizer_config.check()
        lora = self.lora_config
        if lora is None or lora.rank == 0:
            if lora is not None and not (lora.train_unembed and lora.train_mlp and lora.train_attn):
                raise RequestError("rank 0 trains all weights; set train_unembed, train_mlp and train_attn to true")
            return ModelSpec(0, seed, True, True, True)
        return ModelSpec(
            lora.rank, seed if lora.seed is None else lora.seed, lora.train_unembed, lora.train_mlp, lora.train_attn
        )


class ModelBody(Body):
    """Body of `get_info` and `unload_model`."""

    model_id: str


class OperationBody(Body):
    """Part of all bodies of training operations."""

    model_id: str
    seq_id: Operation


class Adam(Body):
    """Settings of one step."""

    learning_rate: Annotated[float, Ge(0)] = 1e-4
    beta1: Annotated[float, Ge(0), Le(1)] = 0.9
    beta2: Annotated[float, Ge(0), Le(1)] = 0.95
    eps: Annotated[float, Ge(0)] = 1e-12
    weight_decay: Annotated[float, Ge(0)] = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(OperationBody):
    """Body of `optim_step`."""

    adam_params: Adam | None = None
    optimizer_params: Optimizer | None = None

    def params(self) -> AdamParams:
        """Return the step's settings. Raise `RequestError` if one is not supported or out of range."""
        if self.optimizer_params is not None:
            raise RequestError(f"the optimizer {self.optimizer_params.type!r:.100} is not supported; send adam_params")
        params = AdamParams(**(self.adam_params or Adam()).model_dump())
        params.in_float32()
        return params


class SaveWeights(OperationBody):
    """Body of `save_weights`."""

    path: str
    ttl_seconds: Ttl | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None


class SaveWeightsForSampler(OperationBody):
    """Body of `save_weights_for_sampler`: a named checkpoint, or one of a sampling session."""

    path: str | None = None
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: Ttl | None = None
    user_metadata: Metadata | None = None

    @pydantic.model_validator(mode="after")
    def _check(self) -> "SaveWeightsForSampler":
        if self.kind != "snapshot":
            raise ValueError("kind 'inflight' is not supported; use 'snapshot'")
        if (self.path is None) == (self.sampling_session_seq_id is None):
            raise ValueError("give either path or sampling_session_seq_id")
        return self


class LoadWeights(Body):
    """Body of `load_weights`: into a model, or into a new one of a session."""

    model_id: str | None = None
    seq_id: Operation | None = None
    session_id: str | None = None
    model_seq_id: Number | None = None
    base_model: str | None = None
    user_metadata: Metadata | None = None
    path: str
    optimizer: bool
    optimizer_config: Optimizer | None = None

    @pydantic.model_validator(mode="after")
    def _check(self) -> "LoadWeights":
        in_place, new = (self.model_id, self.seq_id), (self.session_id, self.model_seq_id)
        if (None in in_place) == (None in new) or in_place.count(None) == 1 or new.count(None) == 1:
            raise ValueError("give either model_id and seq_id, or session_id and model_seq_id")
        return self


class WeightsInfo(Body):
    """Body of `weights_info`."""

    tinker_path: str


class TtlBody(Body):
    """Body of a checkpoint's `ttl`."""

    ttl_seconds: Ttl | None


class CreateSamplingSession(Body):
    """Body of `create_sampling_session`."""

    session_id: str
    sampling_session_seq_id: Number
    base_model: str | None = None
    model_path: str | None = None


class RetrieveFuture(Body):
    """Body of `retrieve_future`."""

    request_id: str


class Chunk(Body):
    """A part of a prompt."""

    type: str = "encoded_text"
    tokens: Annotated[list[Token], _FIRST_ERROR] = []


class Prompt(Body):
    """The parts of a prompt."""

    chunks: Annotated[list[Chunk], _FIRST_ERROR]


class Sampling(Body):
    """Settings of sampling."""

    max_tokens: Annotated[int, Ge(1)] | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], _STOPS] | Annotated[list[Token], _STOPS] | None = None
    temperature: Annotated[float, Ge(0)] = 1.0
    top_k: Annotated[int, Ge(-1)] = -1
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0


class SampleBody(Body):
    """Body of `asample`."""

    sampling_session_id: str
    seq_id: Number
    num_samples: Annotated[int, Ge(1), Le(MAX_SAMPLES)] = 1
    prompt: Prompt
    sampling_params: Sampling = Sampling()
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Ge(0), Le(MAX_TOPK)] = 0
    topk_sample_logprobs: int = 0
    prompt_alt_tokens_k: int = 0
    target_prompt_logprobs: Any = None
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None

    def params(self, seed: int) -> SampleParams:
        """Return what to sample, with `seed` if the client gave none.

        Raises:
            RequestError: if it asks for something that the server does not have.
        """
        for name in (
            "topk_sample_logprobs",
            "prompt_alt_tokens_k",
            "target_prompt_logprobs",
            "prompt_logprobs_last_n",
            "record_stability_info",
        ):
            if getattr(self, name):
                raise RequestError(f"{name} is not supported; omit it")
        for chunk in self.prompt.chunks:
            if chunk.type != "encoded_text":
                raise RequestError(f"a prompt chunk of type {chunk.type!r:.100} is not supported; send encoded_text")
        prompt = tuple(token for chunk in self.prompt.chunks for token in chunk.tokens)
        if not prompt:
            raise RequestError("the prompt is empty; send at least one token")
        given = self.sampling_params
        stop = (given.stop,) if isinstance(given.stop, str) else given.stop
        return SampleParams(
            prompt=prompt,
            num_samples=self.num_samples,
            max_tokens=given.max_tokens,
            seed=seed if given.seed is None else given.seed,
            temperature=given.temperature,
            top_k=given.top_k,
            top_p=given.top_p,
            stop=None if stop is None else tuple(stop),  # pyrefly: ignore
            prompt_logprobs=bool(self.prompt_logprobs),
            topk_prompt_logprobs=self.topk_prompt_logprobs,
        )


BodyT = TypeVar("BodyT", bound=Body)


def parse_body(body_class: type[BodyT], values: Mapping[str, Any]) -> BodyT:
    """Validate a body. Raise `ApiError` with status 422, naming the first invalid field."""
    return validate(body_class, values, HTTPStatus.UNPROCESSABLE_ENTITY)


def canonical_json(values: Mapping[str, Any]) -> bytes:
    """Return a body as bytes that are equal for equal bodies."""
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()
