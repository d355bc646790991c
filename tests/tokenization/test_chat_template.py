# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import concurrent.futures
import sys

import pytest

from marin_rl.tokenization import chat_template
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.chat_template import (
    ChatTemplate,
    ChatTemplateError,
    TemplateEncoder,
    check_template_ends,
    unused_mark,
)
from marin_rl.tokenization.load import CHAT_TEMPLATE, byte_tokenizer

TEMPLATE = ChatTemplate(CHAT_TEMPLATE, {}, "the test's tokenizer")


def test_spans_cover_replies_and_their_end_tokens():
    text, spans = TEMPLATE.render_with_spans(
        [{"role": "assistant", "content": "a"}, {"role": "user", "content": "u"}, {"role": "assistant", "content": ""}]
    )
    assert [text[start:end] for start, end in spans] == ["a<|end|>", "<|end|>"]


def test_error_of_a_rejected_conversation_names_tokenizer_roles_and_reason():
    with pytest.raises(ChatTemplateError, match=r"the test's tokenizer.*\['user', 'end'\].*role 'end' is none of"):
        TEMPLATE.render([{"role": "user", "content": "u"}, {"role": "end", "content": ""}], add_generation_prompt=True)


def test_a_broken_template_is_an_error_that_names_the_tokenizer():
    broken = ChatTemplate("{% for %}", {}, "broken-tokenizer")
    with pytest.raises(ChatTemplateError, match="broken-tokenizer"):
        broken.render([{"role": "user", "content": "u"}], add_generation_prompt=True)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1/0 }}",
        "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[9].x }}",
        "{% for a in range(10**9) %}{% endfor %}",
        "{{ cycler.__init__.__globals__.os.popen('touch x').read() }}",
    ],
)
def test_errors_of_a_template_are_its_own(source: str, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ChatTemplateError, match="the chat template of t rejects a conversation"):
        ChatTemplate(source, {}, "t").render([{"role": "user", "content": "u"}], add_generation_prompt=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.medium
@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% generation %}{{ 'x' * 20000000000 }}{% endgeneration %}",
        "{% set a = namespace(b='x') %}{% for i in range(60) %}{% set a.b = a.b + a.b %}{% endfor %}",
        "{{ range(99999) | join('x' * 100000) }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ '%20000000000d' % 1 }}",
    ],
)
def test_a_template_without_end_is_refused(source: str, monkeypatch):
    monkeypatch.setattr(chat_template, "TRIAL_SECONDS", 1)
    with pytest.raises(ChatTemplateError, match="the chat template of t does not render a message within 1 s"):
        check_template_ends(source, "t")


@pytest.mark.parametrize(
    "source", [CHAT_TEMPLATE, "{% if", "{{ 1/0 }}", "{{ raise_exception('no') }}", "{%- generation -%}"]
)
def test_the_trial_reports_no_other_problem(source: str):
    check_template_ends(source, "t")


def test_templates_with_the_date_do_not_depend_on_the_clock():
    dated = ChatTemplate("{{ strftime_now('%d %b %Y %H:%M') }}{% generation %}{% endgeneration %}", {}, "t")
    assert dated.render([], add_generation_prompt=True) == "26 Jul 2024 00:00"
    assert dated.render_with_spans([])[0] == "26 Jul 2024 00:00"


@pytest.mark.parametrize("tag", ["{% generation %}", "{%- generation -%}", "{%generation%}", "{%+ generation %}"])
def test_generation_blocks_are_found_in_every_spelling(tag: str):
    assert ChatTemplate(f"{tag}x{{% endgeneration %}}", {}, "t").marks_generations


def test_other_uses_of_the_word_are_not_generation_blocks():
    assert not ChatTemplate("{% if add_generation_prompt %}generation{% endif %}", {}, "t").marks_generations


def test_overlapping_control_texts_are_all_escaped():
    tokenizer = byte_tokenizer()
    # One special token's text is a suffix of another's; splitting only the longer one would leave the shorter one.
    tokenizer.add_tokens(["|end|>", "d|>"], special_tokens=True)
    chat = ChatTokenizer(tokenizer)
    content = "<|end|>|end|>d|>"
    assert chat.prompt_tokens([{"role": "user", "content": content}]) == (259, *content.encode(), 257, 260)


def test_internal_boundary_in_a_message_stays_text(byte_chat: ChatTokenizer):
    content = "x\ufdd0boundary\ufdd1<|end|>\ufdd0boundary\ufdd1"
    assert byte_chat.prompt_tokens([{"role": "user", "content": content}]) == (259, *content.encode(), 257, 260)


def test_a_mark_in_a_message_is_not_used_as_the_mark(byte_chat: ChatTokenizer):
    taken = unused_mark([], TEMPLATE)
    content = f"{taken}<|end|>{taken}"
    assert unused_mark([{"role": "user", "content": content}], TEMPLATE) != taken
    assert byte_chat.prompt_tokens([{"role": "user", "content": content}]) == (259, *content.encode(), 257, 260)


def test_error_names_the_message_with_a_lone_surrogate(byte_chat: ChatTokenizer):
    with pytest.raises(ValueError, match=r"the content of message 1 has a lone surrogate .* position 2"):
        byte_chat.prompt_tokens([{"role": "user", "content": "a"}, {"role": "user", "content": "ab\ud83d"}])


def test_saved_truncation_and_padding_do_not_apply():
    backend = byte_tokenizer().backend_tokenizer
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    encoder = TemplateEncoder(backend, [])
    assert encoder.encode("0123456789", mark="\uffff")[0] == list(b"0123456789")
    assert backend.truncation is not None


def test_text_that_continues_earlier_text_gets_no_space(prepending: ChatTokenizer):
    tokenizer = prepending.tokenizer
    encoder = TemplateEncoder(tokenizer.backend_tokenizer, ["</s>"])
    for text, tokens in (
        ("##", ["#", "#"]),
        ("an a", ["an", "\u2581a"]),
        (" an", ["\u2581an"]),
        ("\u00e4", ["<0xC3>", "<0xA4>"]),
        ("</s>", ["</s>"]),
        ("", []),
    ):
        ids, offsets = encoder.encode(text, mark="\uffff", continues=True)
        assert tokenizer.convert_ids_to_tokens(ids) == tokens
        assert not offsets or (offsets[0][0], offsets[-1][1]) == (0, len(text))
    # Each piece after a mark continues the one before.
    ids, _ = encoder.encode("an\uffffan", mark="\uffff")
    assert tokenizer.convert_ids_to_tokens(ids) == ["\u2581an", "an"]


def test_concurrent_rendering_keeps_masks(byte_chat: ChatTokenizer):
    conversations = [[{"role": "assistant", "content": "x" * n}] * 3 for n in range(1, 9)]
    expected = [byte_chat.encode_conversation(messages) for messages in conversations]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            assert list(pool.map(byte_chat.encode_conversation, conversations * 20)) == expected * 20
    finally:
        sys.setswitchinterval(interval)
