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
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

from marin_rl.data.rows import Example, Form, encode_row, form_of
from marin_rl.environments.row_columns import OF_TOKENS, REMEDIES, Row, unused_columns
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import byte_tokenizer
from tests.tokenization.conftest import CHATML as CHATML_TEMPLATE
from tests.tokenization.conftest import (
    chatml_tokenizer,
    instruct_tokenizer,
    llama_tokenizer,
    phi_tokenizer,
    prepending_tokenizer,
    template_ids,
)
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


def test_replies_of_weight_0_are_context():
    rows = [
        [USER, {**REPLY, "weight": 0}, AGAIN, SECOND],
        [{**USER, "weight": 0}, {**REPLY, "weight": 0.0}, AGAIN, {**SECOND, "weight": 1}],
        [USER, {**REPLY, "weight": False}, {**AGAIN, "weight": None}, {**SECOND, "weight": None}],
    ]
    plain, last = encode({"messages": [USER, REPLY, AGAIN, SECOND]}), ["seven<|im_end|>"]
    for messages in rows:
        example = encode({"messages": messages})
        assert example.input_ids.tolist() == plain.input_ids.tolist()
        assert texts(example) == [(texts(plain)[0][0], last)]
    middle = encode({"prompt": [USER], "completion": [REPLY, AGAIN, {**SECOND, "weight": 0}, USER, REPLY]})
    assert texts(middle)[0][1] == ["five<|im_end|>", "five<|im_end|>"]


def test_a_sequence_whose_replies_have_weight_0_is_left_out():
    thought = {"role": "assistant", "content": "<think>\nso\n</think>\n\nfive"}
    both = texts(encode({"messages": [USER, thought, AGAIN, SECOND]}, THINKING), THINKING)
    for silent, kept in ((0, 1), (1, 0)):
        replies = [{**reply, "weight": int(index != silent)} for index, reply in enumerate((thought, SECOND))]
        assert texts(encode({"messages": [USER, replies[0], AGAIN, replies[1]]}, THINKING), THINKING) == [both[kept]]


@given(st.lists(st.booleans(), min_size=1, max_size=6))
def test_weights_select_replies(weights: list[bool]):
    messages = [
        message
        for index, weight in enumerate(weights)
        for message in (USER, {"role": "assistant", "content": f"reply {index}", "weight": int(weight)})
    ]
    expected = [f"reply {index}<|im_end|>" for index, weight in enumerate(weights) if weight]
    if expected:
        assert texts(encode({"messages": messages}))[0][1] == expected
    else:
        with pytest.raises(ValueError, match="no token has loss"):
            encode({"messages": messages})


SHARED = [{"from": "human", "value": USER["content"]}, {"from": "gpt", "value": REPLY["content"]}]


@pytest.mark.parametrize(
    "columns",
    [
        {"conversations": SHARED},
        {"messages": SHARED},
        {"conversations": [{**SHARED[0], "role": None, "content": None}, {**SHARED[1], "weight": None}]},
        {"conversations": {"from": ["user", "assistant"], "value": [USER["content"], REPLY["content"]]}},
        {"conversations": [USER, REPLY]},
        {"prompt": SHARED[:1], "completion": SHARED[1:]},
    ],
)
def test_messages_of_sharegpt_are_converted(columns: dict[str, Any]):
    assert texts(encode(columns)) == texts(encode({"messages": [USER, REPLY]}))


def test_roles_of_sharegpt():
    said = [
        ("system", "s"),
        ("human", "q"),
        ("gpt", "a"),
        ("observation", "o"),
        ("gpt", "b"),
        ("tool", "p"),
        ("gpt", "c"),
    ]
    roles = ["system", "user", "assistant", "tool", "assistant", "tool", "assistant"]
    converted = encode({"conversations": [{"from": sender, "value": text} for sender, text in said]})
    messages = [{"role": role, "content": text} for role, (_, text) in zip(roles, said, strict=True)]
    assert texts(converted) == texts(encode({"messages": messages}))


@pytest.mark.parametrize("form", ["alpaca", "alpaca without input"])
def test_the_conversion_in_a_message_works(form: str):
    row = {"instruction": "add", "input": "2 3" if form == "alpaca" else "", "output": "5"}
    with pytest.raises(ValueError, match="convert each row to ") as raised:
        encode(row)
    converted = eval(str(raised.value).partition("convert each row to ")[2], {"row": row})
    prompt = "add\n\n2 3" if row["input"] else "add"
    assert converted == {"prompt": prompt, "completion": "5"}
    assert texts(encode(converted))[0][1] == ["5<|im_end|>"]


EFFECTS: dict[str, Any] = {"label": False, "kto_tag": False, "weight": 0.5, "chat_template_kwargs": {"thinking": False}}
HARMLESS: dict[str, Any] = {
    "label": "positive", "kto_tag": True, "weight": 1.0, "sample_weight": 1, "token_weights": [1, 1.0], "images": [],
    "chat_template_kwargs": {"thinking": None, "tools": []}, "token_type_ids": [0, 0], "system": "", "history": None,
    "tools": "", "tool_choice": "auto", "parallel_tool_calls": True,
}  # fmt: skip
BASES: dict[Form, dict[str, Any]] = {
    Form.MESSAGES: {"messages": [USER, REPLY]},
    Form.COMPLETION: {"prompt": "x", "completion": "y"},
    Form.TEXT: {"text": "x y"},
    Form.TOKENS: {"input_ids": [5, 6], "labels": [5, 6]},
}


@pytest.mark.parametrize("form", BASES)
def test_columns_with_a_known_meaning_are_not_ignored(form: Form):
    row, used = BASES[form], form.used
    # These have a meaning only beside token ids.
    others = [] if form is Form.TOKENS else OF_TOKENS.split()
    for column in others:
        assert texts(encode({**row, column: [0, 2]})) == texts(encode(row)), column
    for column in REMEDIES.keys() - {*used, *others}:
        with pytest.raises(ValueError, match=rf"^rows\.jsonl:3: column '{column}' holds"):
            encode({**row, column: EFFECTS.get(column, [0, 2])})
    for column, value in HARMLESS.items():
        assert texts(encode({**row, column: value})) == texts(encode(row)), column
    rows = [Row({**row, "source": 1, "id": None}, "a"), Row({**row, "weight": 1, "id": 3}, "b")]
    assert unused_columns(rows, used) == ["source", "weight", "id"]


@pytest.mark.parametrize("key", ["content", "value"])
def test_a_column_that_repeats_a_message_has_no_effect(key: str):
    messages = [{"role": "system", "content": "Be brief."}, USER, REPLY]
    shared = [{"from": item["role"], "value": item["content"]} for item in messages]
    row = {"messages": messages} if key == "content" else {"conversations": shared}
    for column in ("system", "system_prompt"):
        assert texts(encode({**row, column: "Be brief."})) == texts(encode({"messages": messages}))
        with pytest.raises(ValueError, match=f"column '{column}' holds 'Be'"):
            encode({**row, column: "Be"})


@pytest.mark.parametrize("value", [None, "", [], {}])
def test_an_empty_key_of_a_message_has_no_effect(value: Any):
    row = {"messages": [{**USER, "name": value}, {**REPLY, "reasoning_content": value, "tool_calls": value}]}
    assert texts(encode(row)) == texts(encode({"messages": [USER, REPLY]}))


IDS = [5, 6, 7, 8, 9]
TOKENS: dict[str, tuple[dict[str, Any], list[tuple[list[int], list[int]]]]] = {
    "both masks": ({"assistant_masks": [1, 1, 0, 1, 1], "completion_mask": [0, 1, 1, 1, 0]}, [(IDS, [0, 1, 0, 1, 0])]),
    "labels and a mask": (
        {"labels": [-100, 6, 7, 8, -100], "completion_mask": [1, 1, 0, 1, 1]},
        [(IDS, [0, 1, 0, 1, 0])],
    ),
    "null mask": ({"completion_mask": [True] * 5, "assistant_masks": None}, [(IDS, [0, 1, 1, 1, 1])]),
    "all seen": ({"labels": IDS, "attention_mask": [1] * 5}, [(IDS, [0, 1, 1, 1, 1])]),
    "padding at the end": (
        {"labels": [5, 6, 7, -100, -100], "attention_mask": [1, 1, 1, 0, 0]},
        [(IDS[:3], [0, 1, 1])],
    ),
    "padding at the start": (
        {"completion_mask": [0, 0, 1, 1, 1], "attention_mask": [False, False, True, True, True]},
        [(IDS[2:], [0, 1, 1])],
    ),
    "padding at both ends": (
        {"labels": [-100, 6, 7, 8, -100], "attention_mask": [0, 1, 1, 1, 0], "position_ids": [1, 0, 1, 2, 1]},
        [(IDS[1:4], [0, 1, 1])],
    ),
    "one document": ({"labels": IDS, "position_ids": [0, 1, 2, 3, 4], "seq_lengths": [5]}, [(IDS, [0, 1, 1, 1, 1])]),
    "positions": ({"labels": IDS, "position_ids": [0, 1, 0, 1, 2]}, [(IDS[:2], [0, 1]), (IDS[2:], [0, 1, 1])]),
    "lengths": ({"labels": IDS, "seq_lengths": [2, 3]}, [(IDS[:2], [0, 1]), (IDS[2:], [0, 1, 1])]),
    "both": (
        {"labels": IDS, "position_ids": [0, 1, 0, 1, 2], "seq_lengths": [2, 3]},
        [(IDS[:2], [0, 1]), (IDS[2:], [0, 1, 1])],
    ),
    "null positions": (
        {"labels": IDS, "position_ids": None, "seq_lengths": [2, 3]},
        [(IDS[:2], [0, 1]), (IDS[2:], [0, 1, 1])],
    ),
    "document without loss": ({"labels": [5, 6, -100, -100, -100], "seq_lengths": [2, 3]}, [(IDS[:2], [0, 1])]),
    "document of a token": ({"labels": IDS, "seq_lengths": [4, 1]}, [(IDS[:4], [0, 1, 1, 1])]),
    "padding and documents": (
        {"labels": [-100, 6, 7, 8, 9], "attention_mask": [0, 1, 1, 1, 1], "seq_lengths": [2, 2]},
        [(IDS[1:3], [0, 1]), (IDS[3:], [0, 1])],
    ),
}


@pytest.mark.parametrize("case", TOKENS)
def test_masks_padding_and_documents_of_token_ids(case: str):
    columns, expected = TOKENS[case]
    example = encode({"input_ids": IDS, **columns})
    assert [(ids.tolist(), mask.astype(int).tolist()) for ids, mask in example.sequences()] == expected


@pytest.mark.medium
@pytest.mark.torch
def test_packed_rows_have_the_documents_and_labels_of_trl():
    pytest.importorskip("torch", reason="needs the extra test-torch")
    collator = pytest.importorskip("trl.trainer.sft_trainer").DataCollatorForLanguageModeling
    rng = np.random.default_rng(0)
    for _ in range(20):
        lengths = rng.integers(2, 6, rng.integers(1, 5)).tolist()
        ids = rng.integers(0, 200, sum(lengths)).tolist()
        masks = {column: rng.integers(0, 2, len(ids)).tolist() for column in ("assistant_masks", "completion_mask")}
        # TRL's trainer joins masks so before it collates.
        labels = [id if all(bits) else -100 for id, *bits in zip(ids, *masks.values(), strict=True)]
        theirs = collator(pad_token_id=0, padding_free=True)(
            [{"input_ids": ids, "labels": labels, "seq_lengths": lengths}]
        )
        ends = theirs["cu_seq_lens_q"].tolist()[1:-1]
        split = [np.split(theirs[key][0].numpy(), ends) for key in ("input_ids", "labels")]
        expected = [(a.tolist(), (b != -100).tolist()) for a, b in zip(*split, strict=True) if (b != -100).any()]
        positions = theirs["position_ids"][0].tolist()
        for columns in (
            {"seq_lengths": lengths},
            {"position_ids": positions},
            {"labels": labels, "seq_lengths": lengths},
        ):
            if expected:
                found = encode({"input_ids": ids, **masks, **columns}).sequences()
                assert [(tokens.tolist(), mask.tolist()) for tokens, mask in found] == expected


ADDED: dict[str, tuple[Any, str]] = {
    "Llama 3": (llama_tokenizer, "<|begin_of_text|> $A"),
    "Llama 3 with eos": (llama_tokenizer, "<|begin_of_text|> $A <|eot_id|>"),
    "two at the start": (llama_tokenizer, "<|begin_of_text|> <|start_header_id|> $A"),
    "Mistral": (instruct_tokenizer, "<s> $A"),
    "Llama 2": (prepending_tokenizer, "<s> $A"),
    "bos and eos": (prepending_tokenizer, "<s> $A </s>"),
    "T5": (instruct_tokenizer, "$A </s>"),
    "ChatML": (chatml_tokenizer, "$A"),
    "ChatML with eos": (chatml_tokenizer, "$A <|endoftext|>"),
    "Phi": (phi_tokenizer, "<|endoftext|> $A"),
}


@pytest.mark.parametrize("case", ADDED)
def test_text_has_the_tokens_that_a_tokenizer_adds_once(case: str):
    make, template = ADDED[case]
    tokenizer = make()
    plain = tokenizer("hello", add_special_tokens=False)["input_ids"]
    names = [name for name in template.split() if name != "$A"]
    special = [(name, tokenizer.convert_tokens_to_ids(name)) for name in names]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=template, pair=f"{template} $B", special_tokens=special
    )
    chat, ids = ChatTokenizer(tokenizer), dict(special)
    before, _, after = template.partition("$A")
    first, last, eos = (
        [ids[name] for name in before.split()],
        [ids[name] for name in after.split()],
        tokenizer.eos_token_id,
    )
    end = [] if last[-1:] == [eos] else [eos]

    def read(text: str) -> list[int]:
        return encode({"text": text}, chat).input_ids.tolist()

    expected = [*first, *plain, *last, *end]
    assert read("hello") == expected
    assert tokenizer("hello")["input_ids"] == [*first, *plain, *last]
    # The user's own tokens are kept: one of them stands for the added one.
    start, finish = "".join(before.split()), "".join(after.split())
    assert (
        read(f"{start}hello{finish}{tokenizer.eos_token if end else ''}")[len(first) :][-len(last + end) :]
        == last + end
    )
    rendered = tokenizer.apply_chat_template([USER, REPLY], tokenize=False)
    whole = template_ids(tokenizer, [USER, REPLY])
    if whole[: len(first)] == first:
        found = read(rendered)
        assert found[: len(whole)] == whole
        assert found[len(whole) :] in ([], last + end, end)
    if first:
        doubled = tokenizer(start + start + "hello", add_special_tokens=False)["input_ids"]
        assert read(start + start + "hello") == [*doubled, *last, *end]
        moved = tokenizer("\n" + start + "hello", add_special_tokens=False)["input_ids"]
        assert read("\n" + start + "hello") == [*first, *moved, *last, *end]


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
    "conversation as text": ({"conversations": "[{}]"}, "column 'conversations' holds '[{}]'; it must be a list"),
    "false key": ({"messages": [USER, {**REPLY, "train": 0}]}, "message 1 has the key 'train'"),
    "role": ({"messages": [{"role": "bot", "content": "x"}]}, "message 0 has the role 'bot'; choose one of system"),
    "content": ({"messages": [USER, {"role": "assistant", "content": 5}]}, "message 1 is {'role': 'assistant'"),
    "key": (
        {"messages": [USER, {**REPLY, "thoughts": "x"}]},
        "message 1 has the key 'thoughts', but only role, content",
    ),
    "flag": ({"messages": [USER, {**REPLY, "train": False}]}, "message 1 has the key 'train', .* write weight: 0"),
    "share as weight": (
        {"messages": [USER, {**REPLY, "weight": 0.5}]},
        "message 1 is of the assistant and has the weight",
    ),
    "text as weight": ({"messages": [USER, {**REPLY, "weight": "1"}]}, "has the weight '1'"),
    "weight of a user": ({"messages": [{**USER, "weight": 1}, REPLY]}, "message 0 is of the user and has the weight 1"),
    "all of weight 0": ({"messages": [USER, {**REPLY, "weight": 0}]}, "no token has loss"),
    "function_call": (
        {"conversations": [SHARED[0], {"from": "function_call", "value": "{}"}]},
        "column 'conversations', message 1 is from 'function_call'; choose one of",
    ),
    "sender": ({"conversations": [{"from": 3, "value": "x"}]}, "column 'conversations', message 0 is from 3"),
    "no reply of gpt": ({"conversations": SHARED[:1]}, "column 'conversations' has no assistant message"),
    "hidden token": ({**ROW, "attention_mask": [1, 0]}, "column 'attention_mask' hides a token with loss"),
    "hole": (
        {"input_ids": [5, 6, 7], "labels": [5, -100, 7], "attention_mask": [1, 0, 1]},
        "'attention_mask' hides tokens",
    ),
    "all hidden": (
        {"input_ids": [5, 6], "labels": [-100, -100], "attention_mask": [0, 0]},
        "'attention_mask' hides tokens",
    ),
    "numbered mask": (
        {**ROW, "attention_mask": [1, 2]},
        "'attention_mask', item 1 is 2; it must be an integer from 0 to 1",
    ),
    "short mask": ({**ROW, "completion_mask": [1]}, "column 'completion_mask' has 1 values, but input_ids 2"),
    "late positions": ({**ROW, "position_ids": [1, 2]}, "column 'position_ids' must count from 0"),
    "jump": ({**ROW, "position_ids": [0, 2]}, "column 'position_ids' must count from 0"),
    "huge position": ({**ROW, "position_ids": [0, 2**70]}, "column 'position_ids', item 1 is"),
    "lengths": ({**ROW, "seq_lengths": [1]}, "column 'seq_lengths' must add up to the 2 tokens"),
    "empty document": ({**ROW, "seq_lengths": [2, 0]}, "column 'seq_lengths', item 1 is 0"),
    "other documents": ({**ROW, "position_ids": [0, 1], "seq_lengths": [1, 1]}, "'seq_lengths' must add up"),
    "types of tokens": ({**ROW, "token_type_ids": [0, 1]}, "column 'token_type_ids' holds"),
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
    "masks without a common token": ({**ROW, "labels": [5, -100], "assistant_masks": [1, 1]}, "no token has loss"),
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
    with pytest.raises(ValueError, match=".*".join(map(re.escape, text.split(".*")))) as raised:
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
