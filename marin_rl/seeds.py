# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Seeds derived from names, so that no random state has to be carried along or saved."""

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A seed below 2**63 that depends on every part and on nothing else.

    Randomness of a run is a function of its seed and of what the randomness is for (`"sample"`, step 7,
    group 3, attempt 5), never of what happened before: a resumed run draws what the uninterrupted one
    would have drawn.

    Args:
        parts: whole numbers and words; their order and types matter.

    >>> derive_seed(0, "sample", 7) == derive_seed(0, "sample", 7)
    True
    >>> derive_seed(0, "sample", 7) == derive_seed(0, "sample", "7")
    False
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
