# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Section of the run's config for the tokenizer and its chat template."""

import dataclasses
from typing import TYPE_CHECKING

from marin_rl.utils.settings.fields import LOCAL_FILE, STORAGE_INPUT

if TYPE_CHECKING:
    from marin_rl.tokenization.chat import ChatTokenizer

BYTES = "bytes"
"""Value of `tokenizer.path` for the built-in byte-level tokenizer."""
PLAIN = "plain"
"""Value of `tokenizer.chat_template` for plain concatenation of messages."""


@dataclasses.dataclass(frozen=True)
class TokenizerConfig:
    """Configuration of the tokenizer and its chat template."""

    path: str | None = dataclasses.field(default=None, metadata=STORAGE_INPUT)
    """Folder with a Hugging Face tokenizer, its address in an object store, a name on the Hugging Face hub, or `bytes`
    for the built-in byte-level tokenizer of 264 tokens. None: the tokenizer of `initialize_from`, or `bytes` without
    it."""
    chat_template: str | None = dataclasses.field(default=None, metadata=LOCAL_FILE)
    """Path of a Jinja file that replaces the tokenizer's chat template, or `plain`: concatenated message contents,
    without roles or separators, with eos after each reply. None: the tokenizer's chat template."""

    def build(self) -> "ChatTokenizer":
        """Load the tokenizer.

        Raises:
            TokenizerLoadError: if the folder, the hub or the template file cannot be read.
            ChatTemplateError: if there is no chat template, or it does not end.

        >>> TokenizerConfig().build().vocab_size
        264
        """
        # Checks of configs need no tokenizer, and transformers takes a second to import.
        from marin_rl.tokenization.load import build_tokenizer

        return build_tokenizer(self)
