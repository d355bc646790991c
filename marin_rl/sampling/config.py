# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""What a user says about sampling: how it is done, and by which engine."""

import dataclasses
import math
import urllib.parse

import draccus

from marin_rl.retry import RetryConfig

_DEFAULT_PREFILL_TOKENS = 4096
"""Cap on the default of `max_prefill_tokens`: the engine makes logits for every one of them."""


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How training data is sampled, and how large the engine is."""

    max_new_tokens: int = 64
    """Most tokens that any request may ask for, the stop token included. At least 1."""
    temperature: float = 1.0
    """Temperature of the training samples, above 0."""
    top_p: float = 1.0
    """1.0, which is no truncation, and nothing else: every objective is made of log-ratios of the whole
    distribution."""
    top_k: int | None = None
    """null, which is no truncation, and nothing else; as `top_p`."""
    max_seqs: int = 64
    """Sequences that are decoded together. The KV cache holds `max_seqs` times the maximal context, and
    every round costs as much as a full one; more requests than this are answered in several rounds."""
    page_size: int = 16
    """Tokens in a page of the KV cache. 128 on TPU; elsewhere small pages keep short contexts cheap."""
    max_prefill_tokens: int | None = None
    """Prompt tokens that are read together; the engine always pays for this many. At least the maximal
    context. By default as many as `max_seqs` prompts that leave room for `max_new_tokens` can have, at
    most 4096."""
    kv_cache_dtype: str = "float32"
    """Floating-point type of the KV cache. float32 makes log-probabilities agree with the learner's to
    float32 rounding (a mean of 1e-7 to 1e-5, by model), bfloat16 to about 1e-2 at half the memory."""

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "max_seqs", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"sampling.{name} is {getattr(self, name)}; it must be at least 1")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(f"sampling.temperature is {self.temperature}; training samples need one above 0")
        for name, neutral, written in (("top_p", 1.0, "1.0"), ("top_k", None, "null")):
            if getattr(self, name) != neutral:
                raise ValueError(
                    f"sampling.{name} is {getattr(self, name)}, but truncated sampling leaves out part of the "
                    "distribution, which biases every log-ratio of the objectives, and the sampler has no truncation; "
                    f"set sampling.{name}: {written} and change sampling.temperature instead"
                )
        if self.kv_cache_dtype not in ("float32", "bfloat16"):
            raise ValueError(f"sampling.kv_cache_dtype is {self.kv_cache_dtype!r}; use float32 or bfloat16")

    def prefill_tokens(self, max_context: int) -> int:
        """Prompt tokens read together, for a model whose context holds `max_context` tokens.

        Raises:
            ValueError: if the longest prompt would not fit.

        >>> SamplingConfig(max_new_tokens=6, max_seqs=512).prefill_tokens(14)
        4096
        """
        if self.max_prefill_tokens is None:
            prompt_room = max(max_context - self.max_new_tokens, 1)
            return max(max_context, min(self.max_seqs * prompt_room, _DEFAULT_PREFILL_TOKENS))
        if self.max_prefill_tokens < max_context:
            raise ValueError(
                f"sampling.max_prefill_tokens is {self.max_prefill_tokens}, but a prompt may have up to "
                f"{max_context} tokens (the context); raise it to at least that"
            )
        return self.max_prefill_tokens


@dataclasses.dataclass(frozen=True)
class SamplerConfig(draccus.ChoiceRegistry):
    """Chooses an engine by `type`."""


@SamplerConfig.register_subclass("levanter")
@dataclasses.dataclass(frozen=True)
class LevanterSamplerConfig(SamplerConfig):
    """Levanter's engine, in this process and on the learner's own arrays."""


@dataclasses.dataclass(frozen=True)
class ReloadConfig:
    """How an engine outside gets new weights: they are written into a folder, and a function of one's own is called."""

    folder: str
    """Folder that the engine reads, for this run alone. Version 7 is written to `version-7` in it, in Hugging Face
    format: complete, or not there."""
    path: str
    """The Python file that has the function; relative paths start at the working directory."""
    function: str
    """Its name. It takes the folder of the weights (a `pathlib.Path`), their version and `base_url`, has the engine
    load them, and returns when the engine has; an error that it raises ends the run."""
    keep: int = 2
    """Newest versions that stay in the folder; at least 1."""

    def __post_init__(self) -> None:
        if not self.folder:
            raise ValueError("sampler.reload.folder is empty; name a folder that the engine can read")
        if self.keep < 1:
            raise ValueError(f"sampler.reload.keep is {self.keep}; it must be at least 1")


@SamplerConfig.register_subclass("openai")
@dataclasses.dataclass(frozen=True)
class OpenAiSamplerConfig(SamplerConfig):
    """A server that speaks OpenAI's completions protocol, and answers with token ids and log-probs, as vLLM does."""

    base_url: str
    """Where the server is, `/completions` left out: `http://localhost:8000/v1`."""
    model: str
    """The model's name there."""
    reload: ReloadConfig
    """How the server gets new weights."""
    api_key_env: str | None = None
    """Environment variable that holds the key, sent as a bearer token; null for a server without keys."""
    timeout: float = 600.0
    """Seconds that the server may stay silent in one request, which is the time of the longest answer; above 0."""
    retry: RetryConfig = RetryConfig()
    """How long to go on when the server does not answer, or says that it cannot now."""

    def __post_init__(self) -> None:
        address = urllib.parse.urlsplit(self.base_url)
        if address.scheme not in ("http", "https") or not address.hostname or not _has_good_port(address):
            raise ValueError(
                f"sampler.base_url is {self.base_url!r}; it must be an address such as http://localhost:8000/v1"
            )
        if address.username is not None or address.password is not None:
            raise ValueError(
                "sampler.base_url holds a user or a password, which would stand in the run's files; "
                "name the environment variable that holds the key in sampler.api_key_env"
            )
        if not self.model:
            raise ValueError("sampler.model is empty; give the name under which the server knows the model")
        if not (self.timeout > 0 and math.isfinite(self.timeout)):
            raise ValueError(f"sampler.timeout is {self.timeout}; it is a number of seconds above 0")


def _has_good_port(address: urllib.parse.SplitResult) -> bool:
    try:
        return address.port != 0
    except ValueError:
        return False
