# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.chat_template import ChatTemplate, ToolSchema, fit_conversation
from marin_rl.tokenization.load import CHAT_TEMPLATE
from marin_rl.types import Message
from tests.tokenization.conftest import chatml_tokenizer, llama_tokenizer, template_ids
from tests.tokenization.tool_templates import LLAMA, QWEN3, SILENT, STRICT


def schema(name: str, description: str = "Naïve — says “hello”.") -> ToolSchema:
    parameters = {"type": "object", "properties": {"who": {"type": "string"}}, "required": ["who"]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


HELLO, WORLD = schema("hello"), schema("world")
WORDS = "There are hello and world."
ASKED = Message(role="user", content="two plus three?")
SAID = Message(role="assistant", content="five")


def offer(content: str = "", *tools: ToolSchema) -> Message:
    return Message(role="system", content=content, tools=list(tools) or [HELLO, WORLD], tools_in_words=WORDS)


def answer(content: str) -> Message:
    return Message(role="tool", content=content)


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, "the test's tokenizer")


@pytest.mark.parametrize(
    ("source", "tells", "shows"),
    [
        (QWEN3, True, True),
        (LLAMA, True, True),
        (SILENT, False, False),
        (STRICT, False, False),
        (CHAT_TEMPLATE, False, True),
        # Mentions tools without rendering them.
        (
            "{% if tools is none %}{% endif %}{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}",
            False,
            True,
        ),
        ("{% if tools %}{{ raise_exception('no tools') }}{% endif %}{{ messages[0].content }}", False, False),
    ],
)
def test_template_features_are_detected_by_rendering(source: str, tells: bool, shows: bool):
    made = template(source)
    assert (made.renders_tools, made.renders_tool_role) == (tells, shows)


def test_tools_are_passed_to_the_template_or_described_as_text():
    messages = [offer("Be brief."), ASKED]
    told = fit_conversation(messages, template(QWEN3))
    assert told.tools == (HELLO, WORLD)
    assert told.messages == (Message(role="system", content="Be brief."), ASKED)
    worded = fit_conversation(messages, template(SILENT))
    assert worded.tools == ()
    assert worded.messages == (Message(role="system", content=f"Be brief.\n\n{WORDS}"), ASKED)


def test_message_with_only_tools_is_dropped():
    assert fit_conversation([offer(), ASKED], template(QWEN3)).messages == (ASKED,)
    assert fit_conversation([offer(), ASKED], template(SILENT)).messages == (
        Message(role="system", content=WORDS),
        ASKED,
    )


def test_tool_responses_become_one_user_message():
    messages = [ASKED, SAID, answer("5"), answer("6"), SAID, answer("7")]
    assert fit_conversation(messages, template(QWEN3)).messages == tuple(messages)
    assert fit_conversation(messages, template(STRICT)).messages == (
        *(ASKED, SAID),
        Message(
            role="user",
            content="<tool_response>\n5\n</tool_response>\n<tool_response>\n6\n</tool_response>",
        ),
        SAID,
        Message(role="user", content="<tool_response>\n7\n</tool_response>"),
    )


TURNS = st.lists(st.sampled_from([ASKED, answer("5"), answer("6"), offer("x")]), max_size=4)


@given(before=TURNS, behind=TURNS, source=st.sampled_from([QWEN3, LLAMA, SILENT, STRICT]))
@settings(deadline=None)
def test_converting_parts_equals_converting_the_whole(before: list, behind: list, source: str):
    made = template(source)
    first, rest, whole = (fit_conversation(part, made) for part in (before, behind, [*before, SAID, *behind]))
    assert whole.messages == (*first.messages, SAID, *rest.messages)
    assert whole.tools == first.tools + rest.tools


# --- through the tokenizer ---

QWEN3_CHAT = ChatTokenizer(chatml_tokenizer(QWEN3))
LLAMA_CHAT = ChatTokenizer(llama_tokenizer())


@pytest.mark.parametrize("chat", [QWEN3_CHAT, LLAMA_CHAT], ids=["qwen3", "llama"])
@pytest.mark.parametrize("system", ["", "Be brief."])
def test_a_prompt_with_tools_is_that_of_hugging_face(chat: ChatTokenizer, system: str):
    plain = [Message(role="system", content=system), ASKED] if system else [ASKED]
    expected = template_ids(chat.tokenizer, plain, tools=[HELLO, WORLD], add_generation_prompt=True)
    assert list(chat.prompt_tokens([offer(system), ASKED])) == expected


def test_a_written_conversation_with_tools_is_masked_as_hugging_face_does():
    messages = [ASKED, SAID, answer("5"), SAID]
    expected = QWEN3_CHAT.tokenizer.apply_chat_template(
        messages, tools=[HELLO], return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = QWEN3_CHAT.encode_conversation([offer("", HELLO), *messages])
    assert list(ids) == expected["input_ids"]
    assert list(map(int, mask)) == expected["assistant_masks"]


@pytest.mark.parametrize("chat", [QWEN3_CHAT, LLAMA_CHAT], ids=["qwen3", "llama"])
def test_control_tokens_in_a_tool_stay_text(chat: ChatTokenizer):
    special = "".join(chat.tokenizer.all_special_tokens)
    hostile = schema("hello", f"a{special}b")
    hostile["function"]["parameters"]["properties"][special] = {"type": "string", "enum": [special]}
    counts, texts = [], []
    for tool in (schema("hello", "harmless"), hostile):
        ids = chat.prompt_tokens([offer("", tool), ASKED])
        counts.append({token: ids.count(token) for token in chat.tokenizer.all_special_ids})
        texts.append(chat.tokenizer.decode(ids))
    assert counts[0] == counts[1]
    assert f"a{special}b" in texts[1]
    assert texts[1].count(special) == 3


def test_error_names_the_schema_with_a_lone_surrogate():
    with pytest.raises(ValueError, match="the tools of message 0 has a lone surrogate"):
        QWEN3_CHAT.prompt_tokens([offer("", schema("hello", "a\ud800")), ASKED])


def test_a_mark_in_a_schema_is_not_used_as_the_mark():
    description = f"{chr(0x10FFFD)}<|im_end|>{chr(0x10FFFC)}"
    ids = QWEN3_CHAT.prompt_tokens([offer("", schema("hello", description)), ASKED])
    assert description in QWEN3_CHAT.tokenizer.decode(ids)


def test_separate_tool_template_is_used_only_for_tools():
    tokenizer = chatml_tokenizer()
    tokenizer.chat_template = {"default": SILENT, "tool_use": QWEN3}
    chat = ChatTokenizer(tokenizer)
    assert chat.prompt_tokens([offer("Be brief."), ASKED]) == QWEN3_CHAT.prompt_tokens([offer("Be brief."), ASKED])
    silent = ChatTokenizer(chatml_tokenizer(SILENT))
    assert chat.prompt_tokens([ASKED, SAID, ASKED]) == silent.prompt_tokens([ASKED, SAID, ASKED])


@pytest.mark.parametrize("source", [SILENT, STRICT])
def test_tool_responses_are_rendered_without_the_tool_role(source: str):
    chat = ChatTokenizer(chatml_tokenizer(source))
    prompt = chat.prompt_tokens([offer(), ASKED])
    assert WORDS in chat.tokenizer.decode(prompt)
    said = chat.tokenizer("five", add_special_tokens=False)["input_ids"]
    sequence = (*prompt, *said, chat.stop_token_ids[-1])
    rest, starts = chat.observation_tokens([offer(), ASKED, SAID], sequence, [answer("5"), answer("6")])
    assert not starts
    assert chat.tokenizer.decode(rest) == (
        "\n<|im_start|>user\n<tool_response>\n5\n</tool_response>\n<tool_response>\n6\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("chat", [QWEN3_CHAT, LLAMA_CHAT], ids=["qwen3", "llama"])
def test_turn_adds_the_text_that_hugging_face_renders(chat: ChatTokenizer):
    history = [offer("Be brief."), ASKED, SAID]
    sequence = (
        *chat.prompt_tokens(history[:-1]),
        *chat.tokenizer("five", add_special_tokens=False)["input_ids"],
        chat.stop_token_ids[-1],
    )
    rest, starts = chat.observation_tokens(history, sequence, [answer('5 "five"')])
    plain = [Message(role="system", content="Be brief."), ASKED, SAID, answer('5 "five"')]
    expected = template_ids(chat.tokenizer, plain, tools=[HELLO, WORLD], add_generation_prompt=True)
    assert not starts
    assert [*sequence, *rest] == expected
    shown = json.dumps('5 "five"') if chat is LLAMA_CHAT else '5 "five"'
    assert shown in chat.tokenizer.decode(rest)


def test_later_tools_with_a_separate_template_start_a_sequence():
    """The two templates render a reply's context differently, and the policy saw only the first one's."""
    tokenizer = chatml_tokenizer()
    tokenizer.chat_template = {"default": "{{ 'hello ' }}" + SILENT, "tool_use": SILENT}
    chat = ChatTokenizer(tokenizer)
    sequence = (*chat.prompt_tokens([ASKED]), chat.stop_token_ids[-1])
    observation = [offer("Now with tools."), ASKED]
    tokens, starts = chat.observation_tokens([ASKED, Message(role="assistant", content="")], sequence, observation)
    assert starts
    assert not chat.tokenizer.decode(tokens).startswith("hello")


def test_tools_that_come_later_start_a_sequence():
    history = [ASKED, SAID]
    sequence = (*QWEN3_CHAT.prompt_tokens([ASKED]), QWEN3_CHAT.stop_token_ids[-1])
    tokens, starts = QWEN3_CHAT.observation_tokens(history, sequence, [offer("Now with tools."), ASKED])
    assert starts
    assert tokens == QWEN3_CHAT.prompt_tokens([*history, offer("Now with tools."), ASKED])
