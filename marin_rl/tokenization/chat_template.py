# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""From messages to template text, and from template text to tokens, safe against injected control tokens.

A template joins trusted text (its own) with untrusted text (what users, tools and models wrote). If an
untrusted text spells out a control token, say `<|end|>`, tokenizing the joined text would make it one. So
contents are *escaped* before they enter the template: an occurrence of a control token's text is broken after
its first character by a mark that occurs nowhere else. The rendered text is then cut at the marks, which
vanish, and the pieces are tokenized one by one: no piece holds the control token's text.
Texts without control tokens, that is nearly all, contain no mark and are tokenized in one piece.
"""

import dataclasses
import functools
import itertools
import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
from tokenizers import AddedToken, Tokenizer, processors
from transformers.utils.chat_template_utils import render_jinja_template

from marin_rl.types import Message

# A piece that continues earlier text is tokenized behind this token, which is dropped afterwards: some
# tokenizers put a space before whatever they are given first.
_BOUNDARY = "\ufdd0boundary\ufdd1"

_GENERATION_BLOCK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

# transformers compiles each template once per process and tracks generation blocks in the compiled template,
# so that two threads rendering the same template would corrupt one another's masks.
_RENDER_LOCK = threading.Lock()


ToolSchema = Mapping[str, Any]
"""A tool as chat templates take it: `{"type": "function", "function": {"name": …, "parameters": …}}`."""

_PROBE_TOOL: ToolSchema = {
    "type": "function",
    "function": {
        "name": "probe-tool",
        "description": "Probes.",
        "parameters": {
            "type": "object",
            "properties": {"probe": {"type": "string", "description": "A probe."}},
            "required": ["probe"],
        },
    },
}
_PROBE = [{"role": "user", "content": "probe"}]


class ChatTemplateError(ValueError):
    """A chat template is missing, refuses a conversation, or cannot do what was asked of it."""


@dataclasses.dataclass(frozen=True, eq=False)
class ChatTemplate:
    """A Jinja chat template."""

    source: str
    """The Jinja text."""
    variables: Mapping[str, Any]
    """What the template may refer to besides the messages: `bos_token`, `eos_token`, …"""
    owner: str
    """The tokenizer that it belongs to, as error messages name it."""

    @property
    def marks_generations(self) -> bool:
        """Whether it has `{% generation %}` blocks, which tell the assistant's text from the template's."""
        return _GENERATION_BLOCK.search(self.source) is not None

    @functools.cached_property
    def tells_of_tools(self) -> bool:
        """Whether it has words for the schemas of tools, seen by rendering one."""
        return self._shows("probe-tool", _PROBE, tools=[_PROBE_TOOL])

    @functools.cached_property
    def shows_tool_role(self) -> bool:
        """Whether it renders messages of the role `tool` behind a reply; others leave them out, or refuse them."""
        reply = {"role": "assistant", "content": "probe-reply"}
        return self._shows("probe-answer", [*_PROBE, reply, {"role": "tool", "content": "probe-answer"}])

    def _shows(self, text: str, messages: Sequence[dict[str, str]], tools: Sequence[ToolSchema] = ()) -> bool:
        try:
            return text in self.render(messages, add_generation_prompt=True, tools=tools)
        except ChatTemplateError:
            # What it refuses it does not show. Whatever else is wrong with it, a conversation will tell.
            return False

    def render(
        self, messages: Sequence[dict[str, str]], add_generation_prompt: bool, tools: Sequence[ToolSchema] = ()
    ) -> str:
        """The conversation as text.

        Args:
            messages: of role and content.
            add_generation_prompt: whether the text asks for the next reply.
            tools: the template's `tools`; only one that `tells_of_tools` shows them.

        Raises:
            ChatTemplateError: if the template refuses the conversation.
        """
        return self._render(messages, add_generation_prompt, tools, track=False)[0]

    def render_with_spans(
        self, messages: Sequence[dict[str, str]], tools: Sequence[ToolSchema] = ()
    ) -> tuple[str, list[tuple[int, int]]]:
        """The conversation as text, and the `[start, end)` characters that its generation blocks wrote.

        Args:
            messages: of role and content.
            tools: the template's `tools`.

        Raises:
            ChatTemplateError: if the template refuses the conversation, or has no generation blocks.
        """
        if not self.marks_generations:
            raise ChatTemplateError(
                f"the chat template of {self.owner} has no {{% generation %}} blocks, so the assistant's tokens "
                "cannot be told from the template's; put {% generation %} and {% endgeneration %} around the "
                "assistant's content and its end token in a copy of the template, and point chat_template at it"
            )
        return self._render(messages, False, tools, track=True)

    def _render(
        self,
        messages: Sequence[dict[str, str]],
        add_generation_prompt: bool,
        tools: Sequence[ToolSchema],
        track: bool,
    ) -> tuple[str, list[tuple[int, int]]]:
        try:
            with _RENDER_LOCK:
                rendered: Any = render_jinja_template(
                    conversations=[list(messages)],
                    tools=[dict(tool) for tool in tools] or None,
                    chat_template=self.source,
                    return_assistant_tokens_mask=track,
                    add_generation_prompt=add_generation_prompt,
                    **self.variables,
                )
        except jinja2.TemplateError as error:
            roles = [message["role"] for message in messages]
            raise ChatTemplateError(
                f"the chat template of {self.owner} refuses a conversation with roles {roles}: {error}"
            ) from error
        texts, spans = rendered
        return texts[0], spans[0] if track else []


@dataclasses.dataclass(frozen=True, eq=False)
class TemplateEncoder:
    """Tokenizes rendered templates, keeping control tokens in contents mere text."""

    backend: Tokenizer
    """A private copy that also knows the boundary token; neither truncates nor pads."""
    control_tokens: tuple[str, ...]
    """Texts that only the template may turn into tokens."""

    @functools.cached_property
    def _control_start(self) -> re.Pattern[str]:
        alternatives = "|".join(re.escape(text) for text in self.control_tokens)
        return re.compile(f"(?=(?:{alternatives})).", re.DOTALL)

    def escape(self, messages: Iterable[Message], mark: str) -> list[dict[str, str]]:
        """Break every control token's text in the messages with the mark."""
        return [{key: self._escape_text(str(text), mark) for key, text in message.items()} for message in messages]

    def escape_tools(self, tools: Iterable[ToolSchema], mark: str) -> list[ToolSchema]:
        """Break every control token's text in the names and texts of schemas with the mark."""
        return [self._escape_json(tool, mark) for tool in tools]

    def _escape_text(self, text: str, mark: str) -> str:
        return self._control_start.sub(lambda match: match[0] + mark, text)

    def _escape_json(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            return self._escape_text(value, mark)
        if isinstance(value, Mapping):
            return {self._escape_text(str(key), mark): self._escape_json(one, mark) for key, one in value.items()}
        return [self._escape_json(one, mark) for one in value] if isinstance(value, list | tuple) else value

    def encode(
        self, text: str, mark: str, continues: bool = False, cuts: Sequence[int] = ()
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokenize rendered text, the control tokens of the template included.

        Args:
            text: rendered from escaped messages.
            mark: the mark that they were escaped with.
            continues: whether the tokens will be put behind others.
            cuts: ascending indices of characters that begin a token.

        Returns:
            Token ids, and the `[start, end)` characters of `text` that each of them stands for.
        """
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        for position, piece in _pieces(text, mark, cuts):
            lead = _BOUNDARY if continues or position else ""
            encoding = self.backend.encode(lead + piece, add_special_tokens=False)
            skipped = 1 if lead else 0
            shift = position - len(lead)
            ids += encoding.ids[skipped:]
            offsets += [(start + shift, end + shift) for start, end in encoding.offsets[skipped:]]
        return ids, offsets


def _pieces(text: str, mark: str, cuts: Sequence[int]) -> Iterator[tuple[int, str]]:
    """Each piece of the text between marks and cuts, and where it begins."""
    position = 0
    for part in text.split(mark):
        end = position + len(part)
        for start, stop in itertools.pairwise([position, *(cut for cut in cuts if position < cut < end), end]):
            yield start, text[start:stop]
        position = end + len(mark)


def template_encoder(backend: Tokenizer, stop_tokens: Iterable[str]) -> TemplateEncoder:
    """Make an encoder from a tokenizer, which stays as it is.

    Args:
        backend: the tokenizer.
        stop_tokens: texts to guard besides those of the tokens flagged as special.
    """
    copy = Tokenizer.from_str(backend.to_str())
    copy.no_truncation()
    copy.no_padding()
    # Templates bring their own special tokens. A post-processor could only trim spaces off the offsets.
    copy.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    copy.add_tokens([AddedToken(_BOUNDARY, normalized=False, special=False)])
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    # A text of one character cannot be broken.
    control = {text for text in {*special, *stop_tokens} if len(text) > 1}
    return TemplateEncoder(copy, (*sorted(control), _BOUNDARY))


def unused_mark(messages: Iterable[Message], *templates: ChatTemplate) -> str:
    """A private-use character that neither the messages, with what they bring along, nor the templates contain.

    Raises:
        ValueError: if a message is not valid Unicode text.
    """
    text = "".join(template.source for template in templates)
    for index, message in enumerate(messages):
        for key, value in message.items():
            written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            text += _checked(written, f"the {key} of message {index}")
    return next(mark for mark in map(chr, range(0x10FFFD, 0xF0000, -1)) if mark not in text)


def _checked(text: str, name: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} has a lone surrogate (half a character) at position {error.start}, which no tokenizer takes; "
            "repair the text, for example with text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')"
        ) from error
    return text
