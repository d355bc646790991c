# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""A module that a reward function imports during a call, and that runs generated code when it is loaded."""

import collections
import dataclasses

Pair = collections.namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class Record:
    value: float
