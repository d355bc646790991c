# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import json
import re
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.chat_template import ChatTemplateError
from marin_rl.tokenization.load import (
    SPECIAL_TOKENS,
    TokenizerConfig,
    TokenizerLoadError,
    byte_tokenizer,
    plain_template,
)
from marin_rl.utils.hub import HubError
from tests.tokenization.conftest import template_ids

USER = {"role": "user", "content": "2+3="}


def test_default_is_the_byte_tokenizer():
    chat = TokenizerConfig().build()
    assert (chat.vocab_size, chat.stop_token_ids, chat.pad_token_id) == (264, (257,), 256)


def test_a_folder_gives_the_same_tokens(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path)
    chat = TokenizerConfig(path=str(tmp_path)).build()
    assert chat.prompt_tokens([USER]) == TokenizerConfig().build().prompt_tokens([USER])
    assert chat.stop_token_ids == (257,)


@pytest.mark.parametrize(("eos", "expected"), [([263, 257], (257, 263)), (263, (257, 263)), (None, (257,))])
def test_stop_tokens_of_the_generation_config_are_added(tmp_path, eos, expected):
    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({} if eos is None else {"eos_token_id": eos}))
    assert TokenizerConfig(path=str(tmp_path)).build().stop_token_ids == expected


def save_with(folder: Path, **files: object) -> str:
    """Return the built-in tokenizer's folder with additional or replaced JSON (or text) files."""
    byte_tokenizer().save_pretrained(folder)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return str(folder)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        # As in transformers, config.json is only used without a generation config.
        ({"config": {"model_type": "llama", "eos_token_id": [257, 263]}}, (257, 263)),
        ({"config": {"model_type": "llama", "eos_token_id": 263}, "generation_config": {}}, (257,)),
        # Sampling settings are ignored.
        ({"generation_config": {"eos_token_id": 263, "max_new_tokens": -1, "cache_implementation": "?"}}, (257, 263)),
    ],
)
def test_stop_tokens_match_transformers(tmp_path: Path, files: dict, expected: tuple[int, ...]):
    assert TokenizerConfig(path=save_with(tmp_path, **files)).build().stop_token_ids == expected


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "generation_config.json of .* cannot be read: Expecting"),
        ("[" * 100_000, "cannot be read: maximum recursion depth"),
        ([1], "is not a JSON object"),
        ({"eos_token_id": "263"}, "eos_token_id in generation_config.json of .* is '263'; it must be a token id"),
        ({"eos_token_id": [257, 263.0]}, r"is \[257, 263.0\]; it must be a token id or a list"),
        ({"eos_token_id": True}, "is True; it must be a token id"),
        ({"eos_token_id": -1}, "is -1; it must be a token id"),
        ({"eos_token_id": [257, 99999]}, r"lists stop tokens \[99999\] .* its tokenizer has 264 tokens"),
    ],
)
def test_unreadable_stop_tokens_are_rejected(tmp_path: Path, content: object, problem: str):
    with pytest.raises(TokenizerLoadError, match=problem):
        TokenizerConfig(path=save_with(tmp_path, generation_config=content)).build()


def test_a_template_file_replaces_the_tokenizers_and_is_saved_with_it(tmp_path):
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}<|end|>{% endfor %}"
    file = tmp_path / "my template.jinja"
    file.write_text(template)
    chat = TokenizerConfig(chat_template=str(file)).build()
    assert chat.prompt_tokens([USER]) == (*b"user:2+3=", 257)
    chat.tokenizer.save_pretrained(tmp_path / "saved")
    assert TokenizerConfig(path=str(tmp_path / "saved")).build().tokenizer.chat_template == template


@pytest.mark.medium
def test_the_import_prints_nothing():
    # Transformers 5 advises users to install PyTorch.
    command = [sys.executable, "-c", "import marin_rl.tokenization.load"]
    imported = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (imported.stdout, imported.stderr) == ("", "")


# Folders written by transformers 5.


def as_transformers_5_writes(folder: Path, *, tokenizer_class: str = "TokenizersBackend") -> Path:
    """Write the built-in tokenizer's files in the format of transformers 5."""
    byte_tokenizer().save_pretrained(folder)
    config = {
        "backend": "tokenizers",
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|end|>",
        "extra_special_tokens": ["<|system|>", "<|user|>", {"__type": "AddedToken", "content": "<|assistant|>"}],
        "is_local": True,
        "model_max_length": 1000000000000000019884624838656,
        "pad_token": "<|pad|>",
        "tokenizer_class": tokenizer_class,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "special_tokens_map.json").unlink(missing_ok=True)
    return folder


@pytest.mark.parametrize("tokenizer_class", ["TokenizersBackend", "PreTrainedTokenizerFast", "Qwen2Tokenizer"])
def test_a_folder_of_transformers_5_gives_the_same_tokens(
    tmp_path: Path, tokenizer_class: str, capfd: pytest.CaptureFixture[str]
):
    folder = as_transformers_5_writes(tmp_path / "five", tokenizer_class=tokenizer_class)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    chat, expected = TokenizerConfig(path=str(folder)).build(), TokenizerConfig().build()
    assert capfd.readouterr().err == ""
    messages = [USER, {"role": "assistant", "content": "5<|end|>"}]
    assert chat.prompt_tokens([USER]) == expected.prompt_tokens([USER])
    assert chat.encode_conversation(messages) == expected.encode_conversation(messages)
    assert (chat.stop_token_ids, chat.pad_token_id, chat.vocab_size) == ((257,), 256, 264)
    assert {"<|system|>", "<|user|>", "<|assistant|>"} <= set(chat.tokenizer.all_special_tokens)
    # The tokenizer can be saved and loaded again.
    chat.tokenizer.save_pretrained(tmp_path / "saved")
    again = TokenizerConfig(path=str(tmp_path / "saved")).build()
    assert again.encode_conversation(messages) == expected.encode_conversation(messages)
    assert again.tokenizer.all_special_tokens == chat.tokenizer.all_special_tokens


def test_error_names_a_transformers_5_folder_without_tokenizer_json(tmp_path: Path):
    folder = as_transformers_5_writes(tmp_path / "five")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(TokenizerLoadError, match=r"five holds no loadable tokenizer.*such as tokenizer_config"):
        TokenizerConfig(path=str(folder)).build()


# Code in a tokenizer's files.


@pytest.mark.parametrize("declared_in", ["tokenizer_config.json", "config.json"])
def test_code_of_a_tokenizer_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, declared_in: str):
    folder, proof = tmp_path / "hostile", tmp_path / "it ran"
    byte_tokenizer().save_pretrained(folder)
    code = f"open({str(proof)!r}, 'w').close()\nfrom transformers import PreTrainedTokenizerFast as Hostile\n"
    (folder / "hostile.py").write_text(code)
    if declared_in == "config.json":
        (folder / "tokenizer_config.json").unlink()
        declared = {"model_type": "hostile", "auto_map": {"AutoConfig": "hostile.Hostile"}}
    else:
        declared = {"tokenizer_class": "Hostile", "auto_map": {"AutoTokenizer": [None, "hostile.Hostile"]}}
    (folder / declared_in).write_text(json.dumps(declared))

    asked: list[object] = []

    def agree(prompt: object = "") -> str:
        asked.append(prompt)
        return "y"

    monkeypatch.setattr("builtins.input", agree)
    with pytest.raises(TokenizerLoadError, match=r"hostile is Python code in its files .* is never run"):
        TokenizerConfig(path=str(folder)).build()
    assert not asked
    assert not proof.exists()


# Tokenizers without a template.


def test_plain_template_concatenates_contents(tmp_path: Path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    chat = TokenizerConfig(path=str(tmp_path), chat_template="plain").build()
    conversation = [{"role": "system", "content": "Add. "}, USER, {"role": "assistant", "content": "5"}]
    assert chat.prompt_tokens(conversation[:2]) == tuple(b"Add. 2+3=")
    assert chat.encode_conversation(conversation) == ((*b"Add. 2+3=5", 257), (False,) * 9 + (True, True))
    assert chat.stop_token_ids == (257,)
    # An observation continues the exact tokens of a reply.
    sequence = (*b"Add. 2+3=", *b"5", 257)
    answer = [{"role": "tool", "content": "wrong"}]
    assert chat.observation_tokens(conversation, sequence, answer) == (tuple(b"wrong"), False)


def test_plain_template_adds_bos_like_the_tokenizer():
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = "<|reserved_0|>"
    assert ChatTokenizer(with_template(tokenizer, plain_template(tokenizer))).prompt_tokens([USER]) == tuple(b"2+3=")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|reserved_0|> $A", special_tokens=[("<|reserved_0|>", 262)]
    )
    chat = ChatTokenizer(with_template(tokenizer, plain_template(tokenizer)))
    assert chat.prompt_tokens([USER]) == (262, *b"2+3=")


def with_template(tokenizer: PreTrainedTokenizerFast, template: str) -> PreTrainedTokenizerFast:
    tokenizer.chat_template = template
    return tokenizer


def test_plain_needs_an_end_token(tmp_path: Path):
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="generations would never end; set the tokenizer's eos_token"):
        TokenizerConfig(path=str(tmp_path), chat_template="plain").build()


def test_error_names_a_missing_folder():
    with pytest.raises(HubError, match=r"tokenizer.path is '\./no/such/folder', but there is no such folder"):
        TokenizerConfig(path="./no/such/folder").build()


def test_error_names_a_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(
        TokenizerLoadError, match=re.escape(str(tmp_path)) + " holds no loadable tokenizer.*tokenizer.json"
    ):
        TokenizerConfig(path=str(tmp_path)).build()


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"tokenizer": "{"}, "EOF while parsing"),
        ({"tokenizer": {"model": {"type": "BPE"}}}, "Missing vocab/merges"),
        ({"tokenizer_config": "{"}, "Expecting property name"),
        ({"tokenizer_config": [1]}, "list indices must be"),
        ({"tokenizer_config": "[" * 100_000}, "maximum recursion depth"),
        ({"tokenizer_config": {"tokenizer_class": 3}}, "tokenizer_class is 3; it must be the name of a class"),
    ],
)
def test_error_names_a_damaged_tokenizer(tmp_path: Path, files: dict, problem: str):
    with pytest.raises(TokenizerLoadError, match=f"{re.escape(str(tmp_path))} holds no loadable tokenizer: {problem}"):
        TokenizerConfig(path=save_with(tmp_path, **files)).build()


@pytest.mark.parametrize("missing", ["tokenizer.json", "tokenizer_config.json"])
def test_error_names_a_missing_tokenizer_file(tmp_path: Path, missing: str):
    save_with(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(TokenizerLoadError, match=f"holds no loadable tokenizer: {missing} missing"):
        TokenizerConfig(path=str(tmp_path)).build()


def test_error_names_a_template_that_is_not_text(tmp_path: Path):
    save_with(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": 3}))
    with pytest.raises(ChatTemplateError, match=r"the chat_template of .* is 3; it must be the text of a Jinja"):
        TokenizerConfig(path=str(tmp_path)).build()


def test_error_names_the_templates_of_which_none_is_the_default(tmp_path: Path):
    save_with(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = [{"name": "rag", "template": "x"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    with pytest.raises(ChatTemplateError, match="has the chat templates 'rag', but none of the name 'default'"):
        TokenizerConfig(path=str(tmp_path)).build()


def test_error_of_a_template_that_is_not_jinja_names_file_and_line(tmp_path: Path):
    (tmp_path / "mine.jinja").write_text("{% generation %}\n{% endgeneration %}\n{% for m in %}")
    with pytest.raises(ChatTemplateError, match=r"mine\.jinja is not valid Jinja, line 3: .*; correct it"):
        TokenizerConfig(chat_template=str(tmp_path / "mine.jinja")).build()


def test_error_of_a_pointer_of_git_lfs_has_its_remedy(tmp_path: Path):
    save_with(tmp_path)
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(TokenizerLoadError, match=r"tokenizer\.json: it is a pointer of Git LFS .*`git lfs pull`"):
        TokenizerConfig(path=str(tmp_path)).build()


def test_an_unreachable_hub_is_an_error_with_the_remedy(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match=r"tokenizer.path is 'some-org/some-model': there is no such folder.*network"):
        TokenizerConfig(path="some-org/some-model").build()


def test_error_names_a_missing_template_file(tmp_path):
    with pytest.raises(TokenizerLoadError, match=r"absent\.jinja cannot be read"):
        TokenizerConfig(chat_template=str(tmp_path / "absent.jinja")).build()


def test_a_file_instead_of_a_folder_and_the_reverse_are_named(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(HubError, match=r"tokenizer.path is '.*tokenizer.json', which is a file; name the folder"):
        TokenizerConfig(path=str(tmp_path / "tokenizer.json")).build()
    with pytest.raises(TokenizerLoadError, match=r"tokenizer.chat_template is '.*', a folder; name a Jinja file"):
        TokenizerConfig(chat_template=str(tmp_path)).build()


def test_error_of_a_missing_template_contains_a_remedy(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ChatTemplateError, match="has no chat template; give the path of a Jinja file"):
        TokenizerConfig(path=str(tmp_path)).build()


TOKENIZER = byte_tokenizer()

TEXTS = st.text(st.characters(exclude_categories=("Cs",)))


def test_vocabulary_is_bytes_then_special_tokens():
    vocab = TOKENIZER.get_vocab()
    assert len(TOKENIZER) == 264
    assert sorted(vocab.values()) == list(range(264))
    assert [vocab[token] for token in SPECIAL_TOKENS] == list(range(256, 264))
    assert (TOKENIZER.pad_token, TOKENIZER.pad_token_id) == ("<|pad|>", 256)
    assert (TOKENIZER.eos_token, TOKENIZER.eos_token_id) == ("<|end|>", 257)


@settings(deadline=None)
@given(TEXTS)
def test_ids_are_utf8_bytes_and_decode_back(text: str):
    ids = TOKENIZER(text, split_special_tokens=True)["input_ids"]
    assert ids == list(text.encode())
    assert TOKENIZER.decode(ids) == text


@pytest.mark.parametrize(
    "text", ["", " leading", "trailing ", "a  b\t\n\r\n", "isn 't , it ?", "héllo 😀 日本", "\x00\x7f\ufeff"]
)
def test_round_trip_of_awkward_texts(text: str):
    assert TOKENIZER.decode(TOKENIZER(text)["input_ids"]) == text


def test_long_text_is_not_slow_or_cut():
    text = "0123456789" * 20_000
    assert len(TOKENIZER(text)["input_ids"]) == 200_000


def test_saved_and_loaded_from_a_folder(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "2 + 3 =  é"}, {"role": "assistant", "content": "5"}]
    assert loaded.chat_template == TOKENIZER.chat_template
    assert loaded.get_vocab() == TOKENIZER.get_vocab()
    assert (loaded.pad_token_id, loaded.eos_token_id, len(loaded)) == (256, 257, 264)
    assert set(loaded.all_special_ids) == set(range(256, 264))
    assert template_ids(loaded, messages) == template_ids(TOKENIZER, messages)
    assert loaded.decode(loaded(" isn 't  x")["input_ids"]) == " isn 't  x"
    assert set(loaded("x")) == {"input_ids", "attention_mask"}


def test_template_with_plain_hugging_face_use():
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "A"},
        {"role": "tool", "content": "T"},
    ]
    encoded = TOKENIZER.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    assert encoded["input_ids"] == [258, 83, 257, 259, 85, 257, 260, 65, 257, 261, 84, 257]
    assert encoded["assistant_masks"] == [0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0]
