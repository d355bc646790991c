# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Conversations to tokens and back: prompts, assistant masks, exact-token continuation of sampled rollouts."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from marin_rl.tokenization.chat_template import (
    ChatTemplate,
    ChatTemplateError,
    TemplateEncoder,
    ToolSchema,
    template_encoder,
    unused_mark,
)
from marin_rl.tokenization.tool_messages import fit_conversation
from marin_rl.types import Message


@dataclasses.dataclass(frozen=True, eq=False)
class ChatTokenizer:
    """A Hugging Face tokenizer and its chat template.

    Text that spells out a special token, in whatever message, stays text: only the template makes special
    tokens. Tools that a message brings along, and messages of the role `tool`, are put as the template can show
    them. Safe to share between threads.

    Raises:
        ChatTemplateError: if the tokenizer has no chat template, or one that cannot render a plain exchange.
        ValueError: if the tokenizer is not a fast one, or nothing could end a generation.

    >>> from marin_rl.tokenization.byte_tokenizer import byte_tokenizer
    >>> chat = ChatTokenizer(byte_tokenizer())
    >>> chat.prompt_tokens([{"role": "user", "content": "2+3="}])
    (259, 50, 43, 51, 61, 257, 260)
    >>> chat.decode_reply([53, 257])
    '5'
    """

    tokenizer: PreTrainedTokenizerBase
    """The wrapped tokenizer; its chat template is the one in force."""
    more_stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a generation besides eos and the template's end of turn, as a model's
    `generation_config.json` may list."""

    def __post_init__(self) -> None:
        if not self.tokenizer.is_fast:
            raise ValueError(
                f"{self.name} is a slow tokenizer ({type(self.tokenizer).__name__}), which cannot say which "
                "characters a token stands for; load it with use_fast=True, or convert it to a tokenizer.json"
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
        if not self.stop_token_ids:
            raise ValueError(
                f"{self.name} has no eos token and its chat template ends a reply with no special token, so nothing "
                "would end a generation; set the tokenizer's eos_token"
            )

    @property
    def name(self) -> str:
        """The folder or hub name, as error messages give it."""
        return self.tokenizer.name_or_path or type(self.tokenizer).__name__

    @functools.cached_property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included: the largest id plus one."""
        return max(len(self.tokenizer), 1 + max(self.tokenizer.get_vocab().values()))

    @functools.cached_property
    def pad_token_id(self) -> int:
        """The padding token; where the tokenizer has none, the first stop token (eos, if there is one).

        That is harmless: padding is known by segment id 0, never by its token.
        """
        pad = self.tokenizer.pad_token_id
        return self.stop_token_ids[0] if pad is None else pad

    @functools.cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a generation: eos, the template's end of turn, and `more_stop_token_ids`."""
        eos = self.tokenizer.eos_token_id
        found = (*(() if eos is None else (eos,)), *self._end_of_turn(), *self.more_stop_token_ids)
        return tuple(dict.fromkeys(found))

    def prompt_tokens(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Tokens that ask for the next reply: the conversation, then the template's generation prompt.

        Raises:
            ChatTemplateError: if the template refuses the conversation.
        """
        self._require_messages(messages)
        mark = self._mark(messages)
        return tuple(self._encoder.encode(self._text_of(messages, mark), mark)[0])

    def encode_conversation(self, messages: Sequence[Message]) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """Tokens of a finished conversation, and which of them the assistant wrote.

        For text that came without tokens only: tokens that were sampled are never encoded again.

        Args:
            messages: at least one.

        Returns:
            Token ids `[length]`, and a mask `[length]` that is True where a generation block of the template
            wrote at least one of the token's characters. No token has characters on both sides of a block's start,
            where a prompt would have ended.

        Raises:
            ChatTemplateError: if the template has no generation blocks, marks none of the assistant's text, or
                refuses the conversation.
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
                "assistant messages; they must stand directly around the assistant's content, not inside a macro or "
                "a set block"
            )
        return tuple(ids), mask

    def encode_replies(
        self, messages: Sequence[Message], num_prompt_messages: int
    ) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """Tokens of a finished conversation as an episode would have had them, and which of them are replies.

        The prompt asks for the first reply, each reply is its text and the token that ends a turn, and observations
        follow it as in `observation_tokens`. Unlike `encode_conversation` it needs no generation blocks. Where the
        template rewrites the history, the conversation ends with the reply before.

        Args:
            messages: the prompt, a reply, and further observations and replies.
            num_prompt_messages: messages of the prompt, at least 1; assistant messages among them are no replies.

        Returns:
            Token ids `[length]`, and a mask `[length]` that is True on replies.

        Raises:
            ChatTemplateError: if the template refuses the conversation.
        """
        end_token = (*self._end_of_turn(), *self.stop_token_ids)[0]
        roles = [message["role"] for message in messages]
        replies = [index for index in range(num_prompt_messages, len(messages)) if roles[index] == "assistant"]
        ids = list(self.prompt_tokens(messages[:num_prompt_messages]))
        mask = [False] * len(ids)
        for index, following in itertools.zip_longest(replies, replies[1:]):
            mark = self._mark(messages[index : index + 1])
            [said] = self._encoder.escape(messages[index : index + 1], mark)
            reply = [*self._encoder.encode(said["content"], mark, continues=True)[0], end_token]
            ids += reply
            mask += [True] * len(reply)
            if following is not None:
                observed = messages[index + 1 : following]
                observation, rewritten = self.observation_tokens(messages[: index + 1], ids, observed)
                if rewritten:
                    break
                ids += observation
                mask += [False] * len(observation)
        return tuple(ids), tuple(mask)

    def observation_tokens(
        self, history: Sequence[Message], sequence: Sequence[int], observation: Sequence[Message]
    ) -> tuple[tuple[int, ...], bool]:
        """Tokens that put an observation before the policy, after exactly the tokens that it saw and sampled.

        The template is rendered up to the last reply, and with everything. Where the second text is the first
        plus the reply plus a rest, the rest is tokenized and continues the sequence: it starts with the end
        token if the reply was cut before it was sampled, and without it if it was. Otherwise the template
        rewrote something that the policy saw or said (earlier thinking, stripped spaces, another end token).

        Args:
            history: all messages so far; the last is the reply that the sequence ends with.
            sequence: exact tokens so far, prompt and generations, sampled stop tokens included. At least one.
            observation: the messages that answer the reply. At least one.

        Returns:
            `(tokens to append to sequence, False)`, or `(the complete new context, True)` where the template
            rewrote the history, so that a new sequence starts.

        Raises:
            ChatTemplateError: if the template refuses the conversation.
            ValueError: if the history does not end with a reply, or one of the arguments is empty.
        """
        self._require_messages(observation)
        if not history or history[-1]["role"] != "assistant":
            last = history[-1]["role"] if history else None
            raise ValueError(f"history must end with the assistant's reply, but its last role is {last!r}")
        if not sequence:
            raise ValueError("sequence is empty; it holds the prompt and the reply that history ends with")
        everything = [*history, *observation]
        mark = self._mark(everything)
        before, after = self._text_of(history[:-1], mark), self._text_of(everything, mark)
        [said] = self._encoder.escape(history[-1:], mark)
        kept = before + said["content"]
        if not after.startswith(kept) and self._sampled(sequence, " " + history[-1]["content"]):
            # Sentencepiece's decoder drops the space of a reply's first word, and templates made for it put it back.
            kept = before + " " + said["content"]
        rest = self._rest(after, kept, sequence[-1], mark)
        if rest is None:
            return tuple(self._encoder.encode(after, mark)[0]), True
        return rest, False

    def decode_reply(self, token_ids: Sequence[int]) -> str:
        """Text of a generation, without its stop token and without special tokens sampled on the way.

        Bytes that are not valid UTF-8 become U+FFFD.
        """
        return self.tokenizer.decode(
            list(token_ids[: self._reply_length(token_ids)]),
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer.get_chat_template(), self.tokenizer.special_tokens_map, self.name)

    @functools.cached_property
    def _tool_template(self) -> ChatTemplate:
        """The template for conversations with tools: some tokenizers have one of its own for them."""
        source = self.tokenizer.get_chat_template(tools=[])
        if source == self._template.source:
            return self._template
        return ChatTemplate(source, self.tokenizer.special_tokens_map, self.name)

    def _mark(self, messages: Sequence[Message]) -> str:
        return unused_mark(messages, self._template, self._tool_template)

    def _fitted(
        self, messages: Sequence[Message], mark: str
    ) -> tuple[ChatTemplate, list[dict[str, str]], list[ToolSchema]]:
        """The template for a conversation, and messages and tools as it can show them, escaped."""
        template = self._tool_template if any("tools" in message for message in messages) else self._template
        fitted = fit_conversation(messages, template)
        return template, self._encoder.escape(fitted.messages, mark), self._encoder.escape_tools(fitted.tools, mark)

    def _text_of(self, messages: Sequence[Message], mark: str) -> str:
        """The conversation as text that asks for the next reply."""
        template, shown, tools = self._fitted(messages, mark)
        return template.render(shown, add_generation_prompt=True, tools=tools)

    @functools.cached_property
    def _encoder(self) -> TemplateEncoder:
        stop_tokens = self.tokenizer.convert_ids_to_tokens(list(self.stop_token_ids))
        return template_encoder(self.tokenizer.backend_tokenizer, stop_tokens)

    def _end_of_turn(self) -> tuple[int, ...]:
        """The added token that the template puts right after a reply, if it puts one."""
        reply = "probe-reply"
        messages = [{"role": "user", "content": "probe"}, {"role": "assistant", "content": reply}]
        text = self._template.render(messages, add_generation_prompt=False)
        _, found, rest = text.rpartition(reply)
        if not found:
            raise ChatTemplateError(f"the chat template of {self.name} leaves out the assistant's content")
        ids = self.tokenizer(rest, add_special_tokens=False)["input_ids"]
        return tuple(ids[:1]) if ids and ids[0] in self.tokenizer.added_tokens_decoder else ()

    def _rest(self, text: str, prefix: str, last_token: int, mark: str) -> tuple[int, ...] | None:
        """Tokens of the text after the prefix that follow `last_token`; None where they cannot."""
        if not text.startswith(prefix):
            return None
        ids, _ = self._encoder.encode(text[len(prefix) :], mark, continues=True)
        if last_token not in self.stop_token_ids:
            return tuple(ids)
        return tuple(ids[1:]) if ids[:1] == [last_token] else None

    def _sampled(self, sequence: Sequence[int], text: str) -> bool:
        """Whether the sequence ends with the text, its stop token aside."""
        ids = list(sequence[: self._reply_length(sequence)])
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False).endswith(text)

    def _reply_length(self, token_ids: Sequence[int]) -> int:
        length = len(token_ids)
        while length and token_ids[length - 1] in self.stop_token_ids:
            length -= 1
        return length

    def _require_messages(self, messages: Sequence[Message]) -> None:
        if not messages:
            raise ValueError("there are no messages; a conversation needs at least one")


def truncate_at_reply(
    token_ids: Sequence[int], assistant_mask: Sequence[bool], max_length: int
) -> tuple[tuple[int, ...], tuple[bool, ...]] | None:
    """Fit a conversation into a length by dropping whole replies from its end, never part of one.

    A conversation that fits is kept as it is. One that does not is cut after the last reply (run of True in the
    mask) that ends within the limit, so that no reply loses its end and the policy never learns to stop short.

    Args:
        token_ids: `[length]`.
        assistant_mask: `[length]`, True where the assistant wrote the token.
        max_length: most tokens to keep, at least one.

    Returns:
        Token ids and mask of equal length, at most `max_length`, with at least one True; or None where no
        complete reply fits, so that nothing is left to train on.

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
    """Which tokens share a character with a span; both in ascending order."""
    mask = []
    current = 0
    for start, end in offsets:
        while current < len(spans) and spans[current][1] <= start:
            current += 1
        mask.append(current < len(spans) and end > spans[current][0] and end > start)
    return tuple(mask)
