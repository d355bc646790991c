# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""The bytes of each token id, so that stored rollouts can be read without the tokenizer."""

import json
import re

from transformers import PreTrainedTokenizerBase
from transformers.models.gpt2.tokenization_gpt2 import bytes_to_unicode

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenPieces:
    r"""Maps token ids to bytes, with a cache.

    For byte-level tokenizers (GPT-2, Llama 3, Qwen) and those with byte fallback (Llama 2, Gemma) the bytes are exact,
    even if a token is only part of a character. Other tokenizers decode the single token.

    >>> from marin_rl.tokenization.byte_tokenizer import byte_tokenizer
    >>> piece = TokenPieces(byte_tokenizer())
    >>> piece(53), piece(0xC3), piece(257)
    (b'5', b'\xc3', b'<|end|>')
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._special = {id: token.content.encode() for id, token in tokenizer.added_tokens_decoder.items()}
        # The decoder of the backend is only accessible as JSON.
        steps = _decoder_steps(json.loads(tokenizer.backend_tokenizer.to_str())["decoder"])
        kinds = {step["type"] for step in steps}
        self._bytes = (
            {character: byte for byte, character in bytes_to_unicode().items()} if "ByteLevel" in kinds else None
        )
        self._has_byte_tokens = "ByteFallback" in kinds
        self._space = next((mark for step in steps if (mark := _space_mark(step)) is not None), None)
        self._cache: dict[int, bytes] = {}

    def __call__(self, token_id: int) -> bytes:
        """Return the bytes of a token, or `<unknown ID>` if the tokenizer does not have the id."""
        piece = self._cache.get(token_id)
        if piece is None:
            piece = self._cache[token_id] = self._look_up(token_id)
        return piece

    def _look_up(self, token_id: int) -> bytes:
        if token_id in self._special:
            return self._special[token_id]
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if not isinstance(token, str):
            return f"<unknown {token_id}>".encode()
        if self._bytes is not None and all(character in self._bytes for character in token):
            return bytes(self._bytes[character] for character in token)
        if self._has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        if self._space is not None:
            return token.replace(self._space, " ").encode()
        return self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False).encode()


def _decoder_steps(decoder: dict | None) -> list[dict]:
    if decoder is None:
        return []
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _space_mark(step: dict) -> str | None:
    """The character that a decoder step replaces by a space."""
    if step["type"] == "Metaspace":
        return step["replacement"]
    if step["type"] == "Replace" and step["content"] == " ":
        return step["pattern"].get("String")
    return None
