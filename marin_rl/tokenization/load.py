# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Which tokenizer to use: the built-in one, a folder's, or one from the Hugging Face hub."""

import dataclasses
import re
from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from marin_rl.tokenization.byte_tokenizer import byte_tokenizer
from marin_rl.tokenization.chat import ChatTokenizer

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class TokenizerLoadError(ValueError):
    """A tokenizer cannot be loaded; the message names it and what to do."""


@dataclasses.dataclass(frozen=True)
class TokenizerConfig:
    """Chooses the tokenizer and its chat template."""

    path: str | None = None
    """A folder with a Hugging Face tokenizer, or a name on the Hugging Face hub. None: the built-in
    byte-level tokenizer of 264 tokens, which needs no download."""
    chat_template: str | None = None
    """Path of a Jinja file that replaces the tokenizer's chat template. None: the tokenizer's own."""

    def build(self) -> ChatTokenizer:
        """Load the tokenizer.

        Raises:
            TokenizerLoadError: if the folder, the hub or the template's file cannot be read.
            ChatTemplateError: if there is no chat template.

        >>> TokenizerConfig().build().vocab_size
        264
        """
        tokenizer = byte_tokenizer() if self.path is None else _load(self.path)
        if self.chat_template is not None:
            tokenizer.chat_template = _read_template(Path(self.chat_template))
        return ChatTokenizer(tokenizer, () if self.path is None else _generation_stop_ids(self.path))


def _load(path: str) -> PreTrainedTokenizerBase:
    folder = Path(path).expanduser()
    if folder.is_dir():
        try:
            return AutoTokenizer.from_pretrained(str(folder))
        except (OSError, ValueError) as error:
            raise TokenizerLoadError(
                f"the folder {path} holds no loadable tokenizer: {_first_line(error)}; it needs the files that a "
                "Hugging Face tokenizer's save_pretrained writes, tokenizer.json among them"
            ) from error
    if _HUB_NAME.fullmatch(path) is None:
        raise TokenizerLoadError(f"the tokenizer folder {path} does not exist; correct tokenizer.path")
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise TokenizerLoadError(
            f"the tokenizer {path!r} is neither a folder here nor available from the Hugging Face hub: "
            f"{_first_line(error)}; check the name and the network (and HF_TOKEN, where it is gated), or download it "
            "elsewhere and give its folder, or leave tokenizer.path out for the built-in byte-level tokenizer"
        ) from error


def _read_template(path: Path) -> str:
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerLoadError(
            f"the chat template {path} cannot be read: {error}; tokenizer.chat_template is the path of a Jinja file"
        ) from error


def _generation_stop_ids(path: str) -> tuple[int, ...]:
    """Stop tokens that a model's generation_config.json lists, besides the tokenizer's own eos."""
    folder = Path(path).expanduser()
    try:
        config = GenerationConfig.from_pretrained(str(folder) if folder.is_dir() else path)
    except OSError:
        # The file is optional, and transformers reports its absence as it does a failed download.
        return ()
    ids = config.eos_token_id
    return () if ids is None else tuple(ids) if isinstance(ids, list) else (ids,)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")
