# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Parts shared by the environments of other packages: actions in replies, and foreign text."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from marin_rl.escaping import replace_surrogates
from marin_rl.event_loop import BackgroundLoop
from marin_rl.rewards.grading_process import NoAnswerError
from marin_rl.rewards.reply_text import graded_text, search_reply

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


def bounded_text(text: str, max_characters: int) -> str:
    r"""Replace lone surrogates, which tokenizers reject, and characters beyond a limit by a notice of their number.

    >>> bounded_text("a\ud800bcdef", 4)
    'a?bc\n[3 more characters]'
    """
    text = replace_surrogates(text)
    if len(text) <= max_characters:
        return text
    return f"{text[:max_characters]}\n[{len(text) - max_characters} more characters]"


def action_of(reply: str, regex: str | None) -> str:
    r"""Return the action in a reply; empty if there is none, or if the search for it exceeds a limit.

    With a regular expression it blocks, see `find_action`.

    Args:
        reply: the reply; its thoughts are ignored.
        regex: regular expression; group 1 of its last match is the action. None: the whole text.

    >>> action_of("<think>north?</think> go east", None), action_of("go [east] or [west]", r"\[(\w+)\]")
    ('go east', 'west')
    >>> action_of("<think>[north], or", r"\[(\w+)\]")
    ''
    """
    text = graded_text(reply) or ""
    if regex is None:
        return text.strip()
    try:
        found = search_reply(regex, text)
    except NoAnswerError as error:
        logger.warning("the search for an action was given up, no action: %s: %.200r", error, text)
        return ""
    return "" if found is None else found.group or ""


async def find_action(reply: str, regex: str | None) -> str:
    """Return the action in a reply as `action_of` does, without blocking the event loop."""
    return action_of(reply, None) if regex is None else await asyncio.to_thread(action_of, reply, regex)


def run_in_thread(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine in an event loop of its own and wait for it, in threads with and without a running event loop.

    An interrupt of the wait (Ctrl-C) cancels the coroutine.
    """
    loop = BackgroundLoop()
    try:
        return loop.submit(work).result()
    finally:
        loop.close()
