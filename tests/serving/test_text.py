# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import functools
import itertools
import re
from collections.abc import Callable, Sequence

import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from marin_rl.rewards.reply_text import parse_reply
from marin_rl.serving.text import ReplyReader, TextPart, ToolReader
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import byte_tokenizer
from marin_rl.types import StopReason
from tests.sampling.test_stops import GROUPS, merging, table_of, tokenizations

DECODE = ChatTokenizer(byte_tokenizer()).decode_reply


def read(
    chunks: Sequence[Sequence[int]],
    stop: Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    decode: Callable[[Sequence[int]], str] = DECODE,
) -> TextPart:
    """The joined parts of a reply of chunks, the last of which ends the generation."""
    reader = ReplyReader(decode, stop, stop_token_ids)
    tokens: list[int] = []
    text, part = "", TextPart((), (), "")
    for index, chunk in enumerate(chunks):
        part = reader.push(chunk, [-1.0] * len(chunk), StopReason.LENGTH if index == len(chunks) - 1 else None)
        tokens += part.token_ids
        assert len(part.logprobs) == len(part.token_ids)
        text += part.text
        if part.finish_reason is not None:
            break
    return TextPart(tuple(tokens), (), text, part.finish_reason, part.stop_reason)


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.lists(st.sampled_from([*b"abcaab", *"äé€😀".encode(), 0xFF, 0x80, 258, 260]), min_size=1, max_size=60),
    cuts=st.sets(st.integers(1, 59)),
    stop=st.lists(st.sampled_from(["ab", "aab", "c", "bä", "€"]), max_size=2),
)
def test_parts_join_to_the_whole_reply(tokens: list[int], cuts: set[int], stop: list[str]):
    bounds = [0, *sorted(cut for cut in cuts if cut < len(tokens)), len(tokens)]
    chunks = [tokens[start:end] for start, end in itertools.pairwise(bounds)]
    whole = read([tokens], stop)
    assert read(chunks, stop) == whole
    assert read([[token] for token in tokens], stop) == whole
    if not stop:
        assert whole.text == DECODE(tokens)


@functools.cache
def byte_fallback() -> Tokenizer:
    """A tokenizer with the decoder of Llama 2, Mistral and Gemma: a letter, a space, and a token for each byte."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"\u2581": 256, "a": 257, "<unk>": 258}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    replace = decoders.Replace("\u2581", " ")
    tokenizer.decoder = decoders.Sequence(
        [replace, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@settings(max_examples=150, deadline=None)
@given(
    text=st.text("a äé€好😀", min_size=1, max_size=40),
    size=st.integers(1, 20),
    stop=st.lists(st.sampled_from(["a", "好", "€a", "😀😀"]), max_size=2),
)
def test_parts_of_tokens_that_are_single_bytes(text: str, size: int, stop: list[str]):
    words = {"a": [257], " ": [256]}
    tokens = list(itertools.chain.from_iterable(words.get(letter) or letter.encode() for letter in text))

    def decode(ids: Sequence[int]) -> str:
        return byte_fallback().decode(list(ids))

    reply = read([tokens[at : at + size] for at in range(0, len(tokens), size)], stop, decode=decode)
    found = [text.removeprefix(" ").index(one) for one in stop if one in text.removeprefix(" ")]
    assert reply.text == text.removeprefix(" ")[: min(found, default=len(text))]
    assert (reply.finish_reason == "stop") == bool(found)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), texts=st.sampled_from(GROUPS), size=st.integers(1, 8), keeps_stop=st.booleans())
def test_stop_strings_end_replies_in_any_tokenization(
    data: st.DataObject, texts: tuple[str, ...], size: int, keeps_stop: bool
):
    tokens = data.draw(tokenizations(merging()))
    end = table_of(merging(), texts).first_end(tokens)
    reader = ReplyReader(merging().decode, texts, keeps_stop=keeps_stop)
    parts: list[TextPart] = []
    for at in range(0, len(tokens), size):
        parts.append(reader.push(tokens[at : at + size], [-1.0] * len(tokens[at : at + size])))
        if reader.finish_reason is not None:
            break
    said, kept = "".join(part.text for part in parts), sum(len(part.token_ids) for part in parts)
    assert kept == (len(tokens) if end is None else end)
    assert (reader.finish_reason is not None) == (end is not None)
    if end is not None:
        assert merging().decode(tokens[:end]).startswith(said)
        assert any(text in said for text in texts) == keeps_stop


def test_text_is_held_back_while_it_may_change():
    reader = ReplyReader(DECODE, ["abc"])
    shown = [reader.push([byte], [-1.0]).text for byte in "xä€abab".encode()]
    assert shown == ["x", "", "ä", "", "", "€", "", "", "ab", ""]


def test_the_earliest_stop_string_wins():
    reply = read([b"xxabc"], ["c", "ab"])
    assert (reply.text, reply.token_ids, reply.stop_reason) == ("xx", tuple(b"xxab"), "ab")


def test_a_stop_string_in_a_long_reply_takes_few_decodings():
    counts = []

    def decode(tokens: Sequence[int]) -> str:
        counts.append(len(tokens))
        return DECODE(tokens)

    reply = ReplyReader(decode, ["end"]).push(b"x" * 4000 + b"endless", [-1.0] * 4007, StopReason.LENGTH)
    assert (len(reply.token_ids), len(reply.text), reply.stop_reason) == (4003, 4000, "end")
    assert len(counts) < 30


def test_stop_tokens_are_not_part_of_the_text():
    reply = read([[97, 98], [99, 100]], stop_token_ids=[99])
    assert reply == TextPart((97, 98, 99), (), "ab", "stop", 99)


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def read_tools(text: str, size: int, opens_thoughts: bool = False) -> tuple[str, list]:
    reader = ToolReader(opens_thoughts)
    shown = "".join(reader.push(text[start : start + size]) for start in range(0, len(text), size))
    rest, calls = reader.finish()
    return shown + rest, [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls]


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        ("No call < here.", "No call < here.", []),
        (f"Let me see.\n{CALL}", "Let me see.", ["add"]),
        (f"{CALL}\n{CALL}", "", ["add", "add"]),
        ('{"name": "add", "parameters": {"a": 1}}', "", ["add"]),
        ('{"answer": 1}', '{"answer": 1}', []),
        ("a <tool_call>{broken</tool_call> b ", "a <tool_call>{broken</tool_call> b ", []),
        # JSON has neither half a character nor infinity.
        *((text, text, []) for text in (CALL.replace("add", r"\ud800"), CALL.replace("1", r'"\ud800"'))),
        (CALL.replace("1", "1e999"), CALL.replace("1", "1e999"), []),
        (f"<think>\n{CALL}</think>\nno call", f"<think>\n{CALL}</think>\nno call", []),
        (f"<think>no</think> yes {CALL}", "<think>no</think> yes", ["add"]),
        ('<think>no</think>\n{"name": "add", "parameters": {"a": 1}}', "<think>no</think>", ["add"]),
        ('<think>no</think>\n{"answer": 1}', '<think>no</think>\n{"answer": 1}', []),
    ],
)
def test_tool_calls_are_separated_from_text(text: str, content: str, names: list[str], size: int):
    shown, calls = read_tools(text, size)
    assert (shown, [name for _, name, _ in calls]) == (content, names)
    assert [arguments for _, _, arguments in calls] == ['{"a": 1}'] * len(names)
    # Ids are different in all replies.
    ids = [id for id, _, _ in [*calls, *read_tools(text, size)[1]]]
    assert len(set(ids)) == 2 * len(names)
    assert all(re.fullmatch("call_[0-9a-f]{32}", id) for id in ids)


@settings(max_examples=100, deadline=None)
@given(
    text=st.lists(st.sampled_from(["x", "\n", "<think>", "</think>", CALL, "{"]), max_size=6).map("".join),
    size=st.integers(1, 30),
    opens_thoughts=st.booleans(),
)
def test_calls_are_those_of_the_environments(text: str, size: int, opens_thoughts: bool):
    """As in `RolloutBuilder.add_generation`: thoughts that the chat template opens have no calls."""
    content, calls = read_tools(text, size, opens_thoughts)
    assert len(calls) == len(parse_reply(text, opens_thoughts).calls)
    assert text.startswith(content) if calls else content == text


def test_thoughts_are_passed_on_when_they_arrive():
    reader = ToolReader(opens_thoughts=True)
    assert [reader.push(text) for text in ("{a", " b", "</think>", " c", CALL)] == ["{a", " b", "</think>", " c", ""]


def test_a_long_run_of_spaces_is_read_in_one_pass():
    # With a search that starts again at every space, this takes minutes.
    text = "x" + " " * 400_000 + "y"
    assert ToolReader(opens_thoughts=False).push(text) == text
