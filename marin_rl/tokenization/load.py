# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Which tokenizer to use: the built-in one, a folder's, or one from the Hugging Face hub."""

import contextlib
import dataclasses
import json
import re
from pathlib import Path
from typing import cast

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils.hub import cached_file

from marin_rl.tokenization.byte_tokenizer import byte_tokenizer
from marin_rl.tokenization.chat import ChatTokenizer

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


PLAIN = "plain"
"""The value of `tokenizer.chat_template` for messages one after another."""
_PLAIN_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}
{{- message['content'] -}}{{- eos_token -}}
{%- endgeneration -%}
{%- else -%}
{{- message['content'] -}}
{%- endif -%}
{%- endfor -%}
"""


class TokenizerLoadError(ValueError):
    """A tokenizer cannot be loaded; the message names it and what to do."""


@dataclasses.dataclass(frozen=True)
class TokenizerConfig:
    """Chooses the tokenizer and its chat template."""

    path: str | None = None
    """A folder with a Hugging Face tokenizer, or a name on the Hugging Face hub. None: the built-in
    byte-level tokenizer of 264 tokens, which needs no download."""
    chat_template: str | None = None
    """Path of a Jinja file that replaces the tokenizer's chat template, or `plain`: the contents of the messages one
    after another, without roles or separators, and eos behind each reply. None: the tokenizer's own."""

    def build(self) -> ChatTokenizer:
        """Load the tokenizer.

        Raises:
            TokenizerLoadError: if the folder, the hub or the template's file cannot be read.
            ChatTemplateError: if there is no chat template.

        >>> TokenizerConfig().build().vocab_size
        264
        """
        tokenizer = byte_tokenizer() if self.path is None else _load(self.path)
        if self.chat_template == PLAIN:
            tokenizer.chat_template = plain_template(tokenizer)
        elif self.chat_template is not None:
            tokenizer.chat_template = _read_template(Path(self.chat_template))
        chat = ChatTokenizer(tokenizer, () if self.path is None else _stop_ids(self.path))
        if unknown := [token for token in chat.more_stop_token_ids if token >= chat.vocab_size]:
            raise TokenizerLoadError(
                f"{self.path} lists stop tokens {unknown} (eos_token_id in generation_config.json or config.json), but "
                f"its tokenizer has {chat.vocab_size} tokens; use the tokenizer that belongs to the model"
            )
        return chat


def plain_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """A chat template for tokenizers without one, such as those of base models.

    The contents of the messages follow one another; nothing marks their roles. Each reply ends with eos. The text
    begins with bos if the tokenizer puts it before any text.

    Args:
        tokenizer: decides about bos.

    >>> tokenizer = byte_tokenizer()
    >>> tokenizer.chat_template = plain_template(tokenizer)
    >>> messages = [{"role": "user", "content": "2+3="}, {"role": "assistant", "content": "5"}]
    >>> tokenizer.apply_chat_template(messages, tokenize=False)
    '2+3=5<|end|>'
    """
    bos = tokenizer.bos_token_id
    starts_with_bos = bos is not None and tokenizer("text")["input_ids"][:1] == [bos]
    return ("{{- bos_token -}}\n" if starts_with_bos else "") + _PLAIN_TEMPLATE


def _load(path: str) -> PreTrainedTokenizerBase:
    folder = Path(path).expanduser()
    if not folder.is_dir() and _HUB_NAME.fullmatch(path) is None:
        raise TokenizerLoadError(f"the tokenizer folder {path} does not exist; correct tokenizer.path")
    try:
        return _from_files(str(folder) if folder.is_dir() else path)
    except TokenizerLoadError:
        raise
    except Exception as error:
        # Of any type: the Rust library raises a bare Exception for a damaged tokenizer.json, and transformers whatever
        # an unexpected value in the other files leads to.
        if folder.is_dir():
            raise TokenizerLoadError(
                f"the folder {path} holds no loadable tokenizer: {_problem(folder, error)}; it needs the files that a "
                "Hugging Face tokenizer's save_pretrained writes, tokenizer_config.json and tokenizer.json among them"
            ) from error
        raise TokenizerLoadError(
            f"the tokenizer {path!r} is neither a folder here nor available from the Hugging Face hub: "
            f"{_first_line(error)}; check the name and the network (and HF_TOKEN, where it is gated), or download it "
            "elsewhere and give its folder, or leave tokenizer.path out for the built-in byte-level tokenizer"
        ) from error


def _problem(folder: Path, error: Exception) -> str:
    missing = [name for name in ("tokenizer.json", "tokenizer_config.json") if not (folder / name).exists()]
    return f"{' and '.join(missing)} missing" if missing else _first_line(error)


def _from_files(source: str) -> PreTrainedTokenizerBase:
    """Load from a folder or hub name; never runs code that comes with the files."""
    config = get_tokenizer_config(source)
    extra = config.get("extra_special_tokens")
    if config.get("tokenizer_class") == "TokenizersBackend" or isinstance(extra, list):
        # Written by transformers 5: a class and a list that transformers 4 does not have.
        cached_file(source, "tokenizer.json")
        tokens = extra if isinstance(extra, list) else []
        loaded = PreTrainedTokenizerFast.from_pretrained(
            source,
            extra_special_tokens={} if isinstance(extra, list) else extra or {},
            additional_special_tokens=[token["content"] if isinstance(token, dict) else token for token in tokens],
        )
        return cast(PreTrainedTokenizerBase, loaded)
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise TokenizerLoadError(
            f"the tokenizer {source} is Python code that comes with its files (auto_map in tokenizer_config.json), "
            "and such code is never run here. If you trust it, load it with transformers and save it as a fast "
            "tokenizer (a tokenizer.json), and give that folder as tokenizer.path"
        ) from error


def _read_template(path: Path) -> str:
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerLoadError(
            f"the chat template {path} cannot be read: {error}; tokenizer.chat_template is the path of a Jinja file"
        ) from error


def _stop_ids(path: str) -> tuple[int, ...]:
    """Stop tokens of a model, besides the tokenizer's own eos.

    As in transformers, those of generation_config.json, or those of config.json if there is no such file.

    Raises:
        TokenizerLoadError: if the file is damaged, or lists something that is not a token id.
    """
    folder = Path(path).expanduser()
    source = str(folder) if folder.is_dir() else path
    for name in ("generation_config.json", "config.json"):
        # Both are optional: a tokenizer may have a folder of its own. Other trouble with the hub has been reported.
        with contextlib.suppress(OSError):
            if (file := cached_file(source, name, _raise_exceptions_for_missing_entries=False)) is not None:
                return _read_stop_ids(Path(file), f"{name} of {path}")
    return ()


def _read_stop_ids(file: Path, where: str) -> tuple[int, ...]:
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerLoadError(f"{where} cannot be read: {_first_line(error)}; repair or delete the file") from error
    if not isinstance(config, dict):
        raise TokenizerLoadError(f"{where} is not a JSON object; repair or delete the file")
    found = config.get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if any(type(token) is not int or token < 0 for token in ids):
        raise TokenizerLoadError(f"eos_token_id in {where} is {found!r}; it must be a token id or a list of token ids")
    return tuple(ids)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
