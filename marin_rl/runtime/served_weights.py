# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Weights for an engine outside: written into a folder, and loaded by the engine at the call of a user's function."""

import shutil
from pathlib import Path

from levanter.models.lm_model import LmHeadModel
from levanter.trainer import TrainerConfig

from marin_rl.learner.policy_model import save_hf_policy
from marin_rl.sampling.config import ReloadConfig
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.types import WeightVersion
from marin_rl.user_code import UserFileError, load_from_file


class WeightReloader:
    """Gives an engine new weights, version by version."""

    def __init__(self, config: ReloadConfig, base_url: str, tokenizer: ChatTokenizer, trainer: TrainerConfig) -> None:
        """Import the user's function.

        Args:
            config: folder and function.
            base_url: of the engine; handed to the function.
            tokenizer: written beside the weights.
            trainer: mesh and axis mapping of the weights.

        Raises:
            UserFileError: if there is no such function.
        """
        self._config = config
        self._base_url = base_url
        self._tokenizer = tokenizer
        self._trainer = trainer
        self._written: list[Path] = []
        self._function = load_from_file(config.path, config.function)
        if not callable(self._function):
            raise UserFileError(
                f"{config.function!r} of {config.path} is {type(self._function).__name__}, and not a function of "
                "folder, version and base_url"
            )

    def serve(self, model: LmHeadModel, version: WeightVersion) -> None:
        """Write weights, and return when the engine has loaded them.

        Args:
            model: the weights.
            version: steps of training behind them. The same one may come again, with other weights.

        Raises:
            UserFileError: if the function raises.
        """
        folder = self._write(model, version)
        try:
            self._function(folder, version, self._base_url)
        except Exception as error:
            where = f"sampler.reload: {self._config.function!r} of {self._config.path}"
            raise UserFileError(f"{where} raised {type(error).__name__}: {error}") from error
        # Only now: until then the engine may still read the older ones.
        self._forget_old()

    def _write(self, model: LmHeadModel, version: WeightVersion) -> Path:
        folder = Path(self._config.folder).absolute() / f"version-{version}"
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        save_hf_policy(model, self._tokenizer, partial, self._trainer)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        if folder in self._written:
            self._written.remove(folder)
        self._written.append(folder)
        return folder

    def _forget_old(self) -> None:
        while len(self._written) > self._config.keep:
            shutil.rmtree(self._written.pop(0), ignore_errors=True)
