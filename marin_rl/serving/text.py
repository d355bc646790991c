# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Text of a generation that arrives in parts: whole characters, stop strings, and tool calls."""

import bisect
import itertools
import json
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple
from uuid import uuid4

from marin_rl.environments.tools import ToolCall, ToolError, parse_call
from marin_rl.rewards.reply_text import CALL_START, ReplyParser
from marin_rl.types import StopReason, WeightVersion

_REPLACEMENT = "\ufffd"
"""Decoders return it for bytes that are not valid UTF-8, such as the first bytes of a character."""
_CONTEXT = 8
"""Tokens before new ones that are decoded with them, because decoders treat the start of a text differently."""
_MAX_CHARACTER = 4
"""Maximum number of bytes of a character, and of tokens that are single bytes."""


class TextPart(NamedTuple):
    """The next part of a reply."""

    token_ids: tuple[int, ...]
    """The next tokens, up to the one that ends the reply, included."""
    logprobs: tuple[float, ...]
    """Their log-probabilities."""
    text: str
    """The next text, which may lag behind the tokens until the last part."""
    finish_reason: str | None = None
    """`stop` or `length` in the last part; None before."""
    stop_reason: int | str | None = None
    """The stop token or stop string of the request that ended the reply; None for others."""
    weight_versions: tuple[WeightVersion, WeightVersion] = (0, 0)
    """Versions of the weights that produced the first token of the reply, and the last one of this part."""


def join_parts(parts: Sequence[TextPart]) -> TextPart:
    """Return the consecutive parts of a reply as one."""
    return parts[-1]._replace(
        token_ids=tuple(itertools.chain.from_iterable(part.token_ids for part in parts)),
        logprobs=tuple(itertools.chain.from_iterable(part.logprobs for part in parts)),
        text="".join(part.text for part in parts),
    )


class ReplyReader:
    r"""Converts the tokens of a generation to text, and ends the reply at the request's stop strings and stop tokens.

    The parts joined are the same however the tokens are divided: text is passed on only in whole characters, and never
    if it may be the beginning of a stop string.

    >>> reader = ReplyReader(lambda tokens: bytes(tokens).decode(errors="replace"), stop=["END"])
    >>> [reader.push([byte], [-1.0]).text for byte in b"a\xc3\xa4E"]
    ['a', '', 'ä', '']
    >>> reader.push(b"ND", [-1.0, -1.0])  # doctest: +ELLIPSIS
    TextPart(token_ids=(78, 68), ..., text='', finish_reason='stop', stop_reason='END', weight_versions=(0, 0))
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop: Sequence[str] = (),
        stop_token_ids: Collection[int] = (),
        *,
        keeps_stop: bool = False,
    ) -> None:
        """Start an empty reply.

        Args:
            decode: decodes tokens, without the sampler's stop token at their end.
            stop: texts that end the reply.
            keeps_stop: whether the reply's text includes the text that ended it.
            stop_token_ids: tokens that end the reply and are not part of its text.
        """
        self._decode = decode
        self._stop = tuple(stop)
        self._keeps_stop = keeps_stop
        self._stop_token_ids = frozenset(stop_token_ids)
        self._window: list[int] = []
        """The last tokens, with those that are not decoded yet."""
        self._read = ""
        """The text of the window that has been read."""
        self._held = ""
        """Text that was read but not passed on, because it may begin a stop string."""
        self.finish_reason: str | None = None
        """Why the reply ended; None while it has not."""

    def push(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        end: StopReason | None = None,
        versions: tuple[WeightVersion, WeightVersion] = (0, 0),
    ) -> TextPart:
        """Add sampled tokens and return the next part of the reply.

        `end` is why the generation ended with these tokens; None if it continues. `versions` are as in `TextPart`.
        """
        tokens = list(token_ids)
        stop_reason: int | str | None = None
        cut = next((index for index, token in enumerate(tokens) if token in self._stop_token_ids), None)
        if cut is not None:
            tokens, stop_reason, end = tokens[: cut + 1], tokens[cut], StopReason.STOP
        shown = tokens if cut is None else tokens[:-1]
        decoded = self._decode([*self._window, *shown])
        text = self._held + self._unread(decoded, whole=end is not None)
        if any(stop in text for stop in self._stop):
            count, text = self._end_at_stop(shown, text)
            position, _, stop_reason = self._first_stop(text)[0]
            shown_end = position + (len(stop_reason) if self._keeps_stop else 0)
            tokens, text, end = tokens[:count], text[:shown_end], StopReason.STOP
        if end is None:
            self._held = text[len(text) - self._num_held(text) :]
            self._advance(shown, decoded)
        else:
            self.finish_reason = "stop" if end is StopReason.STOP else "length"
        passed = text if end is not None else text[: len(text) - len(self._held)]
        values = tuple(logprobs[: len(tokens)])
        return TextPart(tuple(tokens), values, passed, self.finish_reason, stop_reason, versions)

    def _unread(self, decoded: str, whole: bool) -> str:
        """Return the new text, without a last character that may be incomplete unless `whole`."""
        return (decoded if whole else decoded.rstrip(_REPLACEMENT))[len(self._read) :]

    def _end_at_stop(self, shown: Sequence[int], text: str) -> tuple[int, str]:
        """Return the number of the fewest tokens whose text has a stop string, and that text."""

        def has_stop(count: int) -> bool:
            return bool(self._first_stop(self._text_after(shown[:count])))

        # Each call decodes, so not one by one, unless the bytes of an incomplete character hide the stop string.
        count = bisect.bisect_left(range(len(shown)), True, key=has_stop)
        if not has_stop(count):
            count = next((fewer for fewer in range(len(shown)) if has_stop(fewer)), len(shown))
        return count, self._text_after(shown[:count]) if has_stop(count) else text

    def _text_after(self, tokens: Sequence[int]) -> str:
        return self._held + self._unread(self._decode([*self._window, *tokens]), whole=True)

    def _first_stop(self, text: str) -> list[tuple[int, int, str]]:
        """Return position, negative length and text of the stop strings in a text, the first and longest one first."""
        return sorted((text.index(stop), -len(stop), stop) for stop in self._stop if stop in text)

    def _num_held(self, text: str) -> int:
        """Return the length of the longest end of the text that begins a stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        return next(
            (n for n in range(min(longest, len(text)), 0, -1) if any(s.startswith(text[-n:]) for s in self._stop)), 0
        )

    def _advance(self, tokens: Sequence[int], decoded: str) -> None:
        self._window += tokens
        whole = decoded.rstrip(_REPLACEMENT)
        # Some decoders return U+FFFD for all bytes before an incomplete character, also for those that have been read.
        self._read = max(self._read, whole, key=len)
        if whole != decoded or len(self._window) <= _CONTEXT:
            return
        for kept in range(_CONTEXT, min(_CONTEXT + _MAX_CHARACTER, len(self._window))):
            text = self._decode(self._window[-kept:])
            # Otherwise the first token kept is within a character.
            if decoded.endswith(text):
                del self._window[:-kept]
                self._read = text
                return


class ToolReader:
    """Holds back the text of a reply that may be a tool call, up to the end of the reply."""

    def __init__(self, opens_thoughts: bool) -> None:
        """Start an empty reply.

        With `opens_thoughts`, the prompt ends with `<think>`, so the reply begins in its thoughts.
        """
        self._parser = ReplyParser(opens_thoughts)
        self._passed = 0

    def push(self, text: str) -> str:
        """Add text, and return the next text that is not part of a call."""
        parser = self._parser
        parser.add(text, is_last=False)
        end = _end_before_call(parser.text) if parser.undecided is None else parser.undecided
        if not parser.in_thoughts:
            # White space before a call is dropped.
            start = max(parser.answer_start, self._passed)
            end = start + len(parser.text[start:end].rstrip())
        passed, self._passed = parser.text[self._passed : end], max(end, self._passed)
        return passed

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """Return the rest of the text and the calls; a reply with a malformed call has none, and is all text.

        The text with calls is that before the first one.
        """
        self._parser.add("", is_last=True)
        text, calls = self._parser.text, self._parser.calls
        try:
            found = [tool_call(parse_call(call.text)) for call in calls]
        except ToolError:
            found = []
        if not found:
            return text[self._passed :], []
        return text[self._passed : calls[0].start].rstrip(), found


def _end_before_call(text: str) -> int:
    """Return the length of a text without a beginning of `<tool_call>` at its end.

    >>> [_end_before_call(text) for text in ("a <tool", "a <b")]
    [2, 4]
    """
    begun = (count for count in range(len(CALL_START) - 1, 0, -1) if text.endswith(CALL_START[:count]))
    return len(text) - next(begun, 0)


def tool_call(call: ToolCall) -> dict[str, Any]:
    """Return a tool call in OpenAI's format, with a unique id."""
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": f"call_{uuid4().hex}", "type": "function", "function": {"name": call.name, "arguments": arguments}}
