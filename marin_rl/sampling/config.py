# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Configuration of sampling and of the sampler."""

import dataclasses
from typing import Annotated, ClassVar

import draccus
from annotated_types import Ge, Gt

from marin_rl.utils.retry import RetryConfig
from marin_rl.utils.settings.checks import ConfigSection, check_fields
from marin_rl.utils.settings.fields import LOCAL_FILE, LOCAL_PATH, check_address, read_api_key

MIN_TEMPERATURE = 1e-30
"""Lowest temperature above 0; logits divided by a lower one may exceed the range of float32."""


@dataclasses.dataclass(frozen=True)
class SamplingConfig(ConfigSection):
    """Sampling settings of the training data, and sizes of the sampler."""

    max_new_tokens: Annotated[int, Ge(1)] = 64
    """Maximum number of new tokens per request, the stop token included."""
    temperature: Annotated[float, Ge(MIN_TEMPERATURE), "or use evaluation.greedy for attempts at temperature 0"] = 1.0
    """Temperature of training samples."""
    top_p: float = 1.0
    """Must be 1.0 (no truncation): the log-ratios in every objective need the full distribution."""
    top_k: int | None = None
    """Must be null (no truncation), like `top_p`."""
    stop: tuple[str, ...] = ()
    """Texts that end a reply in any tokenization. The token that completes a text is the last one of the reply, with
    everything in it, so the reply includes the text. Special tokens count as their text."""
    max_seqs: Annotated[int, Ge(1)] = 64
    """Number of sequences that are decoded together, on all training hosts. The KV cache holds `max_seqs` times the
    maximum context. Every decode step costs as much as a full one; additional requests wait for free slots. An episode
    of several turns keeps its slot until it ends."""
    kv_cache_dtype: str | None = None
    """Type of the KV cache, float32 or bfloat16; null is float32 on CPU, bfloat16 on accelerators. With float32,
    log-probabilities agree with the learner's to float32 rounding (a mean of 1e-7 to 1e-5, depending on the model);
    with bfloat16 to about 1e-2, at half the memory."""
    max_cache_gib: Annotated[float, Gt(0)] | None = None
    """Upper bound of the KV cache of each device, in GiB; a config that needs more is refused. Null: no bound."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name, neutral, written in (("top_p", 1.0, "1.0"), ("top_k", None, "null")):
            if getattr(self, name) != neutral:
                raise ValueError(
                    f"sampling.{name} is {getattr(self, name)}, but truncated sampling leaves out part of the "
                    "distribution, which biases every log-ratio of the objectives, so the sampler does not support it; "
                    f"set sampling.{name}: {written} and change sampling.temperature instead"
                )
        if "" in self.stop:
            raise ValueError("sampling.stop has an empty text, which would end every reply; remove it")
        for text in self.stop:
            try:
                text.encode()
            except UnicodeEncodeError:
                raise ValueError(
                    f"sampling.stop has {text!r}, with half a character (an unpaired surrogate); remove it"
                ) from None
        if self.kv_cache_dtype not in (None, "float32", "bfloat16"):
            raise ValueError(f"sampling.kv_cache_dtype is {self.kv_cache_dtype!r}; use float32, bfloat16 or null")

    def cache_dtype(self, platform: str) -> str:
        """Return the type of the KV cache on a platform: `cpu`, `gpu` or `tpu`."""
        return self.kv_cache_dtype or ("float32" if platform == "cpu" else "bfloat16")


@dataclasses.dataclass(frozen=True)
class SamplerConfig(ConfigSection, draccus.ChoiceRegistry):
    """Sampler selected by `type`."""


@SamplerConfig.register_subclass("levanter")
@dataclasses.dataclass(frozen=True)
class LevanterSamplerConfig(SamplerConfig):
    """The built-in sampler, in this process and on the learner's arrays."""


@dataclasses.dataclass(frozen=True)
class ReloadConfig(ConfigSection):
    """Reload of weights by an external server: weights are written to a folder and a user function is called."""

    folder: str = dataclasses.field(metadata=LOCAL_PATH)
    """Folder that the server reads, dedicated to this run. Version 7 is written atomically to `version-7` in it, in
    Hugging Face format; with `lora` only the adapter, in the format of PEFT."""
    path: str = dataclasses.field(metadata=LOCAL_FILE)
    """Python file with the function; relative paths are relative to the working directory."""
    function: str
    """Name of the function. Its arguments are the folder of the weights (a `pathlib.Path`), their version and
    `base_url`. It makes the server load the weights and returns when they are loaded. An error ends the run."""
    keep: Annotated[int, Ge(1)] = 2
    """Newest versions of this process to keep in the folder; those of an earlier process remain."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.folder:
            raise ValueError("sampler.reload.folder is empty; name a folder that the engine can read")


@dataclasses.dataclass(frozen=True)
class AbstractServerConfig(ConfigSection):
    """A server with OpenAI's completions protocol."""

    section: ClassVar[str]
    """Name of the section, for error messages."""

    base_url: str
    """Address of the server without `/completions`, such as `http://localhost:8000/v1`."""
    model: str
    """Name of the model on the server."""
    api_key_env: str | None = None
    """Environment variable with the API key, sent as a bearer token; null for a server without keys."""
    timeout: Annotated[float, Gt(0)] = 600.0
    """Time limit of a request in seconds, from connecting to the last byte of the response."""
    retry: RetryConfig = RetryConfig()
    """Retries when the server does not respond, or responds that it is temporarily unavailable."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_address(f"{self.section}.base_url", self.base_url, f"{self.section}.api_key_env")
        if not self.model:
            raise ValueError(f"{self.section}.model is empty; give the name of the model on the server")

    def read_key(self) -> str | None:
        """Return the API key; None if the server needs none.

        Raises:
            ValueError: if the environment variable is not set, or holds no key; names the setting.
        """
        try:
            return None if self.api_key_env is None else read_api_key(self.api_key_env)
        except ValueError as error:
            raise ValueError(f"{self.section}.api_key_env: {error}") from None


@SamplerConfig.register_subclass("openai")
@dataclasses.dataclass(frozen=True)
class OpenAiSamplerConfig(AbstractServerConfig, SamplerConfig):
    """A server with OpenAI's completions protocol that returns token ids and log-probs, such as vLLM."""

    section: ClassVar[str] = "sampler"

    reload: ReloadConfig = dataclasses.field(kw_only=True)
    """How the server loads new weights."""
