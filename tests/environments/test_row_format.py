# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

from typing import Any

import pytest

from marin_rl.environments.row_format import Row, RowFormat

ASK = {"role": "user", "content": "1+1?"}


def problem(values: dict[str, Any], **fields: Any):
    return RowFormat(**fields).problem(Row(values, "file:3"), "test")


def test_optional_columns():
    plain = problem({"prompt": "1+1?", "answer": 2}).task
    assert (plain.messages, plain.answer, plain.worked_answer, plain.environment) == ((ASK,), "2", None, "test")
    full = problem({"messages": [ASK], "answer": "2", "id": 7, "worked_answer": "so 2"}).task
    assert (full.messages, full.id, full.answer, full.worked_answer) == ((ASK,), "7", "2", "so 2")


@pytest.mark.parametrize("fields", [{}, {"messages_column": "prompt"}, {"prompt_column": "messages"}])
def test_messages_in_the_prompt_column(fields):
    system = {"role": "system", "content": "s"}
    for messages in ([ASK], [system, ASK]):
        values = {fields.get("prompt_column", "prompt"): messages, "answer": "2", "data_source": "sums"}
        made = problem(values, **fields)
        assert (made.task.messages, made.task.answer) == (tuple(messages), "2")
        assert made.task.id == problem({"prompt": "1+1?", "answer": "2"}).task.id


@pytest.mark.parametrize("column", ["prompt", "messages"])
@pytest.mark.parametrize(
    "value",
    [
        {"role": ["system", "user"], "content": ["s", "1+1?"]},
        {"content": ["s", "1+1?"], "role": ["system", "user"], "name": [None, None]},
        {"role": ["system", "user"], "content": ["s", [{"type": "text", "text": "1+1?"}]]},
        [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "1+1?"}]}],
        [
            {"role": "system", "content": [{"type": "text", "text": "s", "image": None}]},
            {"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "1?"}]},
        ],
    ],
)
def test_other_forms_of_messages(column: str, value: object):
    made = problem({column: value, "answer": "2"})
    assert made.task.messages == ({"role": "system", "content": "s"}, ASK)
    assert made.task.id == problem({"prompt": "1+1?", "answer": "2"}).task.id


def test_columns_of_objects():
    made = problem(
        {
            "data_source": "sums",
            "prompt": [ASK],
            "reward_model": {"style": "rule", "ground_truth": "2"},
            "extra_info": {"index": 7, "answer": "so 2", "deep": {"er": 1}},
        },
        answer_column="reward_model.ground_truth",
        id_column="extra_info.index",
        worked_answer_column="extra_info.answer",
    )
    assert made.task.messages == (ASK,)
    assert (made.task.id, made.task.answer, made.task.worked_answer) == ("7", "2", "so 2")
    assert problem({"prompt": "a", "x": {"y.z": 1}, "x.y": "3"}, answer_column="x.y").task.answer == "3"
    assert problem({"q": {"en": "1+1?"}, "answer": "2"}, prompt_column="q.en").task.messages == (ASK,)


def test_columns_without_effect_or_named_by_the_config_are_accepted():
    harmless = {"images": [], "system": None, "tools": [], "chat_template_kwargs": {"thinking": None}, "weight": 1}
    row = {"prompt": "1+1?", "answer": "2", "source": "sums", **harmless}
    assert problem(row).task == problem({"prompt": "1+1?", "answer": "2"}).task
    assert problem({"context": "1+1?", "label": "2"}, prompt_column="context", answer_column="label").task.answer == "2"
    made = problem({"history": [{"from": "human", "value": "1+1?"}], "answer": "2"}, messages_column="history")
    assert made.task.messages == (ASK,)
    dotted = problem({"context": {"q": "1+1?"}, "answer": "2"}, prompt_column="context.q")
    assert dotted.task.messages == (ASK,)


def test_gsm8k():
    made = problem(
        {"question": "q", "answer": "1+1=2\n#### 1,002"},
        prompt_column="question",
        answer_regex="#### (-?[0-9.,]+)",
        worked_answer_column="answer",
    )
    assert (made.task.answer, made.task.worked_answer) == ("1,002", "1+1=2\n#### 1,002")


def test_template_and_system_prompt_do_not_change_the_problem_text():
    made = problem({"prompt": "a {x}?", "answer": "2"}, system_prompt="s", prompt_template="Q: {prompt} {y}")
    assert [message["content"] for message in made.task.messages] == ["s", "Q: a {x}? {y}"]
    assert made.text == "a {x}?"


def test_conversations_that_differ_in_white_space_or_system_message_are_equal():
    example = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    first = problem({"messages": [*example, {"role": "user", "content": "a b"}], "answer": "2"})
    system = {"role": "system", "content": "s"}
    second = problem({"messages": [system, *example, {"role": "user", "content": " a  b "}], "answer": "2"})
    other = problem({"messages": [*example[:1], *example[:1], {"role": "user", "content": "a b"}], "answer": "2"})
    assert (first.text, first.task.id) == (second.text, second.task.id)
    assert first.text != other.text
    assert problem({"prompt": "a  b\n", "answer": "2"}).text == problem({"prompt": "a b", "answer": "2"}).text
    systems = [problem({"messages": [{"role": "system", "content": text}], "answer": "2"}) for text in ("a", "b")]
    assert len({one.text for one in systems}) == 2


@pytest.mark.parametrize(
    ("values", "fields", "message"),
    [
        ({"prompt": "a", "anwser": "2"}, {}, r"file:3: there is no column 'answer'; did you mean 'anwser'\?"),
        ({"prompt": "a", "x": "2"}, {}, "there is no column 'answer'; Valid here: prompt, x"),
        ({"prompt": "a", "answer": None}, {}, "column 'answer' holds None of type NoneType"),
        ({"prompt": "a", "answer": True}, {}, "column 'answer' holds True of type bool"),
        ({"prompt": ["a"], "answer": "2"}, {}, "column 'prompt', message 0 is 'a'"),
        ({"prompt": [], "answer": "2"}, {}, r"column 'prompt' holds \[\]"),
        ({"prompt": {"role": ["user"], "content": ["a", "b"]}, "answer": "2"}, {}, "holds lists of different lengths"),
        ({"prompt": {"role": [], "content": []}, "answer": "2"}, {}, r"holds \[\]; it must be a list of messages"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}], "answer": "2"},
            {},
            "or have a list of parts {type: text, text: ...} as content",
        ),
        ({"prompt": [{"role": "user", "content": [{"type": "text", "text": None}]}], "answer": "2"}, {}, "message 0"),
        ({"prompt": {"text": "a"}, "answer": "2"}, {}, "of type dict; it must be text .* set rows.prompt_column"),
        ({"prompt": [ASK], "answer": "2"}, {"prompt_template": "{prompt}!"}, "has messages in 'prompt'; put the text"),
        (
            {"prompt": [ASK], "reward_model": {"style": "rule", "ground_truth": "2"}},
            {},
            "there is no column 'answer'; Valid here: .*, reward_model.ground_truth; set rows.answer_column",
        ),
        ({"prompt": "a", "answer": "2"}, {"answer_column": "answer.value"}, "there is no column 'answer.value'"),
        ({"prompt": " ", "answer": "2"}, {}, "column 'prompt' is empty"),
        ({"prompt": "a", "answer": "2", "system": "s"}, {}, "file:3: column 'system' holds 's', which is not applied"),
        ({"prompt": "a", "answer": "2", "context": "s"}, {}, "file:3: column 'context' holds"),
        ({"prompt": "a", "answer": "2", "images": ["a.png"]}, {}, "file:3: column 'images' holds"),
        ({"prompt": "a", "answer": "2", "tools": [{}, {"name": "f"}]}, {}, "file:3: column 'tools' holds"),
        ({"prompt": "a", "answer": "2", "chat_template_kwargs": {"a": False}}, {}, "column 'chat_template_kwargs'"),
        ({"prompt": "a", "answer": "2", "weight": 2.0}, {}, "column 'weight' holds 2.0"),
        ({"prompt": "a", "context": "2", "system": "s"}, {"answer_column": "context"}, "column 'system' holds"),
        ({"messages": [{**ASK, "weight": 0.5}], "answer": "2"}, {}, "message 0 is of the user and has the weight 0.5"),
        ({"prompt": "a", "answer": ""}, {}, "column 'answer' is empty"),
        ({"messages": [{"role": "me", "content": "a"}], "answer": "2"}, {}, "has the role 'me'; choose one of system"),
        (
            {"messages": [{"role": "assistant", "content": "", "name": None, "tool_calls": [{}]}, ASK], "answer": "2"},
            {},
            "message 0 has the key 'tool_calls', but only role, content and weight are supported",
        ),
        (
            {"messages": [ASK, {"role": "assistant", "content": "2"}], "answer": "2"},
            {},
            "ends with an assistant message",
        ),
        (
            {"messages": [{"role": "system", "content": "s"}, ASK], "answer": "2"},
            {"system_prompt": "t"},
            "already has a system message",
        ),
        ({"prompt": "a", "answer": "2"}, {"answer_regex": "#### (.*)"}, "does not match the answer '2'"),
        ({"prompt": "a", "answer": "2"}, {"worked_answer_column": "solution"}, "there is no column 'solution'"),
        ({"prompt": "a", "answer": "2"}, {"id_column": "key"}, "there is no column 'key'"),
        ({}, {"prompt_template": "Solve it."}, r"has no \{prompt\}"),
        ({}, {"answer_regex": "####"}, r"rows\.answer_regex: '####' has 0 groups"),
    ],
)
def test_bad_rows(values, fields, message):
    with pytest.raises(ValueError, match=message):
        problem(values, **fields)
