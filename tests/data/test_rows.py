# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Rows of supervised data have the tokens of an episode, and loss on the replies."""

import json
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from marin_rl.data.rows import Example, Form, encode_row, form_of
from marin_rl.environments.row_format import Row
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import byte_tokenizer
from tests.tokenization.conftest import CHATML as CHATML_TEMPLATE
from tests.tokenization.conftest import chatml_tokenizer
from tests.tokenization.tool_templates import QWEN3

BYTE_CHAT = ChatTokenizer(byte_tokenizer())
CHATML, THINKING = ChatTokenizer(chatml_tokenizer()), ChatTokenizer(chatml_tokenizer(QWEN3))
USER, REPLY = {"role": "user", "content": "two plus three?"}, {"role": "assistant", "content": "five"}
AGAIN, SECOND = {"role": "user", "content": "and two?"}, {"role": "assistant", "content": "seven"}
OPENED = "'<|im_start|>assistant\\n<think>\\n' }}"
SCHEMA = {"type": "function", "function": {"name": "tool", "description": "a tool", "parameters": {}}}


def encode(values: dict[str, Any], tokenizer: ChatTokenizer = CHATML) -> Example:
    row = Row(values, "rows.jsonl:3")
    return encode_row(row, form_of(row), tokenizer)


def texts(example: Example, tokenizer: ChatTokenizer = CHATML) -> list[tuple[str, list[str]]]:
    """Decode each sequence, and the runs of its tokens with loss."""
    decoded = []
    for ids, mask in example.sequences():
        runs = np.flatnonzero(np.diff(np.append(False, np.append(mask, False))))
        spans = [tokenizer.tokenizer.decode(ids[a:b]) for a, b in zip(runs[::2], runs[1::2], strict=True)]
        decoded.append((tokenizer.tokenizer.decode(ids), spans))
    return decoded


def test_every_reply_has_loss_up_to_its_end_token():
    [(text, spans)] = texts(encode({"messages": [USER, REPLY, AGAIN, SECOND]}))
    assert text == (
        "<|im_start|>user\ntwo plus three?<|im_end|>\n<|im_start|>assistant\nfive<|im_end|>\n"
        "<|im_start|>user\nand two?<|im_end|>\n<|im_start|>assistant\nseven<|im_end|>"
    )
    assert spans == ["five<|im_end|>", "seven<|im_end|>"]


def test_a_row_has_the_tokens_that_an_episode_samples(any_chat: ChatTokenizer):
    """The prompt of each reply is the one that a policy continues, in every template."""
    messages = [USER, REPLY, AGAIN, SECOND]
    seen = {tuple(any_chat.prompt_tokens(messages[:1])), tuple(any_chat.prompt_tokens(messages[:3]))}
    example = encode({"messages": messages}, any_chat)
    for ids, mask in example.sequences():
        starts = np.flatnonzero(mask & ~np.append(False, mask[:-1]))
        contexts = [tuple(ids[:start].tolist()) for start in starts]
        assert contexts[0] in seen
        assert all(any_chat.tokenizer.decode(context).count("five") == i for i, context in enumerate(contexts[1:], 1))
    replies = [any_chat.decode_reply(ids[mask].tolist()) for ids, mask in example.sequences()]
    assert "".join(replies).replace(" ", "").count("five") == 1
    assert int(example.loss_mask.sum()) >= 2


def test_a_template_that_drops_thoughts_gives_a_sequence_for_each_reply():
    thought = {"role": "assistant", "content": "<think>\nso\n</think>\n\nfive"}
    first, second = texts(encode({"messages": [USER, thought, AGAIN, SECOND]}, THINKING), THINKING)
    assert first[1] == ["<think>\nso\n</think>\n\nfive<|im_end|>"]
    assert second[1] == ["seven<|im_end|>"]
    assert "<think>" not in second[0]
    assert "five<|im_end|>" in second[0]


def test_the_start_of_a_reply_in_the_prompt_is_not_repeated():
    opening = ChatTokenizer(chatml_tokenizer(CHATML_TEMPLATE.replace("'<|im_start|>assistant\\n' }}", OPENED)))
    thought = {"role": "assistant", "content": "<think>\nso\n</think>\n\nfive"}
    [(text, spans)] = texts(encode({"messages": [USER, thought]}, opening), opening)
    assert text.count("<think>") == 1
    assert spans == ["so\n</think>\n\nfive<|im_end|>"]


def test_only_the_completion_has_loss():
    row = {"prompt": [USER, REPLY, AGAIN], "completion": [SECOND]}
    [(text, spans)] = texts(encode(row))
    assert "five<|im_end|>" in text
    assert spans == ["seven<|im_end|>"]
    plain = encode({"prompt": "two plus three?", "completion": "five"})
    assert texts(plain) == texts(encode({"messages": [USER, REPLY]}))


def test_text_has_loss_on_all_tokens_but_the_first():
    example = encode({"text": "<|im_start|>user\nhello<|im_end|>"})
    eos = CHATML.tokenizer.eos_token_id
    assert example.input_ids[-1] == eos
    assert (example.input_ids == eos).sum() == 1
    assert example.input_ids[0] == CHATML.tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert example.loss_mask.tolist() == [False] + [True] * (len(example.input_ids) - 1)


@pytest.mark.parametrize(("column", "mask"), [("labels", [-100, 6, -100, 8]), ("assistant_masks", [1, 1, 0, 1])])
def test_token_ids_have_the_given_mask(column: str, mask: list[int]):
    example = encode({"input_ids": [5, 6, 7, 8], column: mask})
    assert example.input_ids.tolist() == [5, 6, 7, 8]
    # The first token is never predicted.
    assert example.loss_mask.tolist() == [False, True, False, True]


@pytest.mark.parametrize("as_json", [False, True])
def test_tools_are_described_and_calls_are_text_of_the_reply(as_json: bool):
    arguments: Any = {"text": "hello"}
    call = {"type": "function", "function": {"name": "tool", "arguments": arguments}}
    if as_json:
        call["function"]["arguments"] = json.dumps(arguments)
    messages = [
        {"role": "system", "content": "answer", "tool_calls": None},
        {**USER, "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "five", "tool_call_id": "1", "name": "tool"},
        REPLY,
    ]
    tools: Any = [SCHEMA]
    example = encode({"messages": messages, "tools": json.dumps(tools) if as_json else tools}, THINKING)
    [(text, spans)] = texts(example, THINKING)
    called = '<tool_call>\n{"name": "tool", "arguments": {"text": "hello"}}\n</tool_call><|im_end|>'
    assert spans == [called, "five<|im_end|>"]
    assert text.startswith("<|im_start|>system\nanswer\n\n# Tools")
    assert "<tool_response>\nfive\n</tool_response>" in text
    # The reference: the template of the tokenizer, given the call as text.
    given = [messages[0], messages[1], {"role": "assistant", "content": called.removesuffix("<|im_end|>")}]
    reference = [{key: value for key, value in one.items() if value} for one in [*given, messages[3], REPLY]]
    expected = THINKING.tokenizer.apply_chat_template(reference, tools=tools, tokenize=False)
    # Qwen's template closes no thoughts in a reply of an episode.
    assert text == expected.rstrip("\n").replace("<think>\n\n</think>\n\n", "")


ROW = {"input_ids": [5, 6], "labels": [5, 6]}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no columns": ({"question": "x"}, "the row has the columns 'question', but needs messages"),
    "pair": ({"prompt": "x", "chosen": "y", "rejected": "z"}, "or input_ids; such rows are for marin_rl.dpo"),
    "near column": ({"message": []}, "did you mean 'messages'"),
    "no messages": ({"messages": []}, "column 'messages' holds []"),
    "no list": ({"messages": 3}, "column 'messages' holds 3"),
    "role": ({"messages": [{"role": "bot", "content": "x"}]}, "message 0 has the role 'bot'; choose one of system"),
    "content": ({"messages": [USER, {"role": "assistant", "content": 5}]}, "message 1 is {'role': 'assistant'"),
    "key": ({"messages": [USER, {**REPLY, "weight": 1}]}, "message 1 has the key 'weight'"),
    "no reply": ({"messages": [USER]}, "has no assistant message"),
    "empty reply": (
        {"messages": [USER, {"role": "assistant", "content": " ", "tool_calls": []}]},
        "column 'messages', message 1 is a reply without text and tool calls; fill it or remove the row",
    ),
    "empty message": ({"prompt": "x", "completion": [{**REPLY, "content": ""}]}, "message 0 is a reply without text"),
    "no prompt": ({"messages": [REPLY, USER, REPLY]}, "no message before the first reply"),
    "two replies": ({"messages": [USER, REPLY, REPLY]}, "two assistant messages follow each other"),
    "completion": ({"prompt": "x", "completion": [USER]}, "the completion begins with a user message"),
    "empty prompt": ({"prompt": " ", "completion": "x"}, "column 'prompt' is empty"),
    "call of a user": ({"messages": [{**USER, "tool_calls": [{}]}, REPLY]}, "only the assistant calls tools"),
    "call": ({"messages": [USER, {"role": "assistant", "tool_calls": [{"name": 3}]}]}, "it must have a name and"),
    "arguments": (
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]},
        "has arguments that are not JSON",
    ),
    "list of arguments": (
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]}]},
        "it must have a name and arguments, an object",
    ),
    "infinite argument": (
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": math.inf}}]}]},
        "has a tool call that is not JSON",
    ),
    "bytes as argument": (
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": b"y"}}]}]},
        "has a tool call that is not JSON",
    ),
    "tools": ({"messages": [USER, REPLY], "tools": [3]}, "column 'tools' holds [3]"),
    "number as tools": ({"messages": [USER, REPLY], "tools": 3}, "column 'tools' holds 3"),
    "nameless tool": ({"messages": [USER, REPLY], "tools": [{"type": "function"}]}, "column 'tools' holds"),
    "tools as text": ({"messages": [USER, REPLY], "tools": "["}, "column 'tools' is not JSON"),
    "surrogate": ({"messages": [USER, {**REPLY, "content": "\ud800"}]}, "lone surrogate"),
    "empty text": ({"text": ""}, "column 'text' holds ''"),
    "number as text": ({"text": 5}, "column 'text' holds 5"),
    "no mask": ({"input_ids": [5, 6]}, "needs labels, which are -100"),
    "two masks": ({**ROW, "assistant_masks": [1, 1]}, "it has labels and assistant_masks"),
    "length": ({**ROW, "labels": [5]}, "column 'labels' has 1 values, but input_ids 2"),
    "shifted labels": ({**ROW, "labels": [6, -100]}, "do not shift it"),
    "mask": ({"input_ids": [5, 6], "assistant_masks": [0, 2]}, "'assistant_masks', item 1 is 2; it must be an integer"),
    "id": ({"input_ids": [5, 70000], "labels": [5, 70000]}, "item 1 is 70000; it must be an integer from 0 to "),
    "negative id": ({"input_ids": [-1, 5], "labels": [-100, 5]}, "column 'input_ids', item 0 is -1"),
    "huge id": ({**ROW, "input_ids": [5, 2**70]}, "column 'input_ids', item 1 is 1180591620717411303424"),
    "boolean ids": ({"input_ids": [True, False], "labels": [1, 0]}, "column 'input_ids', item 0 is True"),
    "boolean label": ({"input_ids": [5, 1], "labels": [5, True]}, "column 'labels', item 1 is True"),
    "whole float": ({"input_ids": [5, 6], "assistant_masks": [0, 1.0]}, "'assistant_masks', item 1 is 1.0"),
    "not a number": ({**ROW, "labels": [5, math.nan]}, "column 'labels', item 1 is nan"),
    "nested ids": ({**ROW, "input_ids": [[5, 6]]}, "column 'input_ids', item 0 is [5, 6]"),
    "text as ids": ({**ROW, "input_ids": "56"}, "column 'input_ids' holds '56'"),
    "null among ids": ({**ROW, "input_ids": [5, None]}, "column 'input_ids', item 1 is None"),
    "no ids": ({"input_ids": [], "labels": []}, "column 'input_ids' holds []"),
    "no integers": ({"input_ids": [0.5], "labels": [1]}, "column 'input_ids', item 0 is 0.5"),
    "no loss": ({"input_ids": [5, 6], "labels": [-100, -100]}, "no token has loss"),
    "loss on the first token": ({"input_ids": [5, 6], "labels": [5, -100]}, "no token has loss"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_bad_row_is_named(case: str):
    values, text = WRONG[case]
    with pytest.raises(ValueError, match=re.escape(text)) as raised:
        encode(values, BYTE_CHAT)
    assert str(raised.value).startswith("rows.jsonl:3: ")


@pytest.mark.parametrize(
    ("columns", "form"),
    [
        (("messages", "text"), Form.MESSAGES),
        (("prompt", "completion", "text"), Form.COMPLETION),
        (("prompt", "text"), Form.TEXT),
        (("input_ids", "labels"), Form.TOKENS),
    ],
)
def test_form_of_a_row(columns: Sequence[str], form: Form):
    assert form_of(Row(dict.fromkeys(columns, "x") | {"messages_2": None}, "x")) is form
