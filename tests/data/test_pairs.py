# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import dataclasses
import json
import re
from typing import Any

import numpy as np
import pytest

from marin_rl.data.config import LongSequences
from marin_rl.data.dataset import encode_rows, join_pairs
from marin_rl.data.pairs import encode_pair, split_pair
from marin_rl.data.rows import Example, Form
from marin_rl.environments.row_format import Row
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import byte_tokenizer

USER, ASSISTANT, END = "<|user|>", "<|assistant|>", "<|end|>"
PROMPT = {"role": "user", "content": "1+1="}
SYSTEM = {"role": "system", "content": "Add."}
RIGHT, WRONG = ({"role": "assistant", "content": text} for text in "23")
AGAIN = {"role": "user", "content": "again"}


@pytest.fixture(scope="module")
def chat() -> ChatTokenizer:
    return ChatTokenizer(byte_tokenizer())


def row_of(**values: Any) -> Row:
    return Row(values, "pairs.jsonl, line 7")


def texts(chat: ChatTokenizer, pair: Example) -> list[tuple[str, str]]:
    """The text of each sequence, and of its tokens with loss."""
    return [tuple(chat.tokenizer.decode(ids[part]) for part in (slice(None), mask)) for ids, mask in pair.sequences()]


PLAIN = [(f"{USER}1+1={END}{ASSISTANT}{answer}{END}", f"{answer}{END}") for answer in "23"]


@pytest.mark.parametrize(
    "values",
    [
        {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
        {"prompt": [PROMPT], "chosen": [RIGHT], "rejected": [WRONG]},
        {"prompt": [PROMPT], "chosen": "2", "rejected": "3"},
        {"prompt": "1+1=", "chosen": [RIGHT], "rejected": [WRONG]},
        {"chosen": [PROMPT, RIGHT], "rejected": [PROMPT, WRONG]},
        # UltraFeedback repeats the prompt, and has further columns.
        {"prompt": "1+1=", "chosen": [PROMPT, RIGHT], "rejected": [PROMPT, WRONG], "messages": [PROMPT, RIGHT]},
        {"prompt": [PROMPT], "chosen": [PROMPT, RIGHT], "rejected": [PROMPT, WRONG], "score_chosen": 8.0},
        {
            "prompt": [{"from": "human", "value": "1+1="}],
            "chosen": [{"from": "gpt", "value": "2"}],
            "rejected": [{"from": "gpt", "value": "3", "weight": 1}],
        },
        # Parquet has null for absent keys.
        {"prompt": None, "chosen": [{**PROMPT, "name": None}, RIGHT], "rejected": [PROMPT, WRONG]},
    ],
)
def test_forms_of_a_pair_have_the_same_tokens(chat, values):
    pair = encode_pair(row_of(**values), chat)
    assert texts(chat, pair) == PLAIN
    assert (pair.chosen, len(pair.lengths)) == (1, 2)


def test_weights_of_shared_replies_do_not_matter(chat):
    rows = [[PROMPT, {**RIGHT, "weight": weight}, AGAIN] for weight in (0, 1, None)]
    found = [texts(chat, encode_pair(row_of(chosen=[*row, RIGHT], rejected=[*row, WRONG]), chat)) for row in rows]
    assert found[0] == found[1] == found[2]
    assert [loss for _, loss in found[0]] == [f"2{END}", f"3{END}"]


def test_a_system_message_is_part_of_the_prompt(chat):
    with_system = [SYSTEM, PROMPT]
    values = [
        {"prompt": with_system, "chosen": [RIGHT], "rejected": [WRONG]},
        {"chosen": [*with_system, RIGHT], "rejected": [*with_system, WRONG]},
        {"prompt": "1+1=", "chosen": [*with_system, RIGHT], "rejected": [*with_system, WRONG]},
    ]
    found = [texts(chat, encode_pair(row_of(**each), chat)) for each in values]
    assert found[0] == found[1] == found[2]
    assert all("Add." in whole and "Add." not in loss for whole, loss in found[0])


def test_messages_that_both_answers_begin_with_carry_no_loss(chat):
    shared = [PROMPT, RIGHT, AGAIN]
    for values in (
        {"chosen": [*shared, RIGHT], "rejected": [*shared, WRONG]},
        {"prompt": [PROMPT], "chosen": [RIGHT, AGAIN, RIGHT], "rejected": [RIGHT, AGAIN, WRONG]},
    ):
        pair = encode_pair(row_of(**values), chat)
        assert [loss for _, loss in texts(chat, pair)] == [f"2{END}", f"3{END}"]
        assert split_pair(row_of(**values))[0] == shared


def test_an_answer_of_several_turns_has_loss_on_its_replies(chat):
    pair = encode_pair(row_of(prompt="1+1=", chosen=[RIGHT, AGAIN, RIGHT], rejected=[WRONG]), chat)
    assert [loss for _, loss in texts(chat, pair)] == [f"2{END}2{END}", f"3{END}"]


def test_tools_are_in_both_prompts(chat):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    pair = encode_pair(row_of(prompt="1+1=", chosen="2", rejected="3", tools=json.dumps(tools)), chat)
    assert all("add" in whole and "add" not in loss for whole, loss in texts(chat, pair))


def with_reference(pair: Example, logprob: float) -> Example:
    return dataclasses.replace(pair, reference=np.full(np.count_nonzero(pair.loss_mask), logprob, np.float32))


@pytest.mark.parametrize("length_normalized", [False, True])
def test_signs_of_the_answers(chat, length_normalized):
    rows = [row_of(prompt="1+1=", chosen="2", rejected="no idea"), row_of(prompt="2", chosen="abcd", rejected="x")]
    pairs = [with_reference(encode_pair(row, chat), -1.0 - index) for index, row in enumerate(rows)]
    batch = join_pairs(pairs, length_normalized=length_normalized)
    assert batch.lengths == tuple(pair.lengths for pair in pairs)
    assert ((batch.advantages != 0) == batch.loss_mask).all()
    for signs, (chosen, rejected) in zip(batch.actions(batch.advantages), [(2, 8), (5, 2)], strict=True):
        expected = np.repeat([1 / chosen, -1 / rejected] if length_normalized else [1, -1], [chosen, rejected])
        np.testing.assert_array_equal(signs, expected)
    for index, reference in enumerate(batch.actions(batch.reference_logprobs)):
        assert (reference == -1.0 - index).all()


BAD = {
    "equal": ({"prompt": "1+1=", "chosen": "2", "rejected": "2"}, "chosen and rejected are equal; remove the row"),
    "equal tokens": (
        {"prompt": "1+1=", "chosen": [{"role": "assistant", "content": "2"}], "rejected": [RIGHT]},
        "chosen and rejected are equal",
    ),
    "no prompt": ({"chosen": "2", "rejected": "3"}, "column 'prompt' is missing, and chosen and rejected begin with"),
    "no prompt, HH-RLHF": (
        {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"},
        "column 'prompt' is missing",
    ),
    "prompts that differ": (
        {"chosen": [PROMPT, RIGHT], "rejected": [AGAIN, WRONG]},
        "chosen and rejected differ in message 0, which is of the user in 'chosen'; they must be answers to the same",
    ),
    "prompts that differ later": (
        {"chosen": [PROMPT, RIGHT, PROMPT, RIGHT], "rejected": [PROMPT, RIGHT, AGAIN, WRONG]},
        "chosen and rejected differ in message 2, which is of the user",
    ),
    "another prompt": (
        {"prompt": "again", "chosen": [PROMPT, RIGHT], "rejected": [PROMPT, WRONG]},
        "column 'prompt' is not among the messages with which chosen and rejected begin",
    ),
    "one with the prompt": (
        {"prompt": "1+1=", "chosen": [PROMPT, RIGHT], "rejected": [WRONG]},
        "only one of chosen and rejected begins with the answer",
    ),
    "no answer": (
        {"chosen": [PROMPT, RIGHT], "rejected": [PROMPT]},
        "column 'rejected' has no answer after the messages that both columns share",
    ),
    "no assistant": ({"chosen": [PROMPT], "rejected": [AGAIN]}, "differ in message 0, which is of the user"),
    "empty text": ({"prompt": "1+1=", "chosen": "", "rejected": "3"}, "column 'chosen' is empty"),
    "empty list": ({"prompt": "1+1=", "chosen": [RIGHT], "rejected": []}, "column 'rejected' holds []"),
    "a number": ({"prompt": "1+1=", "chosen": 2, "rejected": 3}, "column 'chosen' holds 2; it must be a list"),
    "a role": ({"prompt": "1+1=", "chosen": [{"role": "gpt", "content": "2"}], "rejected": [WRONG]}, "the role 'gpt'"),
    "a sender": (
        {"prompt": "1+1=", "chosen": [{"from": "bing", "value": "2"}], "rejected": [WRONG]},
        "column 'chosen', message 0 is from 'bing'; choose one of",
    ),
    "a reply of weight 0": (
        {"prompt": "1+1=", "chosen": [{**RIGHT, "weight": 0}], "rejected": [WRONG]},
        "column 'chosen' has a reply with weight 0",
    ),
    "scores of a reference": (
        {"prompt": "1+1=", "chosen": "2", "rejected": "3", "ref_chosen_logps": -1.5},
        "column 'ref_chosen_logps' holds -1.5",
    ),
    "an image": ({"prompt": "1+1=", "chosen": "2", "rejected": "3", "images": ["a.png"]}, "column 'images' holds"),
    "a system column": ({"prompt": "1+1=", "chosen": "2", "rejected": "3", "system": "s"}, "column 'system' holds 's'"),
    "answers of OpenAI": (
        {"input": {"messages": [PROMPT]}, "preferred_output": [RIGHT], "non_preferred_output": [WRONG]},
        'convert each row to {"prompt": row["input"]["messages"]',
    ),
    "prompt of the assistant": (
        {"prompt": [RIGHT], "chosen": [RIGHT], "rejected": [WRONG]},
        "there is no message before the first reply",
    ),
    "replies in a row": (
        {"prompt": "1+1=", "chosen": [RIGHT, RIGHT], "rejected": [WRONG]},
        "two assistant messages follow each other",
    ),
    "no column": (
        {"prompt": "1+1=", "chosen": "2"},
        "but needs chosen and rejected",
    ),
    "no pair": ({"prompt": "1+1=", "completion": "2"}, "but needs chosen and rejected; such rows are for marin_rl.sft"),
    "other columns": (
        {"instruction": "1+1=", "chosen_response": "2", "rejected_response": "3"},
        "the row has the columns 'instruction', 'chosen_response', 'rejected_response', but needs chosen and rejected",
    ),
    "null": ({"prompt": "1+1=", "chosen": "2", "rejected": None}, "needs chosen and rejected"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_are_one_sentence(chat, name):
    values, message = BAD[name]
    with pytest.raises(ValueError, match="^" + re.escape("pairs.jsonl, line 7: ")) as caught:
        encode_rows([row_of(**values)], chat, 100, LongSequences.ERROR, (Form.PAIR,))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_long_pair_is_skipped_as_a_whole(chat):
    rows = [row_of(prompt="1+1=", chosen="2", rejected=rejected) for rejected in ("3", "3" * 50)]
    encoded = encode_rows(rows, chat, 20, LongSequences.SKIP, (Form.PAIR,))
    assert [texts(chat, pair) for pair in encoded.examples] == [PLAIN]
    assert encoded.skipped == 1
    with pytest.raises(ValueError, match=r"line 7: a sequence has 58 tokens, .*, 20; .*long_sequences to skip$"):
        encode_rows(rows, chat, 20, LongSequences.ERROR, (Form.PAIR,))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompt": "1+1=", "completion": None}, "or input_ids; add what is missing"),
        ({"messages": json.dumps([PROMPT, RIGHT])}, "column 'messages' holds '[{"),
        (
            {"input_ids": [1, 10**12], "labels": [1, 2]},
            "column 'input_ids', item 1 is 1000000000000; it must be",
        ),
    ],
)
def test_odd_rows_without_pairs_are_one_sentence(chat, values, message):
    with pytest.raises(ValueError, match="^" + re.escape("pairs.jsonl, line 7: ")) as caught:
        encode_rows([row_of(**values)], chat, 100, LongSequences.ERROR)
    assert message in str(caught.value)
