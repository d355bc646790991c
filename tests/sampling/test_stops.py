# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import functools
import re
from collections.abc import Callable, Sequence

import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from marin_rl.sampling.stops import StopTable, stop_table
from marin_rl.tokenization.load import TokenPieces, byte_tokenizer

TRAINED_ON = ["the answer is <answer>4</answer>\n\nQuestion: what?\n\nso </answer>. \u00e9\u20ac\U0001f600 " * 20]


@functools.cache
def merging() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that merges stop texts with their neighbours."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    backend.train_from_iterator(TRAINED_ON, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", name_or_path="merging")


@functools.cache
def marking() -> PreTrainedTokenizerFast:
    """A tokenizer like Llama 2's: a mark for spaces, single bytes, and a decoder that drops the first space."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"\u2581</answer>\n: .xsoth"]
    pieces += ["\u2581the", "er>", "\n\n", "\n\n\u2581", "<a", "\u2581<"]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", name_or_path="marking")


TOKENIZERS = {"bytes": functools.cache(byte_tokenizer), "merging": merging, "marking": marking}
GROUPS = [
    ("\n\n",),
    ("</answer>", "\n\n"),
    ("</", "</answer>"),
    ("wer>\n", " the"),
    ("\u20ac", "\u00e9\u20ac"),
    ("er", ". ", "aab"),
]
STOPS = [text for group in GROUPS for text in group]


@functools.cache
def table_of(tokenizer: PreTrainedTokenizerFast, texts: tuple[str, ...], ids: tuple[int, ...] = ()) -> StopTable:
    return stop_table(len(tokenizer), ids, texts, TokenPieces(tokenizer).in_text)


def first_end(decode: Callable[[Sequence[int]], str], tokens: Sequence[int], texts: Sequence[str]) -> int | None:
    """The first count of tokens whose text has a stop text, by decoding each beginning of the reply."""
    counts = range(1, len(tokens) + 1)
    return next((n for n in counts if any(text in decode(tokens[:n]) for text in texts)), None)


@functools.cache
def tokens_by_first_byte(tokenizer: PreTrainedTokenizerFast) -> dict[int, list[tuple[bytes, int]]]:
    piece = TokenPieces(tokenizer).in_text
    by_first: dict[int, list[tuple[bytes, int]]] = {}
    for token in range(len(tokenizer)):
        if (text := piece(token)) and token not in tokenizer.added_tokens_decoder:
            by_first.setdefault(text[0], []).append((text, token))
    return by_first


@st.composite
def tokenizations(draw: st.DrawFn, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """A random tokenization of a random text, with parts that stop texts consist of."""
    by_first = tokens_by_first_byte(tokenizer)
    words = st.sampled_from([*STOPS, "<answer>", "the", "answer", "\n", "a", " ", "b", ".", "<", "x", "\U0001f600"])
    rest = draw(st.lists(words, max_size=8).map("".join)).encode()
    tokens: list[int] = []
    while rest:
        fitting = [(text, token) for text, token in by_first.get(rest[0], []) if rest.startswith(text)]
        if not fitting:
            break
        text, token = draw(st.sampled_from(fitting))
        tokens.append(token)
        rest = rest[len(text) :]
    return tokens


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=100, deadline=None)
@given(data=st.data(), texts=st.sampled_from(GROUPS))
def test_a_reply_ends_with_the_first_token_that_completes_a_text(
    name: str, data: st.DataObject, texts: tuple[str, ...]
):
    tokenizer = TOKENIZERS[name]()
    tokens = data.draw(tokenizations(tokenizer))
    # A space at the start of the whole text would be dropped by some decoders.
    [before] = tokenizer.convert_tokens_to_ids(["x"])

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode([before, *ids], clean_up_tokenization_spaces=False)[1:]

    assert table_of(tokenizer, texts).first_end(tokens) == first_end(decode, tokens, texts)


LETTERS = [*(letter.encode() for letter in "ab"), b"ab", b"aab", b"ba", b"bbb", b"", b"abababab"]


@settings(max_examples=100, deadline=None)
@given(
    tokens=st.lists(st.integers(0, len(LETTERS) - 1), max_size=12),
    texts=st.lists(st.text("ab", min_size=1, max_size=7), min_size=1, max_size=4),
)
def test_texts_that_overlap_or_begin_each_other(tokens: list[int], texts: list[str]):
    def decode(ids: Sequence[int]) -> str:
        return b"".join(LETTERS[token] for token in ids).decode()

    table = stop_table(len(LETTERS), [], texts, LETTERS.__getitem__)
    assert table.first_end(tokens) == first_end(decode, tokens, texts)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([*"\u20aca\u00e9".encode(), 0xFF, 0x80]), max_size=16))
def test_bytes_that_are_no_text_complete_no_character(tokens: list[int]):
    tokenizer = TOKENIZERS["bytes"]()
    expected = first_end(lambda ids: bytes(ids).decode(errors="replace"), tokens, ["\u20aca", "\u00e9"])
    assert table_of(tokenizer, ("\u20aca", "\u00e9")).first_end(tokens) == expected


def test_special_tokens_end_a_reply_and_count_as_text():
    tokenizer = TOKENIZERS["bytes"]()
    assert table_of(tokenizer, ("b<|tool",), (257,)).first_end([*b"ab", 261, 257]) == 3
    assert table_of(tokenizer, ("zz",), (257,)).first_end([*b"az", 257, *b"zz"]) == 3
    assert table_of(tokenizer, ("zz",)).first_end([*b"z", 257, *b"z"]) is None


def test_a_large_table_has_few_classes():
    """The size of the table on a device depends on the texts, not on the vocabulary."""
    pieces = [*(bytes([byte]) for byte in range(256)), *(f"{number} <".encode() for number in range(50_000))]
    table = stop_table(len(pieces), [7], ["</answer>", "\n\n", "<|"], pieces.__getitem__)
    # The stop token, each letter of the texts, and all other letters; the numbers act like `<`.
    assert table.next_states.shape[1] == len(set("</answer>\n<|")) + 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([-1],), "stop token -1 is not in the model's vocabulary of 264"),
        (([264],), "stop token 264 is not in the model's vocabulary of 264"),
        (([], ["a"]), r"the stop texts \['a'\] need token_bytes"),
        (
            ([], ["ab", "a\u00e4"], lambda token: b"ab"),
            "no tokens of the tokenizer give the stop text 'a\u00e4'; remove it",
        ),
    ],
)
def test_impossible_stops_are_refused(arguments: tuple, message: str):
    with pytest.raises(ValueError, match=message):
        stop_table(264, *arguments)


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        # Without `Fuse`, it drops the space of each token.
        decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Strip(" ", 1, 0)]),
    ],
)
def test_tokenizers_whose_tokens_depend_on_each_other_are_refused(decoder: decoders.Decoder):
    backend = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "play": 1, "##ing": 2}, unk_token="[UNK]"))
    backend.decoder = decoder
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, name_or_path="pieces")
    with pytest.raises(ValueError, match=re.escape("the text of a token of pieces depends on its neighbours")):
        table_of(tokenizer, ("ing",))
