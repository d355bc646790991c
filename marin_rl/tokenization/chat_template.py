# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Rendering of chat templates and tokenization of the result, safe against injected control tokens.

A rendered conversation joins trusted text (from the template) with untrusted text (from users, tools and models). If
untrusted text spells out a control token, such as `<|end|>`, tokenization of the joined text would create that token.
So contents are *escaped* before rendering: a mark that the text does not contain is inserted after the first character
of every control token's text. The rendered text is split at the marks, and the pieces are tokenized separately, so no
piece contains the control token's text. Texts without control tokens, the common case, contain no mark and are
tokenized in one piece.
"""

import contextlib
import dataclasses
import datetime
import functools
import itertools
import json
import re
import subprocess
import sys
import threading
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
from tokenizers import AddedToken, Encoding, Tokenizer, models, processors
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

from marin_rl.tokenization.forward_template import is_append_only, render_prefixes
from marin_rl.types import Message

# A piece that continues earlier text is tokenized after this token, which is then dropped, because some tokenizers add
# a space at the start of their input.
_BOUNDARY = "\ufdd0boundary\ufdd1"
# Some normalizers (Llama 2, Mistral 7B) add the space after each added token, the boundary included. Then this
# noncharacter follows the boundary, so that the space precedes it and not the piece.
_ANCHOR = "\ufdd2"

# A text is cut at first after this number of characters per token that is needed, and this number of more tokens.
_CHARACTERS, _MARGIN = 8, 256

_GENERATION_BLOCK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_GENERATION_BLOCKS = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")

# transformers caches compiled templates per process and tracks generation blocks in the compiled template, so
# concurrent renderings of one template would corrupt each other's masks.
_RENDER_LOCK = threading.Lock()


TEMPLATE_DATE = datetime.datetime(2024, 7, 26)
"""The date in templates that show the current one, so that prompts do not depend on the clock. Llama 3's templates use
this one where they cannot read the clock."""

ToolSchema = Mapping[str, Any]
"""A tool in the format of chat templates: `{"type": "function", "function": {"name": …, "parameters": …}}`."""

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
_PROBE_REPLY = {"role": "assistant", "content": "probe-reply"}


class ChatTemplateError(ValueError):
    """A chat template is missing, rejects a conversation, or lacks a required feature."""


@dataclasses.dataclass(frozen=True, eq=False)
class ChatTemplate:
    """A Jinja chat template."""

    source: str
    """Source of the Jinja template."""
    variables: Mapping[str, Any]
    """Template variables in addition to the messages: `bos_token`, `eos_token`, …"""
    owner: str
    """Name of the tokenizer, for error messages."""

    @property
    def marks_generations(self) -> bool:
        """Whether the template has `{% generation %}` blocks, which mark the assistant's text."""
        return _GENERATION_BLOCK.search(self.source) is not None

    @functools.cached_property
    def renders_tools(self) -> bool:
        """Whether the template renders tool schemas; determined by rendering one."""
        return self._renders("probe-tool", _PROBE, tools=[_PROBE_TOOL])

    @functools.cached_property
    def renders_tool_role(self) -> bool:
        """Whether the template renders messages with the role `tool`; other templates drop or reject them."""
        return self._renders("probe-answer", [*_PROBE, _PROBE_REPLY, {"role": "tool", "content": "probe-answer"}])

    def _renders(self, text: str, messages: Sequence[dict[str, str]], tools: Sequence[ToolSchema] = ()) -> bool:
        try:
            return text in self.render(messages, add_generation_prompt=True, tools=tools)
        except ChatTemplateError:
            # Other problems of the template raise an error when a conversation is rendered.
            return False

    def render(
        self, messages: Sequence[dict[str, str]], add_generation_prompt: bool, tools: Sequence[ToolSchema] = ()
    ) -> str:
        """Render a conversation.

        Args:
            messages: dictionaries with role and content.
            add_generation_prompt: whether to append the generation prompt.
            tools: the template's `tools`; rendered only if `renders_tools`.

        Raises:
            ChatTemplateError: if the template rejects the conversation.
        """
        return self._render(messages, add_generation_prompt, tools, track=False)[0]

    def render_prompts(
        self, messages: Sequence[dict[str, str]], counts: Sequence[int], tools: Sequence[ToolSchema] = ()
    ) -> Iterator[str]:
        """Render a conversation's first messages with the generation prompt, for each of several numbers of messages.

        Args:
            messages: dictionaries with role and content.
            counts: ascending numbers of messages, the last one that of `messages`.
            tools: the template's `tools`.

        Raises:
            ChatTemplateError: if the template rejects the conversation.
        """
        prompts = None
        # An error is reported by the rendering of the prompt that has it.
        with _RENDER_LOCK, contextlib.suppress(Exception):
            if self._is_append_only and len(counts) > 1:
                variables = self._variables(tools, add_generation_prompt=True)
                prompts = render_prefixes(_compile_jinja_template(self.source), messages, counts, variables)
        if prompts is None:
            return (self.render(messages[:count], add_generation_prompt=True, tools=tools) for count in counts)
        return prompts

    @functools.cached_property
    def _is_append_only(self) -> bool:
        return is_append_only(_compile_jinja_template(self.source).environment.parse(self.source))

    def _variables(self, tools: Sequence[ToolSchema], add_generation_prompt: bool) -> dict[str, Any]:
        return {
            "tools": [dict(tool) for tool in tools] or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            "strftime_now": TEMPLATE_DATE.strftime,
            **self.variables,
        }

    def render_with_spans(
        self, messages: Sequence[dict[str, str]], tools: Sequence[ToolSchema] = ()
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render a conversation and return the `[start, end)` character spans of its generation blocks.

        Args:
            messages: dictionaries with role and content.
            tools: the template's `tools`.

        Raises:
            ChatTemplateError: if the template rejects the conversation, or has no generation blocks.
        """
        if not self.marks_generations:
            raise ChatTemplateError(
                f"the chat template of {self.owner} has no {{% generation %}} blocks, so the assistant's tokens "
                "cannot be distinguished from the template's; put {% generation %} and {% endgeneration %} around the "
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
                    chat_template=self.source,
                    return_assistant_tokens_mask=track,
                    **self._variables(tools, add_generation_prompt),
                )
        except Exception as error:
            # Any exception type: a template is a program, which may divide by zero or recurse without end.
            roles = [message["role"] for message in messages]
            kind = "" if isinstance(error, jinja2.TemplateError | TypeError) else f"{type(error).__name__}: "
            raise ChatTemplateError(
                f"the chat template of {self.owner} rejects a conversation with roles {roles}: {kind}{error}"
            ) from error
        texts, spans = rendered
        return texts[0], spans[0] if track else []


def check_template_syntax(source: str, owner: str) -> None:
    """Check that a text is a Jinja template.

    `owner` is the file of the template, or the name of the tokenizer that has it.

    Raises:
        ChatTemplateError: if it is not; the message has the line.
    """
    try:
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION_BLOCKS.sub("", source))
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(
            f"the chat template of {owner} is not valid Jinja, line {error.lineno}: {error.message}; correct it, or "
            "name another one with tokenizer.chat_template"
        ) from error


def check_template_ends(source: str, owner: str) -> None:
    """Render a template once in a process with limits, because it may loop, or build a text, without end.

    A template that does so only for some conversations is not found. `owner` is the name of the tokenizer, for error
    messages.

    Raises:
        ChatTemplateError: if the process exceeds its time or memory; other problems of the template are not reported.
    """
    given = json.dumps({"source": _GENERATION_BLOCKS.sub("", source), "messages": [*_PROBE, _PROBE_REPLY, *_PROBE]})
    command = [sys.executable, "-c", _TRIAL.format(seconds=TRIAL_SECONDS, memory=TRIAL_MEMORY)]
    try:
        trial = subprocess.run(command, input=given.encode(), capture_output=True, timeout=TRIAL_TIMEOUT, check=False)
        is_within_limits = trial.returncode >= 0 and trial.returncode != _OUT_OF_MEMORY
    except subprocess.TimeoutExpired:
        is_within_limits = False
    if not is_within_limits:
        raise ChatTemplateError(
            f"the chat template of {owner} does not render a message within {TRIAL_SECONDS} s and "
            f"{TRIAL_MEMORY // 2**20} MiB; use another one with tokenizer.chat_template"
        )


TRIAL_SECONDS = 5
"""CPU seconds for a template to render a short conversation; real ones take milliseconds."""
TRIAL_MEMORY = 2**30
"""Address space of that process, in bytes."""
TRIAL_TIMEOUT = 120.0
"""Wall-clock seconds of that process."""
_OUT_OF_MEMORY = 3
# As in transformers, which takes seconds to import; without the tags of generation blocks.
_TRIAL = f"""
import json, resource, sys
import jinja2.ext, jinja2.sandbox
resource.setrlimit(resource.RLIMIT_CPU, ({{seconds}}, {{seconds}}))
resource.setrlimit(resource.RLIMIT_AS, ({{memory}}, {{memory}}))
given = json.load(sys.stdin)
def refuse(message):
    raise jinja2.TemplateError(message)
extensions = [jinja2.ext.loopcontrols]
environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
environment.filters["tojson"] = lambda value, **_: json.dumps(value)
environment.globals.update(raise_exception=refuse, strftime_now=lambda format: "")
try:
    environment.from_string(given["source"]).render(messages=given["messages"], add_generation_prompt=True)
except MemoryError:
    sys.exit({_OUT_OF_MEMORY})
except Exception:
    pass
"""


class TemplateEncoder:
    """Tokenizes rendered templates; control tokens in contents stay plain text."""

    def __init__(self, backend: Tokenizer, stop_tokens: Iterable[str]):
        """Create an encoder from a private copy of a tokenizer that neither truncates nor pads.

        `stop_tokens` are texts to escape in addition to those of the tokens flagged as special.
        """
        self._backend = Tokenizer.from_str(backend.to_str())
        self._backend.no_truncation()
        self._backend.no_padding()
        # Templates contain their own special tokens; a post-processor would only trim spaces from the offsets.
        self._backend.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
        self.is_local = not isinstance(self._backend.model, models.Unigram)
        """Whether the end of a long word does not change the tokens at its start; see `encode_start`."""
        self._backend.add_tokens([AddedToken(_BOUNDARY, normalized=False, special=False)])
        normalizer = self._backend.normalizer
        prepends = normalizer is not None and normalizer.normalize_str(_ANCHOR).partition(_ANCHOR)[0] != ""
        self._lead = _BOUNDARY + _ANCHOR if prepends else _BOUNDARY
        special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        # A text of one character cannot be split.
        control = sorted(text for text in {*special, *stop_tokens} if len(text) > 1)
        alternatives = "|".join(re.escape(text) for text in (*control, _BOUNDARY))
        self._control_start = re.compile(f"(?=(?:{alternatives})).", re.DOTALL)
        self._starts = {text[:2] for text in (*control, _BOUNDARY)}

    def escape(self, value: Any, mark: str) -> Any:
        """Insert the mark into every control token's text in a JSON value, keys included."""
        if isinstance(value, str):
            # Much faster than the expression, which few texts need.
            is_plain = not any(start in value for start in self._starts)
            return value if is_plain else self._control_start.sub(lambda match: match[0] + mark, value)
        if isinstance(value, Mapping):
            return {self.escape(str(key), mark): self.escape(item, mark) for key, item in value.items()}
        return [self.escape(item, mark) for item in value] if isinstance(value, list | tuple) else value

    def encode(
        self, text: str, mark: str, continues: bool = False, cuts: Sequence[int] = (), limit: int | None = None
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokenize rendered text, with the template's control tokens.

        Args:
            text: rendered from escaped messages.
            mark: the mark that they were escaped with.
            continues: whether the tokens continue earlier ones.
            cuts: ascending character indices at which a token must start.
            limit: number of tokens after which further ones may be left out; None for all.

        Returns:
            Token ids, and the `[start, end)` characters of `text` of each token.
        """
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        for position, piece in _pieces(text, mark, cuts):
            if limit is not None and len(ids) >= limit:
                break
            lead = self._lead if continues or position else ""
            # With byte fallback the lead has up to eight tokens.
            needed = None if limit is None else limit - len(ids) + 8
            encoding = encode_start(self._encode, lead + piece, needed, self.is_local)
            skipped = 1 if lead else 0
            while _ANCHOR in lead and skipped < len(encoding.ids) and encoding.offsets[skipped][1] <= len(lead):
                skipped += 1
            shift = position - len(lead)
            ids += encoding.ids[skipped:]
            offsets += [(start + shift, end + shift) for start, end in encoding.offsets[skipped:]]
        return ids, offsets

    def _encode(self, text: str) -> Encoding:
        return self._backend.encode(text, add_special_tokens=False)


def encode_start(encode: Callable[[str], Encoding], text: str, limit: int | None, is_local: bool) -> Encoding:
    """Tokenize a text, or so much of it that its first tokens are those of the whole text.

    The text is cut at a character that does not combine with earlier ones, `_MARGIN` tokens behind those that are
    needed: merges of byte-pair encoding do not reach that far. Other tokenizers choose all tokens of a word together.

    Args:
        encode: the tokenizer.
        text: the text.
        limit: number of tokens after which further ones are left out if the text is cut; None for all.
        is_local: whether the end of a long word does not change the tokens at its start.
    """
    if limit is None:
        return encode(text)
    size = _CHARACTERS * (limit + _MARGIN)
    while size < len(text):
        if not unicodedata.combining(text[size]):
            encoding, last = encode(text[:size]), limit + _MARGIN - 1
            if len(encoding.ids) > last + 1 and (is_local or encoding.word_ids[limit - 1] != encoding.word_ids[last]):
                encoding.truncate(limit)
                return encoding
        size *= 4
    return encode(text)


def _pieces(text: str, mark: str, cuts: Sequence[int]) -> Iterator[tuple[int, str]]:
    """Yield each piece of the text between marks and cuts with its start."""
    position = 0
    for part in text.split(mark):
        end = position + len(part)
        for start, stop in itertools.pairwise([position, *(cut for cut in cuts if position < cut < end), end]):
            yield start, text[start:stop]
        position = end + len(mark)


def unused_mark(messages: Iterable[Message], *templates: ChatTemplate) -> str:
    """Return a private-use character that occurs neither in the messages, tools included, nor in the templates.

    Raises:
        ValueError: if a message is not valid Unicode text.
    """
    text = "".join(template.source for template in templates)
    for index, message in enumerate(messages):
        for key, value in message.items():
            part = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            try:
                part.encode("utf-8")
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"the {key} of message {index} has a lone surrogate (half a character) at position {error.start}, "
                    "which cannot be tokenized; repair the text, for example with text.encode('utf-16', "
                    "'surrogatepass').decode('utf-16', 'replace')"
                ) from error
            text += part
    return next(mark for mark in map(chr, range(0x10FFFD, 0xF0000, -1)) if mark not in text)


class Conversation(NamedTuple):
    """Messages and tools as input of a template."""

    messages: tuple[Message, ...]
    """Messages without tools, in roles that the template renders."""
    tools: tuple[ToolSchema, ...]
    """Tool schemas for the template; empty without tools or if the template does not render them."""


def fit_conversation(messages: Sequence[Message], template: ChatTemplate) -> Conversation:
    """Convert a conversation to a form that a template renders.

    If the template renders tools, the tools of all messages become the template's `tools`, and messages without other
    content are dropped. Otherwise they are described in the text of their message, after its content. If the template
    does not render the role `tool`, consecutive messages of that role become one user message, in the format of Qwen's
    template.

    Converting the messages before and after a reply separately gives the same result as converting all at once.
    """
    carried = [message for message in messages if "tools" in message]
    tools = tuple(tool for message in carried for tool in message["tools"]) if template.renders_tools else ()
    plain = [shown for message in messages for shown in _without_tools(message, bool(tools))]
    return Conversation(tuple(plain if template.renders_tool_role else _as_users(plain)), tools)


def _without_tools(message: Message, by_template: bool) -> list[Message]:
    """Return a message without its tools, which are described in its content unless the template renders them."""
    if "tools" not in message:
        return [message]
    words = "" if by_template else message.get("tools_in_words", "")
    content = "\n\n".join(part for part in (message["content"], words) if part)
    return [Message(role=message["role"], content=content)] if content else []


def _as_users(messages: Iterable[Message]) -> list[Message]:
    """Return the messages with tool responses in the user's role."""
    fitted: list[Message] = []
    for is_answer, run in itertools.groupby(messages, lambda message: message["role"] == "tool"):
        if is_answer:
            content = "\n".join(f"<tool_response>\n{message['content']}\n</tool_response>" for message in run)
            fitted.append(Message(role="user", content=content))
        else:
            fitted += run
    return fitted
