# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from marin_rl.tokenization.load import TokenPieces, byte_tokenizer

BYTES = TokenPieces(byte_tokenizer())


def fast(model: models.Model, decoder: object, pre_tokenizer: object = None) -> PreTrainedTokenizerFast:
    backend = Tokenizer(model)
    if decoder is not None:
        backend.decoder = decoder
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    backend.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)


@given(st.binary())
def test_pieces_of_the_built_in_tokenizer_are_its_bytes(data):
    assert b"".join(map(BYTES, data)) == data


@given(st.text())
def test_pieces_concatenate_to_the_text(text):
    assert b"".join(map(BYTES, byte_tokenizer_ids(text))) == text.encode()


def byte_tokenizer_ids(text):
    return BYTES._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


def test_special_and_unknown_tokens_have_names():
    assert (BYTES(257), BYTES(999)) == (b"<|end|>", b"<unknown 999>")


LLAMA = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)


@pytest.mark.parametrize("decoder", [LLAMA, decoders.Metaspace()])
def test_tokenizers_with_a_mark_for_spaces(decoder):
    vocab = {"<unk>": 0, "▁the": 1, "▁": 2, "<0xC3>": 3, "é": 4}
    piece = TokenPieces(fast(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"), decoder))
    assert [piece(id) for id in (1, 2, 4, 5)] == [b" the", b" ", "é".encode(), b"</s>"]
    assert piece(3) == (b"\xc3" if decoder is LLAMA else b"<0xC3>")


def test_word_pieces_are_decoded_by_the_tokenizer():
    vocab = {"[UNK]": 0, "play": 1, "##ing": 2}
    model = models.WordPiece(vocab=vocab, unk_token="[UNK]")
    piece = TokenPieces(fast(model, decoders.WordPiece(), pre_tokenizers.Whitespace()))
    assert (piece(1), piece(2)) == (b"play", b"##ing")


def test_a_tokenizer_without_a_decoder():
    piece = TokenPieces(fast(models.WordLevel(vocab={"a": 0, "b": 1}, unk_token="a"), None))
    assert (piece(0), piece(1)) == (b"a", b"b")


@pytest.mark.parametrize(
    ("decoder", "content"),
    [
        (decoders.ByteLevel(), "\u0120tool"),
        (decoders.ByteLevel(), "<\uff5ctool\uff5c>"),
        (decoders.ByteLevel(), " tool"),
        (decoders.Metaspace(), "\u2581<PRE>"),
        (decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse()]), "\u2581<PRE>"),
    ],
)
@pytest.mark.parametrize("is_special", [True, False])
def test_added_tokens_are_decoded_like_others(decoder: decoders.Decoder, content: str, is_special: bool):
    tokenizer = fast(models.BPE(vocab={"a": 0}, merges=[]), decoder)
    tokenizer.add_tokens([AddedToken(content, special=is_special)])
    assert TokenPieces(tokenizer).in_text(2) == tokenizer.decode([0, 2]).removeprefix("a").encode()
