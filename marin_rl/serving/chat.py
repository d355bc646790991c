# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A chat with a policy in the terminal: exact tokens of the history, and replies that are printed as they are sampled.

The policy sees the tokens that it would see in an episode whose environment sends the same messages.
"""

import contextlib
import dataclasses
import io
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from marin_rl.sampling.config import MIN_TEMPERATURE
from marin_rl.sampling.sampler import Sampler, SampleRequest
from marin_rl.serving.text import ReplyReader, TextPart, join_parts
from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import TokenPieces
from marin_rl.types import Message, StopReason
from marin_rl.utils.output import escape, escape_line, shown_bytes
from marin_rl.utils.seeds import derive_seed
from marin_rl.utils.signals import caught_interrupts

HELP = """\
/probs           tokens of the last reply with their probabilities
/system TEXT     set the system prompt and start a new conversation; without TEXT, no system prompt
/temperature X   set the sampling temperature; 0 is greedy
/reset           start a new conversation
/help            print this list
/quit            end, as Ctrl-D does; Ctrl-C stops a reply"""
_CONVERSATION = "chat"
"""Name of the conversation for the sampler, which keeps its cache between turns."""


class ChatState:
    """Messages, and the exact tokens that the policy saw and sampled."""

    def __init__(self, tokenizer: ChatTokenizer, system: str = "") -> None:
        """Start a conversation; `system` is the system prompt, empty for none."""
        self._tokenizer = tokenizer
        self.messages: tuple[Message, ...] = (Message(role="system", content=system),) if system else ()
        """All messages up to the last reply."""
        self.tokens: tuple[int, ...] = ()
        """`[length]`, the tokens of the last prompt and its reply; empty before the first reply."""

    def prompt(self, text: str) -> tuple[int, ...]:
        """Return the tokens of the conversation with another message of the user.

        They begin with `tokens`, unless the chat template rewrites the history.

        Raises:
            ChatTemplateError: if the template rejects the conversation.
        """
        message = Message(role="user", content=text)
        if not self.tokens:
            return self._tokenizer.prompt_tokens((*self.messages, message))
        added, is_rewritten = self._tokenizer.observation_tokens(self.messages, self.tokens, (message,))
        return added if is_rewritten else (*self.tokens, *added)

    def add(self, text: str, prompt: tuple[int, ...], reply: tuple[int, ...]) -> None:
        """Add a message of the user, its `prompt`, and the sampled tokens of the reply, at least one."""
        content = self._tokenizer.decode_reply(reply)
        self.messages += (Message(role="user", content=text), Message(role="assistant", content=content))
        self.tokens = prompt + reply


def stream(
    sampler: Sampler,
    request: SampleRequest,
    decode: Callable[[Sequence[int]], str],
    stop_requested: Callable[[], bool],
) -> Iterator[TextPart]:
    """Yield the parts of a reply as they are sampled, in whole characters.

    Args:
        sampler: samples this request only.
        request: a request of a conversation.
        decode: decodes the tokens of a reply.
        stop_requested: whether to drop the rest of the reply.
    """
    reader, count = ReplyReader(decode), 0
    [number] = sampler.start([request])
    while reader.finish_reason is None and not stop_requested():
        ended = dict(sampler.advance())
        if number in ended:
            reply = ended[number]
            yield reader.push(reply.token_ids[count:], reply.logprobs[count:], reply.stop_reason)
        elif number in (sampled := sampler.progress({number: count})):
            count += len(sampled[number].token_ids)
            yield reader.push(sampled[number].token_ids, sampled[number].logprobs)
    if reader.finish_reason is None:
        assert request.conversation is not None
        sampler.end_conversation(request.conversation)
        yield reader.push((), (), StopReason.ABORT)


@dataclasses.dataclass
class TerminalChat:
    """Prints replies to standard output, and notes to standard error."""

    sampler: Sampler
    """Samples the replies."""
    tokenizer: ChatTokenizer
    """Tokenizer of the policy."""
    max_context: int
    """Maximum number of tokens of the conversation."""
    max_tokens: int
    """Maximum number of tokens of a reply."""
    temperature: float
    """Sampling temperature; 0 is greedy."""
    system: str = ""
    """System prompt; empty for none."""
    seed: int = 0
    """The seed of a reply is derived from it and from the number of the reply."""
    has_history: bool = True
    """Whether a message continues the conversation; otherwise it begins a new one, with the same system prompt."""

    def __post_init__(self) -> None:
        self.conversation = ChatState(self.tokenizer, self.system)
        self._piece = TokenPieces(self.tokenizer.tokenizer)
        self._replies = 0
        self._last: TextPart | None = None

    def run(self, lines: Iterable[str]) -> None:
        """Answer messages and commands until `/quit` or the end of the lines."""
        for line in lines:
            name, _, argument = line.partition(" ")
            if name == "/quit":
                return
            if name.startswith("/"):
                self._command(name, argument)
            elif line.strip():
                self._answer(line)

    def _command(self, name: str, argument: str) -> None:
        if name == "/help":
            print(HELP, flush=True)
        elif name == "/probs":
            self._show_probabilities()
        elif name == "/temperature":
            self._set_temperature(argument)
        elif name in ("/system", "/reset"):
            self.system = argument.strip() if name == "/system" else self.system
            self._start_conversation()
            self._last = None
            _note("new conversation" + (f" with the system prompt {escape_line(self.system)}" if self.system else ""))
        else:
            _note(f"{escape_line(name)} is not a command; /help lists them")

    def _start_conversation(self) -> None:
        self.sampler.end_conversation(_CONVERSATION)
        self.conversation = ChatState(self.tokenizer, self.system)

    def _set_temperature(self, text: str) -> None:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if value == 0 or MIN_TEMPERATURE <= value < math.inf:
            self.temperature = value
            _note(f"temperature {value:g}")
        else:
            _note(f"the temperature {escape_line(text)!r} is not 0 (greedy) or a positive number")

    def _show_probabilities(self) -> None:
        if self._last is None:
            _note("there is no reply yet")
            return
        table = Table("token", "id", "probability", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for token, logprob in zip(self._last.token_ids, self._last.logprobs, strict=True):
            table.add_row(Text(shown_bytes(self._piece(token))), str(token), f"{math.exp(logprob):.4f}")
        Console(highlight=False).print(table)

    def _answer(self, text: str) -> None:
        if not self.has_history:
            self._start_conversation()
        try:
            prompt = self.conversation.prompt(text)
        except ValueError as error:
            _note(f"not sent: {escape_line(str(error))}")
            return
        room = self.max_context - len(prompt)
        if room < 1:
            _note(
                f"not sent: the conversation would have {len(prompt)} tokens, which leaves no room for a reply in the "
                f"context of {self.max_context} (--max_context); /reset starts a new conversation"
            )
            return
        limit = min(self.max_tokens, room)
        seed = derive_seed(self.seed, self._replies)
        request = SampleRequest(prompt, seed, limit, self.temperature, _CONVERSATION)
        self._replies += 1
        print(escape(self.tokenizer.reply_start(prompt)), end="", flush=True)
        parts = []
        with caught_interrupts() as interrupted:
            for part in stream(self.sampler, request, self.tokenizer.decode_reply, interrupted.is_set):
                parts.append(part)
                print(escape(part.text), end="", flush=True)
        print(flush=True)
        reply = join_parts(parts)
        if reply.token_ids:
            self.conversation.add(text, prompt, reply.token_ids)
            self._last = reply
        if interrupted.is_set():
            _note("interrupted")
        elif reply.finish_reason == "length":
            _note("the context is full" if limit == room else f"the reply has reached {limit} tokens (--max_tokens)")


def input_lines() -> Iterator[str]:
    """Yield the lines of standard input; in a terminal with a prompt, and Ctrl-C discards a line."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        # Editing of the line, and former lines.
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    while True:
        try:
            yield input("> " if is_terminal else "")
        except EOFError:
            print(end="\n" if is_terminal else "")
            return
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            print("\n[Ctrl-D or /quit ends the chat]", file=sys.stderr, flush=True)


def _note(text: str) -> None:
    print(f"[{text}]", file=sys.stderr, flush=True)
