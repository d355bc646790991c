# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Tokenizers in Hugging Face format, read and written alike by transformers 4 and 5.

A folder's `tokenizer.json` determines its tokens. `AutoTokenizer` of transformers 5 rebuilds the normalizer, the
pre-tokenizer and the decoder of many classes instead, and ignores those of the file: the same text becomes other tokens
than the model was trained with. So the class that a folder names only supplies what transformers 4 adds to the file:
special tokens that the config leaves out, and bos and eos around a text.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import get_tokenizer_config, tokenizer_class_from_name
from transformers.utils.hub import cached_file

from marin_rl.utils.logs import without_message
from marin_rl.utils.storage import read_small


class TokenizerLoadError(ValueError):
    """A tokenizer cannot be loaded; the message names the tokenizer and the remedy."""


class _Class(NamedTuple):
    """What a class of transformers 4 adds to `tokenizer.json`."""

    tokens: Mapping[str, str]
    """Special tokens that `tokenizer_config.json` may leave out."""
    adds_bos: bool | None = None
    """Default of `add_bos_token`; None if the class ignores that setting and `add_eos_token`."""


_END = "<|endoftext|>"
_GPT = {"bos_token": _END, "eos_token": _END, "unk_token": _END}
_LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_CLASSES = {
    "CodeLlama": _Class(_LLAMA, adds_bos=True),
    "Cohere": _Class({"bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>"}, adds_bos=True),
    "GPT2": _Class(_GPT),
    "GPTNeoX": _Class(_GPT, adds_bos=False),
    "Gemma": _Class(
        {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}, adds_bos=True
    ),
    "Llama": _Class(_LLAMA, adds_bos=True),
    "Qwen2": _Class({"eos_token": _END, "unk_token": _END, "pad_token": _END}),
}
"""By name, without the ending `Tokenizer` or `TokenizerFast`."""
_CLASS_OF_MODEL: Mapping[object, str] = {
    **{"gpt2": "GPT2", "olmo2": "GPTNeoX", "olmo3": "GPT2", "qwen2": "Qwen2", "qwen3": "Qwen2", "qwen3_moe": "Qwen2"},
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "Gemma"),
    **dict.fromkeys(("llama", "mistral", "mixtral"), "Llama"),
}
"""By `model_type` of `config.json`, for tokenizers that name no class."""


def read_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder or hub name; never runs code from the files.

    Raises:
        TokenizerLoadError: if the tokenizer is Python code, or its settings contradict each other.
        Exception: of many types, from transformers, for files that are missing or damaged.
    """
    config = get_tokenizer_config(source)
    model = _model_config(source) if config.get("tokenizer_class") is None else {}
    if not (config or model):
        raise ValueError("neither tokenizer_config.json nor config.json describes it")
    name = _class_name(config, model)
    _check_no_code(source, config, model, name)
    file = _optional_file(source, "tokenizer.json")
    if file is None:
        return _convert(source, name)
    loaded = _load_file(source, file, config)
    if _is_of_transformers_5(config):
        _set_prefix_space(loaded, _prefix_space_of(file))
        return loaded
    _set_prefix_space(loaded, config.get("add_prefix_space", False))
    if name in _CLASSES:
        _add_of_class(loaded, _CLASSES[name], config)
    return loaded


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer and its chat template in a form that transformers 4 and 5 read alike.

    Args:
        tokenizer: a fast tokenizer.
        folder: where to write; created if it does not exist.

    Raises:
        OSError: if the folder cannot be written.
    """
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_bytes())
    config.pop("backend", None)
    # With this class, both versions take the tokens from tokenizer.json.
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    if named := config.pop("model_specific_special_tokens", None):
        config["extra_special_tokens"] = named
    if isinstance(pre := tokenizer.backend_tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel):
        config["add_prefix_space"] = pre.add_prefix_space
    path.write_text(json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def _optional_file(source: str, name: str) -> Path | None:
    file = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
    return None if file is None else Path(file)


def _model_config(source: str) -> dict[str, Any]:
    """The content of `config.json`; empty if there is no such file."""
    file = _optional_file(source, "config.json")
    model = {} if file is None else json.loads(read_small(file))
    if not isinstance(model, dict):
        raise ValueError("config.json is not a JSON object")
    return model


def _class_name(config: Mapping[str, Any], model: Mapping[str, Any]) -> str | None:
    """The class of a tokenizer, without the ending `Tokenizer` or `TokenizerFast`; None if it is unknown."""
    name = config.get("tokenizer_class") or model.get("tokenizer_class")
    if not isinstance(name, str | None):
        raise ValueError(f"tokenizer_class is {name!r}; it must be the name of a class")
    if name is None:
        return _CLASS_OF_MODEL.get(str(model.get("model_type")))
    return name.removesuffix("Fast").removesuffix("Tokenizer")


def _class(name: str | None) -> type[PreTrainedTokenizerBase] | None:
    """The class of transformers with a name; None if there is none."""
    found = name and (
        tokenizer_class_from_name(f"{name}TokenizerFast") or tokenizer_class_from_name(f"{name}Tokenizer")
    )
    return found if isinstance(found, type) and issubclass(found, PreTrainedTokenizerBase) else None


def _check_no_code(source: str, config: Mapping[str, Any], model: Mapping[str, Any], name: str | None) -> None:
    """Refuse a tokenizer whose class is defined in its own files."""
    code = config.get("auto_map") or {}
    is_declared = isinstance(code, list) or "AutoTokenizer" in code or bool(model.get("auto_map"))
    # Transformers 4 lacks this class, whose tokenizers are a tokenizer.json.
    if is_declared and name != "TokenizersBackend" and name not in _CLASSES and _class(name) is None:
        raise TokenizerLoadError(
            f"the tokenizer {source} is Python code in its files (auto_map in tokenizer_config.json or config.json), "
            "and such code is never run here. If you trust it, load it with transformers and save it as a fast "
            "tokenizer (a tokenizer.json), and give that folder as tokenizer.path"
        )


def _convert(source: str, name: str | None) -> PreTrainedTokenizerBase:
    """Convert a tokenizer in an older format than `tokenizer.json`."""
    if (found := _class(name)) is None:
        raise ValueError(f"transformers has no class {name!r} that could convert its vocabulary")
    files = [file for kind, file in found.vocab_files_names.items() if kind != "tokenizer_file"]
    # Without them, transformers 5 makes a tokenizer without tokens.
    if missing := [file for file in files if _optional_file(source, file) is None]:
        raise ValueError(f"neither tokenizer.json nor {' and '.join(missing)} exists")
    loaded: Any = found.from_pretrained(source, trust_remote_code=False)
    return loaded


def _is_of_transformers_5(config: Mapping[str, Any]) -> bool:
    """Whether transformers 5 wrote the folder, so that `tokenizer.json` is complete."""
    is_new_class = config.get("tokenizer_class") == "TokenizersBackend"
    return "backend" in config or is_new_class or isinstance(config.get("extra_special_tokens"), list)


def _load_file(source: str, file: Path, config: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """Load `tokenizer.json` as it is, with the special tokens and templates of the other files."""
    extra = config.get("extra_special_tokens")
    named = extra if isinstance(extra, dict) else config.get("model_specific_special_tokens")
    # The config may name another file.
    arguments: dict[str, Any] = {"tokenizer_file": str(file)}
    if named is not None or "extra_special_tokens" in config:
        # Transformers 4 reads only named tokens from this key, and transformers 5 then ignores the list of the others.
        arguments["extra_special_tokens"] = named or {}
    # `tokenizer.json` alone determines the tokens.
    with without_message("transformers.tokenization_utils_base", "The tokenizer class you load from"):
        try:
            loaded: Any = PreTrainedTokenizerFast.from_pretrained(source, trust_remote_code=False, **arguments)
        except Exception:
            # The error of a damaged file is clearer than that of transformers.
            Tokenizer.from_file(str(file))
            raise
    if "extra_special_tokens" in arguments:
        others = extra if isinstance(extra, list) else config.get("additional_special_tokens") or []
        present = {token.content: token for token in loaded.added_tokens_decoder.values()}
        texts = [token["content"] if isinstance(token, dict) else token for token in others]
        tokens = [present.get(text) or AddedToken(text, normalized=False, special=True) for text in texts]
        loaded.add_special_tokens({"additional_special_tokens": tokens})
    return loaded


def _prefix_space_of(file: Path) -> object:
    pre = json.loads(read_small(file)).get("pre_tokenizer")
    return pre.get("add_prefix_space") if isinstance(pre, dict) else None


def _set_prefix_space(tokenizer: PreTrainedTokenizerFast, value: object) -> None:
    """Set whether a space is put before a text. Only transformers 4 reads `add_prefix_space`, and False without it."""
    backend = tokenizer.backend_tokenizer
    pre = backend.pre_tokenizer
    if isinstance(pre, pre_tokenizers.ByteLevel) and isinstance(value, bool):
        pre.add_prefix_space = value
        backend.pre_tokenizer = pre


def _add_of_class(tokenizer: PreTrainedTokenizerFast, adds: _Class, config: Mapping[str, Any]) -> None:
    """Add what the class of the tokenizer adds to `tokenizer.json` in transformers 4."""
    backend = tokenizer.backend_tokenizer
    for name, token in adds.tokens.items():
        if name not in config and getattr(tokenizer, name) is None and backend.token_to_id(token) is not None:
            setattr(tokenizer, name, token)
    if adds.adds_bos is None:
        return
    ends = {"bos": config.get("add_bos_token", adds.adds_bos), "eos": config.get("add_eos_token", False)}
    for end, is_added in ends.items():
        if is_added and getattr(tokenizer, f"{end}_token") is None:
            raise TokenizerLoadError(
                f"the tokenizer {tokenizer.name_or_path} adds a token to each text (add_{end}_token), but its "
                f"{end}_token is null; set {end}_token in tokenizer_config.json, or add_{end}_token to false"
            )
    _set_ends(backend, *(getattr(tokenizer, f"{end}_token") if ends[end] else None for end in ends))


def _set_ends(backend: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Put bos and eos around each text, if given."""

    def around(text: str, kind: int) -> list[str]:
        parts = (bos, text, eos)
        return [f"{part}:{kind}" for part in parts if part is not None]

    ids = [(token, backend.token_to_id(token)) for token in dict.fromkeys((bos, eos)) if token is not None]
    single = around("$A", 0)
    backend.post_processor = processors.TemplateProcessing(
        single=single, pair=[*single, *around("$B", 1)], special_tokens=ids
    )
