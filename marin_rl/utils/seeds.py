# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Seeds derived from names, so that no random state has to be stored."""

import hashlib


def derive_seed(*parts: int | str) -> int:
    """Hash `parts` to a seed below 2**63.

    Every random draw of a run is a function of the run's seed and of the draw's purpose (`"sample"`, step 7,
    group 3, attempt 5), not of earlier draws. A resumed run therefore repeats the draws of an uninterrupted run. The
    order and types of `parts` matter.

    >>> derive_seed(0, "sample", 7) == derive_seed(0, "sample", 7)
    True
    >>> derive_seed(0, "sample", 7) == derive_seed(0, "sample", "7")
    False
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
