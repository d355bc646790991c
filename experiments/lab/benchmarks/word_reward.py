# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Reward function of `benchmark_end_to_end`, without dependencies, so that every compared program can import it."""


def even_share(reply: str) -> float:
    """Return the share of words with an even number.

    >>> even_share("w4 w7 w10 w2")
    0.75
    """
    words = reply.split()
    return sum(int(word[1:]) % 2 == 0 for word in words) / max(len(words), 1)
