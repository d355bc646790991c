# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Tools and their answers in a conversation, put as a chat template can show them.

Templates differ: some have words of their own for the schemas of tools, some for messages of the role `tool`, many for
neither. What a template lacks is said in words that all of them have.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from marin_rl.tokenization.chat_template import ChatTemplate, ToolSchema
from marin_rl.types import Message


@dataclasses.dataclass(frozen=True)
class Conversation:
    """What a template is given."""

    messages: tuple[Message, ...]
    """Messages without tools of their own, in roles that the template shows."""
    tools: tuple[ToolSchema, ...]
    """The schemas that it tells of itself; empty where it does not, or there are none."""


def fit_conversation(messages: Sequence[Message], template: ChatTemplate) -> Conversation:
    """Put a conversation as a template can show it.

    Tools that messages bring along become the template's `tools` where it tells of them, and a message that brought
    nothing else is left out; elsewhere they are told in words, behind the message's content. Messages of the role
    `tool` stay where the template shows them; elsewhere those that follow one another become one message of the user,
    in the words of Qwen's template.

    Fitting what stands before and what stands behind a reply gives the same as fitting all of it.

    Args:
        messages: the conversation.
        template: what will render it.
    """
    carried = [message for message in messages if "tools" in message]
    tools = tuple(tool for message in carried for tool in message["tools"]) if template.tells_of_tools else ()
    told = list(itertools.chain.from_iterable(_told(message, bool(tools)) for message in messages))
    return Conversation(tuple(told if template.shows_tool_role else _as_users(told)), tools)


def _told(message: Message, by_template: bool) -> list[Message]:
    """A message without the tools that it brought along."""
    if "tools" not in message:
        return [message]
    words = "" if by_template else message.get("tools_in_words", "")
    content = "\n\n".join(part for part in (message["content"], words) if part)
    return [Message(role=message["role"], content=content)] if content else []


def _as_users(messages: Iterable[Message]) -> list[Message]:
    """The messages, with answers of tools in the user's role."""
    fitted: list[Message] = []
    for is_answer, run in itertools.groupby(messages, lambda message: message["role"] == "tool"):
        if is_answer:
            content = "\n".join(f"<tool_response>\n{message['content']}\n</tool_response>" for message in run)
            fitted.append(Message(role="user", content=content))
        else:
            fitted += run
    return fitted
