# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Creates the samplers of a run: those of the trainer and of rollout workers, in this process or on a server."""

import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from levanter.models.lm_model import LmHeadModel

from marin_rl.config.sections import Mode
from marin_rl.config.train_config import TrainConfig
from marin_rl.learner.policy_model import save_hf_policy
from marin_rl.sampling.config import OpenAiSamplerConfig, ReloadConfig, SamplingConfig
from marin_rl.sampling.group_sampler import GroupSampler
from marin_rl.sampling.openai_sampler import OpenAiSampler, read_server_key
from marin_rl.sampling.sampler import Sampler, WeightPoll
from marin_rl.sampling.stops import stop_table
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import TokenPieces
from marin_rl.trainer_config import AbstractTrainerConfig
from marin_rl.types import WeightVersion
from marin_rl.user_code import UserFileError, load_from_file, user_errors


def open_trainer_sampler(
    config: TrainConfig,
    model: LmHeadModel,
    tokenizer: ChatTokenizer,
    trainer: AbstractTrainerConfig,
    version: WeightVersion,
) -> Sampler:
    """Open the trainer's sampler: the configured one in `mode: sync`, otherwise the built-in one.

    The arguments are those of `open_worker_sampler`.
    """
    if config.mode is Mode.ASYNC:
        return open_group_sampler(config, model, tokenizer, trainer, version)
    return open_worker_sampler(config, model, tokenizer, trainer, version)


def open_worker_sampler(
    config: TrainConfig,
    model: LmHeadModel,
    tokenizer: ChatTokenizer,
    trainer: AbstractTrainerConfig,
    version: WeightVersion,
    weight_poll: WeightPoll | None = None,
) -> Sampler:
    """Open the configured sampler.

    Args:
        config: selects the sampler; limits and sizes.
        model: the learner's weights.
        tokenizer: provides the stop tokens.
        trainer: mesh, axis mapping and compute precision.
        version: number of training steps that produced the weights.
        weight_poll: polls for newer weights during decoding in this process; None disables polling.

    Raises:
        UserFileError: if the function that reloads a server's weights is missing or raises.
        SamplerError: if a server's responses are invalid.
    """
    server = config.sampler
    if not isinstance(server, OpenAiSamplerConfig):
        return open_group_sampler(config, model, tokenizer, trainer, version, weight_poll)
    sampler = OpenAiSampler(
        server,
        config=config.sampling,
        stop_token_ids=tokenizer.stop_token_ids,
        max_context=config.rollouts.max_length,
        token_bytes=stop_text_bytes(config.sampling, tokenizer),
        vocab_size=model.vocab_size,
        load_weights=WeightReloader(server.reload, server.base_url, tokenizer, trainer, config.sampling.stop),
    )
    sampler.update_weights(model, version)
    sampler.check_server()
    return sampler


def open_group_sampler(
    config: TrainConfig,
    model: LmHeadModel,
    tokenizer: ChatTokenizer,
    trainer: AbstractTrainerConfig,
    version: WeightVersion,
    weight_poll: WeightPoll | None = None,
    *,
    sampling: SamplingConfig | None = None,
    max_context: int | None = None,
    call_seconds: float = math.inf,
) -> GroupSampler:
    """Open a sampler in this process, with the learner's weights on its mesh.

    `sampling` (sizes) and `max_context` (maximum number of prompt and new tokens) replace those of the config if given.
    `call_seconds` is that of `GroupSampler`. The other arguments are those of `open_worker_sampler`.
    """
    sampling = sampling or config.sampling
    return GroupSampler(
        model,
        config=sampling,
        stop_token_ids=tokenizer.stop_token_ids,
        max_context=max_context or config.rollouts.max_length,
        token_bytes=stop_text_bytes(sampling, tokenizer),
        version=version,
        weight_poll=weight_poll,
        trainer=trainer,
        call_seconds=call_seconds,
    )


def check_sampler(config: TrainConfig, tokenizer: ChatTokenizer, vocab_size: int) -> None:
    """Check stop tokens, stop texts and the function that reloads a server's weights; asks no server.

    Args:
        config: selects the sampler.
        tokenizer: provides the stop tokens.
        vocab_size: vocabulary size of the policy.

    Raises:
        UserFileError: if the function is missing.
        ValueError: if a stop text cannot be written with the tokens, or the server's key is not set.
    """
    sampling = config.sampling
    stop_table(vocab_size, tokenizer.stop_token_ids, sampling.stop, stop_text_bytes(sampling, tokenizer))
    if isinstance(config.sampler, OpenAiSamplerConfig):
        load_reload_function(config.sampler.reload)
        # Workers may have the key on other machines.
        if config.mode is Mode.SYNC:
            read_server_key(config.sampler)


def stop_text_bytes(sampling: SamplingConfig, tokenizer: ChatTokenizer) -> Callable[[int], bytes] | None:
    """Return the bytes of tokens if there are stop texts, which need them; for a large tokenizer it takes a second."""
    return TokenPieces(tokenizer.tokenizer).in_text if sampling.stop else None


def load_reload_function(config: ReloadConfig) -> Callable[[Path, WeightVersion, str], object]:
    """Import the user's function that makes a server load weights.

    Raises:
        UserFileError: if the file has no such function.
    """
    function = load_from_file(config.path, config.function)
    if not callable(function):
        raise UserFileError(
            f"{config.function!r} of {config.path} is {type(function).__name__}; it must be a function of folder, "
            "version and base_url"
        )
    return function


class WeightReloader:
    """Writes versions of the weights and makes a server load them."""

    def __init__(
        self,
        config: ReloadConfig,
        base_url: str,
        tokenizer: ChatTokenizer,
        trainer: AbstractTrainerConfig,
        stop: Sequence[str] = (),
    ) -> None:
        """Import the user's function.

        Args:
            config: folder and function.
            base_url: address of the server; passed to the function.
            tokenizer: written with the weights.
            trainer: mesh and axis mapping of the weights.
            stop: stop texts, written with the weights.

        Raises:
            UserFileError: if the function does not exist.
        """
        self._config = config
        self._base_url = base_url
        self._tokenizer = tokenizer
        self._trainer = trainer
        self._stop = stop
        self._written: list[Path] = []
        self._function = load_reload_function(config)

    def __call__(self, model: LmHeadModel, version: WeightVersion) -> None:
        """Write weights, and return when the server has loaded them.

        Args:
            model: the weights.
            version: number of training steps. A version may be served again with other weights.

        Raises:
            UserFileError: if the function raises.
        """
        folder = self._write(model, version)
        with user_errors(f"sampler.reload: {self._config.function!r} of {self._config.path} raised"):
            self._function(folder, version, self._base_url)
        # Only after the call, because the server may read the older versions until then.
        self._delete_old()

    def _write(self, model: LmHeadModel, version: WeightVersion) -> Path:
        folder = Path(self._config.folder).absolute() / f"version-{version}"
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        save_hf_policy(model, self._tokenizer, partial, self._trainer, self._stop)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        if folder in self._written:
            self._written.remove(folder)
        self._written.append(folder)
        return folder

    def _delete_old(self) -> None:
        while len(self._written) > self._config.keep:
            shutil.rmtree(self._written.pop(0), ignore_errors=True)
