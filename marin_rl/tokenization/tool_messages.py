# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Conversion of tools and tool messages to a form that a chat template renders.

Some templates render tool schemas, some render messages with the role `tool`, many render neither. Content that a
template does not support is written as text of other messages.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from marin_rl.tokenization.chat_template import ChatTemplate, ToolSchema
from marin_rl.types import Message


@dataclasses.dataclass(frozen=True)
class Conversation:
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

    Args:
        messages: the conversation.
        template: the template that renders it.
    """
    carried = [message for message in messages if "tools" in message]
    tools = tuple(tool for message in carried for tool in message["tools"]) if template.renders_tools else ()
    plain = list(itertools.chain.from_iterable(_without_tools(message, bool(tools)) for message in messages))
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
