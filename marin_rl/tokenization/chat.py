# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Tokenization of conversations: prompts, assistant masks, exact-token continuation of sampled rollouts."""

import dataclasses
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence

import jinja2
import tokenizers
import transformers
from transformers import PreTrainedTokenizerBase

from marin_rl.tokenization.chat_template import (
    ChatTemplate,
    ChatTemplateError,
    TemplateEncoder,
    ToolSchema,
    encode_start,
    fit_conversation,
    unused_mark,
)
from marin_rl.types import Message

_HEADER_TOKENS = 128
"""Largest number of tokens of the assistant's header and what the generation prompt adds to it."""
_THINK_TOKENS = 16
"""Largest number of tokens of `<think>` and the white space after it."""
_TAGS = re.compile(r"(?<=\S)(\s*(<[^<>\s]+>|\[[^\[\]\s]+\]))+\s*$")
"""Tags at the end of a text, after other text."""


@dataclasses.dataclass(frozen=True, eq=False)
class ChatTokenizer:
    """A Hugging Face tokenizer and its chat template.

    Special tokens come only from the template: text that spells out a special token stays text. Tools of a message and
    messages with the role `tool` are converted to a form that the template renders. Thread-safe.

    Raises:
        ChatTemplateError: if the tokenizer has no chat template, or its template cannot render a plain exchange.
        ValueError: if the tokenizer is not a fast one, or has no token that ends a generation.

    >>> from marin_rl.tokenization.load import byte_tokenizer
    >>> chat = ChatTokenizer(byte_tokenizer())
    >>> chat.prompt_tokens([{"role": "user", "content": "2+3="}])
    (259, 50, 43, 51, 61, 257, 260)
    >>> chat.decode_reply([53, 257])
    '5'
    """

    tokenizer: PreTrainedTokenizerBase
    """The wrapped tokenizer, with its chat template."""
    more_stop_token_ids: tuple[int, ...] = ()
    """Additional tokens that end a generation, for example from a model's `generation_config.json`."""

    def __post_init__(self) -> None:
        if not self.tokenizer.is_fast:
            raise ValueError(
                f"{self.name} is a slow tokenizer ({type(self.tokenizer).__name__}), which does not report the "
                "characters of a token; load it with use_fast=True, or convert it to a tokenizer.json"
            )
        if not self.tokenizer.chat_template:
            raise ChatTemplateError(
                f"{self.name} has no chat template; give the path of a Jinja file as tokenizer.chat_template, or "
                "`plain` for the contents of the messages one after another"
            )
        if not isinstance(self.tokenizer.chat_template, str | dict):
            raise ChatTemplateError(
                f"the chat_template of {self.name} is {self.tokenizer.chat_template!r}; it must be the text of a Jinja "
                "template. Correct tokenizer_config.json, or give a file as tokenizer.chat_template"
            )
        if isinstance(self.tokenizer.chat_template, dict) and "default" not in self.tokenizer.chat_template:
            raise ChatTemplateError(
                f"{self.name} has the chat templates {', '.join(map(repr, self.tokenizer.chat_template))}, but none of "
                "the name 'default'; rename one, or name a Jinja file with tokenizer.chat_template"
            )
        if not self.stop_token_ids:
            raise ValueError(
                f"{self.name} has no eos token, and its chat template ends a reply without a special token, so "
                "generations would never end; set the tokenizer's eos_token"
            )

    @property
    def name(self) -> str:
        """Folder or hub name, for error messages."""
        return self.tokenizer.name_or_path or type(self.tokenizer).__name__

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 checksum of everything that determines the tokens of a conversation."""
        versions = [module.__version__ for module in (jinja2, tokenizers, transformers)]
        templates = self._template.source, self._tool_template.source
        special = self.tokenizer.special_tokens_map, self.stop_token_ids, self.tokenizer.split_special_tokens
        parts = [self.tokenizer.backend_tokenizer.to_str(), templates, special, versions]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()

    @functools.cached_property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included: the largest id plus one."""
        return max(len(self.tokenizer), 1 + max(self.tokenizer.get_vocab().values()))

    @functools.cached_property
    def longest_token(self) -> int:
        """Maximum number of characters of a token's text."""
        return max(map(len, self.tokenizer.get_vocab()))

    @functools.cached_property
    def pad_token_id(self) -> int:
        """The padding token; if the tokenizer has none, the first stop token.

        The choice does not matter: padding is identified by segment id 0, not by its token.
        """
        pad = self.tokenizer.pad_token_id
        return self.stop_token_ids[0] if pad is None else pad

    @functools.cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a generation: eos, the template's end of turn, and `more_stop_token_ids`."""
        eos = self.tokenizer.eos_token_id
        ids = (*(() if eos is None else (eos,)), *self._end_of_turn, *self.more_stop_token_ids)
        return tuple(dict.fromkeys(ids))

    def prompt_tokens(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Tokenize a conversation with the template's generation prompt.

        Raises:
            ChatTemplateError: if the template rejects the conversation.
        """
        self._require_messages(messages)
        mark = self._mark(messages)
        return tuple(self._encoder.encode(self._render(messages, mark), mark)[0])

    def text_tokens(self, text: str, max_tokens: int | None = None) -> list[int]:
        """Tokenize a text that is no conversation, with the special tokens in it but none that the tokenizer adds.

        After `max_tokens` tokens, some may be left out; None for all tokens.
        """
        return encode_start(
            lambda part: self.tokenizer(part, add_special_tokens=False).encodings[0],
            text,
            max_tokens,
            self._encoder.is_local,
        ).ids

    def encode_conversation(self, messages: Sequence[Message]) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """Tokenize a finished conversation, with a mask of the assistant's tokens.

        Only for text without tokens; sampled tokens are never re-encoded.

        Args:
            messages: at least one.

        Returns:
            Token ids `[length]`, and a mask `[length]` that is True for tokens with at least one character from a
            generation block of the template. No token crosses the start of a generation block, as a prompt would end
            there.

        Raises:
            ChatTemplateError: if the template has no generation blocks, marks none of the assistant's text, or
                rejects the conversation.
        """
        self._require_messages(messages)
        mark = self._mark(messages)
        template, shown, tools = self._fitted(messages, mark)
        text, spans = template.render_with_spans(shown, tools)
        ids, offsets = self._encoder.encode(text, mark)
        if straddled := [start for start, _ in spans if any(first < start < end for first, end in offsets)]:
            ids, offsets = self._encoder.encode(text, mark, cuts=straddled)
        mask = _overlapping(offsets, spans)
        if not any(mask) and any(message["role"] == "assistant" and message["content"] for message in messages):
            raise ChatTemplateError(
                f"the generation blocks in the chat template of {self.name} marked no token of a conversation with "
                "assistant messages; put them directly around the assistant's content, not inside a macro or a set "
                "block"
            )
        return tuple(ids), mask

    def encode_replies(
        self, messages: Sequence[Message], num_prompt_messages: int, max_tokens: int | None = None
    ) -> list[tuple[tuple[int, ...], tuple[bool, ...]]]:
        """Tokenize a finished conversation as a sampled episode, with masks of the replies.

        The prompt ends with the generation prompt, each reply is its text and the end-of-turn token, and observations
        are those of `observation_tokens`. Unlike `encode_conversation` it needs no generation blocks. If the template
        rewrites the history, the next reply begins a new sequence, as in an episode; each reply is on the mask of one.
        The start of a reply that the prompt already contains, such as `<think>`, is not repeated.

        Args:
            messages: the prompt, a reply, and further observations and replies.
            num_prompt_messages: number of messages in the prompt, at least 1; its assistant messages are not replies.
            max_tokens: number of tokens of a sequence after which some may be left out, not the end of a reply; None
                for all tokens.

        Returns:
            Token ids `[length]` of each sequence, at least one, and a mask `[length]` that is True on replies.

        Raises:
            ChatTemplateError: if the template rejects the conversation.
        """
        end_token = (*self._end_of_turn, *self.stop_token_ids)[0]
        self._require_messages(messages)
        mark, roles = self._mark(messages), [message["role"] for message in messages]
        replies = [index for index in range(num_prompt_messages, len(messages)) if roles[index] == "assistant"]
        prompts = self._render_prompts(messages, replies or [num_prompt_messages], mark)
        before = next(prompts)
        ids = self._encoder.encode(before, mark, limit=max_tokens)[0]
        mask = [False] * len(ids)
        sequences = []
        for index, following in itertools.zip_longest(replies, replies[1:]):
            content, room = messages[index]["content"], None if max_tokens is None else max(max_tokens - len(ids), 0)
            escaped = self._encoder.escape(without_start(content, self.reply_start(ids)), mark)
            sampled = functools.partial(self._sampled, ids[-_HEADER_TOKENS:], escaped, mark)
            reply = [*self._encoder.encode(escaped, mark, continues=True, limit=room)[0], end_token]
            ids += reply
            mask += [True] * len(reply)
            if following is None:
                break
            self._require_messages(messages[index + 1 : following])
            after = next(prompts)
            observed = self._continuation(before, after, content, mark, end_token, sampled, room)
            if observed is None:
                sequences.append((tuple(ids), tuple(mask)))
                ids, mask, observed = [], [], self._encoder.encode(after, mark, limit=max_tokens)[0]
            ids += observed
            mask += [False] * len(observed)
            before = after
        return [*sequences, (tuple(ids), tuple(mask))]

    def observation_tokens(
        self, history: Sequence[Message], sequence: Sequence[int], observation: Sequence[Message]
    ) -> tuple[tuple[int, ...], bool]:
        """Tokenize an observation so that it continues exactly the tokens that the policy saw and sampled.

        The template is rendered up to the last reply, and with all messages. If the second text is the first text plus
        the reply plus a rest, the rest is tokenized and continues the sequence. It starts with the end token only if
        the reply was cut before its end token was sampled. Otherwise the template rewrote part of the history (for
        example earlier thinking, stripped spaces or another end token).

        Args:
            history: all messages so far; the last one is the reply that the sequence ends with.
            sequence: exact tokens so far, prompt and generations, sampled stop tokens included. At least one.
            observation: the messages that follow the reply. At least one.

        Returns:
            `(tokens to append to sequence, False)`, or `(the complete new context, True)` if the template rewrote the
            history, so that a new sequence starts.

        Raises:
            ChatTemplateError: if the template rejects the conversation.
            ValueError: if the history does not end with a reply, or an argument is empty.
        """
        self._require_messages(observation)
        if not history or history[-1]["role"] != "assistant":
            last = history[-1]["role"] if history else None
            raise ValueError(f"history must end with the assistant's reply, but its last role is {last!r}")
        if not sequence:
            raise ValueError("sequence is empty; it holds the prompt and the reply that history ends with")
        messages = [*history, *observation]
        mark = self._mark(messages)
        before, after = self._render_prompts(messages, [len(history) - 1, len(messages)], mark)
        sampled = functools.partial(self._without_stop_tokens, sequence)
        observed = self._continuation(before, after, history[-1]["content"], mark, sequence[-1], sampled)
        if observed is None:
            return tuple(self._encoder.encode(after, mark)[0]), True
        return tuple(observed), False

    def _continuation(
        self,
        before: str,
        after: str,
        reply: str,
        mark: str,
        last: int,
        sampled: Callable[[], Sequence[int]],
        limit: int | None = None,
    ) -> list[int] | None:
        """Tokenize what the template adds to a sequence between two prompts; None if it rewrote the history."""
        # Both prompts are rendered with `mark`. `last` is the last token of the sequence; `sampled` returns at least
        # its last tokens without stop tokens, reply included. After `limit` tokens some may be left out.
        prefix = before + self._encoder.escape(reply, mark)
        if not after.startswith(prefix):
            # Sentencepiece's decoder drops the leading space of a reply, and templates made for it restore the space.
            prefix = f"{before} {prefix[len(before) :]}"
            if not after.startswith(prefix) or not self._decode(sampled()).endswith(" " + reply):
                return None
        # The first token is that of the end of the turn; another one separates this reply from the next.
        room = None if limit is None else limit + 2
        ids, _ = self._encoder.encode(after[len(prefix) :], mark, continues=True, limit=room)
        if last not in self.stop_token_ids:
            return ids
        return ids[1:] if ids[:1] == [last] else None

    def decode_reply(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode a generation without its stop token.

        Bytes that are not valid UTF-8 become U+FFFD. With `skip_special_tokens`, special tokens before the stop token
        are left out, too.
        """
        ids = self._without_stop_tokens(token_ids)
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    def opens_thoughts(self, prompt: Sequence[int]) -> bool:
        """Return whether a prompt ends with `<think>`, to which templates of reasoning models may add a newline.

        `prompt` has its tokens, or the last ones.
        """
        end = self._decode(prompt[-_THINK_TOKENS:])
        return end.rstrip().endswith("<think>")

    def reply_start(self, prompt: Sequence[int]) -> str:
        r"""Return the text of the assistant's turn that a prompt already contains, such as `<think>\n`.

        `prompt` has its tokens, or the last ones.

        >>> from marin_rl.tokenization.load import byte_tokenizer
        >>> chat = ChatTokenizer(byte_tokenizer())
        >>> prompt = chat.prompt_tokens([{"role": "user", "content": "2+3="}])
        >>> chat.reply_start(prompt), chat.reply_start((*prompt, *b"<think>"))
        ('', '<think>')
        """
        header, opened = self._header_and_tags
        end = ""
        # The header is usually among the last tokens, and to decode more takes long.
        for length in (_THINK_TOKENS, _HEADER_TOKENS):
            end = self._decode(prompt[-length:])
            if header and header in end:
                # Templates may end the header with other spaces in the generation prompt than in the history.
                return end.rpartition(header)[2].lstrip()
        opening = next((tag for tag in (opened, "<think>") if tag and end.rstrip().endswith(tag)), "")
        return end[end.rindex(opening) :] if opening else ""

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer.get_chat_template(), self.tokenizer.special_tokens_map, self.name)

    @functools.cached_property
    def _tool_template(self) -> ChatTemplate:
        """The template for conversations with tools; some tokenizers have a separate one."""
        source = self.tokenizer.get_chat_template(tools=[])
        if source == self._template.source:
            return self._template
        return ChatTemplate(source, self.tokenizer.special_tokens_map, self.name)

    @functools.cached_property
    def _header_and_tags(self) -> tuple[str, str]:
        """The text between a message and a reply, and without it the tags that the generation prompt adds."""
        question = [{"role": "user", "content": "probe"}]
        reply = {"role": "assistant", "content": "probe-reply"}
        try:
            before = self._template.render(question, add_generation_prompt=False)
            prompt = self._template.render(question, add_generation_prompt=True)
            # Templates add empty thoughts to the last reply, but not to earlier ones.
            history = self._template.render([*question, reply, *question], add_generation_prompt=False)
        except ChatTemplateError:
            return "", ""
        if not (prompt.startswith(before) and history.startswith(before)):
            return "", ""
        added, shown = (text.removeprefix(before).partition("probe-reply")[0] for text in (prompt, history))
        # Two different tags may begin with the same letters.
        header = re.sub(r"[<\[][^>\]]*$", "", _common_start(added, shown).partition("<think>")[0])
        tags = _TAGS.search(header)
        if tags and self._are_ordinary(tags[0]):
            header = header[: tags.start()]
        if header.strip():
            return header, ""
        return "", added.strip() if added.lstrip()[:1] in ("<", "[") and self._are_ordinary(added) else ""

    def _are_ordinary(self, tags: str) -> bool:
        return not any(token in tags for token in self.tokenizer.all_special_tokens)

    def _mark(self, messages: Sequence[Message]) -> str:
        return unused_mark(messages, self._template, self._tool_template)

    def _fitted(
        self, messages: Sequence[Message], mark: str
    ) -> tuple[ChatTemplate, list[dict[str, str]], list[ToolSchema]]:
        """Return the template of a conversation, with escaped messages and tools that the template renders."""
        template = self._tool_template if any("tools" in message for message in messages) else self._template
        fitted = fit_conversation(messages, template)
        return template, self._encoder.escape(fitted.messages, mark), self._encoder.escape(fitted.tools, mark)

    def _render(self, messages: Sequence[Message], mark: str) -> str:
        """Render the conversation with the generation prompt."""
        template, shown, tools = self._fitted(messages, mark)
        return template.render(shown, add_generation_prompt=True, tools=tools)

    def _render_prompts(self, messages: Sequence[Message], ends: Sequence[int], mark: str) -> Iterator[str]:
        """Render the prompts of several replies: the messages before each, for the index of each or the length."""
        if any("tools" in message for message in messages[ends[0] : ends[-1]]):
            return (self._render(messages[:end], mark) for end in ends)
        template, shown, tools = self._fitted(messages[: ends[-1]], mark)
        parts = (messages[start:end] for start, end in itertools.pairwise((0, *ends)))
        counts = itertools.accumulate(len(fit_conversation(part, template).messages) for part in parts)
        return template.render_prompts(shown, list(counts), tools)

    def _sampled(self, prompt_end: Sequence[int], reply: str, mark: str) -> list[int]:
        return [*prompt_end, *self._encoder.encode(reply, mark, continues=True)[0]]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False)

    @functools.cached_property
    def _encoder(self) -> TemplateEncoder:
        stop_tokens = self.tokenizer.convert_ids_to_tokens(list(self.stop_token_ids))
        return TemplateEncoder(self.tokenizer.backend_tokenizer, stop_tokens)

    @functools.cached_property
    def _end_of_turn(self) -> tuple[int, ...]:
        """Return the added token that the template puts directly after a reply, if any."""
        reply = "probe-reply"
        messages = [{"role": "user", "content": "probe"}, {"role": "assistant", "content": reply}]
        text = self._template.render(messages, add_generation_prompt=False)
        _, separator, rest = text.rpartition(reply)
        if not separator:
            raise ChatTemplateError(
                f"the chat template of {self.name} leaves out the assistant's content, message['content']; correct it, "
                "or name another one with tokenizer.chat_template"
            )
        ids = self.tokenizer(rest, add_special_tokens=False)["input_ids"]
        return tuple(ids[:1]) if ids and ids[0] in self.tokenizer.added_tokens_decoder else ()

    def _without_stop_tokens(self, token_ids: Sequence[int]) -> list[int]:
        length = len(token_ids)
        while length and token_ids[length - 1] in self.stop_token_ids:
            length -= 1
        return list(token_ids[:length])

    def _require_messages(self, messages: Sequence[Message]) -> None:
        if not messages:
            raise ValueError("messages is empty; a conversation needs at least one message")


def without_start(reply: str, start: str) -> str:
    r"""Remove the text from a reply that its prompt already contains; white space around and in it may differ.

    Args:
        reply: text of the whole turn of the assistant, or without its start.
        start: the start of the turn in the prompt, such as `<think>\n`.

    >>> without_start("<think>2 + 3", "<think>\n"), without_start("\n<think>\n\n2 + 3", "<think>\n")
    ('2 + 3', '\n2 + 3')
    >>> without_start("<think> </think>5", "<think>\n\n</think>\n\n"), without_start("5", "<think>\n")
    ('5', '5')
    """
    found = re.match(r"\s*" + r"\s*".join(map(re.escape, start.split())), reply)
    if not found or not start.strip():
        return reply
    rest, spaces = reply[found.end() :], start[len(start.rstrip()) :]
    return rest[len(_common_start(rest, spaces)) :]


def _common_start(one: str, other: str) -> str:
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return "".join(character for character, _ in pairs)


def truncate_at_reply(
    token_ids: Sequence[int], assistant_mask: Sequence[bool], max_length: int
) -> tuple[tuple[int, ...], tuple[bool, ...]] | None:
    """Truncate a conversation to a length by dropping whole replies from its end.

    A conversation that fits is unchanged. Otherwise it is cut after the last reply (run of True in the mask) that ends
    within the limit. A partial reply would train the policy to stop early.

    Args:
        token_ids: `[length]`.
        assistant_mask: `[length]`, True on tokens of the assistant.
        max_length: maximum number of tokens, at least one.

    Returns:
        Token ids and mask of equal length, at most `max_length`, with at least one True; or None if no complete reply
        fits.

    Raises:
        ValueError: if the lengths differ, or `max_length` is not positive.

    >>> truncate_at_reply((1, 2, 3, 4, 5, 6), (False, True, True, False, True, True), 5)
    ((1, 2, 3), (False, True, True))
    >>> truncate_at_reply((1, 2, 3), (False, True, True), 2) is None
    True
    """
    if len(token_ids) != len(assistant_mask):
        raise ValueError(f"token_ids has length {len(token_ids)} but assistant_mask has length {len(assistant_mask)}")
    if max_length < 1:
        raise ValueError(f"max_length is {max_length}; it must be at least 1")
    if len(token_ids) <= max_length:
        return (tuple(token_ids), tuple(assistant_mask)) if any(assistant_mask) else None
    followed = (*assistant_mask[1 : max_length + 1], False)
    ends = [i + 1 for i in range(max_length) if assistant_mask[i] and not followed[i]]
    return (tuple(token_ids[: ends[-1]]), tuple(assistant_mask[: ends[-1]])) if ends else None


def _overlapping(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> tuple[bool, ...]:
    """Return which tokens share a character with a span; both in ascending order."""
    mask = []
    current = 0
    for start, end in offsets:
        while current < len(spans) and spans[current][1] <= start:
            current += 1
        mask.append(current < len(spans) and end > spans[current][0] and end > start)
    return tuple(mask)
