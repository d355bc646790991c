# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Replies of finished conversations: exact tokens in every template, from as few renderings as it allows."""

import itertools
import re
from collections.abc import Sequence

import jinja2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from marin_rl.tokenization.chat import ChatTokenizer, without_start
from marin_rl.tokenization.chat_template import ChatTemplateError
from marin_rl.tokenization.forward_template import is_append_only
from marin_rl.tokenization.load import byte_tokenizer, plain_template
from tests.tokenization.conftest import (
    CHATML,
    THINKING,
    chatml_tokenizer,
    instruct_tokenizer,
    llama_tokenizer,
    phi_tokenizer,
    prepending_tokenizer,
)
from tests.tokenization.tool_templates import LLAMA, QWEN3, SILENT, STRICT

Sequences = list[tuple[tuple[int, ...], tuple[bool, ...]]]


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def rendered_twice(chat: ChatTokenizer, messages: Sequence[dict], num_prompt: int) -> Sequences:
    """The tokens of `encode_replies` from two complete renderings for each reply, as it was first written."""
    end_token = (*chat._end_of_turn, *chat.stop_token_ids)[0]
    replies = [index for index in range(num_prompt, len(messages)) if messages[index]["role"] == "assistant"]
    ids = list(chat.prompt_tokens(messages[:num_prompt]))
    mask, sequences = [False] * len(ids), []
    for index, following in itertools.zip_longest(replies, replies[1:]):
        mark = chat._mark(messages[index : index + 1])
        content = without_start(messages[index]["content"], chat.reply_start(ids))
        reply = [*chat._encoder.encode(chat._encoder.escape(content, mark), mark, continues=True)[0], end_token]
        ids += reply
        mask += [True] * len(reply)
        if following is None:
            break
        observation, rewritten = observed_twice(chat, messages[: index + 1], ids, messages[index + 1 : following])
        if rewritten:
            sequences.append((tuple(ids), tuple(mask)))
            ids, mask = [], []
        ids += observation
        mask += [False] * len(observation)
    return [*sequences, (tuple(ids), tuple(mask))]


def observed_twice(
    chat: ChatTokenizer, history: Sequence[dict], sequence: Sequence[int], observation: Sequence[dict]
) -> tuple[tuple[int, ...], bool]:
    messages = [*history, *observation]
    mark = chat._mark(messages)
    before, after = chat._render(history[:-1], mark), chat._render(messages, mark)
    reply = chat._encoder.escape(history[-1]["content"], mark)
    prefix = before + reply
    if not after.startswith(prefix):
        sampled = chat.tokenizer.decode(chat._without_stop_tokens(sequence), clean_up_tokenization_spaces=False)
        if sampled.endswith(" " + history[-1]["content"]):
            prefix = f"{before} {reply}"
    if after.startswith(prefix):
        ids, _ = chat._encoder.encode(after[len(prefix) :], mark, continues=True)
        if sequence[-1] not in chat.stop_token_ids:
            return tuple(ids), False
        if ids[:1] == [sequence[-1]]:
            return tuple(ids[1:]), False
    return tuple(chat._encoder.encode(after, mark)[0]), True


TURN = "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
PROMPT = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
LOOP = "{%- for message in messages %}%s{%- endfor %}" + PROMPT
BEFORE_LAST_USER = (
    "{%- for message in messages %}{%- if message.role == 'user' and loop.index0 + 2 >= messages | length %}"
    "{{- 'tools: none\\n' }}{%- endif %}" + TURN + "{%- endfor %}" + PROMPT
)

ONE_RENDERING = {
    "in the order of the loop": LOOP.replace("%s", TURN),
    "first": LOOP.replace(
        "%s", "{%- if loop.first and messages[0].role != 'system' %}{{- 'You help.' }}{%- endif %}" + TURN
    ),
    "index": LOOP.replace("%s", "{{- loop.index0 ~ ' ' ~ loop.index }}" + TURN),
    "previous": LOOP.replace("%s", "{%- if loop.previtem %}{{- loop.previtem.role }}{%- endif %}" + TURN),
    "state": "{%- set ns = namespace(n=0) %}" + LOOP.replace("%s", "{%- set ns.n = ns.n + 1 %}{{- ns.n }}" + TURN),
    "slice": "{%- if messages[0].role == 'system' %}{%- set messages = messages[1:] %}{%- endif %}"
    + LOOP.replace("%s", TURN),
    "other name": "{%- set rest = messages %}" + LOOP.replace("in messages", "in rest").replace("%s", TURN),
    "macro": "{%- macro turn(message) %}" + TURN + "{%- endmacro %}" + LOOP.replace("%s", "{{- turn(message) }}"),
    "trim": LOOP.replace("%s", TURN.replace("message.content", "(message.content | trim)")),
    "documents": "{%- if documents is defined %}{{- documents }}{%- endif %}" + LOOP.replace("%s", TURN),
    "continue": LOOP.replace("%s", "{%- if message.role == 'tool' %}{%- continue %}{%- endif %}" + TURN),
}
"""Templates whose tokens one rendering must give."""

SEVERAL_RENDERINGS = {
    "last": LOOP.replace("%s", "{%- if loop.last %}{{- 'last ' }}{%- endif %}" + TURN),
    "last by item": LOOP.replace("%s", "{%- if loop['last'] %}{{- 'last ' }}{%- endif %}" + TURN),
    "next": LOOP.replace("%s", "{%- if loop.nextitem is defined %}{{- loop.nextitem.role }}{%- endif %}" + TURN),
    "length of the loop": LOOP.replace("%s", "{{- loop.length }}" + TURN),
    "distance": LOOP.replace("%s", "{{- loop.revindex }}" + TURN),
    "number of messages": LOOP.replace("%s", "{{- messages | length }}" + TURN),
    "last message": "{{- messages[-1].role }}" + LOOP.replace("%s", TURN),
    "last message by filter": "{{- (messages | last).role }}" + LOOP.replace("%s", TURN),
    "third message": "{%- if messages[2] %}{{- messages[2].content }}{%- endif %}" + LOOP.replace("%s", TURN),
    "next by index": LOOP.replace("%s", "{%- if messages[loop.index0 + 1] %}{{- 'more ' }}{%- endif %}" + TURN),
    "reversed": "{%- for message in messages | reverse %}{{- message.role }}{%- endfor %}" + LOOP.replace("%s", TURN),
    "backwards": "{%- for message in messages[::-1] %}{{- message.role }}{%- endfor %}" + LOOP.replace("%s", TURN),
    "but the last": "{%- for message in messages[:-1] %}{{- message.role }}{%- endfor %}" + LOOP.replace("%s", TURN),
    "all roles": "{{- messages | map(attribute='role') | join }}" + LOOP.replace("%s", TURN),
    "as a whole": "{%- set all = namespace(messages=messages) %}{{- all.messages | length }}"
    + LOOP.replace("%s", TURN),
    "with": "{%- with all = messages %}{{- all | length }}{%- endwith %}" + LOOP.replace("%s", TURN),
    "argument": "{%- macro count(all) %}{{- all | length }}{%- endmacro %}{{- count(messages) }}"
    + LOOP.replace("%s", TURN),
    "state at the end": "{%- set ns = namespace(n=0) %}"
    + LOOP.replace("%s", "{%- set ns.n = ns.n + 1 %}" + TURN)
    + "{{- ns.n }}",
    "variable at the end": "{%- set n = messages | length %}" + LOOP.replace("%s", TURN) + "{{- n }}",
    "two loops": "{%- for message in messages %}{{- message.role }}{%- endfor %}" + LOOP.replace("%s", TURN),
    "nested loops": LOOP.replace("%s", "{%- for other in messages %}{{- other.role }}{%- endfor %}" + TURN),
    "filtered": LOOP.replace("in messages", "in messages if message.role != 'tool'").replace("%s", TURN),
    "selected": LOOP.replace("in messages", "in messages | rejectattr('role', 'equalto', 'tool')").replace("%s", TURN),
    "break": LOOP.replace("%s", TURN + "{%- if loop.index == 4 %}{%- break %}{%- endif %}"),
    "set block": "{%- set text %}" + LOOP.replace("%s", TURN) + "{%- endset %}{{- text | replace('x', 'y') }}",
    "in a condition": "{%- if true %}" + LOOP.replace("%s", TURN) + "{%- endif %}",
    "truth": "{%- if messages %}" + LOOP.replace("%s", TURN) + "{%- endif %}",
    "recursive": LOOP.replace("in messages", "in messages recursive").replace("%s", TURN),
    "tools before the last question": BEFORE_LAST_USER,
    "thoughts": THINKING,
    "Qwen3": QWEN3,
}
"""Templates that look ahead, or that do so at first sight."""

CHATS = {
    **{name: ChatTokenizer(chatml_tokenizer(source)) for name, source in (ONE_RENDERING | SEVERAL_RENDERINGS).items()},
    "bytes": ChatTokenizer(byte_tokenizer()),
    "chatml": ChatTokenizer(chatml_tokenizer(CHATML)),
    "llama": ChatTokenizer(llama_tokenizer(LLAMA)),
    "silent": ChatTokenizer(chatml_tokenizer(SILENT)),
    "strict": ChatTokenizer(chatml_tokenizer(STRICT)),
    "phi": ChatTokenizer(phi_tokenizer()),
    "instruct": ChatTokenizer(instruct_tokenizer()),
    "prepending": ChatTokenizer(prepending_tokenizer()),
}

TEXTS = st.lists(
    st.sampled_from(
        ["x", " ", "\n", "the answer", "<think>", "</think>", "<|im_end|>", "<|im_start|>", "\U0010fffd", "é😀"]
    ),
    max_size=4,
).map("".join)


@st.composite
def episodes(draw: st.DrawFn) -> tuple[list[dict], int]:
    """A prompt, then replies with observations between them; the number of messages in the prompt."""
    prompt = [message("system", draw(TEXTS))] if draw(st.booleans()) else []
    prompt += [message("user", draw(TEXTS))]
    if draw(st.booleans()):
        prompt += [message("assistant", draw(TEXTS)), message(draw(st.sampled_from(["user", "tool"])), draw(TEXTS))]
    messages = list(prompt)
    for number in range(draw(st.integers(0, 4))):
        if number:
            roles = draw(st.sampled_from([("user",), ("tool",), ("tool", "tool"), ("user", "system")]))
            messages += [message(role, draw(TEXTS)) for role in roles]
        messages.append(message("assistant", draw(TEXTS)))
    return messages, len(prompt)


def outcome(encode, *arguments) -> object:
    try:
        return encode(*arguments)
    except ChatTemplateError as error:
        return type(error)


@pytest.mark.parametrize("name", CHATS)
@settings(deadline=None, max_examples=15, suppress_health_check=list(HealthCheck))
@given(episode=episodes())
def test_tokens_are_those_of_two_renderings_for_each_reply(name: str, episode: tuple[list[dict], int]):
    chat = CHATS[name]
    assert outcome(chat.encode_replies, *episode) == outcome(rendered_twice, chat, *episode)


@pytest.mark.parametrize("name", [*ONE_RENDERING, "bytes", "chatml", "silent"])
def test_common_templates_are_rendered_once(name: str):
    source = re.sub(r"\{%-?\s*(?:end)?generation\s*-?%\}", "", CHATS[name].tokenizer.chat_template)
    tree = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source)
    assert is_append_only(tree)


# --- the start of a reply in the prompt ---

STARTS = [
    ("<think>\n", "<think>\n5", "5"),
    ("<think>\n", "<think>5", "5"),
    ("<think>", "<think>\n5", "\n5"),
    ("<think>\n", "\n<think>\n\n5", "\n5"),
    ("<think>\n", "  <think> 5", " 5"),
    ("<think>\n\n", "<think>\n5", "5"),
    ("<think>\n\n</think>\n\n", "<think>\n\n</think>\n\n5", "5"),
    ("<think>\n\n</think>\n\n", "<think></think>5", "5"),
    ("<think>\n\n</think>\n\n", "<think>2 + 3</think>5", "<think>2 + 3</think>5"),
    ("<|think|>", "<|think|>\n5", "\n5"),
    ("[THINK]", " [THINK]5", "5"),
    ("<reasoning>\n", "<reasoning>5", "5"),
    ("<reasoning>\n", "<reasons>5", "<reasons>5"),
    ("<seed:think>\n", "<seed:think>\n5", "5"),
    ("Let me think.\n", "Let me think. 5", " 5"),
    ("<think>\n", "5 <think>\n", "5 <think>\n"),
    ("", "<think>\n5", "<think>\n5"),
    ("\n", "\n5", "\n5"),
]
HEADERS = {
    "in the history": ("<|im_start|>assistant\\n%s", "<|im_start|>assistant\\n"),
    "in both": ("<|im_start|>assistant\\n%s", "<|im_start|>assistant\\n%s"),
    "no header": ("%s", ""),
}


@pytest.mark.parametrize(
    ("header", "start", "reply", "rest"),
    # Text before a reply without a header is no part of the reply, unless it is a tag.
    [(name, *case) for name in HEADERS for case in STARTS if name == "in the history" or case[0][:1] in ("<", "[")],
)
def test_a_tag_that_the_prompt_opens_is_not_repeated(header: str, start: str, reply: str, rest: str):
    prompt, history = (part.replace("%s", start.replace("\n", "\\n")) for part in HEADERS[header])
    source = (
        "{%- for message in messages %}{%- if message.role == 'user' %}{{- '<|im_start|>user\\n' + message.content }}"
        "{%- else %}{{- '" + history + "' + message.content }}{%- endif %}{{- '<|im_end|>' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '" + prompt + "' }}{%- endif %}"
    )
    chat = ChatTokenizer(chatml_tokenizer(source))
    [(ids, mask)] = chat.encode_replies([message("user", "2+3="), message("assistant", reply)], 1)
    asked = chat.prompt_tokens([message("user", "2+3=")])
    assert ids[: len(asked)] == asked
    assert mask == (*[False] * len(asked), *[True] * (len(ids) - len(asked)))
    sampled = chat.tokenizer(rest, add_special_tokens=False)["input_ids"]
    assert list(ids[len(asked) :]) == [*sampled, chat.tokenizer.convert_tokens_to_ids("<|im_end|>")]
    # The text that is rewarded is the whole turn.
    assert chat.reply_start(asked).rstrip() == start.strip()


# --- long texts ---


def one_word(merges: Sequence[str], *, byte_level: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer of byte-pair encoding that merges across spaces, as Llama's and Gemma's do."""
    pieces = [*map(chr, range(32, 127)), "\u2581", *(merge.replace(" ", "") for merge in merges)]
    model = models.BPE(
        {"<unk>": 0, **{piece: index + 1 for index, piece in enumerate(dict.fromkeys(pieces))}},
        [tuple(merge.split()) for merge in merges],
        unk_token="<unk>",
        fuse_unk=True,
    )
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Replace("\u2581", " ")
    backend.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    return with_plain_template(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"))


def unigram(**scores: float) -> PreTrainedTokenizerFast:
    """A tokenizer whose choice of a word's first token depends on the word's end."""
    backend = Tokenizer(models.Unigram([("<unk>", 0.0), *scores.items()], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    return with_plain_template(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>"))


def with_plain_template(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    tokenizer.chat_template = plain_template(tokenizer)
    return tokenizer


LONG = {
    "bytes": ChatTokenizer(byte_tokenizer()),
    "byte-level": CHATS["chatml"],
    "spaces absorbed": CHATS["phi"],
    "metaspace": CHATS["instruct"],
    "prepending": CHATS["prepending"],
    "one word": ChatTokenizer(
        one_word(["a a", "aa aa", "aaaa aaaa", "a b", "b a", "\u2581 \u2581", "\u2581\u2581 \u2581\u2581"])
    ),
    "unigram": ChatTokenizer(unigram(ab=-1.0, ba=-0.9, a=-3.0, b=-3.0, **{"\u2581": -2.0})),
}
RUNS = st.tuples(
    st.sampled_from(
        ["a", "ab", " ", "\n", "the answer ", "é", "\u0301", "e\u0301\u0323", "<|end|> ", "</s>", "😀", "x1 "]
    ),
    st.integers(1, 3000),
).map(lambda run: run[0] * run[1])


@pytest.mark.medium
@pytest.mark.parametrize("name", LONG)
@settings(deadline=None, max_examples=15, suppress_health_check=list(HealthCheck))
@given(text=st.lists(RUNS, min_size=1, max_size=4).map("".join), limit=st.sampled_from([1, 2, 7, 40]))
def test_the_first_tokens_of_a_cut_text_are_those_of_the_whole(name: str, text: str, limit: int):
    chat = LONG[name]
    assert chat.text_tokens(text, limit)[:limit] == chat.text_tokens(text)[:limit]
    for messages in (
        [message("user", "x"), message("assistant", text), message("user", text), message("assistant", "5")],
        [message("user", text), message("assistant", "5")],
    ):
        whole, cut = chat.encode_replies(messages, 1), chat.encode_replies(messages, 1, limit)
        assert [(ids[:limit], mask[:limit]) for ids, mask in cut] == [
            (ids[:limit], mask[:limit]) for ids, mask in whole
        ]
        assert [len(ids) > limit for ids, _ in cut] == [len(ids) > limit for ids, _ in whole]
        assert [any(mask) for _, mask in cut] == [any(mask) for _, mask in whole]


def test_a_long_text_is_not_tokenized_whole():
    text = "the answer " * 100_000
    for chat in (LONG["bytes"], LONG["byte-level"], LONG["metaspace"], LONG["prepending"], LONG["one word"]):
        assert len(chat.text_tokens(text, 10)) == 10
        [(ids, mask)] = chat.encode_replies([message("user", "x"), message("assistant", text)], 1, 10)
        assert len(ids) < 30
        assert mask[-1]
