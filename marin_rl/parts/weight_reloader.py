# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Weights for an inference server: a folder for each version, and the user's function that makes the server load it."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import equinox as eqx
from levanter.models.lm_model import LmHeadModel

from marin_rl.learner.policy_model import save_adapter_folder, save_hf_policy
from marin_rl.models.lora import split_adapter
from marin_rl.sampling.config import ReloadConfig
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.types import WeightVersion
from marin_rl.utils.devices.trainer_config import TrainerConfig
from marin_rl.utils.user_code import load_function, user_errors


def load_reload_function(config: ReloadConfig) -> Callable[[Path, WeightVersion, str], object]:
    """Import the user's function that makes a server load weights.

    Raises:
        UserFileError: if the file has no such function.
    """
    return load_function(config.path, config.function, "a function of folder, version and base_url")


class WeightReloader:
    """Writes versions of the weights and makes a server load them."""

    def __init__(
        self,
        config: ReloadConfig,
        base_url: str,
        tokenizer: ChatTokenizer,
        trainer: TrainerConfig,
        stop: Sequence[str] = (),
        base: str = "",
    ) -> None:
        """Import the user's function.

        The function gets `base_url`, the address of the server. Tokenizer and stop texts are written with the weights,
        and with an adapter the name of its `base`.

        Raises:
            UserFileError: if the function does not exist.
        """
        self._config = config
        self._base_url = base_url
        self._tokenizer = tokenizer
        self._trainer = trainer
        self._stop = stop
        self._base = base
        self._written: list[Path] = []
        self._function = load_reload_function(config)

    def __call__(self, model: LmHeadModel, version: WeightVersion) -> None:
        """Write weights, and return when the server has loaded them.

        `version` is the number of training steps. A version may be served again with other weights.

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
        if self._config.adapter:
            partial.mkdir(parents=True)
            base, adapter = split_adapter(eqx.filter(model, eqx.is_array))
            save_adapter_folder(base, adapter, self._base, None, self._tokenizer, partial)
        else:
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
