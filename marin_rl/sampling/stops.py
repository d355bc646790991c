# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Stop tokens and stop texts: the first token that ends a reply, in any tokenization of the text.

A finite automaton reads the bytes of a reply (Aho and Corasick 1975) and tells in its state how much of a stop text has
been written. Its transitions are tabulated for whole tokens, so that programs on a device end a reply in the same step.
"""

import re
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from marin_rl.tokenization.chat import ChatTokenizer
from marin_rl.tokenization.load import TokenPieces

START, ENDED = 0, 1
"""States before the first token, and from the token that ends the reply."""


class StopTable(NamedTuple):
    """Transitions of the automaton: `next_states[state, classes[token]]` is the state after a token."""

    classes: Int[np.ndarray, " vocab"]
    """Class of each token; tokens of a class have the same transitions."""
    next_states: Int[np.ndarray, "states classes"]
    """The next state."""

    def first_end(self, token_ids: Sequence[int]) -> int | None:
        """Return the number of tokens up to the first one that ends a reply; None if it does not end."""
        state = START
        for count, token in enumerate(token_ids, 1):
            state = self.next_states[state, self.classes[token]]
            if state == ENDED:
                return count
        return None


def stop_text_bytes(tokenizer: ChatTokenizer, texts: Sequence[str]) -> Callable[[int], bytes] | None:
    """Return the bytes of tokens if there are stop texts, which need them; for a large tokenizer it takes a second."""
    return TokenPieces(tokenizer.tokenizer).in_text if texts else None


def stop_table(
    vocab_size: int,
    stop_token_ids: Collection[int],
    texts: Sequence[str] = (),
    token_bytes: Callable[[int], bytes] | None = None,
) -> StopTable:
    """Tabulate when a reply ends.

    Only the text of the reply counts, not that of the prompt before it. The token that completes a stop text ends the
    reply also if further text follows in the same token.

    Args:
        vocab_size: vocabulary size of the model.
        stop_token_ids: tokens that end a reply.
        texts: texts that end a reply; none is empty.
        token_bytes: returns the bytes that a token adds to the text; needed for stop texts.

    Raises:
        ValueError: if a stop token is not in the vocabulary, a text cannot be written with the tokens, or `token_bytes`
            is missing.

    >>> table = stop_table(4, [0], ["abc"], token_bytes=[b"", b"a", b"xab", b"cd"].__getitem__)
    >>> table.first_end([1, 2, 3, 1]), table.first_end([1, 0]), table.first_end([2, 1, 3])
    (3, 2, None)
    """
    if invalid := [token for token in stop_token_ids if not 0 <= token < vocab_size]:
        raise ValueError(f"stop token {invalid[0]} is not in the model's vocabulary of {vocab_size}")
    if texts and token_bytes is None:
        raise ValueError(f"the stop texts {list(texts)} need token_bytes, the bytes of the tokens")
    pieces = [b""] * vocab_size if token_bytes is None or not texts else [token_bytes(id) for id in range(vocab_size)]
    # With a token for each byte any text can be written, and no table is needed to see that.
    single_bytes = b"".join({piece for piece in pieces if len(piece) == 1})
    for text in texts:
        if text.encode().translate(None, single_bytes) and not _can_end(_tabulate([text.encode()], pieces, [])):
            raise ValueError(f"no tokens of the tokenizer give the stop text {text!r}; remove it from sampling.stop")
    return _tabulate([text.encode() for text in texts], pieces, stop_token_ids)


def _tabulate(texts: Sequence[bytes], pieces: Sequence[bytes], stop_token_ids: Collection[int]) -> StopTable:
    distinct: dict[bytes, int] = {}
    other = re.compile(b"[^" + re.escape(b"".join(texts)) + b"]+") if texts else None
    numbers = np.array([distinct.setdefault(_essence(piece, texts, other), len(distinct)) for piece in pieces])
    after = _after_tokens(_byte_automaton(texts), list(distinct))
    # The last row is that of stop tokens.
    after = np.concatenate([after, np.full_like(after[:1], ENDED)])
    columns, classes = np.unique(after, axis=0, return_inverse=True)
    classes = classes.reshape(-1).astype(np.int32)
    of_tokens = classes[numbers]
    of_tokens[list(stop_token_ids)] = classes[-1]
    return StopTable(of_tokens, np.ascontiguousarray(columns.T))


def _essence(piece: bytes, texts: Sequence[bytes], other: re.Pattern[bytes] | None) -> bytes:
    """Return a shorter text with the same transitions; `other` matches bytes that no stop text has."""
    if any(text in piece for text in texts):
        return texts[0]
    parts = [piece] if other is None else other.split(piece)
    # UTF-8 has no byte 255.
    return piece if len(parts) == 1 else parts[0] + b"\xff" + parts[-1]


def _byte_automaton(texts: Sequence[bytes]) -> Int[np.ndarray, "states 256"]:
    """Return the next state for each state and byte. A state is the longest end of the text that begins a stop text."""
    beginnings = sorted({text[:length] for text in texts for length in range(len(text))} | {b""}, key=len)
    numbers = {beginning: index + (index > START) for index, beginning in enumerate(beginnings)}
    steps = {text[:length] for text in texts for length in range(1, len(text) + 1)}
    following: dict[bytes, list[bytes]] = {beginning: [] for beginning in beginnings}
    for step in steps:
        following[step[:-1]].append(step)
    table = np.full((len(beginnings) + 1, 256), START, np.int32)
    table[ENDED] = ENDED
    shorter = {b"": START}
    """State of the longest proper end of each beginning that is a beginning too."""
    for beginning in beginnings:
        row = table[shorter[beginning]].copy()
        for step in following[beginning]:
            shorter[step] = int(row[step[-1]]) if beginning else START
        for step in following[beginning]:
            row[step[-1]] = ENDED if step.endswith(tuple(texts)) else numbers[step]
        table[numbers[beginning]] = row
    return table


def _after_tokens(
    automaton: Int[np.ndarray, "states 256"], pieces: Sequence[bytes]
) -> Int[np.ndarray, "tokens states"]:
    """Return the state after each token, for each state before it."""
    lengths = np.array([len(piece) for piece in pieces])
    order = np.argsort(-lengths, kind="stable")
    text = np.frombuffer(b"".join(pieces[index] for index in order), np.uint8)
    starts = np.cumsum(lengths[order]) - lengths[order]
    after = np.tile(np.arange(len(automaton), dtype=np.int32), (len(pieces), 1))
    for position in range(max(lengths, default=0)):
        # The tokens are sorted, the longest first.
        count = int(np.count_nonzero(lengths > position))
        after[:count] = automaton[after[:count], text[starts[:count] + position][:, None]]
    result = np.empty_like(after)
    result[order] = after
    return result


def _can_end(table: StopTable) -> bool:
    """Return whether tokens lead to the end."""
    next_states = table.next_states[:, np.unique(table.classes)]
    reached, new = {START}, [START]
    while new:
        new = sorted({*np.unique(next_states[new]).tolist()} - reached)
        reached.update(new)
    return ENDED in reached
