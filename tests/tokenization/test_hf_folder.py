# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Folders of tokenizers, made of plain files, must give the same tokens with transformers 4 and 5.

The oracle is the Rust library, which reads `tokenizer.json` alone.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.hf_folder import TokenizerLoadError, save_tokenizer
from marin_rl.tokenization.load import TokenizerConfig, byte_tokenizer
from tests.tokenization.conftest import (
    CHATML,
    INSTRUCT,
    chatml_tokenizer,
    instruct_tokenizer,
    llama_tokenizer,
    phi_tokenizer,
    prepending_tokenizer,
    template_ids,
)

TEXTS = (
    "Hello, the answer is 12345 , isn 't it ?",
    " the  answer\n\nTHE Answer<think>x</think> 3.14",
    "naïve café 日本 😀 \t tabs",
    "<|im_start|>user</s><s>[INST] hi <|eot_id|>a<end_of_turn>\n\n",
    "",
)
CONVERSATION = [{"role": "user", "content": "Hello, 12345?"}, {"role": "assistant", "content": "the  answer"}]


def special(*texts: str, **flags: bool) -> list[AddedToken]:
    return [AddedToken(text, special=True, normalized=False, **flags) for text in texts]


def digits() -> Tokenizer:
    """Like SmolLM2: every digit is a token, which the class GPT2Tokenizer does not do."""
    backend = chatml_tokenizer().backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return backend


def gemma() -> Tokenizer:
    """Like Gemma: spaces become a letter without a prefix, and runs of newlines are added tokens."""
    backend = Tokenizer.from_str(prepending_tokenizer().backend_tokenizer.to_str())
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(special("<bos>", "<eos>", "<pad>"))
    backend.add_tokens([AddedToken("\n\n", normalized=False), AddedToken("  ", normalized=False)])
    return backend


def unigram() -> Tokenizer:
    scores = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -5.0), ("\u2581the", -4.0), ("an", -4.5)]
    letters = [(letter, -6.0) for letter in ("\u2581", *map(chr, range(33, 127)))]
    backend = Tokenizer(models.Unigram([*scores, *letters], unk_id=2, byte_fallback=False))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    backend.add_special_tokens(special("<pad>", "</s>", "<unk>"))
    return backend


def wordpiece() -> Tokenizer:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "answer", *map(chr, range(33, 127))]
    pieces += [f"##{chr(code)}" for code in range(33, 127)]
    backend = Tokenizer(models.WordPiece({piece: index for index, piece in enumerate(pieces)}, unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(special("[PAD]", "[UNK]", "[CLS]", "[SEP]"))
    return backend


def flags() -> Tokenizer:
    """Added tokens of all kinds, behind a normalizer that changes their text."""
    backend = digits()
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    split = pre_tokenizers.Split(Regex(r"\p{N}{1,3}|\s+|[^\s\p{N}]+"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(use_regex=False)])
    backend.add_tokens([AddedToken("Answer", normalized=True, lstrip=True)])
    backend.add_tokens([AddedToken("THE", normalized=False, single_word=True), AddedToken("3.14", rstrip=True)])
    return backend


def with_bos(backend: Tokenizer, bos: str) -> Tokenizer:
    ids = [(bos, backend.token_to_id(bos))]
    backend.post_processor = processors.TemplateProcessing(single=[bos, "$A"], special_tokens=ids)
    return backend


LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "LlamaTokenizer"}
LLAMA_3 = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "unk_token": None}
QWEN = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "bos_token": None, "unk_token": None}
FAST = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
FOLDERS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "llama 3": (llama_tokenizer, {**LLAMA_3, "tokenizer_class": "PreTrainedTokenizerFast"}, "llama"),
    "distilled llama": (llama_tokenizer, {**LLAMA_3, "tokenizer_class": "LlamaTokenizerFast"}, "llama"),
    "distilled qwen": (llama_tokenizer, {**LLAMA_3, "tokenizer_class": "LlamaTokenizerFast"}, "qwen2"),
    "llama 2": (prepending_tokenizer, {**LLAMA, "legacy": True}, "llama"),
    "mistral": (instruct_tokenizer, {**LLAMA, "legacy": False}, "mistral"),
    "phi 3": (phi_tokenizer, {**LLAMA_3, **FAST, "bos_token": None, "eos_token": "<|end|>"}, "llama"),
    "gemma": (gemma, {"tokenizer_class": "GemmaTokenizer"}, "gemma2"),
    "qwen 2": (chatml_tokenizer, {**QWEN, "additional_special_tokens": ["<|im_start|>"]}, "qwen2"),
    "qwen 3": (chatml_tokenizer, QWEN, "qwen3"),
    "smollm 2": (digits, {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>"}, "llama"),
    "olmo 2": (chatml_tokenizer, {"tokenizer_class": "GPTNeoXTokenizer", "bos_token": None}, "olmo2"),
    "gpt 2": (chatml_tokenizer, {"model_max_length": 1024}, "gpt2"),
    "unigram": (unigram, {"eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "T5Tokenizer"}, "llama"),
    "wordpiece": (wordpiece, {"eos_token": "[SEP]", "tokenizer_class": "BertTokenizer"}, "llama"),
    "flags": (flags, FAST, "qwen2"),
    "unknown class": (chatml_tokenizer, {**QWEN, "tokenizer_class": "LaterTokenizer"}, "llama"),
    "transformers 5": (chatml_tokenizer, {**QWEN, "backend": "tokenizers", "extra_special_tokens": []}, "qwen3"),
}


def write(folder: Path, backend: Any, config: dict[str, Any], model: dict[str, Any], template: str = CHATML) -> Path:
    """Write a folder as other tools than transformers would."""
    folder.mkdir(exist_ok=True)
    (backend if isinstance(backend, Tokenizer) else backend().backend_tokenizer).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template)
    if model:
        (folder / "config.json").write_text(json.dumps(model))
    return folder


def load(folder: Path) -> ChatTokenizer:
    return TokenizerConfig(path=str(folder)).build()


@pytest.mark.parametrize("kind", FOLDERS)
def test_tokens_are_those_of_the_file_also_after_an_export(tmp_path: Path, kind: str):
    make, config, model_type = FOLDERS[kind]
    made = make()
    backend = made if isinstance(made, Tokenizer) else made.backend_tokenizer
    folder, exported = write(tmp_path / "original", backend, config, {"model_type": model_type}), tmp_path / "exported"
    chat, oracle = load(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    save_tokenizer(chat.tokenizer, exported)
    # AutoTokenizer of transformers 5 takes the class of Qwen 2 for all models of that type.
    (exported / "config.json").write_text(json.dumps({"model_type": "llama" if model_type == "qwen2" else model_type}))
    readers = [chat.tokenizer, load(exported).tokenizer, AutoTokenizer.from_pretrained(exported)]
    whole = [chat.tokenizer(text)["input_ids"] for text in TEXTS]
    for reader in readers:
        for text, with_ends in zip(TEXTS, whole, strict=True):
            ids = reader(text, add_special_tokens=False)["input_ids"]
            assert ids == oracle.encode(text, add_special_tokens=False).ids
            expected = oracle.decode(ids, skip_special_tokens=False)
            assert reader.decode(ids, clean_up_tokenization_spaces=False) == expected
            assert reader(text)["input_ids"] == with_ends
        assert reader.get_vocab() == oracle.get_vocab()
        assert reader.special_tokens_map.get("eos_token") == chat.tokenizer.eos_token
        assert set(reader.all_special_tokens) == set(chat.tokenizer.all_special_tokens)
        assert reader.chat_template == CHATML
        assert tuple(template_ids(reader, CONVERSATION[:1], add_generation_prompt=True)) == chat.prompt_tokens(
            CONVERSATION[:1]
        )


def test_an_export_is_in_the_form_that_both_versions_read(tmp_path: Path):
    folder = write(tmp_path, chatml_tokenizer, {**QWEN, "additional_special_tokens": ["<|im_start|>"]}, {})
    chat = load(folder)
    save_tokenizer(chat.tokenizer, tmp_path / "exported")
    config = json.loads((tmp_path / "exported" / "tokenizer_config.json").read_text())
    # Transformers 4 has no other class for tokenizer.json alone, and reads no list under the newer key.
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["additional_special_tokens"] == ["<|im_start|>"]
    assert not config.get("extra_special_tokens")


@pytest.mark.parametrize(
    ("config", "model", "expected"),
    [
        ({"tokenizer_class": "LlamaTokenizer"}, {}, ("<s>", "</s>", "<unk>", None)),
        ({"model_max_length": 9}, {"model_type": "mistral"}, ("<s>", "</s>", "<unk>", None)),
        ({"tokenizer_class": "LlamaTokenizerFast", "unk_token": None}, {}, ("<s>", "</s>", None, None)),
        ({"tokenizer_class": "GemmaTokenizer", "pad_token": "</s>"}, {}, ("<bos>", "<eos>", "<unk>", "</s>")),
        # Tokens that the vocabulary lacks are not added to it.
        ({"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>"}, {}, (None, "</s>", None, None)),
        ({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}, {}, (None, "</s>", None, None)),
    ],
)
def test_special_tokens_that_the_config_leaves_out(tmp_path: Path, config: dict, model: dict, expected: tuple):
    tokenizer = load(write(tmp_path, gemma(), config, model, INSTRUCT)).tokenizer
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token, tokenizer.pad_token) == expected
    assert len(tokenizer) == gemma().get_vocab_size()


@pytest.mark.parametrize("model_type", ["gpt2", "olmo2", "olmo3"])
def test_special_tokens_of_a_model_type(tmp_path: Path, model_type: str):
    backend = chatml_tokenizer().backend_tokenizer
    backend.add_special_tokens(["<|endoftext|>"])
    tokenizer = load(write(tmp_path, backend, {"model_max_length": 9}, {"model_type": model_type})).tokenizer
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<|endoftext|>",) * 3


@pytest.mark.parametrize(
    ("config", "ends"),
    [
        (LLAMA, (1, None)),
        ({**LLAMA, "add_bos_token": False}, (None, None)),
        ({**LLAMA, "add_bos_token": True, "add_eos_token": True}, (1, 2)),
        ({**LLAMA, "tokenizer_class": "GPTNeoXTokenizer"}, (None, None)),
        # Other classes, and folders of transformers 5, leave it to tokenizer.json.
        ({**LLAMA, "tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True}, (None, 2)),
        ({**LLAMA, "tokenizer_class": "Qwen2Tokenizer", "add_bos_token": True}, (None, 2)),
        ({**LLAMA, "backend": "tokenizers"}, (None, 2)),
    ],
)
def test_bos_and_eos_around_a_text(tmp_path: Path, config: dict, ends: tuple[int | None, int | None]):
    backend = prepending_tokenizer().backend_tokenizer
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    tokenizer = load(write(tmp_path, backend, config, {}, INSTRUCT)).tokenizer
    inner = tokenizer("an", add_special_tokens=False)["input_ids"]
    before, after = ([] if end is None else [end] for end in ends)
    assert tokenizer("an")["input_ids"] == [*before, *inner, *after]


def test_error_names_a_token_that_is_added_but_null(tmp_path: Path):
    folder = write(tmp_path, prepending_tokenizer, {**LLAMA, "bos_token": None}, {}, INSTRUCT)
    with pytest.raises(
        TokenizerLoadError, match=r"add_bos_token.*bos_token is null; set bos_token in tokenizer_config"
    ):
        load(folder)


@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, False),
        ({"add_prefix_space": True}, True),
        ({"add_prefix_space": None}, None),
        ({"backend": "tokenizers"}, None),
    ],
)
def test_the_space_before_a_text(tmp_path: Path, in_file: bool, config: dict, expected: bool | None):
    backend = chatml_tokenizer().backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=in_file)
    chat = load(write(tmp_path / "original", backend, {**FAST, **config}, {}))
    save_tokenizer(chat.tokenizer, tmp_path / "exported")
    has_space = in_file if expected is None else expected
    for tokenizer in (chat.tokenizer, AutoTokenizer.from_pretrained(tmp_path / "exported")):
        assert tokenizer.decode(tokenizer("an")["input_ids"]) == (" an" if has_space else "an")


OTHER = CHATML.replace("'\\n'", "' \\n'")


@pytest.mark.parametrize("form", ["text", "file", "list", "folder"])
def test_templates_are_read_from_every_place(tmp_path: Path, form: str):
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": OTHER}]
    template: dict[str, object] = {"text": {"chat_template": CHATML}, "list": {"chat_template": named}}.get(form, {})
    folder = write(tmp_path / "original", chatml_tokenizer, {**QWEN, **template}, {})
    if form in ("text", "list"):
        (folder / "chat_template.jinja").unlink()
    if form == "folder":
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(OTHER)
    expected = {"default": CHATML, "tool_use": OTHER} if form in ("list", "folder") else CHATML
    chat = load(folder)
    assert chat.tokenizer.chat_template == expected
    save_tokenizer(chat.tokenizer, tmp_path / "exported")
    assert load(tmp_path / "exported").tokenizer.chat_template == expected


@pytest.mark.parametrize(
    "config",
    [
        {"additional_special_tokens": ["<|im_start|>"], "extra_special_tokens": {}},
        {"additional_special_tokens": ["<|im_start|>"], "extra_special_tokens": {"mark_token": "<|im_end|>"}},
        {"extra_special_tokens": ["<|im_start|>"], "model_specific_special_tokens": {"mark_token": "<|im_end|>"}},
        {"extra_special_tokens": [{"__type": "AddedToken", "content": "<|im_start|>"}], "backend": "tokenizers"},
        {"additional_special_tokens": ["<|im_start|>", "<|new|>"], "extra_special_tokens": {}},
    ],
)
def test_special_tokens_are_kept_in_the_forms_of_both_versions(tmp_path: Path, config: dict):
    chat = load(write(tmp_path / "original", chatml_tokenizer, {**QWEN, **config}, {}))
    save_tokenizer(chat.tokenizer, tmp_path / "exported")
    expected = {"<|im_start|>", "<|im_end|>"} | ({"<|new|>"} if "<|new|>" in str(config) else set())
    for tokenizer in (chat.tokenizer, load(tmp_path / "exported").tokenizer):
        assert set(tokenizer.all_special_tokens) - {"<|endoftext|>"} == expected
        named = "mark_token" in str(config)
        assert tokenizer.special_tokens_map.get("mark_token") == ("<|im_end|>" if named else None)
        assert set(tokenizer.convert_ids_to_tokens(range(len(tokenizer)))) >= expected


def test_the_config_cannot_name_another_file(tmp_path: Path):
    other = tmp_path / "other.json"
    byte_tokenizer().backend_tokenizer.save(str(other))
    folder = write(tmp_path / "folder", chatml_tokenizer, {**QWEN, "tokenizer_file": str(other)}, {})
    assert load(folder).tokenizer.get_vocab() == chatml_tokenizer().get_vocab()


def test_special_tokens_in_the_oldest_files(tmp_path: Path):
    config = {"tokenizer_class": "Qwen2Tokenizer", "unk_token": None}
    folder = write(tmp_path, chatml_tokenizer, config, {})
    tokens = {"eos_token": {"content": "<|im_end|>"}, "additional_special_tokens": ["<|im_start|>"]}
    (folder / "special_tokens_map.json").write_text(json.dumps(tokens))
    tokenizer = load(folder).tokenizer
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert "<|im_start|>" in tokenizer.all_special_tokens


@pytest.mark.filterwarnings("ignore:Deprecated in 0.9.0:DeprecationWarning")
@pytest.mark.parametrize("config", [{"tokenizer_class": "GPT2Tokenizer"}, None])
def test_an_older_format_is_converted(tmp_path: Path, config: dict | None):
    state = json.loads(chatml_tokenizer().backend_tokenizer.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(state["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in state["merges"]))
    (tmp_path / "chat_template.jinja").write_text(INSTRUCT)
    name, content = ("config", {"model_type": "gpt2"}) if config is None else ("tokenizer_config", config)
    (tmp_path / f"{name}.json").write_text(json.dumps(content))
    backend = Tokenizer(models.BPE(vocab=state["vocab"], merges=list(map(tuple, state["merges"]))))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    text = "Hello, the answer is 12345, isn't it?"
    assert load(tmp_path).tokenizer(text)["input_ids"] == backend.encode(text).ids


# Python code in the files of a tokenizer.

CODE = {"AutoTokenizer": [None, "hostile.Hostile"]}
CODE_5 = {"AutoTokenizer": ["hostile.Hostile", "hostile.Hostile"]}


@pytest.mark.parametrize("has_file", [True, False])
@pytest.mark.parametrize(
    ("config", "model", "is_refused"),
    [
        ({"tokenizer_class": "Hostile", "auto_map": CODE}, {}, True),
        ({"tokenizer_class": "Hostile", "auto_map": CODE_5["AutoTokenizer"]}, {}, True),
        ({"auto_map": CODE_5}, {"model_type": "hostile", "auto_map": {"AutoConfig": "hostile.Hostile"}}, True),
        (None, {"model_type": "hostile", "auto_map": {"AutoConfig": "hostile.Hostile", **CODE}}, True),
        (None, {"model_type": "hostile", "tokenizer_class": "Hostile", "auto_map": CODE_5}, True),
        # Transformers 5 has a list of models whose tokenizer class it does not believe.
        ({"tokenizer_class": "Hostile", "auto_map": CODE}, {"model_type": "deepseek_v3"}, True),
        # Classes of transformers that load other things, with code.
        ({"tokenizer_class": "AutoConfig", "auto_map": CODE}, {"auto_map": {"AutoConfig": "hostile.Hostile"}}, True),
        ({"tokenizer_class": "AutoTokenizer", "auto_map": CODE}, {}, True),
        # The class of transformers is used instead.
        ({**QWEN, "auto_map": CODE}, {"model_type": "hostile", "auto_map": {"AutoConfig": "hostile.Hostile"}}, False),
        ({**QWEN, "tokenizer_class": "TokenizersBackend", "auto_map": CODE}, {}, False),
        # Code of the model only.
        (QWEN, {"model_type": "hostile", "auto_map": {"AutoModelForCausalLM": "hostile.Hostile"}}, False),
    ],
)
def test_code_of_a_tokenizer_never_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_file: bool, config: dict, model: dict, is_refused: bool
):
    folder, proof = tmp_path / "hostile", tmp_path / "it ran"
    write(folder, chatml_tokenizer, config or {}, model)
    if config is None:
        (folder / "tokenizer_config.json").unlink()
    if not has_file:
        (folder / "tokenizer.json").unlink()
    code = f"open({str(proof)!r}, 'w').close()\nfrom transformers import PreTrainedTokenizerFast as Hostile\n"
    for name in ("hostile.py", "tokenization_hostile.py", "__init__.py"):
        (folder / name).write_text(code)
    monkeypatch.setattr("builtins.input", lambda prompt="": pytest.fail("the user was asked to run the code"))
    monkeypatch.chdir(folder)
    modules = set(sys.modules)
    try:
        if is_refused:
            with pytest.raises(
                TokenizerLoadError, match=r"hostile is Python code in its files .* never run.*fast tokenizer"
            ):
                load(folder)
        elif has_file:
            assert load(folder).tokenizer.eos_token == "<|im_end|>"
        else:
            with pytest.raises(
                TokenizerLoadError, match=r"hostile holds no loadable tokenizer: tokenizer\.json missing"
            ):
                load(folder)
    finally:
        assert not proof.exists()
        assert not [name for name in set(sys.modules) - modules if "hostile" in name]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        (
            "tokenizer_config",
            {"tokenizer_class": ["LlamaTokenizer"]},
            r"tokenizer_class is \['LlamaTokenizer'\]; it must",
        ),
        ("config", [1], "config.json is not a JSON object"),
        ("config", "{", "Expecting property name"),
        ("tokenizer", {"version": "1.0"}, "Model missing"),
        ("tokenizer", [1], "invalid type"),
    ],
)
def test_error_of_a_damaged_file_is_the_same_in_both_versions(tmp_path: Path, name: str, content: object, problem: str):
    config = {"model_max_length": 9} if name == "config" else QWEN
    folder = write(tmp_path, chatml_tokenizer, config, {})
    (folder / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(TokenizerLoadError, match=f"holds no loadable tokenizer: {problem}"):
        load(folder)


def test_the_built_in_tokenizer_is_the_same_after_an_export(tmp_path: Path):
    save_tokenizer(byte_tokenizer(), tmp_path)
    chat, expected = load(tmp_path), TokenizerConfig().build()
    assert chat.encode_conversation(CONVERSATION) == expected.encode_conversation(CONVERSATION)
    assert set(chat.tokenizer.all_special_tokens) == set(expected.tokenizer.all_special_tokens)
