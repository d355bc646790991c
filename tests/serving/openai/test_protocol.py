# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import json
from typing import Any

import levanter.trainer  # noqa: F401  before marin_rl: see tests/tiny_run.py
import pytest

from marin_rl.serving.bodies import ApiError
from marin_rl.serving.openai.engine import EngineRequest
from marin_rl.serving.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    RequestLimits,
    engine_requests,
    parse_body,
)

LIMITS = RequestLimits(max_context=32, max_new_tokens=20, max_choices=4, vocab_size=100, stop_token_ids=frozenset([7]))
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def chat(messages: list[Any], **more: Any) -> list[dict[str, Any]]:
    body = parse_body(ChatRequest, {"model": "m", "messages": messages, **more})
    return [dict(message) for message in body.conversation(LIMITS._replace(max_context=10**6))]


def requests_of(prompts: list[tuple[int, ...]], limits: RequestLimits = LIMITS, **more: Any) -> list[EngineRequest]:
    return engine_requests(prompts, parse_body(CompletionRequest, {"model": "m", "prompt": "a", **more}), limits, "r")


def test_default_lengths():
    def length(body_class: Any, prompt: int, **more: Any) -> int:
        base = {"model": "m", **({"messages": [{}]} if body_class is ChatRequest else {"prompt": "a"})}
        [one] = engine_requests([(1,) * prompt], parse_body(body_class, {**base, **more}), LIMITS, "r")
        return one.sample.max_new_tokens

    assert length(CompletionRequest, 1) == 16
    assert length(CompletionRequest, 30) == 2
    assert length(ChatRequest, 1) == 20
    assert length(ChatRequest, 30) == 2
    assert length(ChatRequest, 1, max_tokens=5, max_completion_tokens=4) == 4


def test_ignore_eos_needs_the_stop_tokens():
    [one] = requests_of([(1,)], ignore_eos=True, stop_token_ids=[7, 8])
    assert one.stop_token_ids == {8}
    for stop_token_ids, limits in (([], LIMITS), ([7], LIMITS._replace(has_stop_texts=True))):
        with pytest.raises(ApiError, match="end every reply"):
            requests_of([(1,)], limits, ignore_eos=True, stop_token_ids=stop_token_ids)


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


def call_of(id: str, city: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "weather", "arguments": json.dumps({"city": city})}}


def result(id: str | None, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content}


def test_results_have_the_order_of_their_calls():
    """Whatever the order in which a client answers parallel calls; each reply's results are sorted by its calls."""
    calls = {"role": "assistant", "content": None, "tool_calls": [call_of("a", "Rome"), call_of("b", "Oslo")]}
    swapped = {**calls, "tool_calls": calls["tool_calls"][::-1]}
    user = {"role": "user", "content": "and now?"}
    messages = [user, calls, result("b", "-5"), result("a", "20"), swapped, result("b", "-6"), result("a", "21"), user]
    found = [message["content"] for message in chat(messages)]
    assert found[2:4] == ["20", "-5"]
    assert found[5:7] == ["-6", "21"]
    assert [chat(messages)[place]["role"] for place in (0, 1, 4, 7)] == ["user", "assistant", "assistant", "user"]
    without_id = [user, calls, result("b", "-5"), result(None, "20")]
    assert [message["content"] for message in chat(without_id)[2:]] == ["-5", "20"]


@pytest.mark.parametrize(
    ("id", "before", "message"),
    [
        ("c", [call_of("a", "Rome")], r"messages\[1\].tool_call_id is 'c', .*: messages\[0\] has \['a'\]"),
        (7, [call_of("a", "Rome")], r"messages\[1\].tool_call_id is 7, "),
        ("a", None, r"messages\[1\].tool_call_id is 'a', .*: messages\[0\] has \[\]"),
    ],
)
def test_a_result_of_an_unknown_call_is_refused(id: Any, before: Any, message: str):
    with pytest.raises(ApiError, match=message):
        chat([{"role": "assistant", "content": "x", "tool_calls": before}, result(id, "20")])
