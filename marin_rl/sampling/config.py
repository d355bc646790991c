# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""What a user says about the engine that samples: this project's own, or one outside."""

import dataclasses
import math
import urllib.parse

import draccus

from marin_rl.retry import RetryConfig


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
