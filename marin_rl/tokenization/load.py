# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Tokenizers: the built-in byte-level one, those of folders and the Hugging Face hub, and the bytes of their tokens."""

import contextlib
import json
import re
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils.hub import cached_file

from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.chat_template import check_template_ends, check_template_syntax
from marin_rl.tokenization.config import BYTES, PLAIN, TokenizerConfig
from marin_rl.tokenization.hf_folder import TokenizerLoadError, read_tokenizer
from marin_rl.utils.hub import LFS_PROBLEM, check_source, is_lfs_pointer
from marin_rl.utils.remote_path import RemotePath
from marin_rl.utils.storage import (
    WEIGHTS,
    StoragePath,
    check_descriptions,
    check_small,
    local_copy,
    read_small,
    storage_path,
    user_cache,
)

PAD = "<|pad|>"
END = "<|end|>"
SPECIAL_TOKENS = (
    PAD,
    END,
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    # Reserved tokens make the vocabulary a multiple of 8, divisible by meshes and kernels.
    "<|reserved_0|>",
    "<|reserved_1|>",
)
"""Special tokens in the order of their ids, from 256."""

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] -%}
{{- raise_exception("role '" + message['role'] + "' is none of system, user, assistant, tool") -}}
{%- endif -%}
{{- '<|' + message['role'] + '|>' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}
{{- message['content'] + '<|end|>' -}}
{%- endgeneration -%}
{%- else -%}
{{- message['content'] + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{%- endif -%}
"""
"""Role token, content, end token; the end token of a reply is inside its generation block."""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Create the byte-level tokenizer: id b is the byte b, and ids 256 to 263 are special tokens.

    Any text that UTF-8 can encode survives encoding and decoding unchanged.

    Returns:
        A new Hugging Face tokenizer of 264 tokens, with eos, pad and a chat template.

    >>> tokenizer = byte_tokenizer()
    >>> tokenizer("2+3=")["input_ids"]
    [50, 43, 51, 61]
    >>> tokenizer.apply_chat_template([{"role": "user", "content": "2+3="}], add_generation_prompt=True, tokenize=False)
    '<|user|>2+3=<|end|><|assistant|>'
    """
    vocab = {character: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        # Without types of tokens, which `generate` of transformers refuses for models that have none.
        model_input_names=["input_ids", "attention_mask"],
        tokenizer_object=tokenizer,
        name_or_path="the built-in byte-level tokenizer",
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[token for token in SPECIAL_TOKENS if token not in (PAD, END)],
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
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


KEY = "tokenizer.path"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def build_tokenizer(config: TokenizerConfig) -> ChatTokenizer:
    """Load a tokenizer and its chat template; see `TokenizerConfig.build`."""
    path = config.path or BYTES
    source = None if path == BYTES else _find(path)
    tokenizer = byte_tokenizer() if source is None else _load(source, path)
    if config.chat_template == PLAIN:
        tokenizer.chat_template = plain_template(tokenizer)
    elif config.chat_template is not None:
        tokenizer.chat_template = _read_template(Path(config.chat_template))
    if tokenizer.chat_template != CHAT_TEMPLATE and config.chat_template != PLAIN:
        _check_templates(tokenizer, config.chat_template or tokenizer.name_or_path)
    chat = ChatTokenizer(tokenizer, () if source is None else _stop_ids(source, path))
    if unknown := [token for token in chat.more_stop_token_ids if token >= chat.vocab_size]:
        raise TokenizerLoadError(
            f"{config.path} lists stop tokens {unknown} (eos_token_id in generation_config.json or config.json), but "
            f"its tokenizer has {chat.vocab_size} tokens; use the tokenizer that belongs to the model"
        )
    return chat


def _check_templates(tokenizer: PreTrainedTokenizerBase, owner: str) -> None:
    templates: object = tokenizer.chat_template
    for template in templates.values() if isinstance(templates, dict) else [templates]:
        # The tokenizer reports a missing template, and one that is not text.
        if isinstance(template, str):
            check_template_syntax(template, owner)
            check_template_ends(template, owner)


def plain_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a chat template for tokenizers without one, such as those of base models.

    It concatenates the contents of the messages, without roles. Each reply ends with eos. The text begins with bos if
    the tokenizer adds bos to plain text. `tokenizer` determines whether bos is added.

    >>> tokenizer = byte_tokenizer()
    >>> tokenizer.chat_template = plain_template(tokenizer)
    >>> messages = [{"role": "user", "content": "2+3="}, {"role": "assistant", "content": "5"}]
    >>> tokenizer.apply_chat_template(messages, tokenize=False)
    '2+3=5<|end|>'
    """
    bos = tokenizer.bos_token_id
    starts_with_bos = bos is not None and tokenizer("text")["input_ids"][:1] == [bos]
    return ("{{- bos_token -}}\n" if starts_with_bos else "") + _PLAIN_TEMPLATE


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a `tokenizer.path`, without checks of its chat template; see `TokenizerConfig.build`."""
    return byte_tokenizer() if path == BYTES else _load(_find(path), path)


def other_tokens(
    tokenizer: PreTrainedTokenizerBase, of_weights: PreTrainedTokenizerBase, *, added: bool = False
) -> dict[int, tuple[str, str | None]]:
    """Compare the vocabulary of a tokenizer with that of the tokenizer with which weights were trained.

    Args:
        tokenizer: the tokenizer.
        of_weights: tokenizer of the weights.
        added: whether to compare added tokens and ids that the weights' tokenizer lacks, too. They may differ in a
            policy that is trained: chat tokens are often added, or take the ids of reserved ones.

    Returns:
        The ids that both use for different tokens, with the token of each; None if there is none.
    """
    ignored = () if added else tokenizer.added_tokens_decoder.keys() | of_weights.added_tokens_decoder.keys()
    theirs = {index: token for token, index in of_weights.get_vocab().items()}
    return {
        index: (token, theirs.get(index))
        for token, index in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
        if index not in ignored and theirs.get(index, None if added else token) != token
    }


def is_byte_tokenizer(folder: StoragePath) -> bool:
    """Return whether a folder has the tokenizer and the template of `byte_tokenizer`, as exports of runs have."""
    files = folder / "tokenizer.json", folder / "chat_template.jinja"
    if not all(file.is_file() for file in files):
        return False
    try:
        saved, built = json.loads(read_small(files[0])), json.loads(byte_tokenizer().backend_tokenizer.to_str())
        same = all(saved[key] == built[key] for key in ("model", "added_tokens", "pre_tokenizer"))
        return same and files[1].read_text(encoding="utf-8") == CHAT_TEMPLATE
    except (ValueError, KeyError, TypeError, RecursionError):
        # Damaged files are reported when they are loaded.
        return False


def _find(path: str) -> str:
    """Return the local folder or hub name of a tokenizer; its files in an object store are copied to this machine."""
    folder = storage_path(path, KEY)
    if not isinstance(folder, RemotePath):
        return str(check_source(path, KEY) or path)
    try:
        return str(local_copy(folder, user_cache("tokenizers"), WEIGHTS))
    except OSError as error:
        raise TokenizerLoadError(f"{KEY} is {path!r}, which cannot be copied: {error.strerror or error}") from error


def _load(source: str, path: str) -> PreTrainedTokenizerBase:
    folder = Path(source)
    is_folder = folder.is_dir()
    if is_folder:
        check_descriptions(folder)
    try:
        return read_tokenizer(source)
    except TokenizerLoadError:
        raise
    except Exception as error:
        # Any exception type: the Rust library raises a plain Exception for a damaged tokenizer.json, and transformers
        # raises various types for unexpected values in the other files.
        if is_folder:
            missing = [name for name in TOKENIZER_FILES if not (folder / name).exists()]
            problem = f"{' and '.join(missing)} missing" if missing else _first_line(error)
            pointers = [name for name in TOKENIZER_FILES if is_lfs_pointer(folder / name)]
            if pointers:
                raise TokenizerLoadError(
                    f"the folder {path} holds no loadable tokenizer: {pointers[0]}: {LFS_PROBLEM}"
                ) from error
            raise TokenizerLoadError(
                f"the folder {path} holds no loadable tokenizer: {problem}; it needs the files that "
                "save_pretrained of a Hugging Face tokenizer writes, such as tokenizer_config.json and tokenizer.json"
            ) from error
        raise TokenizerLoadError(
            f"{KEY} is {path!r}, a repository on the Hugging Face hub whose tokenizer cannot be loaded: "
            f"{_first_line(error)}; check that it has one, or give a folder"
        ) from error


def _read_template(path: Path) -> str:
    try:
        check_small(path := path.expanduser())
        return path.read_text(encoding="utf-8")
    except IsADirectoryError as error:
        raise TokenizerLoadError(f"tokenizer.chat_template is {str(path)!r}, a folder; name a Jinja file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerLoadError(
            f"the chat template {path} cannot be read: {error}; tokenizer.chat_template is the path of a Jinja file"
        ) from error


def _stop_ids(source: str, path: str) -> tuple[int, ...]:
    """Read a model's stop tokens: from generation_config.json or, if there is no such file, config.json."""
    for name in ("generation_config.json", "config.json"):
        # Both are optional: a tokenizer may be in a separate folder. Other hub errors have been reported already.
        with contextlib.suppress(OSError):
            if (file := cached_file(source, name, _raise_exceptions_for_missing_entries=False)) is not None:
                return _read_stop_ids(Path(file), f"{name} of {path}")
    return ()


def _read_stop_ids(file: Path, where: str) -> tuple[int, ...]:
    try:
        config = json.loads(read_small(file))
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerLoadError(f"{where} cannot be read: {_first_line(error)}; repair or delete the file") from error
    if not isinstance(config, dict):
        raise TokenizerLoadError(f"{where} is not a JSON object; repair or delete the file")
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token) is not int or token < 0 for token in ids):
        raise TokenizerLoadError(f"eos_token_id in {where} is {value!r}; it must be a token id or a list of token ids")
    return tuple(ids)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")


class TokenPieces:
    r"""Maps token ids to bytes, with a cache.

    For byte-level tokenizers (GPT-2, Llama 3, Qwen) and those with byte fallback (Llama 2, Gemma) the bytes are exact,
    even if a token is only part of a character. Other tokenizers decode the single token.

    >>> from marin_rl.tokenization.load import byte_tokenizer
    >>> piece = TokenPieces(byte_tokenizer())
    >>> piece(53), piece(0xC3), piece(257)
    (b'5', b'\xc3', b'<|end|>')
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        # The decoder of the backend is only accessible as JSON.
        decoder = json.loads(tokenizer.backend_tokenizer.to_str())["decoder"] or {"type": "Sequence", "decoders": []}
        steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        kinds = {step["type"] for step in steps}
        # Without `Fuse`, `Strip` changes each token, and not only the first one.
        self._local = bool(steps) and all(map(_is_local, steps)) and ("Fuse" in kinds or "Strip" not in kinds)
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

    def in_text(self, token_id: int) -> bytes:
        r"""Return the bytes that a token adds to a text; none if the tokenizer does not have the id.

        They do not depend on other tokens, except that some tokenizers drop a space at the start of the whole text.

        Raises:
            ValueError: if the tokenizer's decoder treats tokens according to their neighbours.

        >>> TokenPieces(byte_tokenizer()).in_text(0xC3), TokenPieces(byte_tokenizer()).in_text(999)
        (b'\xc3', b'')
        """
        if not self._local:
            raise ValueError(
                f"the text of a token of {self._tokenizer.name_or_path} depends on its neighbours (its decoder is "
                f"{self._tokenizer.backend_tokenizer.decoder}), so stop texts are not supported; remove sampling.stop"
            )
        return b"" if self._text_of(token_id) is None else self(token_id)

    def _text_of(self, token_id: int) -> str | None:
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        return token if isinstance(token, str) else None

    def _look_up(self, token_id: int) -> bytes:
        if (token := self._text_of(token_id)) is None:
            return f"<unknown {token_id}>".encode()
        if self._bytes is not None and all(character in self._bytes for character in token):
            return bytes(self._bytes[character] for character in token)
        if self._has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        if self._space is not None:
            return token.replace(self._space, " ").encode()
        return self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False).encode()


def _is_local(step: dict) -> bool:
    """Whether a decoder step treats each token alike, except at the start of the text."""
    if step["type"] == "Replace":
        return _space_mark(step) is not None
    if step["type"] == "Strip":
        return step["stop"] == 0
    return step["type"] in ("ByteLevel", "ByteFallback", "Fuse", "Metaspace")


def _space_mark(step: dict) -> str | None:
    """The character that a decoder step replaces by a space."""
    if step["type"] == "Metaspace":
        return step["replacement"]
    if step["type"] == "Replace" and step["content"] == " ":
        return step["pattern"].get("String")
    return None
