# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import json
import re

import huggingface_hub.constants
import pytest

from marin_rl.tokenization.byte_tokenizer import byte_tokenizer
from marin_rl.tokenization.chat_template import ChatTemplateError
from marin_rl.tokenization.load import TokenizerConfig, TokenizerLoadError

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


def test_a_template_file_replaces_the_tokenizers_and_is_saved_with_it(tmp_path):
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}<|end|>{% endfor %}"
    file = tmp_path / "my template.jinja"
    file.write_text(template)
    chat = TokenizerConfig(chat_template=str(file)).build()
    assert chat.prompt_tokens([USER]) == (*b"user:2+3=", 257)
    chat.tokenizer.save_pretrained(tmp_path / "saved")
    assert TokenizerConfig(path=str(tmp_path / "saved")).build().tokenizer.chat_template == template


def test_a_missing_folder_is_named():
    with pytest.raises(TokenizerLoadError, match=r"\./no/such/folder does not exist; correct tokenizer.path"):
        TokenizerConfig(path="./no/such/folder").build()


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(
        TokenizerLoadError, match=re.escape(str(tmp_path)) + " holds no loadable tokenizer.*tokenizer.json"
    ):
        TokenizerConfig(path=str(tmp_path)).build()


def test_an_unreachable_hub_is_an_error_with_the_remedy(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(TokenizerLoadError, match=r"'some-org/some-model' is neither a folder.*network.*its folder"):
        TokenizerConfig(path="some-org/some-model").build()


def test_a_missing_template_file_is_named(tmp_path):
    with pytest.raises(TokenizerLoadError, match=r"absent\.jinja cannot be read"):
        TokenizerConfig(chat_template=str(tmp_path / "absent.jinja")).build()


def test_a_tokenizer_without_a_template_says_how_to_give_one(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ChatTemplateError, match="has no chat template; give the path of a Jinja file"):
        TokenizerConfig(path=str(tmp_path)).build()
