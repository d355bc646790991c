# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import pytest

from marin_rl.data.conversations import batch_conversation
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import byte_tokenizer


@pytest.fixture(scope="module")
def chat() -> ChatTokenizer:
    return ChatTokenizer(byte_tokenizer())


CONVERSATION = [
    {"role": "user", "content": "2+3="},
    {"role": "assistant", "content": "6"},
    {"role": "user", "content": "wrong"},
    {"role": "assistant", "content": "5"},
]


def test_a_conversation_has_loss_on_assistant_messages(chat: ChatTokenizer) -> None:
    batch = batch_conversation(CONVERSATION, id="c", max_length=32, tokenizer=chat)
    assert batch is not None
    assert chat.tokenizer.decode(batch.input_ids[batch.loss_mask]) == "6<|end|>5<|end|>"
    assert batch.lengths == ((4 + 2 + 1 + 2 + 5 + 2 + 1 + 2,),)
    assert not batch.policy_logprobs.any()
    assert batch.turn_ids[batch.loss_mask].tolist() == [0, 0, 1, 1]
    assert (batch.turn_ids[~batch.loss_mask] == -1).all()


@pytest.mark.parametrize(("length", "replies"), [(19, "6<|end|>5<|end|>"), (18, "6<|end|>"), (9, "6<|end|>")])
def test_a_reply_that_does_not_fit_is_dropped(chat: ChatTokenizer, length: int, replies: str) -> None:
    batch = batch_conversation(CONVERSATION, id="c", max_length=length, tokenizer=chat)
    assert batch is not None
    assert chat.tokenizer.decode(batch.input_ids[batch.loss_mask]) == replies


def test_a_conversation_without_a_fitting_reply_is_none(chat: ChatTokenizer) -> None:
    assert batch_conversation(CONVERSATION, id="c", max_length=8, tokenizer=chat) is None
