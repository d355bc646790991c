# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from marin_rl.tokenization.byte_tokenizer import SPECIAL_TOKENS, byte_tokenizer

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
    assert loaded.apply_chat_template(messages) == TOKENIZER.apply_chat_template(messages)
    assert loaded.decode(loaded(" isn 't  x")["input_ids"]) == " isn 't  x"


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
