# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import contextlib
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from marin_rl.rewards import reply_text
from marin_rl.rewards.grading_process import NoAnswerError, ask
from marin_rl.rewards.reply_text import (
    CALL_END,
    CALL_START,
    Found,
    check_pattern,
    extract_last,
    graded_text,
    parse_reply,
    search_reply,
)


def test_patterns_of_data_sets():
    assert extract_last(r"<answer>(.*?)</answer>", "<answer>1</answer> no <answer>2</answer>") == "2"
    assert extract_last(r"#### (\d+)", "42") is None
    with pytest.raises(ValueError, match=r"reply_regex: 'abc' has 0 groups but needs 1"):
        check_pattern("reply_regex", "abc", groups=1)


@pytest.mark.parametrize(
    ("pattern", "text", "whole", "found"),
    [
        (r"#### (\d+)", "#### 41, no: #### 42.", False, Found("42", ".")), (r"#### (\d+)", "42", False, None),
        (r"\d+", "42", False, Found(None, "")), (r"(a)|b", "ab", False, Found(None, "")),
        (r"(x)", "x" + "y" * 300, False, Found("x", "y" * 100)),
        (r"(?s)<think>.*</think>\d+", "<think>\n</think>42", True, Found(None, "")), (r"\d+", "42.", True, None),
        (r"(.)", "\ud800", True, Found("\ud800", "")), (r"", "", True, Found(None, "")),
    ],
)  # fmt: skip
def test_search_of_a_reply(pattern: str, text: str, whole: bool, found: Found | None):
    assert search_reply(pattern, text, whole=whole) == found


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"(a+)+b", "a" * 100),
        (r"(a|aa)+$", "a" * 100 + "!"),
        (r"(.*?,){30}P", "x," * 60),
        (r"(?s)<answer>(.*?)</answer>", "<answer>" * 100_000),
        (r"\s+(x)", " " * 200_000),
        (r"(\w+\s?)*!", "word " * 100),
    ],
)
@pytest.mark.parametrize("whole", [False, True])
def test_a_search_without_end_is_given_up(monkeypatch, pattern: str, text: str, whole: bool):
    monkeypatch.setattr(reply_text, "SEARCH_SECONDS", 0.1)
    # Of a whole text, some of the patterns are refuted at its first character.
    with contextlib.suppress(NoAnswerError) if whole else pytest.raises(NoAnswerError):
        assert search_reply(pattern, text, whole=whole) is None
    assert search_reply(r"(\d+)", "42") == Found("42", "")


@pytest.mark.parametrize(
    ("reply", "calls"),
    [
        ("4", []), ("<tool_call>a</tool_call>", ["a"]), ("<think><tool_call>a</tool_call></think> 4", []),
        ("<think>or <tool_call>a</tool_call>", []),
        ("<think>a</think><tool_call>the <think> token</tool_call>", ["the <think> token"]),
        ("<think>a</think><think>b</think><tool_call> b </tool_call>", ["b"]),
        ("so <tool_call>a</tool_call> and <tool_call>b", ["a", "b"]), ("<tool_call>", [""]), ("</tool_call>", []),
        ('<think>so</think> {"name": "a", "parameters": {}}\n', ['{"name": "a", "parameters": {}}']),
        ('{"type": "function", "name": "a", "parameters": {}}',
         ['{"type": "function", "name": "a", "parameters": {}}']),
        ('{"name": "a", "arguments": 3}', ['{"name": "a", "arguments": 3}']), ('{"name": "Ada", "age": 36}', []),
        ('{"name": "Ada", "parameters": {}, "age": 36}', []), ('I call {"name": "a", "parameters": {}}', []),
        ('{"name": "a", "parameters": {}', []), ("[" * 100_000, []),
    ],
)  # fmt: skip
def test_positions_of_calls(reply: str, calls: list[str]):
    assert [call.text for call in parse_reply(reply).calls] == calls


def call(text: str) -> str:
    """A well-formed call with an argument."""
    return json.dumps({"name": "a", "arguments": {"x": text}}, ensure_ascii=False)


TAGS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]


@pytest.mark.parametrize("inner", [*TAGS, 'a "quoted" </tool_call> and \\', "</think></tool_call><think><tool_call>{}"])
@pytest.mark.parametrize("text", ["{tagged}", "<think>so</think> well: {tagged} done", "{tagged}\n{tagged}", "{plain}"])
def test_tags_in_strings_of_a_call_are_text(text: str, inner: str):
    one = call(inner)
    parsed = parse_reply(text.format(tagged=f"{CALL_START}\n{one}\n{CALL_END}", plain=one))
    assert [found.text for found in parsed.calls] == [one] * max(text.count("{tagged}"), 1)
    assert not parsed.in_thoughts
    assert parsed.answer_start == (len("<think>so</think>") if text.startswith("<think>") else 0)


@pytest.mark.parametrize(
    ("reply", "calls"),
    [
        # The closing tag may be missing at the end, or before another tag, and may be cut off.
        (f"<tool_call>{call('<tool_call>')}", 1),
        (f"<tool_call>{call('</tool_call>')}\n</tool_", 1),
        (f"<tool_call>{call('1')}<tool_call>{call('2')}</tool_call>", 2),
        # The JSON is one call, however its values are written.
        (f"<tool_call>{call('1').replace('1', 'line 1' + chr(10) + '</tool_call>')}</tool_call>", 1),
        ('<tool_call>{"name": "a", "arguments": {"x": ' + "1" * 5000 + ', "y": "</tool_call>"}}</tool_call>', 1),
        ('<tool_call>{"name": "a", "arguments": {"x": NaN, "y": "</tool_call>"}}</tool_call>', 1),
        (r'<tool_call>{"name": "a", "arguments": {"x": "\ud800</tool_call>"}}</tool_call>', 1),
        # Malformed calls extend to the closing tag.
        (f"<tool_call>{call('1')} {call('2')}</tool_call>", 1),
        (f"<tool_call>use <tool_call>{call('1')}</tool_call> {call('2')}", 1),
        (f"<tool_call>{{'x': '</tool_call>'}}</tool_call><tool_call>{call('2')}</tool_call>", 2),
        (f"<tool_call>{call('</tool_call>')[:-1]}</tool_call><tool_call>{call('2')}</tool_call>", 2),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", 1),
        # Quoted tags are text.
        (f"`<tool_call>` begins a call: <tool_call>{call('1')}</tool_call>", 1),
        (f'"<think>" begins thoughts: <tool_call>{call("1")}</tool_call>', 1),
        (f"<think></think><tool_call>{call('1')}</tool_call> and '</think>' ends them", 1),
        # Calls in thoughts, and before thoughts, are no calls.
        (f"<think>{call('1')}", 0),
        (f"<think><tool_call>{call('</think>')}</tool_call> or <tool_call>{call('2')}</tool_call>", 0),
        (f"<tool_call>{call('1')}</tool_call><think>", 0),
        (f"<tool_call>{call('1')}</tool_call></think>", 0),
        (f"I may use <tool_call> here.</think><tool_call>{call('1')}</tool_call>", 1),
        (f"{call('1')}</think>{call('2')}", 1),
    ],
)
def test_number_of_calls(reply: str, calls: int):
    assert len(parse_reply(reply).calls) == calls


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("42", "42"), ("<think>a</think>42", "42"), ("a</think>42", "42"), ("<think>a", None),
        ("<think>a</think>4<think>", None),
        ('The tag "<think>" opens thoughts', 'The tag "<think>" opens thoughts'),
        ("<think>a</think>Now `</think>` closes them", "Now `</think>` closes them"),
        ('<think>I say "hi"</think>"hi"', '"hi"'), ('I say "hi"</think>"hi"', '"hi"'),
        ('<think>then "</think>" ends them</think>42', "42"),
        (f"<think><tool_call>{call('</think>')}</tool_call>", None),
        (f"<think><tool_call>{call('</think>')}</tool_call></think>42", "42"),
        (f"I may use <tool_call>{call('</think>')}</tool_call>.</think>42", "42"),
        ("I may use <tool_call> here.</think>42", "42"),
    ],
)  # fmt: skip
def test_answers(reply: str, answer: str | None):
    assert graded_text(reply) == answer


HOSTILE = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    '"',
    "{",
    "[",
    '{"a":',
    "\\",
    '\\"',
    "`",
    "1",
    ",",
    " ",
]


@given(
    unit=st.lists(st.sampled_from(HOSTILE), min_size=1, max_size=4).map("".join),
    opens_thoughts=st.booleans(),
)
@example(unit='<tool_call>\\"', opens_thoughts=False)
@example(unit='<tool_call>{"', opens_thoughts=False)
@example(unit='<tool_call>["', opens_thoughts=True)
@example(unit="</think>{", opens_thoughts=False)
def test_the_decoder_reads_hostile_replies_in_linear_time(unit: str, opens_thoughts: bool):
    """Count the characters that the decoder gets, for many repetitions of a unit."""
    read = 0

    class Counting:
        def raw_decode(self, text: str) -> object:
            nonlocal read
            read += len(text)
            return decoder.raw_decode(text)

        decode = raw_decode

    decoder = reply_text._SYNTAX
    reply = unit * 300
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reply_text, "_SYNTAX", Counting())
        parse_reply(reply, opens_thoughts)
    assert read <= 4 * len(reply)


@pytest.mark.parametrize("unit", ["<tool_call>x</think>", "<tool_call>{}x", '<tool_call>{"</think>'])
def test_a_long_reply_of_malformed_calls_is_read_within_a_time_limit(unit: str):
    # In quadratic time the first takes 25 seconds of CPU time.
    request = {"do": "parse", "reply": unit * (1_200_000 // len(unit))}
    assert ask("tests.rewards.fake_graders:open_behaviors", request, 8.0) in (0, 1)


@given(st.lists(st.sampled_from([*HOSTILE, call("</think>"), "x", "\n"]), max_size=10), st.booleans())
def test_a_reply_in_parts_is_the_whole_reply(parts: list[str], opens_thoughts: bool):
    parser = reply_text.ReplyParser(opens_thoughts)
    for part in parts:
        for character in part:
            parser.add(character, is_last=False)
    parser.add("", is_last=True)
    whole = parse_reply("".join(parts), opens_thoughts)
    assert (parser.answer, parser.in_thoughts, parser.calls) == (whole.answer, whole.in_thoughts, whole.calls)


@pytest.mark.parametrize(
    ("reply", "in_thoughts"),
    [
        ("a", True),
        ('say "hi"</think>"hi"', False),
        (f"<tool_call>{call('</think>')}</tool_call>", True),
        (f"{call('1')}</think>{call('2')}", False),
    ],
)
def test_thoughts_that_the_prompt_opened(reply: str, in_thoughts: bool):
    parsed = parse_reply(reply, opens_thoughts=True)
    assert parsed.in_thoughts == in_thoughts
    assert len(parsed.calls) == reply.count("</think>{")
