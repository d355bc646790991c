# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

from typing import Any

import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
import pytest

from marin_rl.seeds import derive_seed
from marin_rl.serving.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    Limits,
    SamplingParams,
    engine_requests,
    parse_body,
)

LIMITS = Limits(max_context=32, max_new_tokens=20, max_choices=4, vocab_size=100, stop_token_ids=frozenset([7]))
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def chat(messages: list[Any], **more: Any) -> list[dict[str, Any]]:
    body = parse_body(ChatRequest, {"model": "m", "messages": messages, **more})
    return [dict(message) for message in body.conversation()]


def test_choices_have_different_seeds():
    requests = engine_requests([(1,), (2,)], SamplingParams(n=2, seed=5, max_tokens=3), LIMITS)
    assert [one.sample.prompt_tokens for one in requests] == [(1,), (1,), (2,), (2,)]
    assert [one.sample.seed for one in requests] == [5, derive_seed(5, 1)] * 2
    assert engine_requests([(1,)], SamplingParams(), LIMITS) != engine_requests([(1,)], SamplingParams(), LIMITS)


def test_default_lengths():
    def length(body_class: type, prompt: int, **more: Any) -> int:
        base = {"model": "m", **({"messages": [{}]} if body_class is ChatRequest else {"prompt": "a"})}
        [one] = engine_requests([(1,) * prompt], parse_body(body_class, {**base, **more}), LIMITS)
        return one.sample.max_new_tokens

    assert length(CompletionRequest, 1) == 16
    assert length(CompletionRequest, 30) == 2
    assert length(ChatRequest, 1) == 20
    assert length(ChatRequest, 30) == 2
    assert length(ChatRequest, 1, max_tokens=5, max_completion_tokens=4) == 4


def test_ignore_eos_needs_the_stop_tokens():
    [one] = engine_requests([(1,)], SamplingParams(ignore_eos=True, stop_token_ids=[7, 8]), LIMITS)
    assert one.stop_token_ids == {8}
    for params, limits in (
        (SamplingParams(ignore_eos=True), LIMITS),
        (SamplingParams(ignore_eos=True, stop_token_ids=[7]), LIMITS._replace(has_stop_texts=True)),
    ):
        with pytest.raises(ApiError, match="end every reply"):
            engine_requests([(1,)], params, limits)


def test_tool_calls_of_earlier_replies_are_written_as_the_policy_writes_them():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    found = chat(messages, tools=[TOOL])
    assert [message["role"] for message in found] == ["system", "user", "assistant", "tool"]
    assert found[0]["tools"] == [TOOL]
    assert '"name": "add"' in found[0]["tools_in_words"]
    assert found[2]["content"] == '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert chat(messages, tools=[TOOL], tool_choice="none") == found[1:]


def test_tools_join_the_system_message():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}]
    [system, user] = chat(messages, tools=[TOOL])
    assert (system["content"], system["tools"], user["content"]) == ("Be brief.", [TOOL], "a")


@pytest.mark.parametrize("role", [None, "judge", ["user"], {"name": "user"}])
def test_an_invalid_role_is_named(role: Any):
    with pytest.raises(ApiError, match=r"messages\[0\].role is .*; use system, user, assistant or tool"):
        chat([{"role": role, "content": "a"}])


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([{}], "a call without a function name"),
        ([{"function": {"name": "add", "arguments": "{"}}], "arguments that are not JSON"),
        ("add", "must be a text or a list of text parts"),
    ],
)
def test_malformed_tool_calls_are_named(calls: Any, message: str):
    with pytest.raises(ApiError, match=message):
        chat([{"role": "assistant", "content": None, "tool_calls": calls}])
